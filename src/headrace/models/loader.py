"""Fills a decoder's parameters: from a checkpoint, strictly and one tensor at a time, or with seeded random numbers.

What lives here: matching rules against keys, copying into the parameters' own storage, and the errors of both ends.
What may not: knowledge of families (families.py writes the rules), file formats (checkpoint.py), packing (finish_loading).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.models.checkpoint import Checkpoint
from headrace.models.families import WeightRule

# Checkpoints of the same model differ in whether names begin at the causal-LM wrapper or at the bare model.
_WRAPPERS = ("model.", "transformer.")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_weights(decoder: nn.Module, checkpoint: Checkpoint, rules: Iterable[WeightRule], ignored: Sequence[str], dtype: torch.dtype) -> None:
    """Every parameter is filled and every key used (or ignored), or ModelError names the first few.

    ``dtype`` is the parameters' type, into which tensors are cast while they are copied. The decoder's ``finish_loading`` is the caller's.
    """
    parameters = dict(decoder.named_parameters())
    names = _Names(checkpoint.keys())
    plan = list(rules)
    _check_complete(plan, parameters, names)
    _check_nothing_left(plan, names, ignored)
    with torch.inference_mode():
        for rule in plan:
            _fill(parameters[rule.target], rule, checkpoint, names, dtype)


class _Names:
    """Finds a rule's key in a checkpoint that may lack or add the wrapper's prefix."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = set(keys)

    def find(self, name: str) -> str | None:
        return next((key for key in spellings(name) if key in self.keys), None)

    def __getitem__(self, name: str) -> str:
        key = self.find(name)
        assert key is not None, name  # _check_complete has seen to it
        return key


def spellings(name: str) -> Iterator[str]:
    """A key as written, without its wrapper's prefix, and with one."""
    yield name
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            yield name.removeprefix(wrapper)
    for wrapper in _WRAPPERS:
        yield wrapper + name


def _sources(rule: WeightRule) -> Iterator[str]:
    for group in rule.sources:
        yield from group


def _check_complete(rules: list[WeightRule], parameters: dict[str, nn.Parameter], names: _Names) -> None:
    unfilled = sorted(set(parameters) - {rule.target for rule in rules})
    assert not unfilled, f"no rule fills {unfilled[:3]}"
    missing = [source for rule in rules for source in _sources(rule) if names.find(source) is None]
    if missing:
        raise ModelError(
            f"the checkpoint lacks {len(missing)} of the tensors that its config calls for (first: {_few(missing)}); "
            f"config.json and the weights do not belong together, or a file is missing. Download the model again."
        )


def _check_nothing_left(rules: list[WeightRule], names: _Names, ignored: Sequence[str]) -> None:
    used = {names[source] for rule in rules for source in _sources(rule)}
    patterns = [re.compile(pattern) for pattern in ignored]
    unknown = sorted(key for key in names.keys - used if not _is_ignored(key, patterns))
    if unknown:
        raise ModelError(
            f"the checkpoint holds {len(unknown)} tensors that this model has no place for (first: {_few(unknown)}); "
            f"running without them would give wrong answers. Check that config.json belongs to these weights."
        )


def _is_ignored(key: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(spelling) for spelling in spellings(key) for pattern in patterns)


def _few(names: Sequence[str]) -> str:
    return ", ".join(name[:100] for name in names[:3]) + (", …" if len(names) > 3 else "")


def _fill(parameter: nn.Parameter, rule: WeightRule, checkpoint: Checkpoint, names: _Names, dtype: torch.dtype) -> None:
    if parameter.dtype != dtype and parameter.dtype != torch.float32:
        raise ModelError(f"parameter {rule.target} is {parameter.dtype} but weights load as {dtype}; build the decoder with that dtype.")
    groups = parameter.data.unbind(0) if rule.stack else (parameter.data,)
    if len(groups) != len(rule.sources):
        raise ModelError(f"{rule.target} stacks {len(groups)} tensors but the checkpoint has {len(rule.sources)}; check num_experts in config.json.")
    for target, sources in zip(groups, rule.sources, strict=True):
        _fill_group(target, rule, [names[source] for source in sources], checkpoint)


def _fill_group(target: Tensor, rule: WeightRule, keys: list[str], checkpoint: Checkpoint) -> None:
    """Copies tensors one after another along dimension 0 of ``target``; their sizes must use it up exactly."""
    shapes = [_oriented(checkpoint.shape(key), rule.transpose) for key in keys]
    rows = sum(shape[0] if shape else 1 for shape in shapes)
    wrong = rows != target.shape[0] or any(shape[1:] != tuple(target.shape[1:]) for shape in shapes)
    if wrong:
        raise ModelError(
            f"{' + '.join(keys[:3])} has shape {' + '.join(str(list(shape)) for shape in shapes[:3])}, "
            f"but the config calls for {list(target.shape)}. "
            f"Check that config.json belongs to these weights."
        )
    start = 0
    for key, shape in zip(keys, shapes, strict=True):
        _copy(target.narrow(0, start, shape[0]), key, checkpoint, transpose=rule.transpose)
        start += shape[0]


def _oriented(shape: tuple[int, ...], transpose: bool) -> tuple[int, ...]:
    return (shape[1], shape[0]) if transpose and len(shape) == 2 else shape


def _copy(target: Tensor, key: str, checkpoint: Checkpoint, *, transpose: bool) -> None:
    if checkpoint.dtype(key) not in _FLOATS:
        raise ModelError(
            f"tensor {key} is stored as {checkpoint.dtype(key)}, which needs a "
            "quantization format that is not supported; use an unquantized checkpoint."
        )
    tensor = checkpoint.read(key)
    target.copy_(tensor.t() if transpose and tensor.dim() == 2 else tensor)


_DUMMY_BLOCK = 1 << 20  # elements drawn at a time


def fill_dummy(decoder: nn.Module, seed: int) -> None:
    """Random weights, the same for the same seed and names, made where the parameters are.

    Matrices are uniform with the variance of the usual initialisation (0.02²); vectors named ``weight`` are norms and stay near 1.
    """
    with torch.inference_mode():
        for name, parameter in decoder.named_parameters():
            generator = torch.Generator(device=parameter.device).manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
            _fill_random(parameter.data, name, generator)


def _fill_random(data: Tensor, name: str, generator: torch.Generator) -> None:
    if data.dim() == 1 and name.endswith("weight"):
        data.uniform_(0.9, 1.1, generator=generator)
        return
    bound = 0.02 * 3**0.5
    data.uniform_(-bound, bound, generator=generator)
