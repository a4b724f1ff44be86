"""Ranks as threads of one process: what they compute together, without starting any.

What lives here: a group over barriers, decoders of every rank from one checkpoint. What may not: tests.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from headrace.config import Decision, DeviceConfig, EngineConfig
from headrace.engine import assembly
from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs
from headrace.kernels.sums.reference import Normed, Onto, best_of, normed, onto
from headrace.layers.shared_rows import NONE_SHARED, Sharing
from headrace.models import families
from headrace.models.checkpoint import SafetensorsCheckpoint
from headrace.models.decoder import Decoder
from headrace.models.loader import load_weights
from headrace.models.source import ModelSource
from headrace.models.weight_rules import ignored_keys, weight_rules
from headrace.parallel import leader
from headrace.parallel.group import Peers
from headrace.parallel.placement import held_experts
from headrace.parallel.shares import cuts, share
from headrace.parallel.stages import split_layers
from headrace.spec import attention_groups
from headrace.worker.worker import create_executor
from tests.support.forward import CPU, load_decoder

Result = TypeVar("Result")


class ThreadGroup:
    """One rank's; ``shelf`` is everybody's."""

    backend = "threads"

    def __init__(self, rank: int, shelf: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.comm_ops = rank, len(shelf), 0
        self._shelf, self._barrier = shelf, barrier
        self.rows_onto, self.folded = 24, 0  # as where a hidden state is long: fewer than a product takes
        self.rows_normed, self.normed = 60, 0
        self.scattered = self.dispatched = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(sum(self._everybodys(x)[1:], start=self._last[0]))

    def all_reduce_best(self, peaks: Tensor, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return best_of(self.all_gather_stacked(peaks), self.all_gather_stacked(places + first))

    def max_onto_rows(self, width: int, dtype: torch.dtype) -> int:
        return self.rows_onto

    def all_reduce_onto(self, x: Tensor, residual: Tensor, scale: Tensor) -> Onto:
        self.folded += 1
        return onto(self.all_reduce(x), residual, scale)

    def all_reduce_normed(
        self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> Normed | None:
        if not self.rows_onto < len(x) <= self.rows_normed:
            return None
        self.normed += 1
        return normed(self.all_reduce(torch.cat([product(each) for each in x.split(13)])), residual, scale, eps)

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        return torch.stack(self._everybodys(x))

    def all_gather_async(self, x: Tensor) -> Callable[[], Tensor]:
        found = self.all_gather_stacked(x)
        return lambda: found

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.scattered += 1
        return self.all_reduce(x.clone()).chunk(self.size)[self.rank]

    def all_to_all(self, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
        if not sends:
            return torch.stack([each[self.rank] for each in self._everybodys(x)])
        self.dispatched += 1
        sizes = self._everybodys(torch.tensor(sends))
        parts = [each.split(size.tolist())[self.rank] for each, size in zip(self._everybodys(x), sizes, strict=True)]
        assert [len(each) for each in parts] == list(receives)
        return torch.cat(parts)

    def coalesced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce_min(self, value: int) -> int:
        return min(int(each) for each in self._everybodys(torch.tensor(value)))

    def abort(self) -> None:
        self._barrier.abort()

    def _everybodys(self, x: Tensor) -> list[Tensor]:
        self.comm_ops += 1
        self._shelf[self.rank] = x.clone()
        self._barrier.wait(20)
        self._last = list(self._shelf)
        self._barrier.wait(20)
        return self._last


def together(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """What ``work`` brings on each of so many ranks."""
    shelf, barrier = [torch.empty(0)] * size, threading.Barrier(size)

    def run(rank: int) -> Result:
        torch.set_num_threads(1)
        try:
            return work(ThreadGroup(rank, shelf, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def thread_groups(ranks: int, size: int) -> list[ThreadGroup | None]:
    """Of so many ranks, neighbours in groups of ``size``; of one alone none."""
    if size == 1:
        return [None] * ranks
    shared = [([torch.empty(0)] * size, threading.Barrier(size)) for _ in range(ranks // size)]
    return [ThreadGroup(at % size, *shared[at // size]) for at in range(ranks)]


class Belts:
    """Between all stages: what is sent lies there until it is received."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)

    def put(self, kind: str, to: int, x: Tensor) -> None:
        self.sent[kind, to].put(x.clone())

    def take(self, kind: str, to: int, x: Tensor) -> Tensor:
        return x.copy_(self.sent[kind, to].get(timeout=20))


class Belt:
    """The stages of one place."""

    backend, comm_ops = "belts", 0

    def __init__(self, belts: Belts, stage: int, stages: int) -> None:
        self._belts, self.stage, self.stages = belts, stage, stages
        self.all = self

    def send(self, hidden: Tensor) -> None:
        self._belts.put("hidden", self.stage + 1, hidden)

    def receive(self, hidden: Tensor) -> Tensor:
        return self._belts.take("hidden", self.stage, hidden)

    def send_tokens(self, picked: Tensor, *, to_all: bool = False) -> None:
        for stage in range(self.stages - 1 if to_all else 1):
            self._belts.put("tokens", stage, picked)

    def receive_tokens(self, picked: Tensor) -> Tensor:
        return self._belts.take("tokens", self.stage, picked)

    def all_reduce_min(self, value: int) -> int:
        """All have the same room."""
        return value

    def abort(self) -> None:
        """Nothing waits."""


