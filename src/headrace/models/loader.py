"""Fills a decoder's parameters: from a checkpoint, strictly and one tensor at a time, or with seeded random numbers.

What lives here: the choice between containers, matching rules with keys, copying into the parameters' own storage, and
the errors of both sides. What may not: knowledge of families (families.py writes the rules), file formats
(checkpoint.py), packing (finish_loading).
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.layers.packed import Piece
from headrace.models.checkpoint import Checkpoint, KeyNames, SafetensorsCheckpoint, spellings
from headrace.models.decoder import Decoder
from headrace.models.source import ModelSource, WeightFormat
from headrace.models.streaming import Source, stream
from headrace.models.weight_rules import WeightRule, kv_scale_names
from headrace.observe.progress import LoadingLine
from headrace.parallel.shares import Cut

_log = logging.getLogger(__name__)
_LAYER = re.compile(r"layers\.(\d+)\.")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Opens a source's weights, as stored or dequantized. Raises ModelError for damaged files and for sources without
    weights (dummy)."""
    if source.weights is WeightFormat.GGUF:
        from headrace.models.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(source.path, packed=source.dequantize_from is None)
    if source.weights is WeightFormat.SAFETENSORS and source.dequantize_from is not None:
        from headrace.models.dequantized import DequantizedCheckpoint

        return DequantizedCheckpoint(SafetensorsCheckpoint(source.path), source)
    if source.weights is WeightFormat.SAFETENSORS:
        return SafetensorsCheckpoint(source.path)
    raise ModelError(f"{source.name} is loaded with --load-format dummy and has no checkpoint to open; use fill_dummy.")


def load_weights(
    decoder: nn.Module, checkpoint: Checkpoint, rules: Iterable[WeightRule], ignored: Sequence[str], dtype: torch.dtype
) -> None:
    """Fills every parameter and uses (or ignores) every key; otherwise a ModelError names the first few.

    ``dtype`` is the parameters' type, to which tensors are cast while they are copied. The caller must call the
    decoder's ``finish_loading``. On a CPU, files are mapped and copied tensor by tensor; for a GPU, several threads
    read them at once.
    """
    parameters = dict(decoder.named_parameters())
    names = KeyNames(checkpoint.keys())
    plan = [found for rule in rules if (found := _as_stored(rule, names)) is not None]
    for name in set(parameters) - {rule.target for rule in plan}:
        parameters.pop(name).data = torch.empty(0)  # an optional one that is not there
    _check_complete(plan, names)
    _check_nothing_left(plan, names, ignored, checkpoint)
    copies = [copy for rule in plan for copy in _copies(parameters[rule.target], rule, checkpoint, names, dtype)]
    line = LoadingLine(sum(copy.target.nbytes for copy in copies), _layer_ends(plan, parameters))
    try:
        _fill(copies, checkpoint, line.add)
    finally:
        line.close()


def _as_stored(rule: WeightRule, names: KeyNames) -> WeightRule | None:
    """The rule with the suffixes that this checkpoint has; None for an optional tensor that is missing."""
    if rule.stored is None:
        return rule
    usual, first = rule.stored.on_disk[0], next(_sources(rule))
    found = next(
        (each for each in rule.stored.on_disk if names.find(first.removesuffix(usual) + each) is not None), None
    )
    if found is None:
        return None if rule.stored.optional else rule
    return replace(
        rule, sources=tuple(tuple(each.removesuffix(usual) + found for each in group) for group in rule.sources)
    )


def _layer_ends(rules: Iterable[WeightRule], parameters: Mapping[str, nn.Parameter]) -> list[int]:
    """Bytes after which each layer is complete, in the rules' order."""
    ends: dict[str, int] = {}
    done = 0
    for rule in rules:
        done += parameters[rule.target].nbytes
        if layer := _LAYER.match(rule.target):
            ends[layer[1]] = done
    return sorted(ends.values())


@dataclass(frozen=True, slots=True)
class _Copy:
    """Where a stored tensor goes. ``transpose``: it is stored as the transpose of ``target``."""

    key: str
    target: Tensor
    transpose: bool
    box: tuple[slice, ...] = ()
    whole: tuple[int, ...] = ()  # with a box: the stored tensor's shape, as its format has it


