"""CUDA graphs and events without a GPU: a graph is the list of torch operations that ran while it was captured,
replayed over the same tensors.

What was decided by the host during the capture stays decided, tensors are where they were, and reading one is an error,
as on the device.

What lives here: the stand-ins for torch.cuda, a decoder whose answers hang on every slot it reads, an executor made of
them. What may not: tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.clock import VirtualClock
from headrace.engine.executor import Executor, ExecutorInfo
from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs, TreeInputs
from headrace.kernels.operations import GATHER_INPUTS, PICK_TOKENS, STORE_TOKENS, Operation
from headrace.kernels.rows.reference import gather_inputs, store_tokens
from headrace.kernels.sampling import reference as sampling
from headrace.layers.pooling import Pooled
from headrace.models.decoder import Tap
from headrace.request import StepPlan
from headrace.spec import DecoderSpec, KVGroup, KVKind, KVSpec, LayerSpec, PoolingSpec
from headrace.worker import launches, model_runner, recorder
from headrace.worker.apart_drafts import ApartDrafts, DraftSide
from headrace.worker.draft_model import AHEAD, DraftModel, HeadDrafter
from headrace.worker.draft_tree import TreeDrafts
from headrace.worker.executor import DeviceExecutor
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.model_runner import ModelRunner, Step
from headrace.worker.passes import ForwardPasses
from headrace.worker.prompt_graphs import Bounds, PromptGraphs
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Rows
from headrace.worker.speculator import Speculator
from tests.support import modes

CPU = torch.device("cpu")
VOCAB = 97
READS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "unique_dim",
    "_unique2",
    "masked_select",
    "allclose",
)


class _Recording(TorchDispatchMode):
    """Runs every operation and writes down how to run it again. ``undo`` takes back what was written: a capture
    computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for each in _tensors([value for value, written in _arguments(func, args, kwargs) if written]):
            if _place(each) not in self._before:
                self._before[_place(each)] = each.untyped_storage(), each.untyped_storage().clone()
        found = func(*args, **kwargs)
        given = {_place(each) for each in _tensors((args, kwargs))}
        made = [
            each for each in _tensors(found) if _place(each) not in given
        ]  # others are views, or were written in place

        def again() -> None:
            results = _tensors(func(*args, **kwargs))
            for old, new in zip(made, [each for each in results if _place(each) not in given], strict=True):
                old.copy_(new)

        self.steps.append(again)
        return found


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, bool]]:
    """Each argument, and whether the operation writes to it."""
    for place, declared in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(declared.name)
        yield given, declared.alias_info is not None and declared.alias_info.is_write


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [each for value in values for each in _tensors(value)] if isinstance(values, (list, tuple)) else []


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph:
    """As torch.cuda.CUDAGraph. A capture that ends with an error leaves its pool among those recorded to, until the
    allocator is told."""

    recorded_to: ClassVar[set[int | None]] = set()

    def __init__(self, keep_graph: bool = False) -> None: ...

    def instantiate(self) -> None: ...

    def raw_cuda_graph(self) -> RecordedGraph:
        return self

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        if pool in self.recorded_to:
            raise RuntimeError(f"already recording to pool {pool}")
        self.recorded_to.add(pool)
        self._pool = pool
        self._recording: _Recording | None = _Recording()
        self._recording.__enter__()

    def capture_end(self) -> None:
        if self._recording is None:
            raise RuntimeError("nothing is being captured")
        recording, self._recording = self._recording, None
        recording.__exit__(None, None, None)
        recording.undo()
        self.made(recording.steps)
        self.recorded_to.discard(self._pool)

    def made(self, steps: list[Callable[[], None]]) -> None:
        """What the driver makes of it."""
        self._steps = steps

    def replay(self) -> None:
        for step in self._steps:
            step()


class RecordedChain:
    """As the driver's, of graphs that are their own handles."""

    def __init__(self, graphs: Sequence[RecordedGraph]) -> None:
        self._graphs = graphs

    def launch(self, stream: int) -> None:
        for graph in self._graphs:
            graph.replay()


class Event:
    """As torch.cuda.Event on a device that is never late."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 0.0


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda as far as graphs, rings and the queued executor use it."""
    stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
    for name, stand_in in {
        "CUDAGraph": RecordedGraph,
        "Event": Event,
        "Stream": lambda device=None: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": partial(next, itertools.count()),
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(RecordedGraph, "recorded_to", set())
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda device, pool: RecordedGraph.recorded_to.remove(pool), raising=False
    )
    monkeypatch.setattr(launches, "GraphChain", RecordedChain)
    monkeypatch.setattr(model_runner, "_to_host", _copied)
    monkeypatch.setattr(recorder, "scratch_of_graphs", lambda device: nullcontext())