class Threaded:
    """In place of parallel/leader.py's: the executors of all ranks, each in a thread, as one. What ``modes`` poisons it
    poisons on every rank."""

    def __init__(self, config: EngineConfig, source: ModelSource, *rest: Any, **_: Any) -> None:
        device = config.device
        self._stages = device.pipeline_parallel_size
        belts = [Belts() for _ in range(device.ranks_a_stage)]
        met = [peers for stage in range(self._stages) for peers in self._stage(device, belts, stage)]
        self._pools = [ThreadPoolExecutor(1) for _ in met]
        made = [
            pool.submit(create_executor, config, source, peers=peers)
            for pool, peers in zip(self._pools, met, strict=True)
        ]
        self._ranks, decisions = zip(*(each.result() for each in made), strict=True)
        self.decisions, self.info = decisions[0], self._ranks[0].info
        self._runner = self  # as modes.py looks for it
        self._kv_caches = [
            Caches(each) for each in zip(*(rank._runner._kv_caches for rank in self._ranks), strict=True)
        ]

    @staticmethod
    def _stage(device: DeviceConfig, belts: list[Belts], stage: int) -> list[Peers]:
        """By rank, as parallel/device.py counts them."""
        size, ranks, stages = device.ranks_a_stage, device.tensor_parallel_size, device.pipeline_parallel_size
        groups, keys = (thread_groups(size, each) for each in (ranks, size // ranks))
        pipes = [Belt(each, stage, stages) if stages > 1 else None for each in belts]
        return [Peers(groups[at], keys[at % ranks * (size // ranks) + at // ranks], pipes[at]) for at in range(size)]

    def __getattr__(self, name: str) -> Any:
        if name in ("submit", "sample", "collect", "recover", "prepare", "control", "close"):
            return partial(self._on_all, name)
        return getattr(self._ranks[0], name)

    def _on_all(self, name: str, *given: Any) -> Any:
        waits = [pool.submit(getattr(rank, name), *given) for pool, rank in zip(self._pools, self._ranks, strict=True)]
        found = [each.result() for each in waits]
        return found[-1] if name == "collect" else found[0]  # what the last stage has sampled


class Caches(tuple[Tensor, ...]):
    """One group's, of all ranks."""

    def fill_(self, value: float) -> None:
        for each in self:
            each.fill_(value)

    def __setitem__(self, block: int, value: float) -> None:
        for each in self:
            each[block] = value


def as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of several ranks start no processes."""

    def create(*given: Any, **more: Any) -> tuple[Any, tuple[Decision, ...]]:
        made = Threaded(*given, **more)
        return made, made.decisions

    monkeypatch.setattr(assembly, "_begin_ranks", lambda *_: None)
    monkeypatch.setattr(leader, "create_executor", create)


class Staged:
    """The stages of a pipeline one after the other, in place of a decoder; each has its layers' part of the caches."""

    def __init__(self, folder: Path, stages: int) -> None:
        self.spec = families.spec_from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        bounds = split_layers(self.spec, stages)
        self._parts = [load_decoder(folder, max_model_len=64, held=held) for held in bounds]
        self.embedding, self.logits = self._parts[0].embedding, self._parts[-1].logits

    def __call__(self, inputs: ForwardInputs, caches: Sequence[Tensor]) -> Tensor:
        hidden, begun = None, [0] * len(caches)
        for part in self._parts:
            counts = [len(layers) for _, layers in attention_groups(part.spec)]
            own = [cache[:, at : at + count] for cache, at, count in zip(caches, begun, counts, strict=True)]
            begun = [at + count for at, count in zip(begun, counts, strict=True)]
            hidden = part(inputs if part.spec.answers else replace(inputs, wanted=None, queries=None), own, hidden)
        assert hidden is not None and begun == [cache.shape[1] for cache in caches]
        return hidden


def load_share(
    folder: Path,
    group: ThreadGroup,
    *,
    max_model_len: int = 64,
    device: DeviceConfig | None = None,
    sharing: Sharing = NONE_SHARED,
) -> Decoder:
    """As ``load_decoder``, what one rank holds of it. ``device``: where ranks hold whole experts."""
    whole = families.spec_from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    mine = share(whole, group.size, None if device is None else held_experts(whole, device, group.rank))
    how: dict[str, Any] = {"kernels": Kernels(CPU), "dtype": torch.float32, "device": CPU, "sharing": sharing}
    decoder = Decoder(mine, max_model_len=max_model_len, group=group, **how)
    checkpoint = SafetensorsCheckpoint(folder)
    load_weights(
        decoder, checkpoint, weight_rules(mine, cuts(whole, mine, group.rank)), ignored_keys(mine), torch.float32
    )
    checkpoint.close()
    decoder.finish_loading()
    return decoder
