"""Which layers each stage of a pipeline holds.

What lives here: that split, and what does not divide. What may not: torch, how stages meet (pipeline.py), how ranks
share a layer (shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from headrace.config import DeviceConfig, EngineConfig
from headrace.errors import ConfigError
from headrace.sites import head, is_plain, layer_weights
from headrace.spec import DecoderSpec
from headrace.speculative.settings import HEADS, read_settings

_ELEMENT_BYTES = 2


def split_layers(spec: DecoderSpec, stages: int, counts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(first, behind the last) of each stage. ``counts``: as asked for; none: the largest sum of bytes that a stage reads
    for a token is as small as can be, the LM head counted with the last layer. Raises ConfigError."""
    layers = spec.num_layers
    if stages > layers:
        raise ConfigError(
            f"--pipeline-parallel-size is {stages}, but the model has {layers} layers. Give at most {layers}."
        )
    if counts:
        if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
            raise ConfigError(
                f"--pipeline-layers is {' '.join(map(str, counts))}, but {stages} stages have {layers} layers between them. "
                f"Give {stages} numbers above 0 whose sum is {layers}."
            )
        return list(pairwise(accumulate(counts, initial=0)))
    costs = [sum(each.num_bytes(_ELEMENT_BYTES) for each in layer_weights(spec, index)) for index in range(layers)]
    costs[-1] += head(spec).num_bytes(_ELEMENT_BYTES)
    return list(pairwise(_bounds(costs, stages)))


def _bounds(costs: Sequence[float], parts: int) -> list[int]:
    """Where to cut a row of costs into so many parts, none empty, that the dearest is cheapest."""
    sums = list(accumulate(costs, initial=0.0))
    # best[n]: (the dearest part of the first n, where its last part begins …)
    best: list[tuple[float, tuple[int, ...]]] = [(total, (0,)) for total in sums]
    for part in range(2, parts + 1):
        best = [
            min(
                ((max(best[cut][0], sums[n] - sums[cut]), (*best[cut][1], cut)) for cut in range(part - 1, n)),
                default=best[n],
            )
            for n in range(len(sums))
        ]
    return [*best[-1][1], len(costs)]


def staged(spec: DecoderSpec, config: EngineConfig, stage: int) -> DecoderSpec:
    """What one stage holds, whole as far as its ranks are concerned. Raises ConfigError where the model cannot be
    computed in stages."""
    device = config.device
    if device.pipeline_parallel_size == 1:
        return spec
    if problem := next(iter(_problems(spec, config)), None):
        raise ConfigError(
            f"--pipeline-parallel-size is {device.pipeline_parallel_size}, but {problem}. Use --tensor-parallel-size."
        )
    if any(device.pooled_layers) and (not is_plain(spec) or config.model.share_weights):
        raise ConfigError(
            "--pooled-layers is for weights that are computed with as they are stored, by one process; leave it out."
        )
    stages = split_layers(spec, device.pipeline_parallel_size, device.pipeline_layers)
    for each in range(len(stages)):
        _check_room(spec, device, each, pooled_layers(stages, device, each))
    return replace(spec, held=stages[stage])


def pooled_layers(stages: Sequence[tuple[int, int]], device: DeviceConfig, stage: int) -> tuple[int, ...]:
    """Which layers of a stage lie in the next one's memory, as far from each other as can be, so that others are computed
    while they come. Raises ConfigError."""
    counts, sizes = device.pooled_layers, [end - first for first, end in stages]
    if not counts:
        return ()
    if len(counts) != len(sizes) or any(not 0 <= each <= size for each, size in zip(counts, sizes, strict=True)):
        raise ConfigError(
            f"--pooled-layers is {' '.join(map(str, counts))}, but the stages have {' '.join(map(str, sizes))} layers. "
            "Give as many numbers, each from 0 to its stage's."
        )
    first, end = stages[stage]
    return tuple(first + (2 * at + 1) * (end - first) // (2 * counts[stage]) for at in range(counts[stage]))


def places_for(layers: Sequence[int]) -> int:
    """Of pooled layers, on their own device. Two where neighbours are pooled, of three or more: one of them comes while the
    other is computed."""
    return 2 if len(layers) > 2 and any(after - before < 2 for before, after in pairwise(layers)) else 1


def _check_room(spec: DecoderSpec, device: DeviceConfig, stage: int, pooled: Sequence[int]) -> None:
    """Raises ConfigError where their places take as much as they would: each is as large as the largest layer."""
    sizes = [sum(each.num_bytes(_ELEMENT_BYTES) for each in layer_weights(spec, layer)) for layer in pooled]
    if sizes and places_for(pooled) * max(sizes) >= sum(sizes):
        raise ConfigError(
            f"--pooled-layers is {' '.join(map(str, device.pooled_layers))}, but those of stage {stage} take turns in memory of its own "
            "that would hold all of them. Give 0, or more layers."
        )


def _problems(spec: DecoderSpec, config: EngineConfig) -> list[str]:
    settings = read_settings(config.scheduler.speculative_config)
    found = {
        "this model's prompts are pooled": spec.pooling is not None or not spec.causal,
        "draft heads go on from hidden states that the first stage, which proposes, has not": settings is not None
        and settings.method in HEADS,
        "accepted branches of a draft tree are not moved in stages": settings is not None and settings.tree is not None,
        "a cache in FP8 is not held in stages": config.cache.kv_cache_dtype.startswith("fp8"),
        "--enable-sleep-mode puts no stages to sleep": config.device.enable_sleep_mode,
    }
    return [problem for problem, is_so in found.items() if is_so]
