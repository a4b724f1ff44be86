"""Which rank holds which experts, where each holds whole ones.

What lives here: placements, the files they come from, and what is wrong with those. What may not: torch, balancing
(balance.py), how rows find their experts (kernels/moe).

Under tensor parallel attention every rank has all rows of the residual stream. So no row is sent to its experts: each
rank adds up what its own experts make of the rows that chose them, and the all-reduce that follows a split
feed-forward anyway adds up the ranks. Of an expert that several ranks hold, the copies take turns at the rows of a
step, and each row's pair is computed by one of them: a token's result is the same sum of top_k terms, in another order.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.parallel.balance import balanced, imbalance
from headrace.spec import DecoderSpec, Held

if TYPE_CHECKING:
    from headrace.config import DeviceConfig

Layer = tuple[tuple[int, ...], ...]  # the experts of each rank
_LARGEST_FILE = 2**26
_WANTED = (
    'Give {"counts": {layer: [rows of each expert]}} or {"experts": {layer: [[experts of rank 0], …]}} as JSON; '
    "headrace bench experts writes both."
)


def contiguous(num_experts: int, ranks: int) -> Layer:
    """Neighbours together; the first ranks have one more where the number does not divide."""
    bounds = [-(-num_experts * rank // ranks) for rank in range(ranks + 1)]
    return tuple(tuple(range(*each)) for each in pairwise(bounds))


def held_experts(spec: DecoderSpec, device: DeviceConfig, rank: int) -> tuple[tuple[Held, ...], ...] | None:
    """What rank ``rank`` of a stage has of each layer's experts; None: a part of each, or all of them. Raises
    ConfigError."""
    if not device.enable_expert_parallel or device.tensor_parallel_size == 1:
        return None
    return tuple(held_of(layer, rank) if layer else () for layer in placement_of(spec, device))


def placement_of(spec: DecoderSpec, device: DeviceConfig) -> tuple[Layer, ...]:
    """Of each layer; of one without experts nothing. Raises ConfigError."""
    ranks, path = device.tensor_parallel_size, device.expert_placement
    sparse = {index: layer.moe for index, layer in enumerate(spec.layers) if layer.moe is not None}
    if not sparse:
        raise ConfigError(
            "--enable-expert-parallel is on, but this model has no experts. Leave it out: --tensor-parallel-size splits its matrices."
        )
    if few := next((moe for moe in sparse.values() if moe.num_experts < ranks), None):
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, but a layer has {few.num_experts} experts, and each rank needs one. "
            f"Give at most {few.num_experts} ranks, or leave --enable-expert-parallel out."
        )
    sizes = {index: moe.num_experts for index, moe in sparse.items()}
    found = {index: contiguous(size, ranks) for index, size in sizes.items()}
    if device.expert_failover:  # each has its neighbour's, too
        found = {
            index: tuple(tuple(sorted({*each, *layer[(at + 1) % ranks]})) for at, each in enumerate(layer))
            for index, layer in found.items()
        }
    if path is not None:
        found = _read(Path(path), sizes, ranks)
    if device.batch_invariant and any(len(set(sum(each, ()))) < sum(map(len, each)) for each in found.values()):
        raise ConfigError(
            f"--expert-placement {path} has copies of experts, and which copy computes a row depends on the batch, "
            "which --batch-invariant forbids. Leave one of them out."
        )
    placed = tuple(found.get(index, ()) for index in range(spec.num_layers))
    if device.expert_failover and not spare(placed, ranks):
        raise ConfigError(
            f"expert_failover is on, but with --expert-placement {path} each rank has an expert that no other has. "
            "Leave the placement out, or give one with copies (headrace bench experts --copies)."
        )
    return placed


def outlived(placement: Sequence[Layer], left: Sequence[int]) -> bool:
    """Whether these ranks have all experts between them."""
    return all(
        {expert for each in left for expert in layer[each]} >= set().union(*layer) for layer in placement if layer
    )


def spare(placement: Sequence[Layer], ranks: int) -> list[int]:
    """Who may die, by himself; the first rank has the engine."""
    return [each for each in range(1, ranks) if outlived(placement, [other for other in range(ranks) if other != each])]


def check_agreed(spec: DecoderSpec, device: DeviceConfig, least: Callable[[int], int]) -> None:
    """Each rank has read the file by itself. ``least``: of what all ranks give. Raises ConfigError."""
    mark = zlib.crc32(repr(placement_of(spec, device)).encode())
    if least(mark) != -least(-mark):
        raise ConfigError(
            f"--expert-placement {device.expert_placement} was changed while ranks were reading it. Start again."
        )


def explained(spec: DecoderSpec, device: DeviceConfig) -> tuple[str, str]:
    """What was chosen, and why, for people."""
    layers = [each for each in placement_of(spec, device) if each]
    sizes = sorted({len(rank) for layer in layers for rank in layer})
    each = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    copies = sum(sum(map(len, layer)) - len(set(sum(layer, ()))) for layer in layers)
    chosen = f"{each} experts of a layer on each of {device.tensor_parallel_size} ranks"
    if device.expert_placement is None and device.expert_failover:
        return (
            chosen,
            "its own and the next rank's, so that any but the first may die; --expert-placement says otherwise",
        )
    if device.expert_placement is None:
        return chosen, "neighbours together; --expert-placement balances them by recorded routing"
    counts = read_counts(Path(device.expert_placement), spec)
    loads = [
        (imbalance(counts[index], layer), imbalance(counts[index], contiguous(len(counts[index]), len(layer))))
        for index, layer in enumerate(placement_of(spec, device))
        if layer and counts
    ]
    reason = f"as {device.expert_placement} says"
    if loads:
        mean, plain = (sum(each) / len(loads) for each in zip(*loads, strict=True))
        reason = f"{reason}: the busiest rank has {mean:.2f} times the mean's rows, {plain:.2f} times with neighbours together"
    return chosen, reason + (f"; {copies} copies" if copies else "")


def held_of(layer: Sequence[Sequence[int]], rank: int) -> tuple[Held, ...]:
    copies = Counter(expert for each in layer for expert in each)
    before = Counter(expert for each in layer[:rank] for expert in each)
    return tuple(Held(expert, before[expert], copies[expert]) for expert in sorted(layer[rank]))


# --- files


def read_counts(path: Path, spec: DecoderSpec) -> dict[int, list[float]]:
    """Rows of each expert, by layer; empty if the file has none. Raises ConfigError."""
    counts, _ = _parts(path)
    sizes = {index: layer.moe.num_experts for index, layer in enumerate(spec.layers) if layer.moe is not None}
    _refuse(path, _count_problems(counts, sizes) if counts else iter(()))
    return counts


def _read(path: Path, sizes: dict[int, int], ranks: int) -> dict[int, Layer]:
    counts, experts = _parts(path)
    if experts:
        _refuse(path, _placement_problems(experts, sizes, ranks))
        return {index: tuple(map(tuple, experts[index])) for index in sizes}
    _refuse(path, _count_problems(counts, sizes))
    return {index: balanced(counts[index], ranks) for index in sizes}


def _parts(path: Path) -> tuple[dict[int, list[float]], dict[int, list[list[int]]]]:
    import msgspec  # not for --help

    class Stored(msgspec.Struct):
        counts: dict[int, list[float]] = {}
        experts: dict[int, list[list[int]]] = {}

    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"--expert-placement {path} is larger than {_LARGEST_FILE >> 20} MiB. {_WANTED}")
        stored = msgspec.json.decode(path.read_bytes(), type=Stored)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"--expert-placement {path} cannot be read ({error}). {_WANTED}") from error
    if not stored.counts and not stored.experts:
        raise ConfigError(f"--expert-placement {path} has neither counts nor experts. {_WANTED}")
    return stored.counts, stored.experts


def _refuse(path: Path, problems: Iterator[str]) -> None:
    if problem := next(problems, None):
        raise ConfigError(f"--expert-placement {path}: {problem}. {_WANTED}")


def _count_problems(counts: dict[int, list[float]], sizes: dict[int, int]) -> Iterator[str]:
    for index, size in sizes.items():
        if index not in counts:
            yield f"counts lack layer {index}"
        elif len(counts[index]) != size:
            yield f"layer {index} has {len(counts[index])} counts, but {size} experts"
        elif not all(0 <= each < float("inf") for each in counts[index]):
            yield f"layer {index} has counts that are no numbers from 0"
    if more := sorted(set(counts) - set(sizes)):
        yield f"counts name layer {more[0]}, which has no experts in this model"


def _placement_problems(experts: dict[int, list[list[int]]], sizes: dict[int, int], ranks: int) -> Iterator[str]:
    for index, size in sizes.items():
        layer: Sequence[Sequence[int]] = experts.get(index, ())
        held = {expert for rank in layer for expert in rank}
        if not layer:
            yield f"experts lack layer {index}"
        elif len(layer) != ranks:
            yield f"layer {index} is placed on {len(layer)} ranks, but --tensor-parallel-size is {ranks}"
        elif strange := sorted(held - set(range(size))):
            yield f"layer {index} names expert {strange[0]}, but has experts 0 to {size - 1}"
        elif missing := sorted(set(range(size)) - held):
            yield f"layer {index} lacks expert {missing[0]}: no rank holds it"
        elif any(not rank or len(set(rank)) < len(rank) for rank in layer):
            yield f"layer {index} has a rank that holds no expert, or one twice"
    if more := sorted(set(experts) - set(sizes)):
        yield f"experts name layer {more[0]}, which has none in this model"
