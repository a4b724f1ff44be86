"""The device of one rank: which it is, and the group it becomes part of.

What lives here: telling CPUs and GPUs apart, for ranks. What may not: processes, what is computed.

Each rank's process sees one GPU alone (CUDA_VISIBLE_DEVICES), so that nothing in it need know of others.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from headrace.config import DeviceConfig
from headrace.errors import ConfigError
from headrace.parallel import frames
from headrace.parallel.group import GlooGroup, Group, check_members
from headrace.parallel.nccl import NCCLGroup, NCCLPipe, use_interface
from headrace.parallel.pipeline import GlooPipe, Pipe
from headrace.parallel.ranks import device_of


def device_here(kind: str) -> str:
    """What ranks must have in common."""
    if kind == "cpu":
        return "cpu"
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"


def count_ids(config: DeviceConfig, *, drafts: bool = False) -> int:
    """``drafts``: some are verified, and all stages hear of that."""
    stages = config.pipeline_parallel_size
    links = 2 * stages - 2 if drafts else stages
    return stages if stages == 1 else stages + config.num_ranks // stages * links + 1


def meet(place: frames.Meet, rank: int, config: DeviceConfig, store: Any) -> tuple[Group | None, Pipe | None]:
    """What rank ``rank`` has in common with the others of its stage or of its keys, and with the other stages; None
    where there are none. ``store``: through which CPUs find each other."""
    stages, ids = config.pipeline_parallel_size, place.ids
    size = config.num_ranks // stages
    stage, at = divmod(rank, size)
    address, name = place.addresses[rank], f"stage-{stage}"
    pipe: Pipe | None = None
    group: Group | None = None
    if ids:
        use_interface(address)
    if stages > 1 and ids:
        pipe = NCCLPipe(ids[stages:], rank, size * stages, stages)
    elif stages > 1:
        pipe = GlooPipe(store, address, rank, size * stages, stages)
    if size > 1 and ids:
        near = len(set(place.addresses[stage * size : (stage + 1) * size])) == 1
        group = NCCLGroup(ids[stage], at, size, one_shot=config.one_shot_sums and near, onto=config.fused_sums)
    elif size > 1:
        group = GlooGroup(store, address, at, size, name)
    for each, called in ((None if pipe is None else pipe.all, "all stages"), (group, name)):
        if each is not None:
            check_members(each, called, place.key, "cuda" if ids else "cpu")
    return group, pipe


def check_devices(config: DeviceConfig, needed: int) -> None:
    """Raises ConfigError where there are fewer GPUs than are needed: those of one replica, or of all."""
    count, kinds = torch.cuda.device_count(), ("tensor", "pipeline", "context", "data")
    sizes = {name: getattr(config, f"{name}_parallel_size") for name in kinds[: 3 if needed <= config.num_ranks else 4]}
    if count < needed:
        flags = " times ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{flags} is {needed} devices{' on each node' * (config.nnodes > 1)}, but {count} GPU{'s are' if count != 1 else ' is'} visible here. "
            f"Give at most {count}, or make more visible (CUDA_VISIBLE_DEVICES)."
        )


def take_gpus(config: DeviceConfig, replica: int) -> None:
    """From now on this process and its children see the GPUs of one replica alone. Raises ConfigError where there are
    too few of them for all. Must come before anything looks for a GPU."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.device_count()):
        return
    check_devices(config, config.num_devices)
    first = replica * config.num_ranks
    seen = [device_of(number)["CUDA_VISIBLE_DEVICES"] for number in range(first, first + config.num_ranks)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
