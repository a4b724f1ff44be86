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
from headrace.parallel.failover import Survivors
from headrace.parallel.group import GlooGroup, Group, Peers, check_members
from headrace.parallel.nccl import NCCLGroup, NCCLPipe, use_interface
from headrace.parallel.pipeline import GlooPipe, Pipe
from headrace.parallel.placement import placement_of
from headrace.parallel.ranks import device_of
from headrace.spec import DecoderSpec


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
    return stages * _groups(config) + (config.ranks_a_stage * links + 1 if stages > 1 else 0)


def _groups(config: DeviceConfig) -> int:
    """Of a stage: of those who share layers there is one for each place of the keys, and the other way round."""
    ranks, places = config.tensor_parallel_size, config.context_parallel_size
    return ranks + places if ranks > 1 < places else 1


def _survivors(place: frames.Meet, rank: int, config: DeviceConfig, spec: DecoderSpec, store: Any) -> Survivors:
    def those(told: frames.Gone) -> Group:
        name, members = f"experts-{told.epoch}", told.members
        group = GlooGroup(store, place.addresses[rank], members.index(rank), len(members), name)
        check_members(group, name, place.key, "cpu")
        return group

    if place.ids:
        raise ConfigError("expert_failover is on, but ranks on GPUs end together; leave it out, or use --device cpu.")
    return Survivors(those, rank, config.tensor_parallel_size, placement_of(spec, config))


def meet(place: frames.Meet, rank: int, config: DeviceConfig, spec: DecoderSpec, store: Any) -> Peers:
    """Whom rank ``rank`` meets: it is (stage · places of the keys + place) · ranks that share layers + place among
    these, so that those who meet most are neighbours. ``store``: through which CPUs find each other."""
    stages, ids, size = config.pipeline_parallel_size, place.ids, config.ranks_a_stage
    ranks, places = config.tensor_parallel_size, config.context_parallel_size
    stage, at = divmod(rank, size)
    holder, part = divmod(at, ranks)
    kind, address, first = "cuda" if ids else "cpu", place.addresses[rank], stage * _groups(config)
    near = len(set(place.addresses[rank - part : rank - part + ranks])) == 1
    if ids:
        use_interface(address)

    def meeting(number: int, at: int, size: int, name: str, *, sums: bool) -> Group | None:
        """The stage's group of that number; None where it is this rank's alone."""
        if size == 1:
            return None
        if not ids:
            group: Group = GlooGroup(store, address, at, size, name)
        else:
            small = sums and near and config.one_shot_sums
            group = NCCLGroup(ids[first + number], at, size, one_shot=small, onto=config.fused_sums)
        check_members(group, name, place.key, kind)
        return group

    if config.expert_failover:
        return Peers(experts=_survivors(place, rank, config, spec, store))
    pipe: Pipe | None = None
    if stages > 1:
        all = size * stages, stages
        pipe = NCCLPipe(ids[stages * _groups(config) :], rank, *all) if ids else GlooPipe(store, address, rank, *all)
        check_members(pipe.all, "all stages", place.key, kind)
    group = meeting(holder if places > 1 else 0, part, ranks, f"stage-{stage}-{holder}", sums=True)
    keys = meeting(places + part if ranks > 1 else 0, holder, places, f"keys-{stage}-{part}", sums=False)
    return Peers(group, keys, pipe, near=len(set(place.addresses)) == 1)


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