def _source(copy: _Copy, checkpoint: SafetensorsCheckpoint) -> Source:
    entry, dtype = checkpoint.entry(copy.key), checkpoint.dtype(copy.key)
    if not copy.box:
        return Source(entry.file, entry.start, dtype, entry.shape, copy.target, copy.transpose)
    pitch = math.prod(copy.whole[1:]) * dtype.itemsize
    shape = tuple(part.stop - part.start for part in copy.box)
    begin = entry.start + copy.box[0].start * pitch + (copy.box[1].start * dtype.itemsize if len(shape) > 1 else 0)
    return Source(
        entry.file, begin, dtype, shape, copy.target, copy.transpose, 0 if shape[1:] == copy.whole[1:] else pitch
    )


def _fill(copies: Sequence[_Copy], checkpoint: Checkpoint, filled: Callable[[int], None]) -> None:
    """``filled`` is called with the bytes of finished targets, by several threads if several read."""
    devices = {copy.target.device for copy in copies}
    if isinstance(checkpoint, SafetensorsCheckpoint) and all(device.type == "cuda" for device in devices):
        for device in devices:
            stream(
                [_source(copy, checkpoint) for copy in copies if copy.target.device == device], device, filled=filled
            )
        return
    with torch.inference_mode():
        for copy in copies:
            tensor = checkpoint.read(copy.key)
            tensor = (
                tensor.view(copy.whole)[copy.box]
                if copy.box
                else tensor
                if copy.transpose
                else tensor.view(copy.target.shape)
            )
            copy.target.copy_(tensor.t() if copy.transpose else tensor)
            filled(copy.target.nbytes)


def _sources(rule: WeightRule) -> Iterator[str]:
    for group in rule.sources:
        yield from group


def _check_complete(rules: list[WeightRule], names: KeyNames) -> None:
    missing = [source for rule in rules for source in _sources(rule) if names.find(source) is None]
    if missing:
        raise ModelError(
            f"the checkpoint lacks {len(missing)} of the tensors that its config calls for (first: {_few(missing)}); "
            f"config.json and the weights do not belong together, or a file is missing. Download the model again."
        )


def _check_nothing_left(
    rules: list[WeightRule], names: KeyNames, ignored: Sequence[str], checkpoint: Checkpoint
) -> None:
    used = {names[source] for rule in rules for source in _sources(rule)}
    patterns = [re.compile(pattern) for pattern in ignored]
    left = (key for key in names.keys - used if not _is_ignored(key, patterns))
    # some tools write biases of zeros
    unknown = sorted(key for key in left if not (key.endswith(".bias") and not checkpoint.read(key).any()))
    if unknown:
        raise ModelError(
            f"the checkpoint holds {len(unknown)} tensors that this model has no place for (first: {_few(unknown)}); "
            f"running without them would give wrong answers. Check that config.json belongs to these weights."
        )


def _is_ignored(key: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(spelling) for spelling in spellings(key) for pattern in patterns)


def _few(names: Sequence[str]) -> str:
    return ", ".join(name[:100] for name in names[:3]) + (", …" if len(names) > 3 else "")


def _copies(
    parameter: nn.Parameter, rule: WeightRule, checkpoint: Checkpoint, names: KeyNames, dtype: torch.dtype
) -> Iterator[_Copy]:
    if rule.stored is None and parameter.dtype != dtype and parameter.dtype != torch.float32:
        raise ModelError(
            f"parameter {rule.target} is {parameter.dtype} but weights load as {dtype}; build the decoder with that dtype."
        )
    stored = checkpoint.dtype(names[next(_sources(rule))])
    if -1 in rule.shape:  # as long as the longest
        longest = max(math.prod(checkpoint.shape(names[source])) for source in _sources(rule))
        parameter.data = parameter.new_zeros([longest if size == -1 else size for size in rule.shape])
    elif rule.stored is not None and rule.stored.any_float and stored in _FLOATS:
        parameter.data = parameter.new_empty(parameter.shape, dtype=stored)
    groups = parameter.data.unbind(0) if rule.stack else (parameter.data,)
    if rule.cut is not None and (not rule.cut.bias or sum(map(len, rule.cut.rows)) < len(parameter)):
        parameter.data.zero_()  # what no tensor fills: a bias that is another rank's, tokens that are none
    if len(groups) != len(rule.sources):
        raise ModelError(
            f"{rule.target} stacks {len(groups)} tensors but the checkpoint has {len(rule.sources)}; check num_experts in config.json."
        )
    for target, sources in zip(groups, rule.sources, strict=True):
        target = target[: math.prod(checkpoint.shape(names[sources[0]]))] if -1 in rule.shape else target
        yield from _copies_of_group(target, rule, [names[source] for source in sources], checkpoint)


