"""The device of one rank: which it is, and the group it becomes part of.

What lives here: telling CPUs and GPUs apart, for ranks. What may not: processes, what is computed.

Each rank's process sees one GPU alone (CUDA_VISIBLE_DEVICES), so that nothing in it need know of others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.config import DeviceConfig
from headrace.errors import ConfigError
from headrace.parallel.group import GlooGroup, Group
from headrace.parallel.nccl import NCCLGroup, NCCLPipe
from headrace.parallel.pipeline import GlooPipe, Pipe
from headrace.parallel.ranks import device_of


def device_here(kind: str) -> str:
    """What ranks must have in common."""
    if kind == "cpu":
        return "cpu"
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"


def create_group(folder: str, id: bytes, rank: int, size: int, *, one_shot: bool = True, onto: bool = True) -> Group:
    """``folder``, ``id``: where ranks meet on CPUs, or on GPUs. ``one_shot``, ``onto``: see NCCLGroup."""
    return NCCLGroup(id, rank, size, one_shot=one_shot, onto=onto) if id else GlooGroup(Path(folder), rank, size)


def count_ids(config: DeviceConfig) -> int:
    stages = config.pipeline_parallel_size
    return stages if stages == 1 else stages + config.num_ranks + 1


def meet(folder: str, ids: Sequence[bytes], rank: int, config: DeviceConfig) -> tuple[Group | None, Pipe | None]:
    """What rank ``rank`` has in common with the others of its stage, and with the other stages; None where there are
    none. ``ids``: on GPUs, as ``count_ids`` counts them: of each stage's group, then those of the pipe (nccl.py)."""
    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    stage, place = divmod(rank, size)
    pipe: Pipe | None = None
    group: Group | None = None
    if stages > 1 and ids:
        pipe = NCCLPipe(ids[stages:], rank, size * stages, stages)
    elif stages > 1:
        pipe = GlooPipe(Path(folder), rank, size * stages, stages)
    if size > 1 and ids:
        switches = {"one_shot": config.one_shot_sums, "onto": config.fused_sums}
        group = create_group("", ids[stage], place, size, **switches)
    elif size > 1:
        group = GlooGroup(Path(folder), place, size, f"stage-{stage}")
    if pipe is not None:
        pipe.least(0)  # once all are there, the folder may go
    return group, pipe


def check_devices(config: DeviceConfig, needed: int) -> None:
    """Raises ConfigError where there are fewer GPUs than are needed: those of one replica, or of all."""
    count, kinds = torch.cuda.device_count(), ("tensor", "pipeline", "data")
    sizes = {name: getattr(config, f"{name}_parallel_size") for name in kinds[: 2 if needed == config.num_ranks else 3]}
    if count < needed:
        flags = " times ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{flags} is {needed} devices, but {count} GPU{'s are' if count != 1 else ' is'} visible here. "
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
