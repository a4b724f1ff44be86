"""Which checkpoint tensors make up which parameter of the decoder, and which format each matrix is in.

What lives here: the rules that merge, stack and transpose, and formats by the names that families use on disk
(weight_names.toml). What may not: torch, reading, what a format means (quant/).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from headrace.errors import ModelError
from headrace.parallel.shares import Cut
from headrace.quant import Format, StoredTensor
from headrace.quant.floats import MXFP4
from headrace.quant.gguf import GGUFBlocks
from headrace.sites import Role, Weight, is_plain, layer_weights, weights
from headrace.spec import DecoderSpec, Formats

# Checkpoints of the same model differ in whether names begin at a head's wrapper or at the bare model.
WRAPPERS = ("model.", "transformer.", "bert.", "roberta.")


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How one parameter is built from checkpoint tensors.

    Each inner tuple of ``sources`` is concatenated on dimension 0 (each tensor transposed first, if ``transpose``); the
    outer ones are stacked on a new dimension 0 if ``stack``, otherwise there is exactly one. ``target`` is a name from
    the decoder's ``named_parameters()``, ``shape`` the finished shape. Names are those of the causal language model,
    with its leading ``model.`` or ``transformer.``; some checkpoints leave it out, and the loader finds them, too.

    ``stored``: one of a format's tensors, which may have other suffixes than the first, as the sources are written.
    """

    target: str
    sources: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    stack: bool = False
    transpose: bool = False
    stored: StoredTensor | None = None
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """A family's names on disk, by the weight's name in the decoder; those of a layer follow ``layer`` and its
    index."""

    prefix: str
    layer: str
    words: Mapping[str, tuple[str, ...]]
    transposed: bool = False  # matrices are stored [in, out]
    ignored: tuple[str, ...] = ()  # patterns of keys that are no part of the model
    behind: str = ""  # of post-norm layers, the norm that ends one: the next layer's first, or the last of all
    num_layers: int = 0


def _read_names() -> dict[str, Names]:
    found: dict[str, Names] = {}
    entries = tomllib.loads(Path(__file__).with_name("weight_names.toml").read_text(encoding="utf-8"))
    for family, entry in entries.items():
        words = {name: tuple(each) for name, each in entry.pop("words", {}).items()}
        if "ignored" in entry:
            entry["ignored"] = tuple(entry["ignored"])
        if (base := found.get(entry.pop("like", ""))) is not None:
            found[family] = replace(base, words={**base.words, **words}, **entry)
        else:
            found[family] = Names(words=words, **entry)
    return found


_NAMES = _read_names()


def names_of(family: str) -> Names:
    return _NAMES.get(family, _NAMES["llama"])


def _names(spec: DecoderSpec) -> Names:
    return replace(names_of(spec.family), num_layers=spec.num_layers)


# What a cache in FP8 takes its scales from (loader.py), and scales of inputs in 4 bits, which stay in the type the
# model computes in.
_KV_SCALES = r".*\.[kv]_(proj\.([kv]_|output_)?)?(scale|zero_point)"
_OF_WHOLE = r".*\.(g_idx|weight_shape)"  # what says nothing of a part: groups in order, a shape
_UNUSED_SCALES = r".*\.(input_global_scale|weight_format)"


def ignored_keys(spec: DecoderSpec) -> tuple[str, ...]:
    """Regular expressions for keys that hold no weights: constants that some checkpoints store, and a tied head's
    copy."""
    prefix = _names(spec).prefix.replace(".", r"\.")
    found = [
        rf"{prefix}(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",
        rf"{prefix}h\.\d+\.attn\.(bias|masked_bias)",
    ]
    found += [r"lm_head\.weight"] if spec.tied_head else []
    # Layers for multi-token prediction (heads.py) are no part of the model's own answers.
    found += [r"model\.mtp_layers\..*", r"mtp\..*"]
    found += [rf"model\.layers\.{spec.num_layers + index}\..*" for index in range(spec.predicting)]
    found += [_OF_WHOLE] if spec.ranks > 1 else []
    found += _of_other_stages(spec)
    found += _of_other_ranks(spec)
    found += _names(spec).ignored
    return (*found, _KV_SCALES) if is_plain(spec) else (*found, _KV_SCALES, _UNUSED_SCALES)


def _of_other_stages(spec: DecoderSpec) -> Iterator[str]:
    """Keys of what this stage of a pipeline does not hold."""
    names, held = _names(spec), {weight.name for weight in weights(spec)}
    for index in set(range(spec.num_layers)) - set(spec.held_layers):
        yield rf"{re.escape(names.layer)}\.{index}\..*"
    for weight in weights(replace(spec, held=None)) if spec.held is not None else ():
        if weight.layer is None and weight.name not in held and not weight.tied:
            yield from (rf"{re.escape(each)}\..*" for merged in _modules(names, weight) for each in merged)


