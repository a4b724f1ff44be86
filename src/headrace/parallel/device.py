"""The device of one rank: which it is, and the group it becomes part of.

What lives here: telling CPUs and GPUs apart, for ranks. What may not: processes, what is computed.

Each rank's process sees one GPU alone (CUDA_VISIBLE_DEVICES), so that nothing in it need know of others.
"""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.errors import ConfigError
from headrace.parallel.group import GlooGroup, Group
from headrace.parallel.nccl import NCCLGroup


def device_here(kind: str) -> str:
    """What ranks must have in common."""
    if kind == "cpu":
        return "cpu"
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"


def create_group(folder: str, id: bytes, rank: int, size: int, *, one_shot: bool = True) -> Group:
    """``folder``, ``id``: where ranks meet on CPUs, or on GPUs. ``one_shot``: see NCCLGroup."""
    return NCCLGroup(id, rank, size, one_shot=one_shot) if id else GlooGroup(Path(folder), rank, size)


def check_devices(size: int) -> None:
    """Raises ConfigError where there are fewer GPUs than ranks."""
    count = torch.cuda.device_count()
    if count < size:
        raise ConfigError(
            f"--tensor-parallel-size is {size}, but {count} GPU{'s are' if count != 1 else ' is'} visible here. "
            f"Give at most {count}, or make more visible (CUDA_VISIBLE_DEVICES)."
        )
