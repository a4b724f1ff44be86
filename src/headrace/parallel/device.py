"""The device of one rank: which it is, and the group it becomes part of.

What lives here: telling CPUs and GPUs apart, for ranks. What may not: processes, what is computed.

Each rank's process sees one GPU alone (CUDA_VISIBLE_DEVICES), so that nothing in it need know of others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from headrace.config import DeviceConfig
from headrace.errors import ConfigError
from headrace.parallel import frames
from headrace.parallel.failover import Survivors
from headrace.parallel.group import Agreement, GlooGroup, Group, Peers, check_members
from headrace.parallel.nccl import NCCLGroup, NCCLPipe, create_id, use_interface
from headrace.parallel.peer_memory import PeerMemory
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


def _survivors(place: frames.Rendezvous, rank: int, config: DeviceConfig, spec: DecoderSpec, store: Any) -> Survivors:
    """On GPUs, sums of theirs go through NCCL alone: memory of a rank that is gone is nobody's to write to."""

    def those(told: frames.Gone) -> Group:
        name, among = f"experts-{told.epoch}", (told.members.index(rank), len(told.members))
        if not place.ids:
            group: Group = GlooGroup(store, place.addresses[rank], *among, name)
            check_members(group, name, place.key, "cpu")
            return group
        made = NCCLGroup(told.id or place.ids[0], *among, one_shot=False)
        _connect([(made, name)], place.key)
        return made

    if place.ids:
        use_interface(place.addresses[rank])
    create = create_id if place.ids else bytes
    return Survivors(those, rank, config.tensor_parallel_size, placement_of(spec, config), create)


def _connect(groups: Sequence[tuple[NCCLGroup, str]], key: bytes) -> None:
    """One after the other, while this process goes on."""

    def connect() -> None:
        for group, name in groups:
            group.connect(partial(check_members, name=name, key=key, device="cuda"))

    threading.Thread(target=connect, daemon=True, name="headrace-connect").start()


def create_peers(place: frames.Rendezvous, rank: int, config: DeviceConfig, spec: DecoderSpec, store: Any) -> Peers:
    """Whom rank ``rank`` meets: it is (stage · places of the keys + place) · ranks that share layers + place among
    these, so that those who meet most are neighbours. ``store``: through which CPUs find each other, and GPUs settle
    what they must before they are connected."""
    stages, ids, size = config.pipeline_parallel_size, place.ids, config.ranks_a_stage
    ranks, places = config.tensor_parallel_size, config.context_parallel_size
    stage, at = divmod(rank, size)
    holder, part = divmod(at, ranks)
    kind, address, first = "cuda" if ids else "cpu", place.addresses[rank], stage * _groups(config)
    near = len(set(place.addresses[rank - part : rank - part + ranks])) == 1
    if ids:
        use_interface(address)
    connecting: list[tuple[NCCLGroup, str]] = []

    def meeting(number: int, at: int, size: int, name: str, *, sums: bool) -> Group | None:
        """The stage's group of that number; None where it is this rank's alone."""
        if size == 1:
            return None
        if not ids:
            group = GlooGroup(store, address, at, size, name)
            check_members(group, name, place.key, kind)
            return group
        how: dict[str, Any] = {"one_shot": sums and near and config.one_shot_sums, "onto": config.fused_sums}
        if config.ranks_per_device > 1:
            how["host"] = GlooGroup(store, address, at, size, f"{name} of one device")
        made = NCCLGroup(ids[first + number], at, size, **how, agree=Agreement(store, name, at, size).all_reduce_min)
        connecting.append((made, name))
        return made

    if config.expert_failover:
        return Peers(experts=_survivors(place, rank, config, spec, store))
    pipe: Pipe | None = None
    if stages > 1:
        all = size * stages, stages
        if ids:
            pipe = nccl_pipe = NCCLPipe(ids[stages * _groups(config) :], rank, *all)
            nccl_pipe.all.connect()
        else:
            pipe = GlooPipe(store, address, rank, *all)
        check_members(pipe.all, "all stages", place.key, kind)
    group = meeting(holder if places > 1 else 0, part, ranks, f"stage-{stage}-{holder}", sums=True)
    keys = meeting(places + part if ranks > 1 else 0, holder, places, f"keys-{stage}-{part}", sums=False)
    if connecting:
        _connect(connecting, place.key)
    near = len(set(place.addresses)) == 1
    before, on_gpu = (rank - size) % (size * stages), kind == "cuda"
    memory = PeerMemory(store, rank, before, on_gpu=on_gpu) if any(config.pooled_layers) else None
    return Peers(group, keys, pipe, near, memory=memory, await_all=lambda: [each.connected() for each, _ in connecting])


def check_devices(config: DeviceConfig, needed: int) -> None:
    """Raises ConfigError where there are fewer GPUs than are needed: those of one replica, or of all."""
    count, kinds = torch.cuda.device_count(), ("tensor", "pipeline", "context", "data")
    sizes = {name: getattr(config, f"{name}_parallel_size") for name in kinds[: 3 if needed <= config.num_ranks else 4]}
    needed, shared = needed // config.ranks_per_device, config.ranks_per_device > 1
    if count < needed:
        flags = " times ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)
        flags += f" with --ranks-per-device {config.ranks_per_device}" if shared else ""
        raise ConfigError(
            f"{flags} is {needed} device{'s' * (needed != 1)}{' on each node' * (config.nnodes > 1)}, "
            f"but {count} GPU{'s are' if count != 1 else ' is'} visible here. "
            f"{f'Give at most {count}, or make' if count else 'Make'} more visible (CUDA_VISIBLE_DEVICES)."
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