def _of_other_ranks(spec: DecoderSpec) -> Iterator[str]:
    """Keys of experts that this rank does not hold; layers with the same ones have one pattern."""
    names, layers = _names(spec), dict[str, list[str]]()
    for index in spec.held_layers:
        if (moe := spec.layers[index].moe) is not None and moe.held is not None:
            others = "|".join(str(each) for each in range(moe.num_experts) if each not in moe.experts)
            layers.setdefault(others, []).append(str(index))
    for others, indices in layers.items():
        (experts,) = names.words["experts"]
        yield rf"{re.escape(names.layer)}\.({'|'.join(indices)})\.{re.escape(experts)}\.({others})\..*"


def kv_scale_names(spec: DecoderSpec, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names under which checkpoints store the scale of a layer's keys, and of its values, most common first."""
    names = _names(spec)
    at = f"{names.layer}.{layer}.{names.words['attention.output'][0].rpartition('.')[0]}"
    keys, values = (
        tuple(f"{at}.{each.format(letter)}" for each in ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale"))
        for letter in "kv"
    )
    return keys, values


def weight_rules(spec: DecoderSpec, cuts: Mapping[str, Cut] = MappingProxyType({})) -> Iterator[WeightRule]:
    """One rule for every parameter of the decoder, in the order in which it computes. ``cuts``: of a rank's weights, by
    name."""
    names = _names(spec)
    for weight in weights(spec):
        if not weight.tied:
            yield from rules_of(names, weight, cuts.get(weight.name))


def rules_of(names: Names, weight: Weight, cut: Cut | None = None, at: str | None = None) -> Iterator[WeightRule]:
    """Tensors merged in the order of their names; the finished matrix is [out, in] whatever the order on disk. ``at``:
    what stands before its names; None: as the family has it."""
    modules = _modules(names, weight, at)
    if weight.formats:
        yield from _stacked_rules(names, weight) if _one_tensor(weight) else _packed_rules(modules, weight, cut)
    for target, shape in weight.tensors.items():
        suffix = target.removeprefix(weight.name)
        if suffix.startswith(".pieces."):
            continue
        sources = tuple(tuple(module + (suffix or ".weight") for module in merged) for merged in modules)
        turned = names.transposed and weight.layer is not None and len(shape) == 2
        yield WeightRule(target, sources, shape, stack=weight.moe is not None, transpose=turned, cut=cut)


def _stacked_rules(names: Names, weight: Weight) -> Iterator[WeightRule]:
    """All experts in one tensor, as in gpt-oss; a rank takes its own out of it."""
    assert weight.moe is not None
    held, count = weight.moe.experts, weight.moe.num_experts
    word = "gate_up_proj" if weight.role is Role.UP else "down_proj"
    for index, each in weight.stored:
        source = f"{names.layer}.{weight.layer}.{names.words['experts'][0]}.{word}_{each.on_disk[0]}"
        target, shape = f"{weight.name}.pieces.{index}.{each.name}", (*weight.stacked, *each.shape)
        rows = tuple(range(expert, expert + 1) for expert in held)
        cut = Cut(rows, range(each.shape[0]), (count, *each.shape), (count,), bias=True) if len(held) < count else None
        yield WeightRule(target, ((source,),), shape, stored=each, cut=cut)


def _packed_rules(modules: tuple[tuple[str, ...], ...], weight: Weight, cut: Cut | None) -> Iterator[WeightRule]:
    """Each part that is stored separately has its own tensors."""
    apart = len(weight.formats) > 1
    for index, each in weight.stored:
        if cut is not None and each.optional:  # it is of the whole matrix
            continue
        sources = tuple(
            tuple(f"{module}.{each.on_disk[0]}" for module in (merged[index : index + 1] if apart else merged))
            for merged in modules
        )
        target, shape = f"{weight.name}.pieces.{index}.{each.name}", (*weight.stacked, *each.shape)
        own = None if cut is None else cut.of_stored(weight.pieces[index][1], each.name, index if apart else None)
        yield WeightRule(target, sources, shape, stack=weight.moe is not None, stored=each, cut=own)


def _one_tensor(weight: Weight) -> bool:
    return weight.moe is not None and any(isinstance(form, MXFP4) and form.blocks for form in weight.formats)


def _modules(names: Names, weight: Weight, at: str | None = None) -> tuple[tuple[str, ...], ...]:
    """The modules on disk that make it up, merged, for each copy."""
    own = weight.name.removeprefix(f"layers.{weight.layer}.")
    if at is None:
        at = "" if weight.layer is None else f"{names.layer}.{weight.layer}."
    if names.behind and own in ("attention_norm", "norm"):
        before = (names.num_layers if weight.layer is None else weight.layer) - 1
        return ((f"{names.layer}.{before}.{names.behind}" if before >= 0 else names.words[own][0],),)
    if weight.moe is None:
        return (tuple(at + word for word in names.words[own]),)
    words, (experts,) = names.words[own.replace("feed_forward", "experts")], names.words["experts"]
    return tuple(tuple(f"{at}{experts}.{expert}.{word}" for word in words) for expert in weight.moe.experts)


@dataclass(frozen=True, slots=True)
class Module:
    """A module by its name on disk, and which part of the decoder it is: part ``part`` of ``weight``, or (None) all of
    it. ``outs``: its own; for an embedding, its rows."""

    name: str
    weight: Weight
    part: int | None
    outs: int


def adapted_modules(spec: DecoderSpec) -> Iterator[Module]:
    """The modules that an adapter may add to: all linear layers except routers and experts, plus the embedding and the
    head."""
    names = _names(spec)
    for weight in weights(spec):
        tables = weight.role is Role.EMBEDDING and weight.name != "embedding"
        if weight.role in (Role.NORM, Role.ROUTER, Role.CLASSIFIER) or weight.moe is not None or tables:
            continue
        (merged,) = _modules(names, weight)
        if len(merged) == 1:
            yield Module(merged[0], weight, None, weight.outs)
        else:
            yield from (Module(name, weight, part, weight.parts[part]) for part, name in enumerate(merged))


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix that is stored in a format; ``module``: its name on disk. It is part ``part`` of copy ``copy`` of
    ``weight``."""

    module: str
    form: Format
    outs: int
    ins: int
    weight: Weight
    copy: int
    part: int


def disk_modules(spec: DecoderSpec, weight: Weight) -> tuple[tuple[str, ...], ...]:
    """The modules on disk that make up each copy of a weight."""
    return _modules(_names(spec), weight)


def disk_name(spec: DecoderSpec, weight: Weight) -> str:
    """For one copy of a weight that is a single tensor on disk."""
    ((module,),) = _modules(_names(spec), weight)
    return module


def stored_matrices(spec: DecoderSpec) -> Iterator[StoredMatrix]:
    for weight in weights(spec):
        if _one_tensor(weight):
            raise ModelError(
                f"Experts of {weight.name} are stored in one tensor, which cannot be dequantized at load; "
                "leave --quantization none out."
            )
        if weight.formats and not weight.tied:
            for copy, merged in enumerate(_modules(_names(spec), weight)):
                pieces = weight.pieces
                if len(pieces) < len(merged):  # held as one, stored apart
                    pieces = tuple((outs, weight.formats[0]) for outs in weight.parts)
                for part, (module, (outs, form)) in enumerate(zip(merged, pieces, strict=True)):
                    yield StoredMatrix(module, form, outs, weight.ins, weight, copy, part)


# --- formats ----------------------------------------------------------------------------------------------------------


def with_formats(spec: DecoderSpec, choose: Callable[[str], Format | None], *, embeddings: bool = False) -> DecoderSpec:
    """The same model with the formats that ``choose`` gives its matrices, by their names on disk. Raises ModelError for
    one that is not possible."""
    names = _names(spec)

    def formats_of(found: Iterator[Weight]) -> Formats:
        roles = (Role.NORM, Role.CLASSIFIER) if embeddings else (Role.NORM, Role.CLASSIFIER, Role.EMBEDDING)
        chosen = (
            (each, _formats(names, each, choose))
            for each in found
            if each.role not in roles and not each.tied and each.ins
        )
        return tuple((each.name.removeprefix(f"layers.{each.layer}."), formats) for each, formats in chosen if formats)

    layers = tuple(
        replace(layer, formats=formats_of(layer_weights(spec, index))) for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers, formats=formats_of(each for each in weights(spec) if each.layer is None))


def _formats(names: Names, weight: Weight, choose: Callable[[str], Format | None]) -> tuple[Format, ...]:
    """The format of each part that is stored separately; empty if all of them are plain."""
    copies = {tuple(choose(module) for module in merged) for merged in _modules(names, weight)}
    found = copies.pop()
    if copies:
        first = _modules(names, weight)[0][0]
        raise ModelError(
            f"Experts of {first} are in different formats, which is not supported; "
            "use a checkpoint in which all experts have the same format."
        )
    if not any(found):
        return ()
    outs = weight.parts if len(found) == len(weight.parts) else (weight.outs,)
    formats = tuple(form or Format() for form in found)
    for module, size, form in zip(_modules(names, weight)[0], outs, formats, strict=True):
        problem = form.problem(size, weight.ins)
        if names.transposed and not isinstance(form, GGUFBlocks):
            problem = "this family stores its matrices [in, out]"
        if problem is not None:
            raise ModelError(
                f"{module} cannot be stored as {form.label}: {problem}. "
                "Use a checkpoint that leaves this layer unquantized."
            )
    if not formats[0].merges or len(set(formats)) > 1:
        return formats
    form = formats[0]
    return (replace(form, interleaved=True),) if isinstance(form, MXFP4) and weight.gated else (form,)