def _copies_of_group(target: Tensor, rule: WeightRule, keys: list[str], checkpoint: Checkpoint) -> Iterator[_Copy]:
    """Tensors concatenated along dimension 0 of ``target``; their sizes must add up exactly."""
    whole = tuple(target.shape) if rule.cut is None else rule.cut.whole[: target.dim()]
    shapes = [_oriented(checkpoint.shape(key), rule, whole) for key in keys]
    rows = sum(shape[0] if shape else 1 for shape in shapes)
    wrong = rows != (whole[0] if whole else 1) or any(shape[1:] != whole[1:] for shape in shapes)
    if wrong:
        raise ModelError(
            f"{' + '.join(keys[:3])} has shape {' + '.join(str(list(checkpoint.shape(key))) for key in keys[:3])}, "
            f"but the config calls for {list(whole)}. "
            f"Check that config.json belongs to these weights."
        )
    start = 0
    for key, shape in zip(keys, shapes, strict=True):
        _check_type(key, rule, target, checkpoint)
        transpose, count = rule.transpose and len(shape) == 2, shape[0] if shape else 1
        if rule.cut is not None:
            yield from _cut_copies(key, target, rule.cut, start, shape, transpose=transpose)
        else:
            yield _Copy(key, target.narrow(0, start, count) if len(keys) > 1 else target, transpose)
        start += count


def _cut_copies(
    key: str, target: Tensor, cut: Cut, first: int, shape: tuple[int, ...], *, transpose: bool
) -> Iterator[_Copy]:
    """Of a tensor [out, …] that holds rows ``first`` … of the whole: what belongs to the cut."""
    if target.dim() == 1 and not cut.bias:
        return
    columns = [slice(cut.columns.start, cut.columns.stop)] if target.dim() > 1 else []
    columns += [slice(0, size) for size in shape[2:]]
    for place, rows in cut.pieces(first, shape[0]):
        box, turn = (rows, *columns), -1 if transpose else 1
        yield _Copy(key, target.narrow(0, place, rows.stop - rows.start), transpose, box[::turn], shape[::turn])


def _oriented(shape: tuple[int, ...], rule: WeightRule, whole: tuple[int, ...]) -> tuple[int, ...]:
    """The stored shape in the target's orientation: transposed, or with dimensions of one element added or removed
    where a format stores a different number of them."""
    if rule.transpose and len(shape) == 2:
        return shape[1], shape[0]
    if rule.stored is None:
        return shape
    same = math.prod(shape) == math.prod(whole) if rule.stored.flat else _squeezed(shape) == _squeezed(whole)
    return whole if same else shape