def _copied(step: Step) -> None:
    """What a copy to the host is on a CPU: what is computed later does not show in it."""
    step.samples = tuple(replace(each, picked=torch.as_tensor(each.picked).clone()) for each in step.samples)
    step.pooled = None if step.pooled is None else step.pooled.clone()


STAND_IN = DecoderSpec("stand-in", 64, 8, 1, 1, 8, 8, (LayerSpec(),), 64, None)


class SlotDecoder:
    """Its cache holds (token, position) of every slot; a hidden state is a sum over the slots that the block table says
    a token sees.

    So a wrong table, length, slot or row shows as another token. Nothing here reads the device or depends on values: it
    can be captured.
    """

    def __init__(self, block_size: int, pooled: str | None = None) -> None:
        """``pooled``: which of a prompt's hidden states are its result, in place of a token."""
        self._block_size = block_size
        self.fault: Exception | None = None
        self.most_logits = 0  # rows at once
        self.draft_tokens = None
        self.tap: Tap | None = None
        self.spec = STAND_IN if pooled is None else replace(STAND_IN, pooling=PoolingSpec(pooled))
        self.pooler = self.spec.pooling
        self.embeds = self.answers = True

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        (cache,), (seen,) = kv_caches, inputs.attention
        flat = cache.view(-1)  # the last slot is for tokens that write none
        written = (inputs.token_ids + 1) * 7919 + inputs.positions * 104729
        flat.index_copy_(0, torch.where(seen.slots < 0, flat.shape[0] - 1, seen.slots), written)
        tokens = torch.arange(len(inputs.token_ids))
        chunk = torch.searchsorted(seen.query_start.contiguous(), tokens, right=True, out_int32=False) - 1
        chunk = chunk.clamp(max=len(seen.context_len) - 1)  # tokens behind the last sequence are of none
        at = torch.arange(seen.block_table.shape[1] * self._block_size)
        slots = seen.block_table.long()[:, at // self._block_size] * self._block_size + at % self._block_size
        visible = (at[None] <= inputs.positions[:, None]) & (at[None] < seen.context_len[chunk][:, None])
        position = at[None]
        if seen.tree is not None:
            visible, position = _seen_in_tree(seen.tree, chunk, at, visible)
        mixed = flat[slots.clamp(0, flat.shape[0] - 1)][chunk] * (position * 2 + 1)
        hidden = torch.where(visible, mixed, 0).sum(-1, keepdim=True)
        if self.tap is not None:
            self.tap.take(hidden)
        if inputs.adapters is not None:
            hidden = hidden + (inputs.adapters.slots.long()[:, None] + 1) * 15485863
        return hidden if inputs.wanted is None else hidden[inputs.wanted]

    def pooled(self, hidden: Tensor, places: Pooled) -> Tensor:
        if self.pooler is not None and self.pooler.kind == "mean":
            sums = torch.cat([torch.zeros(1, 1, dtype=hidden.dtype), hidden]).cumsum(0)
            return (sums[places.last + 1] - sums[places.first]).float()
        return hidden[places.last].float()  # or the first: where one is wanted, there is no other

    def megakernel_context(self, rows: int, block_size: int) -> int:
        """Small steps of short contexts have graphs of their own."""
        return 24 if rows <= 2 else 0

    def composed(self, tokens: int) -> None:
        """All alike."""

    def least_shared(self, rows: int) -> int | None:
        """And so have large ones that share keys."""
        return 8 if rows > 2 else None

    def logits(self, hidden: Tensor, adapters: object = None) -> Tensor:
        self.most_logits = max(self.most_logits, len(hidden))
        return slot_logits(hidden)

    def greedy(self, hidden: Tensor, largest: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return largest(self.logits(hidden))


def slot_logits(hidden: Tensor) -> Tensor:
    mixed = (hidden * 2654435761 + torch.arange(VOCAB) * 40503 + 12345) % 1000003
    return (mixed * mixed % 100003).float() / 1e4


def _seen_in_tree(tree: TreeInputs, chunk: Tensor, at: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the places ``at`` each token sees, and where what lies there stands in its text; [tokens, places] each.
    ``otherwise``: what tokens of no tree see."""
    behind = at[None] - tree.first[chunk][:, None]
    mine = ((tree.ancestors[:, None] >> behind.clamp(0, 62)) & 1) * (behind >= 0)
    position = torch.where(behind < 0, at[None], at[None] - behind + mine.cumsum(-1) - 1)
    inside = (tree.ancestors != 0)[:, None]
    return torch.where(inside, (behind < 0) | (mine == 1), otherwise), torch.where(inside, position, at[None])


class SlotHead:
    """A head of a SlotDecoder that is always right: it goes on from the target's sum, and what it says hangs on its own
    entry before, which holds the same."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.spec = SimpleNamespace(carried=1)

    def carried(self, tapped: Tensor) -> Tensor:
        return tapped

    def _summed(self, inputs: ForwardInputs, carried: Tensor) -> Tensor:
        """The target's hidden states behind the token of each entry."""
        after = inputs.positions + AHEAD
        return carried[:, 0] + ((inputs.token_ids + 1) * 7919 + after * 104729) * (after * 2 + 1)

    def write(self, inputs: ForwardInputs, carried: Tensor, cache: Tensor) -> None:
        (seen,), flat = inputs.attention, cache.view(-1)
        flat.index_copy_(0, torch.where(seen.slots < 0, flat.shape[0] - 1, seen.slots), self._summed(inputs, carried))

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor], carried: Tensor) -> Tensor:
        self.write(inputs, carried, kv_caches[0])
        (seen,), size = inputs.attention, self._block_size
        tokens = torch.arange(len(inputs.token_ids))
        chunk = torch.searchsorted(seen.query_start.contiguous(), tokens, right=True, out_int32=False) - 1
        before = (inputs.positions - 1).clamp(min=0)
        block = seen.block_table.long()[chunk.clamp(max=len(seen.context_len) - 1), before // size]
        own = kv_caches[0].view(-1)[(block * size + before % size).clamp(0, kv_caches[0].numel() - 1)]
        missing = torch.where(inputs.positions > 0, own - carried[:, 0], 0)
        carried.copy_((self._summed(inputs, carried) + missing * 31)[:, None])
        return carried.clone()

    logits = staticmethod(lambda hidden: slot_logits(hidden))
    greedy = staticmethod(lambda hidden, largest: largest(slot_logits(hidden)))

    def megakernel_context(self, rows: int, block_size: int) -> int:
        return 0

    def least_shared(self, rows: int) -> int | None:
        return None


class RecordableKernels(Kernels):
    """The torch twins; the one that looks at which rows are left to sort sorts them all."""

    def __init__(self) -> None:
        super().__init__(CPU, disabled=frozenset(modes.NATIVE))

    def choose(self, op: Operation[Any, Any], facts: Any) -> Any:
        own = {PICK_TOKENS: _pick_tokens, STORE_TOKENS: self.stored, GATHER_INPUTS: _gather_inputs}
        return own[op] if op in own else super().choose(op, facts)

    stored = staticmethod(store_tokens)


def _gather_inputs(token_ids: Tensor, table: Tensor, row: Tensor, chunk: Tensor, position: Tensor, *more: Any) -> Any:
    """A recording computes, of whatever step the host wrote there last: what is beyond its contexts is of no sequence."""
    _, block_size, width = more
    return gather_inputs(token_ids, table, row, chunk, torch.where(position < block_size * width, position, -1), *more)


def _pick_tokens(
    logits: Tensor, peak: Tensor, temperature: Tensor, filters: Any, seeds: Tensor, positions: Tensor
) -> Tensor:
    scores = (logits - peak[:, None]) / temperature.clamp(min=1e-6)[:, None]
    kept = (
        None
        if filters is None
        else sampling._thresholds_among(scores.sort(-1, descending=True).values, scores, *filters)[0]
    )
    noisy = scores + sampling.vocabulary_noise(seeds, positions, scores.shape[1])
    return (noisy if kept is None else torch.where(scores >= kept[:, None], noisy, float("-inf"))).argmax(-1)


def info_of(max_num_seqs: int, num_blocks: int, block_size: int, max_model_len: int) -> ExecutorInfo:
    spec = KVSpec((0,), KVKind.FULL, block_size, 1, 1, 8)
    return ExecutorInfo(VOCAB, max_model_len, max_num_seqs, (KVGroup(spec, num_blocks),), "recorded")


@contextmanager
def recorded_executor(
    *,
    graphed: bool,
    max_num_seqs: int = 8,
    num_blocks: int = 140,
    block_size: int = 4,
    max_model_len: int = 64,
    overlap: int = 0,
    max_logits_rows: int = 100,
    prompts: bool = False,
    adapters: Any = None,
    drafts: int = 0,
    ahead: bool | None = None,
    tree: int | None = None,
    head: bool = False,
    pooled: str | None = None,
) -> Iterator[tuple[Executor, ModelRunner, SlotDecoder]]:
    """Rows, runner and sampler as they are, over a SlotDecoder; with ``graphed`` a queue and graphs, as a GPU has them;
    with ``prompts`` those of steps with prompts, too; with ``drafts`` the decoder is its own draft model, which is so
    always right; ``ahead`` not None: with rows and a thread of its own, and whether it goes on while it is verified; ``tree``:
    it grows trees that look at so many continuations; ``head``: a SlotHead drafts instead; ``pooled``: prompts have a
    result as SlotDecoder has it, and no graphs but their own."""
    info = replace(info_of(max_num_seqs, num_blocks, block_size, max_model_len), max_drafts=drafts)
    rows, kernels, decoder = (
        Rows(max_num_seqs, max_model_len, VOCAB, (block_size,), CPU),
        RecordableKernels(),
        SlotDecoder(block_size, pooled),
    )
    caches = [torch.full((num_blocks + 1, block_size), 987654321, dtype=torch.int64)]
    captured = prompt_graphs = None
    if graphed:
        limits = {
            "max_num_seqs": max_num_seqs * (1 + drafts),
            "max_model_len": max_model_len,
            "max_logits_rows": max_logits_rows,
        }
        joined = launches.Launches(joins=bool(drafts) and not head)
        made = Recorder(decoder, kernels, rows, caches, launches=joined)  # type: ignore[arg-type]
        if pooled is None:
            captured = DecodeGraphs(made, **limits)
            captured.capture_all()
    prune = pooled != "mean"
    if graphed and prompts:
        bounds = Bounds(
            max_num_seqs, max_model_len=max_model_len, tokens_a_step=64, products=1e6, key_bytes=2.1e8, prune=prune
        )
        hidden = torch.zeros((bounds.most_wanted, 1), dtype=torch.int64)
        prompt_graphs = PromptGraphs(made, bounds, hidden)
        prompt_graphs.capture_all()
    settings: dict[str, Any] = {
        "max_logits_rows": max_logits_rows,
        "clock": VirtualClock(),
        "queued": graphed,
    }
    if drafts and ahead is not None:
        mirror = Rows(max_num_seqs, max_model_len, VOCAB, (block_size,), CPU)
        model = DraftModel(decoder, [each.clone() for each in caches], (0,), mirror, kernels, 64, told=True)  # type: ignore[arg-type]
        side = DraftSide(model, mirror, block_size, ahead=ahead)
        settings["speculator"] = Speculator(rows, ApartDrafts(rows, side, threads=1, most_tokens=64))
    elif drafts:
        own, most = [cache.clone() for cache in caches], max(64, max_num_seqs * (1 + drafts))
        drafter: Any = SlotHead(block_size) if head else decoder
        entry = torch.zeros((most + 8, 1), dtype=torch.int64) if head else None
        drafted = None
        if graphed:
            made = Recorder(drafter, kernels, rows, own, (0,), None, entry, AHEAD * head, joined)
            drafted = DecodeGraphs(made, **limits, passes=drafts + 1)
            drafted.capture_all()
        parts = decoder, own, (0,), rows, kernels, 64, (), drafted
        if head:
            decoder.tap = Tap(torch.zeros((512, 1), dtype=torch.int64), ())  # tokens of a step
            prune = False
            model: Any = HeadDrafter(drafter, decoder.tap, own[0], 0, rows, kernels, 64, (), drafted)
        else:
            model = DraftModel(*parts) if tree is None else TreeDrafts(*parts, topk=tree)  # type: ignore[arg-type]
        moved = [cache.view(len(cache), 1, 1, 1, block_size) for cache in caches]  # as accepted branches are
        settings["speculator"] = Speculator(rows, model, moved)
    ways: dict[str, Any] = {"graphs": captured, "prompt_graphs": prompt_graphs, "adapters": adapters, "prune": prune}
    runner = ModelRunner(ForwardPasses(decoder, caches, rows, kernels, **ways), **settings)  # type: ignore[arg-type]
    executor = DeviceExecutor(runner, info, threads=1 if overlap and not graphed else None)
    yield executor, runner, decoder
    executor.close()


def failing(executor: Executor, runner: Any, plan: StepPlan, error: Exception) -> Any:
    """Submits ``plan`` so that it fails on the way; returns its ticket."""
    real = runner._forward

    def fail(*_: Any) -> Any:
        raise error

    runner._forward = fail
    try:
        return executor.submit(plan)
    finally:
        runner._forward = real


__all__ = ["VOCAB", "Event", "RecordedGraph", "SlotDecoder", "failing", "info_of", "recorded_executor", "without_a_gpu"]
