"""Draft heads: one decoder layer that goes on from the target's own hidden states, and how checkpoints store it.

Entry i of a head is made of the hidden states of position i and of token i + 1, and predicts token i + 2:

    eagle    x = fc [e; h], a layer without its first norm; the target's LM head (EAGLE, Li et al. 2024; EAGLE-2)
    eagle3   g = fc [h of three layers]; q, k, v of [norm e; norm g], a layer on g; norm and an LM head of its own, of
             fewer tokens (EAGLE-3, Li et al. 2025)
    mtp      x = fc [norm e; norm h], a layer; norm, and the target's LM head (DeepSeek-V3, 2024, section 2.2)

What lives here: layouts (heads.toml), configs, weights and their names. What may not: torch, computing (draft_head.py), fitting a
head to a target (worker/draft_setup.py).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models import families
from headrace.models.weight_rules import WeightRule, names_of, rules_of
from headrace.sites import Role, Weight, layer_weights
from headrace.spec import DecoderSpec, NormKind


@dataclass(frozen=True, slots=True)
class Layout:
    """A row of heads.toml, which says what it means."""

    layer: Sequence[str]
    words: Mapping[str, str]
    beside: bool = False
    first_norm: bool = True
    hidden_first: bool = False
    goes_on_normed: bool = False


_TABLE = tomllib.loads(Path(__file__).with_name("heads.toml").read_text(encoding="utf-8"))
LAYOUTS: Mapping[str, Layout] = {name: Layout(**row) for name, row in _TABLE["layouts"].items()}
_PREDICTORS = ("mimo", "qwen", "deepseek")  # multi-token prediction, in the target's own checkpoint
_EMBEDDING, _HEAD, _MAP = "embed_tokens", "lm_head", "d2t"
_NESTED = ("model", "transformer_layer_config")  # in which some tools write the layer's own config
_OF_HEADS = frozenset((*_TABLE["of_heads"], *_NESTED))


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """``block``: a decoder of one layer, whose head and embedding count only where they are its own. ``inputs``: width of
    the target's hidden states; ``taps``: of these layers' inputs, side by side; empty: after the last norm. ``own_head``:
    over ``block.vocab_size`` tokens, ``mapped`` onto the target's. ``fc_bias``: fc has one. ``normed_residual``: the
    residual stream begins after the norm of the hidden states."""

    layout: str
    block: DecoderSpec
    inputs: int
    layer_prefix: str
    target_vocab: int
    taps: tuple[int, ...] = ()
    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    mapped: bool = False
    normed_residual: bool = False

    @property
    def form(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def tapped(self) -> int:
        """Numbers that the target gives with each token."""
        return self.inputs * max(1, len(self.taps))

    @property
    def carried(self) -> int:
        """Numbers that an entry takes beside its token."""
        return self.block.hidden_size if self.form.beside else self.inputs


def head_weights(spec: HeadSpec) -> Iterator[Weight]:
    """All that a head holds of its own."""
    hidden, words = spec.block.hidden_size, spec.form.words
    if spec.own_embedding:
        yield Weight("embedding", Role.EMBEDDING, None, (spec.target_vocab,), hidden)
    for name in ("embedding_norm", "hidden_norm"):
        if name in words:
            yield Weight(name, Role.NORM, None, (hidden,))
    ins = spec.tapped if spec.form.beside else hidden + spec.inputs
    yield Weight("fc", Role.UP, None, (hidden,), ins, bias=spec.fc_bias)
    yield from layer_of(spec)
    if "norm" in words:
        yield Weight("norm", Role.NORM, None, (hidden,))
    if spec.own_head:
        yield Weight("head", Role.HEAD, None, (spec.block.vocab_size,), hidden)


def layer_of(spec: HeadSpec) -> Iterator[Weight]:
    for weight in layer_weights(spec.block, 0):
        if weight.role is Role.QKV and spec.form.beside:
            weight = replace(weight, ins=2 * weight.ins)
        if spec.form.first_norm or not weight.name.endswith("attention_norm"):
            yield weight


def head_bytes(spec: HeadSpec, element_bytes: int) -> int:
    return (
        int(sum(each.num_bytes(element_bytes) for each in head_weights(spec))) + 8 * spec.block.vocab_size * spec.mapped
    )


def head_rules(spec: HeadSpec) -> Iterator[WeightRule]:
    own = {name: (word.replace("+", spec.layer_prefix),) for name, word in spec.form.words.items()}
    names = names_of(spec.block.family)
    names = replace(names, words={**names.words, "embedding": (_EMBEDDING,), "head": (_HEAD,), **own})
    for weight in head_weights(spec):
        yield from rules_of(names, weight, at=spec.layer_prefix if weight.layer is not None else "")


def ignored_by(spec: HeadSpec) -> tuple[str, ...]:
    """Copies of what is the target's, and maps that are read apart or say nothing more."""
    if spec.layout in _PREDICTORS:  # all that is the target's lies beside it
        return (rf"(?!mtp\.|{re.escape(spec.layer_prefix)}).*", r".*\.(embed_tokens|shared_head\.head)\.weight")
    own = {"embed_tokens": spec.own_embedding, "lm_head": spec.own_head}
    copies = tuple(rf"{name}\.weight" for name, held in own.items() if not held)
    return (*copies, r"(d2t|t2d)", r".*rotary_emb\.inv_freq")


# --- configs