def _squeezed(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _check_type(key: str, rule: WeightRule, target: Tensor, checkpoint: Checkpoint) -> None:
    """Numbers may be cast from any float type; quantized codes must have exactly their type."""
    stored = checkpoint.dtype(key)
    if rule.stored is not None and rule.stored.dtype:
        if stored != target.dtype and not (target.dtype is torch.float32 and stored in _FLOATS):
            raise ModelError(
                f"tensor {key} is stored as {stored}, but its format calls for {target.dtype}. Check that config.json belongs to these weights."
            )
    elif stored not in _FLOATS:
        raise ModelError(
            f"tensor {key} is stored as {stored}, and config.json names no quantization (quantization_config) that it would belong to. "
            "Fetch config.json again, or use an unquantized checkpoint."
        )


# --- scales of keys and values in FP8, one per layer or per KV head


def load_kv_scales(decoder: Decoder, checkpoint: Checkpoint) -> int:
    """Fills in the scales of every layer that has some, and returns how many tensors held them; layers without keep 1.

    If the cache is not in FP8, they are not used, and a message says so. Raises ModelError for an invalid scale, and if
    only some layers have them.
    """
    names = KeyNames(checkpoint.keys())
    found = {}
    for layer, block in enumerate(decoder.blocks):
        held = block.attention.quantized
        targets = (None, None) if held is None else (held.k_scales, held.v_scales)
        for known, target in zip(kv_scale_names(decoder.spec, layer), targets, strict=True):
            if (key := next(filter(None, map(names.find, known)), None)) is not None:
                found[key] = target
    unused = sum(target is None for target in found.values())
    if unused:
        _log.warning(
            "%d scales for keys and values in FP8 are not used: give --kv-cache-dtype fp8 to store the cache in FP8",
            unused,
        )
        return 0
    if found and len(found) < 2 * decoder.spec.num_layers:
        missing = 2 * decoder.spec.num_layers - len(found)
        raise ModelError(
            f"the checkpoint has {len(found)} scales for keys and values and lacks {missing}. Download it again, or use another cache."
        )
    for key, target in found.items():
        assert target is not None
        _fill_scale(target, checkpoint.read(key), key)
    return len(found)


def _fill_scale(target: Tensor, scale: Tensor, key: str) -> None:
    """``target`` [kv_heads], float32; ``scale``: one element, or as many as ``target``."""
    wide = scale.float().flatten()
    if wide.numel() not in (1, target.numel()):
        raise ModelError(
            f"{key} has {wide.numel()} elements; a scale has one, or one for each of {target.numel()} KV heads. Check config.json."
        )
    if not bool((wide.isfinite() & (wide > 0)).all()):
        bad = next(value for value in wide.tolist() if not 0 < value < float("inf"))
        raise ModelError(
            f"{key} is {bad}, which is not a valid scale. Download the checkpoint again, or give --kv-cache-dtype auto or int8."
        )
    target.copy_(wide.expand(target.shape))


# --- random weights ---------------------------------------------------------------------------------------------------

_CHUNK = 1 << 20  # elements drawn at a time: their random bits stay in the cache

# type → (integer of its size, bits kept of a random word: sign and fraction, exponent put in their place: 2⁻⁶)
_LAYOUTS: Mapping[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.bfloat16: (torch.int16, 0x807F - 2**16, 121 << 7),
    torch.float16: (torch.int16, 0x83FF - 2**16, 9 << 10),
    torch.float32: (torch.int32, 0x807FFFFF - 2**32, 121 << 23),
}


def fill_dummy(decoder: nn.Module, seed: int, apart: Collection[str] = (), rank: int = 0) -> None:
    """Random weights, equal for equal seeds and names (on one kind of device), generated where the parameters are.

    Matrices have a standard deviation close to that of the usual initialization, 0.02; vectors named ``weight`` are
    norms, close to 1.
    """
    with torch.inference_mode():
        packed = {
            id(parameter)
            for module in decoder.modules()
            if isinstance(module, Piece)
            for parameter in module.make_up(seed)
        }
        for name, parameter in decoder.named_parameters():
            if id(parameter) not in packed:
                own = f" {rank}" if rank and (name in apart or name.rpartition(".")[0] in apart) else ""
                _fill_random(parameter.data, name, zlib.crc32(f"{seed} {name}{own}".encode()))


def _fill_random(data: Tensor, name: str, seed: int) -> None:
    if data.device.type == "cpu" and data.dtype in _LAYOUTS and data.is_contiguous():
        _fill_bits(data.view(-1), seed)
    else:
        data.uniform_(-0.04, 0.04, generator=torch.Generator(device=data.device).manual_seed(seed))
    if data.dim() == 1 and name.endswith("weight"):
        data.add_(1.0)


def _fill_bits(data: Tensor, seed: int) -> None:
    """Floats of random sign and fraction, ±[2⁻⁶, 2⁻⁵), assembled from random bits in a tenth of the time that drawing
    floats takes.

    A model of a billion parameters is filled in a second instead of ten.
    """
    integer, kept, exponent = _LAYOUTS[data.dtype]
    random = np.random.Generator(np.random.SFC64(seed))
    for chunk in data.view(integer).split(_CHUNK):
        words = random.integers(0, 2**64, size=-(-chunk.numel() * data.itemsize // 8), dtype=np.uint64)
        torch.bitwise_and(torch.from_numpy(words.view(np.uint8)).view(integer)[: chunk.numel()], kept, out=chunk)
        chunk.bitwise_or_(exponent)
