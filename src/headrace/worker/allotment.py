"""Who gets how much of one device's memory, in the order in which it becomes known.

A CPU's plan is made of bounds, before anything is loaded. On a GPU that plan is a draft: it refuses what cannot fit and bounds the longest
sequence. Once the weights are there, the largest steps are rehearsed, what they hold is measured, and KV gets exactly the rest.

What lives here: that order. What may not: sizes of single things (memory.py), reading counters (device_memory.py), loading, running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.config import CacheConfig, EngineConfig
from headrace.errors import OutOfMemory
from headrace.head_start import HeadStart
from headrace.kernels.around import LEAST_ADDED
from headrace.models import families
from headrace.spec import DecoderSpec, KVGroup, kv_groups
from headrace.worker.device_memory import SMALL_BYTES, DeviceMeter, device_use, measured_peak, set_aside
from headrace.worker.failure import out_of_memory
from headrace.worker.host import available_memory
from headrace.worker.memory import (
    GIB,
    KVPlan,
    Room,
    activation_bytes,
    check_weights_fit,
    gpu_share,
    graph_bytes,
    plan_kv,
    row_bytes,
    weight_bytes,
)
from headrace.worker.rehearsal import Limits, RunsSteps, all_masked, chunks, decode_step, largest_step, rehearse
from headrace.worker.rows import Rows

_REMEDIES = {  # by purpose: what to lower where it cannot be allocated
    "weights": "Use a smaller model, end what else holds memory, or use --device cpu.",
    "KV blocks": "Lower --gpu-memory-utilization or --kv-cache-memory.",
    "activations": "Lower --gpu-memory-utilization, --max-num-batched-tokens, --max-num-seqs or --max-logits-rows.",
    "rows": "Lower --max-num-seqs or --max-model-len.",
    "graphs": "Lower --gpu-memory-utilization or --max-num-seqs, or give --enforce-eager.",
}

CreateRunner = Callable[[Rows, Sequence[Tensor]], RunsSteps]  # without graphs


class Captures(Protocol):
    """What the division needs of graphs of one kind."""

    @property
    def most(self) -> int: ...  # graphs there may come to be

    @property
    def samples(self) -> tuple[Any, ...]: ...  # some of them, the largest first

    def capture(self, samples: tuple[Any, ...]) -> None: ...


CreateGraphs = Callable[[int, Rows, Sequence[Tensor]], Sequence[Captures]]  # of sequences so long; each kind finds the memory of those before


@dataclass(frozen=True, slots=True)
class Demand:
    """What the division depends on."""

    spec: DecoderSpec
    cache: CacheConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int
    tokens_a_step: int
    max_num_seqs: int
    max_logits_rows: int
    requested_len: int | None
    graphs: bool
    arena: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def most_rows(self) -> int:
        """Of one step."""
        return min(self.max_num_seqs, self.tokens_a_step)

    def limits(self, longest: int) -> Limits:
        return Limits(self.max_num_seqs, self.tokens_a_step, self.max_logits_rows, longest)


def create_demand(
    config: EngineConfig, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, *, tokens_a_step: int, block_size: int
) -> Demand:
    scheduler = config.scheduler
    graphs = device.type == "cuda" and not config.device.enforce_eager
    return Demand(
        spec,
        config.cache,
        device,
        dtype,
        block_size,
        tokens_a_step,
        scheduler.rows,
        scheduler.logits_rows,
        config.model.max_model_len,
        graphs,
        config.device.activation_arena,
    )


class Allotment:
    """One engine's share of a device. Made before anything is allocated there: on a GPU it makes the context."""

    def __init__(self, demand: Demand, head_start: HeadStart | None = None) -> None:
        self._demand = demand
        self._meter = None if demand.on_cpu else DeviceMeter(demand.device, head_start)
        self._room = Room(self._available(), {"weights": self._weights(), "activations": self._bound()})
        self._arena = 0  # bytes that steps share
        self._scratch = 0  # bytes that libraries keep

    def draft(self) -> KVPlan:
        """Before anything is loaded. A CPU's plan is final; on a GPU sequences will be no longer than this says."""
        check_weights_fit(self._room, self._demand.device)
        if self._demand.on_cpu:
            return self._plan(self._room)
        return self._plan(Room(self._room.available, {"weights": self._room.purposes["weights"]}))

    def settle(self, decoder: nn.Module, longest: int, create_runner: CreateRunner, create_graphs: CreateGraphs) -> KVPlan:
        """On a GPU, with everything loaded: the plan that holds. ``longest``: of the draft. Raises ConfigError or OutOfMemory."""
        assert self._meter is not None, "a CPU's draft is its plan"
        demand = self._demand
        graphs, self._arena = self._rehearse(longest, create_runner, create_graphs)
        weights = weight_bytes(decoder)
        self._scratch = self._meter.kept(weights)
        self._room = Room(
            self._room.available,
            {
                "weights": weights,
                "activations": self._arena + SMALL_BYTES,
                "graphs": graphs,
                "rows": row_bytes(demand.max_num_seqs, longest, demand.spec.vocab_size, self._block_sizes()),
                "context": self._meter.context,
                "kernels": self._meter.code() + self._scratch,
            },
        )
        check_weights_fit(self._room, demand.device)
        return self._plan(self._room)

    def set_aside(self) -> None:
        """Once rows and KV are allocated: what the largest step needs becomes the allocator's own, so that no step asks the driver."""
        if self._meter is not None:
            with self.explaining("activations"):
                set_aside(self._arena, self._demand.device)

    def restore(self) -> None:
        """After a step that ran out of memory took the allocator's cache apart: the cache is emptied and made whole again, if that is possible."""
        torch.cuda.empty_cache()
        with suppress(OutOfMemory):  # then steps ask the driver for what they need, as far as it has it
            self.set_aside()

    @contextmanager
    def explaining(self, purpose: str, size: int | None = None) -> Iterator[None]:
        """What runs out of memory within becomes an OutOfMemory: the ``purpose``, its size in bytes (None: as planned), what to lower."""
        try:
            yield
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            free = available_memory() if self._demand.on_cpu else torch.cuda.mem_get_info(self._demand.device)[0]
            planned = self._room.purposes[purpose] if size is None else size
            needed = f"{planned / GIB:.2f} GiB for {purpose} could not be allocated: {free / GIB:.2f} GiB are free"
            raise OutOfMemory(f"{needed}. {_REMEDIES[purpose]}") from error

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Graphs are captured within."""
        if self._meter is None:
            yield
        else:
            with self._meter.capturing(), self.explaining("graphs"):
                yield

    def account(self, decoder: nn.Module, plan: KVPlan, rows: Rows, *, process: int, kernels: int) -> dict[str, int]:
        """Bytes by purpose. ``process``, ``kernels``: of the host, before the model and by a first step; a GPU's are its own."""
        tensors = {"weights": weight_bytes(decoder), "kv_cache": plan.num_bytes, "rows": rows.num_bytes}
        activations = self._room.purposes["activations"]
        if self._meter is None:
            return {"process": process, "kernels": kernels, **tensors, "activations": activations}
        meter = self._meter
        outside = {"context": meter.context, "kernels": meter.code() + self._scratch, "in use before": meter.others}
        return {**tensors, "activations": activations, "graphs": meter.graphs, **outside}

    # --- parts

    def _available(self) -> int:
        if self._meter is None:
            return available_memory()
        return gpu_share(self._meter.total, self._meter.others, self._demand.cache.gpu_memory_utilization)

    def _weights(self) -> int:
        return families.count_weights(self._demand.spec) * self._demand.dtype.itemsize

    def _bound(self) -> int:
        demand = self._demand
        logits_rows = min(demand.max_logits_rows, max(demand.max_num_seqs, demand.tokens_a_step))
        return activation_bytes(demand.spec, demand.tokens_a_step, logits_rows, demand.dtype.itemsize)

    def _block_sizes(self) -> list[int]:
        return [each.block_size for each in kv_groups(self._demand.spec, self._demand.block_size, self._demand.dtype.itemsize)]

    def _plan(self, room: Room) -> KVPlan:
        demand = self._demand
        return plan_kv(
            kv_groups(demand.spec, demand.block_size, demand.dtype.itemsize),
            demand.cache,
            room,
            on_cpu=demand.on_cpu,
            max_num_seqs=demand.max_num_seqs,
            tokens_a_step=demand.tokens_a_step,
            max_positions=demand.spec.max_positions,
            requested_len=demand.requested_len,
        )

    def _rehearse(self, longest: int, create_runner: CreateRunner, create_graphs: CreateGraphs) -> tuple[int, int]:
        """(bytes of graphs, bytes the allocator comes to hold by the largest steps)."""
        demand, limits = self._demand, self._demand.limits(longest)
        length = max(chunks(limits)) + 1
        groups = [KVGroup(each, 1) for each in kv_groups(demand.spec, demand.block_size, demand.dtype.itemsize)]
        try:
            rows = Rows(demand.max_num_seqs, length, demand.spec.vocab_size, self._block_sizes(), demand.device)
            caches = [allocate_kv(group, demand.dtype, demand.device).zero_() for group in groups]
            runner = create_runner(rows, caches)
            with measured_peak(demand.device) as peaks:
                rehearse(runner, decode_step(limits))
            graphs = self._try_graphs(partial(create_graphs, longest, rows, caches))
            if demand.arena:
                self._record(runner, limits)
            with measured_peak(demand.device) as peaks_of_all:
                largest = largest_step(limits)
                rehearse(runner, largest, all_masked(largest, demand.spec.vocab_size))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(self._too_large(limits)) from error
        del runner, rows, caches
        torch.cuda.empty_cache()
        return graphs, max(peaks[0].held, peaks_of_all[0].held)

    def _record(self, runner: RunsSteps, limits: Limits) -> None:
        """A step of the largest one's kind, so that the arena plans that one: what steps hold is measured as they will hold it."""
        runner.begin(largest_step(replace(limits, tokens_a_step=min(limits.tokens_a_step, LEAST_ADDED))))
        runner.forget()

    def _try_graphs(self, create_graphs: Callable[[], Sequence[Captures]]) -> int:
        """Bytes that all graphs will take beside what is in use when these are gone again."""
        kinds, begin, taken = create_graphs(), self._used(), 0
        if not kinds:
            return 0
        for kind in kinds:
            used = [self._used()]
            for sample in kind.samples:
                kind.capture((sample,))
                used.append(self._used())
            taken += graph_bytes(kind.most, [after - before for before, after in pairwise(used)])
        del kinds, kind
        torch.cuda.empty_cache()
        kept = max(0, self._used() - begin)  # what the driver does not give back serves the next ones
        return max(0, taken - kept)

    def _used(self) -> int:
        return device_use(self._demand.device).used

    def _too_large(self, limits: Limits) -> str:
        free, total = torch.cuda.mem_get_info(self._demand.device)
        shape = f"{limits.tokens_a_step} tokens, {limits.max_num_seqs} sequences, {limits.max_logits_rows} rows of logits"
        weights = self._room.purposes["weights"]
        return (
            f"The largest step ({shape}) does not fit beside the weights ({weights / GIB:.2f} GiB): of the GPU's {total / GIB:.2f} GiB, "
            f"{free / GIB:.2f} GiB were left. Lower --max-num-batched-tokens, --max-num-seqs or --max-logits-rows, or use --device cpu."
        )


def allocate_kv(group: KVGroup, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[blocks, layers, 2, kv_heads, block_size, head_dim]; on a CPU pages are taken at first touch."""
    spec = group.spec
    return torch.empty(group.num_blocks, len(spec.layers), 2, spec.num_kv_heads, spec.block_size, spec.head_dim, dtype=dtype, device=device)
