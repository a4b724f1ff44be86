"""Who gets how much of one device's memory, in the order in which it becomes known.

A CPU's plan is made of bounds, before anything is loaded. On a GPU that plan is a draft: it refuses what cannot fit and
bounds the longest sequence. Once the weights are there, the largest steps are taken, what they hold is measured, and KV
gets exactly the rest.

What lives here: that order. What may not: sizes of single things (memory.py), reading counters (device_memory.py),
loading, running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.config import Decision
from headrace.errors import OutOfMemory
from headrace.kernels.linear.epilogue import LEAST_ADDED
from headrace.parallel.group import Peers
from headrace.spec import KVGroup
from headrace.worker.device_memory import DeviceMeter, device_use, measured_peak, set_aside, small_bytes
from headrace.worker.failure import out_of_memory
from headrace.worker.head_start import HeadStart
from headrace.worker.host import available_memory
from headrace.worker.memory import (
    COPY,
    GIB,
    KVPlan,
    Room,
    bounds,
    check_weights_fit,
    gpu_share,
    graph_bytes,
    held_copy_bytes,
    plan_kv,
    row_bytes,
    weight_bytes,
    with_copy,
    with_pool,
)
from headrace.worker.model_runner import ModelRunner
from headrace.worker.rows import Rows
from headrace.worker.settings import Setup
from headrace.worker.warm_up import Limits, chunks, decode_plan, largest_plan, run_masked

_REMEDIES = {  # by purpose: what to lower where it cannot be allocated
    "weights": "Use a smaller model, end what else holds memory, or use --device cpu.",
    COPY: "Give --technique wide_copy=off.",
    "KV blocks": "Lower --gpu-memory-utilization or --kv-cache-memory.",
    "activations": "Lower --gpu-memory-utilization, --max-num-batched-tokens, --max-num-seqs or --max-logits-rows.",
    "rows": "Lower --max-num-seqs or --max-model-len.",
    "graphs": "Lower --gpu-memory-utilization or --max-num-seqs, or give --enforce-eager.",
}

CreateRunner = Callable[[Rows, Sequence[Tensor]], ModelRunner]  # without graphs


class Captures(Protocol):
    """What the division needs of graphs of one kind."""

    @property
    def most(self) -> int: ...  # graphs there may come to be

    @property
    def samples(self) -> tuple[Any, ...]: ...  # some of them, the largest first

    def capture(self, samples: tuple[Any, ...]) -> None: ...


# of sequences so long; each kind finds the memory of those before
CreateGraphs = Callable[[int, Rows, Sequence[Tensor]], Sequence[Captures]]


class Allocation:
    """One engine's share of a device. Made before anything is allocated there: on a GPU it makes the context."""

    def __init__(self, setup: Setup, head_start: HeadStart | None = None, peers: Peers | None = None) -> None:
        """``peers``: all have as many blocks as the one that has the least room for them."""
        self._setup = setup
        self._least = (peers or Peers()).all_reduce_min
        shares = setup.config.model.share_weights
        self._meter = None if setup.on_cpu else DeviceMeter(setup.device, head_start, small_stacks=shares)
        self.room = Room(self._available(), self._bounds())
        self._arena = 0  # bytes that steps share
        self._scratch = 0  # bytes that libraries keep
        # bytes of weights that other processes hold, and that this one has put beside torch's
        self._found = self._given = 0

    def decide_copy(self) -> tuple[Decision, ...]:
        """Whether matrices in few bits get a widened copy, on all ranks or on none. Before ``draft``."""
        setup = self._setup
        parts = setup.spec, setup.config, setup.kv_specs, setup.dtype.itemsize
        room, said = with_copy(self.room, *parts, on_cpu=setup.on_cpu)
        if self._least(int(said is None or said.value)):
            self.room = room
        elif said is not None and said.value:
            said = replace(said, value=False, reason="another rank has no room for it")
        return () if said is None else (said,)

    @property
    def copies(self) -> bool:
        return COPY in self.room.purposes

    def share(self, size: int, *, ours: bool) -> None:
        """So many bytes of weights lie in memory of several processes, which this one has filled, or others have."""
        self._found, self._given = (0, size) if ours else (size, 0)

    def draft(self) -> KVPlan:
        """Before anything is loaded. A CPU's plan is final; on a GPU sequences will be no longer than this says."""
        if not self._setup.on_cpu and self._setup.config.model.share_weights:  # they may be there
            return self.plan(Room(self.room.available, {}))
        check_weights_fit(self.room, self._setup.device)
        if self._setup.on_cpu:
            return self.plan(self.room)
        known = {name: size for name, size in self.room.purposes.items() if name in ("weights", COPY)}
        return self.plan(Room(self.room.available, known))

    def plan(self, room: Room) -> KVPlan:
        """How ``room`` is divided. Raises ConfigError or OutOfMemory."""
        setup, draft = self._setup, self._setup.beside
        sizes: dict[str, Any] = {
            "max_positions": setup.spec.max_positions,
            "on_cpu": setup.on_cpu,
            "adapters": setup.adapter_layout,
        }
        plan = plan_kv(setup.kv_specs, setup.config, room, **sizes)
        if draft is None or setup.speculative is None or setup.speculative.draft_memory is None:
            return self._agreed(plan)
        specs, held = setup.draft_kv_specs, setup.draft_bytes
        whole = sum(group.spec.beside * group.num_blocks for group in plan.groups)
        blocks = draft.bounded_blocks(setup.speculative.draft_memory, plan.num_bytes, held, specs)
        each = sum(spec.bytes_per_block for spec in specs)
        if blocks * each >= whole:
            return self._agreed(plan)
        plan = plan_kv(setup.target_kv_specs, setup.config, room, **sizes, reserved=blocks * each)
        return self._agreed(replace(plan, draft_blocks=blocks))

    def _agreed(self, plan: KVPlan) -> KVPlan:
        """Stages have bytes of their own for a block, and as many blocks as the one with the fewest."""
        if self._setup.spec.held is None:
            return plan
        groups = tuple(replace(each, num_blocks=self._least(each.num_blocks)) for each in plan.groups)
        return replace(plan, groups=groups, max_model_len=self._least(plan.max_model_len))

    def measure(
        self, decoder: nn.Module, longest: int, create_runner: CreateRunner, create_graphs: CreateGraphs
    ) -> Room:
        """On a GPU, with everything loaded: the room that there is. ``longest``: of the draft. Raises OutOfMemory."""
        assert self._meter is not None, "a CPU's room is known"
        setup = self._setup
        graphs, self._arena = self._take_largest_steps(longest, create_runner, create_graphs)
        weights, drafts = weight_bytes(decoder), self.room.purposes.get("draft model", 0)
        copies = {COPY: held_copy_bytes(decoder)} if self.copies else {}
        self._scratch = self._meter.kept(weights - self._found - self._given + drafts + sum(copies.values()))
        purposes = {
            "weights": weights - self._found,
            **copies,
            "draft model": drafts,
            "activations": self._arena + small_bytes(setup.rows),
            "graphs": graphs,
            "rows": row_bytes(setup.rows, longest, setup.spec.vocab_size, setup.block_sizes),
            "context": self._meter.context,
            "kernels": self._meter.code(self._given) + self._scratch,
        }
        self.room = Room(self.room.available, purposes)
        check_weights_fit(self.room, setup.device)
        left = self.room.left
        return Room(self.room.available - left + self._least(left), purposes)

    def set_aside(self) -> None:
        """Once rows and KV are allocated: what the largest step needs becomes the allocator's own, so that no step asks
        the driver."""
        if self._meter is not None:
            with self.explaining("activations"):
                set_aside(self._arena, small_bytes(self._setup.rows), self._setup.device)

    def restore(self) -> None:
        """After a step that ran out of memory took the allocator's cache apart: the cache is emptied and made whole
        again, if that is possible."""
        torch.cuda.empty_cache()
        with suppress(OutOfMemory):  # then steps ask the driver for what they need, as far as it has it
            self.set_aside()

    @contextmanager
    def explaining(self, purpose: str, size: int | None = None) -> Iterator[None]:
        """What runs out of memory within becomes an OutOfMemory: the ``purpose``, its size in bytes (None: as planned),
        what to lower."""
        try:
            yield
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            free = available_memory() if self._setup.on_cpu else torch.cuda.mem_get_info(self._setup.device)[0]
            planned = self.room.purposes[purpose] if size is None else size
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
        """Bytes by purpose. ``process``, ``kernels``: of the host, before the model and by a first step; a GPU's are
        its own."""
        copies = {COPY: held_copy_bytes(decoder)} if self.copies else {}
        tensors = {"weights": weight_bytes(decoder) - self._found, **copies}
        tensors |= {"kv_cache": plan.num_bytes, "rows": rows.num_bytes}
        activations = self.room.purposes["activations"]
        if self._meter is None:
            return {"process": process, "kernels": kernels, **tensors, "activations": activations}
        meter = self._meter
        outside = {
            "context": meter.context,
            "kernels": meter.code(self._given) + self._scratch,
            "in use before": meter.others,
        }
        return {**tensors, "activations": activations, "graphs": meter.graphs, **outside}

    # --- parts

    def _bounds(self) -> dict[str, int]:
        setup = self._setup
        found = bounds(setup.spec, setup.config, setup.dtype.itemsize, setup.adapter_layout)
        if setup.beside is not None:
            found["draft model"] = setup.draft_bytes
        return with_pool(found, setup.spec, setup.pooled, setup.kept, setup.dtype.itemsize)

    def _available(self) -> int:
        if self._meter is None:  # ranks and replicas of a CPU have its memory between them
            own = available_memory() // self._setup.config.device.devices_here
        else:
            config = self._setup.config
            share = config.cache.gpu_memory_utilization / config.device.ranks_per_device
            own = gpu_share(self._meter.total, 0 if config.device.ranks_per_device > 1 else self._meter.others, share)
        return self._least(own)

    def _take_largest_steps(
        self, longest: int, create_runner: CreateRunner, create_graphs: CreateGraphs
    ) -> tuple[int, int]:
        """(bytes of graphs, bytes the allocator comes to hold by the largest steps)."""
        setup, scheduler = self._setup, self._setup.config.scheduler
        limits = Limits(scheduler.rows, setup.tokens_a_step, scheduler.logits_rows, longest)
        try:
            sizes = setup.rows, max(chunks(limits)) + 1, setup.spec.vocab_size, setup.block_sizes
            rows = Rows(*sizes, setup.device, share=setup.share)
            caches = [allocate_kv(KVGroup(each, 1), setup.dtype, setup.device).zero_() for each in setup.kv_specs]
            runner = create_runner(rows, caches)
            with measured_peak(setup.device) as peak:
                runner.run(decode_plan(limits))
                runner.forget()
            graphs = self._try_graphs(partial(create_graphs, longest, rows, caches))
            if setup.config.device.activation_arena:
                self._record(runner, limits)
            with measured_peak(setup.device) as peak_of_all:
                run_masked(runner, largest_plan(limits), setup.spec.vocab_size)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(self._too_large(limits)) from error
        del runner, rows, caches
        torch.cuda.empty_cache()
        return graphs, max(peak.held, peak_of_all.held)

    def _record(self, runner: ModelRunner, limits: Limits) -> None:
        """A step of the largest one's kind, so that the arena plans that one: what steps hold is measured as they will
        hold it."""
        step = largest_plan(replace(limits, tokens_a_step=min(limits.tokens_a_step, LEAST_ADDED)))
        runner.submit(replace(step, masked=(0,)))  # as far as its hidden states
        runner.forget()

    def _try_graphs(self, create_graphs: Callable[[], Sequence[Captures]]) -> int:
        """Bytes that all graphs will take beside what is in use when these are gone again; 0 where the size of KV was
        given, and does not depend on it."""
        if self._setup.config.cache.kv_cache_memory is not None:
            return 0
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
        return device_use(self._setup.device).used

    def _too_large(self, limits: Limits) -> str:
        free, total = torch.cuda.mem_get_info(self._setup.device)
        shape = (
            f"{limits.tokens_a_step} tokens, {limits.max_num_seqs} sequences, {limits.max_logits_rows} rows of logits"
        )
        weights = self.room.purposes["weights"]
        return (
            f"The largest step ({shape}) does not fit beside the weights ({weights / GIB:.2f} GiB): of the GPU's {total / GIB:.2f} GiB, "
            f"{free / GIB:.2f} GiB were left. Lower --max-num-batched-tokens, --max-num-seqs or --max-logits-rows, or use --device cpu."
        )


def allocate_kv(group: KVGroup, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[blocks, layers, 2, kv_heads, tokens of a block here, head_dim]; in a format of fewer bits uint8, with the bytes of a token
    in place of the last. On a CPU pages are taken at first touch."""
    spec = group.spec
    row, kind = (spec.head_dim, dtype) if spec.format is None else (spec.row_bytes, torch.uint8)
    return torch.empty(
        group.num_blocks, len(spec.layers), 2, spec.num_kv_heads, spec.held_tokens, row, dtype=kind, device=device
    )