def read_head(config: Mapping[str, Any], keys: Collection[str], method: str, target: DecoderSpec) -> HeadSpec:
    """The head that a checkpoint of its own holds. ``keys``: of its tensors; none: made-up weights. Raises ModelError
    where it is none of that ``method``, or not for such a target."""
    flat, beside = _flat(config), LAYOUTS[method].beside
    block = families.spec_from_config({name: value for name, value in flat.items() if name not in _OF_HEADS})
    if block.num_layers != 1 or block.norm is not NormKind.RMS or block.sandwich_norm or block.rope is None:
        found = f"has {block.num_layers} decoder layers of family {block.family}"
        raise _unfit(found, "one layer as Llama's is supported")
    keys = {key.removeprefix("model.") for key in keys}
    prefix = _prefix(keys, method)
    drawn = _integer(flat, "draft_vocab_size", block.vocab_size)
    inputs = _integer(flat, "target_hidden_size", block.hidden_size) if beside else block.hidden_size
    if inputs != target.hidden_size:
        raise _unfit(f"is for a target of hidden size {inputs}", f"this one has {target.hidden_size}")
    if block.vocab_size != target.vocab_size or drawn > target.vocab_size:
        found = f"has a vocabulary of {block.vocab_size} tokens and draws from {drawn}"
        raise _unfit(found, f"the target has {target.vocab_size}")
    layer = replace(block.layers[0], window=None)
    longest = max(block.max_positions, target.max_positions)  # rotation goes on: only its drafts are worse there
    return HeadSpec(
        method,
        replace(block, vocab_size=drawn, layers=(layer,), tied_head=False, max_positions=longest),
        inputs,
        prefix,
        target.vocab_size,
        _taps(flat, target) if beside else (),
        fc_bias="fc.bias" in keys,
        own_head=beside,
        mapped=beside and (_MAP in keys or drawn < target.vocab_size),
        own_embedding=block.hidden_size != target.hidden_size,
        normed_residual=flat.get("norm_before_residual") is True,
    )


def read_predictor(keys: Collection[str], target: DecoderSpec) -> HeadSpec:
    """The first multi-token prediction layer of the target's own checkpoint. ``keys``: of its tensors; none: made-up
    weights. Raises ModelError where it has none that is known."""
    prefixes = {name: LAYOUTS[name].layer[0].format(target.num_layers) for name in _PREDICTORS}
    usual = "mimo" if target.family == "mimo" else "qwen"
    found = (name for name, each in prefixes.items() if any(key.startswith(each) for key in keys))
    layout = next(found, None) if keys else usual
    if layout is None:
        names = ", ".join(f"{each}*" for each in prefixes.values())
        raise ModelError(
            f"this checkpoint has no multi-token prediction layer ({names}); use another method, or one that has."
        )
    if target.norm is not NormKind.RMS or target.sandwich_norm or target.rope is None:
        raise ModelError(f"multi-token prediction is not supported for family {target.family}; use another method.")
    layer = replace(target.layers[-1], window=None, formats=())
    block = replace(target, layers=(layer,), formats=(), tied_head=False)
    return HeadSpec(layout, block, target.hidden_size, prefixes[layout], target.vocab_size)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """With what is nested in it, and the family of its layer."""
    nested = [config[name] for name in _NESTED if isinstance(config.get(name), Mapping)]
    own = {name: value for name, value in config.items() if name != "model_type" or value in families.FAMILIES}
    return {name: value for each in (*nested, own) for name, value in each.items()}


def _prefix(keys: Collection[str], method: str) -> str:
    """What stands before the names of the layer's weights."""
    form = LAYOUTS[method]
    if not keys:
        return form.layer[0]
    found = next((each for each in form.layer if any(key.startswith(each) for key in keys)), None)
    beside = any(".hidden_norm." in key for key in keys)
    if found is None or beside != form.beside:
        other = "eagle3" if beside else "eagle"
        raise _unfit(f"has no layer as method {method} names it", f"give method {other} if that is what it is")
    return found


def _unfit(found: str, wanted: str) -> ModelError:
    return ModelError(f"this draft head {found}, but {wanted}; give one that was made for this target.")


def _integer(flat: Mapping[str, Any], name: str, default: int) -> int:
    value = flat.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= 2**24:
        raise ModelError(f"its config has {name} {str(value)[:40]!r}, which is no size; fetch it again.", param=name)
    return value


def _taps(flat: Mapping[str, Any], target: DecoderSpec) -> tuple[int, ...]:
    """Layers of the target whose inputs count: named as such, or (``eagle_config``) as layers whose outputs do; else as
    EAGLE-3 was published: the third, the middle one, the last but two."""
    nested, last = flat.get("eagle_config"), target.num_layers
    named = flat.get("eagle_aux_hidden_state_layer_ids")
    if named is None and isinstance(nested, Mapping):
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
        named = [each + 1 if isinstance(each, int) else each for each in ids] if isinstance(ids, list) else ids
    found = named if named is not None else [2, last // 2, last - 3]
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise ModelError("its config has eagle_aux_hidden_state_layer_ids that are no list of layers; fetch it again.")
    layers = tuple(sorted(set(found)))
    if len(layers) != 3 or not 0 <= layers[0] <= layers[-1] < last:
        raise _unfit(f"takes the inputs of layers {', '.join(map(str, found))}", f"the target has {last} layers")
    return layers
