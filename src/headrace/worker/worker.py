"""One process, one device: a model loaded, memory divided, an executor that runs plans on it.

What lives here: the phases in which a worker comes to be. On a GPU kernels are built in threads from the moment that
layers exist. What may not: the parts themselves (settings, memory, runner, executor).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.clock import RealClock
from headrace.config import Decision, EngineConfig
from headrace.cost.cards import card_named
from headrace.cost.cost_model import CostModel
from headrace.cost.links import shared_rows
from headrace.cost.shapes import multiplications
from headrace.engine.executor import Executor, ExecutorInfo
from headrace.errors import ModelError
from headrace.kernels import Kernels
from headrace.kernels.build import gpu
from headrace.kernels.build.ahead import CompileAhead, PendingKernels
from headrace.kernels.candidate import Facts, Sizes, plainly_empty
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.kernels.operations import (
    FETCH_STEP,
    GATHER_INPUTS,
    GREEDY_TOKENS,
    PICK_TOKENS,
    SCORE_TOKENS,
    STORE_TOKENS,
    WRITE_ROWS,
    Operation,
)
from headrace.layers.context import LayerContext
from headrace.layers.shared_rows import NONE_SHARED, Sharing
from headrace.lora.device import DeviceAdapters, Reading
from headrace.lora.layout import Layout
from headrace.lora.slots import AdapterSlots
from headrace.models import families, loader
from headrace.models.checkpoint import Checkpoint
from headrace.models.decoder import Decoder
from headrace.models.layer_pool import LayerPool
from headrace.models.loader import open_checkpoint
from headrace.models.shared_weights import share_weights
from headrace.models.source import ModelSource, WeightFormat
from headrace.models.weight_rules import ignored_keys, weight_rules, with_formats
from headrace.observe.progress import waiting
from headrace.parallel.context import KeyShare, check_context
from headrace.parallel.group import Group, Peers
from headrace.parallel.placement import check_agreed, explained, held_experts
from headrace.parallel.shares import Cut, cuts, share, share_experts
from headrace.parallel.stages import pooled_layers, split_layers, staged
from headrace.processes.builders import Builders
from headrace.quant import lossless
from headrace.quantize.at_load import QuantizedCheckpoint
from headrace.sites import is_plain, weights
from headrace.spec import DecoderSpec
from headrace.techniques import in_use
from headrace.worker.allocation import Allocation, allocate_kv
from headrace.worker.arena import create_arena
from headrace.worker.asleep import DeviceMemory, HostPages
from headrace.worker.draft_setup import check_tree, resolve_draft
from headrace.worker.drafting import Drafting, place_draft
from headrace.worker.executor import DeviceExecutor
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.head_start import HeadStart, Stages
from headrace.worker.host import process_memory
from headrace.worker.launches import Launches
from headrace.worker.memory import COPY, Room, buckets_up_to, memory_decision, row_bytes
from headrace.worker.model_runner import ModelRunner
from headrace.worker.passes import ForwardPasses
from headrace.worker.prompt_graphs import Bounds, PromptGraphs
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Rows
from headrace.worker.settings import Setup, check_sharing, find_gpu, resolve_setup
from headrace.worker.shared_device import DeviceSpans, share_on_device
from headrace.worker.warm_up import product_sizes, warm_linears, warm_samples, warm_up

# Call sites outside the decoder (rows.py, graphs.py, sampler.py), known before they exist so that their
# kernels are built in time.
STEP_SITES: tuple[tuple[Operation[Any, Facts], torch.dtype], ...] = (
    (WRITE_ROWS, torch.int32),
    (GATHER_INPUTS, torch.int32),
    (GREEDY_TOKENS, torch.float32),
    (PICK_TOKENS, torch.float32),
    (SCORE_TOKENS, torch.float32),
    (STORE_TOKENS, torch.int32),
    (FETCH_STEP, torch.int32),
)


@dataclass(frozen=True, slots=True)
class Graphs:
    """``draft``: decode steps of the draft model."""

    decode: DecodeGraphs | None = None
    prompts: PromptGraphs | None = None
    draft: DecodeGraphs | None = None

    @property
    def kinds(self) -> tuple[DecodeGraphs | PromptGraphs, ...]:
        """In the order of capture: prompts' find the memory of decode steps."""
        return tuple(kind for kind in (self.decode, self.prompts, self.draft) if kind is not None)


_NO_GRAPHS = Graphs()


def create_executor(
    config: EngineConfig,
    source: ModelSource,
    head_start: HeadStart | None = None,
    stages: Stages | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    peers: Peers | None = None,
) -> tuple[Executor, tuple[Decision, ...]]:
    """Loads the model, sizes the KV cache and takes the first step. ``stages``: of the start so far. ``meanwhile`` is
    called once on a GPU, where the start waits for the last of its kernels and the device has nothing to do. ``peers``:
    whom this rank meets, of several.

    ``config`` is resolved. Raises ConfigError, ModelError, OutOfMemory or StrictKernelError.
    """
    worker = Worker(config, source, head_start, stages or Stages(RealClock()), peers or Peers())
    try:
        room = worker.prepare(meanwhile)
        worker.allocate(room)
        return worker.capture()
    finally:
        worker.close()


class Worker:
    """One device's part of an engine: ``prepare``, ``allocate``, ``capture``, then the executor's ``submit`` and
    ``collect``.

    Ranks allocate by the least room that one of them has, and meet wherever they compute. What changes a worker between
    two steps (adapters, sleep) is a verb of its executor, ``control``, that every rank is told at the same place of the
    queue.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        head_start: HeadStart | None,
        stages: Stages,
        peers: Peers,
    ) -> None:
        self._config = config
        self._source = source
        self._head_start = head_start
        self._stages = stages
        self._process = process_memory()
        setup = resolve_setup(config, families.spec_from_config(source.config))
        self._formats = _weight_formats(setup.spec, source)
        if config.device.compressed_weights:
            setup, self._formats = _without_loss(setup)
        self._peers = peers
        self._group, self._keys, self._pipe = group, keys, pipe = peers.group, peers.keys, peers.pipe
        self._cuts: Mapping[str, Cut] = {}
        check_context(setup.spec, config)
        if pipe is not None:
            bounds = split_layers(setup.spec, pipe.stages, config.device.pipeline_layers)
            pooled, kept = (
                pooled_layers(bounds, config.device, each % pipe.stages) for each in (pipe.stage, pipe.stage - 1)
            )
            spec = staged(setup.spec, config, pipe.stage)
            setup = replace(setup, spec=spec, stages=tuple(bounds), pooled=pooled, kept=kept)
        self._whole = setup.spec
        ranks = group or peers.experts
        experts = None if ranks is None else held_experts(self._whole, config.device, ranks.rank)
        if group is not None:
            setup = replace(setup, spec=share(self._whole, group.size, experts))
            self._cuts = cuts(self._whole, setup.spec, group.rank)
        elif experts is not None:
            setup = replace(setup, spec=share_experts(self._whole, experts))
        if experts is not None:
            check_agreed(self._whole, config.device, (group or peers).all_reduce_min)
            self._formats = (*self._formats, Decision("expert placement", *explained(self._whole, config.device)))
        if keys is not None:
            setup = _sharing_keys(setup, keys, near=peers.near)
        check_tree(config, setup.device)
        proposes = pipe is None or pipe.stage == 0  # what later stages of a pipeline verify, the first has proposed
        here = setup.device.type, find_gpu().capability
        draft = resolve_draft(config, source, self._whole, *here) if proposes else None
        self._setup = setup = place_draft(replace(setup, draft=draft))
        self._cuda = setup.device.type == "cuda"
        self._sleeping = DeviceMemory(setup.device) if self._cuda and config.device.enable_sleep_mode else None
        self._lasting = nullcontext if self._sleeping is None else self._sleeping.keeping
        self._arena = create_arena(setup.device) if config.device.activation_arena and self._keys is None else None
        disabled = frozenset(config.device.disabled_kernels)
        if config.model.share_weights:
            check_sharing(setup)
        if config.model.share_weights or setup.pooled:
            disabled |= {"onednn"}  # it packs a copy of each weight
        self._kernels = Kernels(
            setup.device,
            strict=config.device.strict_kernels,
            techniques=in_use(config.device),
            disabled=disabled,
            empty=plainly_empty if self._arena is None else self._arena.empty,
        )
        builders = None if head_start is None else head_start.builders
        self._drafting = Drafting(setup, self._kernels, disabled, pipe)
        how = {"strict": config.device.strict_kernels, "share": peers.share}
        self._ahead = create_ahead(setup.device, builders=builders, later=not peers.groups, **how)

    def close(self) -> None:
        """The start is over."""
        if self._ahead is not None:
            self._ahead.close()

    # --- phases

    def prepare(self, meanwhile: Callable[[], object]) -> Room:
        """The model is loaded, kernels are built, what steps hold is known: the room there is for KV."""
        self._memory = Allocation(self._setup, self._head_start, self._peers)
        self._formats = (*self._formats, *self._memory.decide_copy())
        self._stages.done("device")
        longest = self._memory.draft().max_model_len
        self._drafting.count_blocks(longest)
        with self._memory.explaining("weights"), self._lasting():
            groups: dict[str, Any] = {"group": self._group, "keys": self._keys, "experts": self._peers.experts}
            if self._group is not None:
                groups["sharing"] = sharing = _sharing_rows(self._setup, self._group, near=self._peers.near)
                if sharing.least is not None:
                    to = "" if sharing.dispatched is None else f"; to their experts from {sharing.dispatched} on"
                    reason = f"of steps of {sharing.least} or more{to}"
                    self._formats = (*self._formats, Decision("rows shared out", True, reason))
            if self._shares_device:
                groups["weights_on"] = torch.device("meta")
            how: dict[str, Any] = {"kernels": self._kernels, "dtype": self._setup.dtype, "device": self._setup.device}
            how |= {"max_model_len": longest, "kv": self._setup.kv, "pooled": self._setup.pooled}
            self._decoder = Decoder(self._setup.spec, **how, **groups)
            self._drafting.create(self._decoder, longest)
            if self._peers.memory is not None:
                pool = self._decoder.pool
                memory = self._peers.memory.exchange(0 if pool is None else pool.num_bytes)
                if pool is not None:
                    pool.settle(memory)
                    self._formats = (*self._formats, _said_of_pool(self._setup, pool))
        self._build_kernels(longest)
        self._stages.done("decoder")
        self._load(longest)
        if not self._cuda:
            return self._memory.room
        self._await_kernels(meanwhile)
        self._peers.await_all()
        self._stages.done("ranks")
        room = self._memory.measure(self._decoder, longest, self._create_runner, self._kinds_of_graphs)
        self._stages.done("largest steps")
        return room

    def allocate(self, room: Room) -> None:
        """Rows and KV, and what runs steps over them."""
        setup, memory = self._setup, self._memory
        self._plan = plan = memory.plan(room)
        sizes = setup.rows, plan.max_model_len, setup.spec.vocab_size, setup.block_sizes
        with memory.explaining("rows", row_bytes(*sizes)):
            write = self._kernels.choose(WRITE_ROWS, Facts(torch.int32))
            self._rows = Rows(*sizes, setup.device, write, setup.share)
        self._plan = plan = self._drafting.allocate(plan, self._rows)
        with memory.explaining("KV blocks", plan.num_bytes), self._fleeting():
            kv_caches = [allocate_kv(group, setup.dtype, setup.device) for group in plan.groups]
            self._drafting.caches = own = self._drafting.create_caches(kv_caches)
        self._kv_caches = kv_caches
        if self._adapters is not None and self._adapters.slots.layout.is_shared:
            self._adapters.slots.attach(kv_caches[0])
        self._graphs = self._create_graphs(plan.max_model_len, self._rows, kv_caches, own)
        self._runner = self._create_runner(self._rows, kv_caches, own, self._graphs)
        memory.set_aside()
        self._stages.done("rows and KV")

    def capture(self) -> tuple[Executor, tuple[Decision, ...]]:
        """The first steps, the graphs; what runs from now on, and what was decided."""
        plan, loaded = self._plan, process_memory()
        warm_up(self._runner, plan.groups, plan.max_model_len, thorough=self._cuda and self._setup.rows > 1)
        self._stages.done("first steps")
        if self._graphs.kinds and self._kernels.graphable:
            with self._memory.capturing(), waiting("Capturing graphs", "Captured graphs"):
                for kind in self._graphs.kinds:
                    if kind is not self._graphs.prompts or not self._shares_device:  # those come with their first steps
                        kind.capture_all()
            self._stages.done("graphs")
        first_step = max(0, process_memory() - loaded)  # what it leaves: threads, generated code, scratch
        memory = self._memory.account(self._decoder, plan, self._rows, process=self._process, kernels=first_step)
        said = (
            *self._setup.decisions,
            *plan.decisions,
            *memory_decision(plan, memory, None if self._cuda else process_memory()),
        )
        return self._create_executor(memory), (*said, *self._decisions())

    # --- parts of prepare

    def _load(self, longest: int) -> None:
        with self._memory.explaining("weights"):
            self._fill(self._decoder, self._source, self._setup.spec)
            self._drafting.load(self._fill)
            if (pool := self._decoder.pool) is not None:
                pool.bind()
                self._memory.share(pool.saved, ours=False)
        with (
            torch.inference_mode(),
            self._memory.explaining("weights"),
            self._lasting(),
            waiting("Packing weights for this device", "Packed weights"),
        ):
            for each in (self._decoder, *self._drafting.modules):
                each.finish_loading()
            self._adapters = self._create_adapters()
        if self._memory.copies:
            self._copy_wide()
        self._build_kernels(longest)  # of what layers chose now that they have their weights
        if self._cuda:
            self._fill_copies()
            torch.cuda.synchronize(self._setup.device)
        self._stages.done("weights")

    def _copy_wide(self) -> None:
        """Memory for all copies first: what is in use while one is filled would else lie between them. A CPU's kernels
        take what is there; a GPU's are built meanwhile."""
        with torch.inference_mode(), self._memory.explaining(COPY), self._fleeting():
            for layer in self._decoder.linears:
                layer.reserve_copy()
        if not self._cuda:
            self._fill_copies()
        with torch.inference_mode():
            self._decoder.use_copies()

    def _fill_copies(self) -> None:
        if self._memory.copies:
            with torch.inference_mode(), self._memory.explaining(COPY):
                for layer in self._decoder.linears:
                    layer.fill_copy()

    def _fleeting(self) -> AbstractContextManager[None]:
        """What is made within need not be kept while the worker sleeps."""
        return nullcontext() if self._sleeping is None else self._sleeping.giving_up()

    def _create_adapters(self) -> DeviceAdapters | None:
        layout, setup = self._setup.adapter_layout, self._setup
        if layout is None:
            return None
        slots = AdapterSlots(self._decoder, layout, LayerContext(setup.dtype, setup.device, self._kernels))
        model = replace(self._whole, held=None)
        return DeviceAdapters(slots, Reading(model, layout, setup.dtype, pinned=self._cuda, cuts=self._cuts))

    def _fill(self, decoder: Decoder, source: ModelSource, spec: DecoderSpec) -> None:
        shared = self._cuts if decoder is self._decoder else {}  # a draft model every rank has whole
        rank = self._group.rank if self._group is not None else 0
        if source.weights is WeightFormat.DUMMY:
            with waiting("Making random weights", "Made random weights"):
                self._share(decoder, source, lambda: loader.fill_dummy(decoder, self._config.model.seed, shared, rank))
            return
        checkpoint: Checkpoint = open_checkpoint(source)
        if source.makes is not None:
            of_pieces = next(each.device for each in decoder.parameters())
            checkpoint = QuantizedCheckpoint(checkpoint, source, of_pieces)
        try:
            rules, ignored = weight_rules(spec, shared), ignored_keys(spec)
            load = partial(loader.load_weights, decoder, checkpoint, rules, ignored, self._dtype_of(decoder))
            self._share(decoder, source, load)
            scales = loader.load_kv_scales(decoder, checkpoint)
        finally:
            checkpoint.close()
        if decoder is self._decoder and self._setup.kv is not None and not self._setup.kv.scales:
            reason = f"{scales} scales of the checkpoint" if scales else "the checkpoint has none, so they are 1"
            self._formats = (*self._formats, Decision("kv_cache scales", "fp8", reason))

    def _dtype_of(self, decoder: Decoder) -> torch.dtype:
        return self._setup.draft_dtype if decoder is self._drafting.model else self._setup.dtype

    def _share(self, decoder: Decoder, source: ModelSource, fill: Callable[[], None]) -> None:
        if not self._config.model.share_weights or (self._cuda and decoder is not self._decoder):
            return fill()
        group = None if self._group is None else (self._group.rank, self._group.size)
        key = (
            source.path.resolve(),
            source.path.stat().st_mtime_ns,
            source.weights,
            source.revision,
            decoder.spec,
            self._dtype_of(decoder),
            self._config.model.seed,
            group,
        )
        share = self._share_on_device if self._shares_device else share_weights
        found = share(decoder, key, fill)
        said = (
            "another process of this host has them in memory"
            if found
            else "others that start now take them from memory"
        )
        self._formats = (*self._formats, Decision("weights", "shared", said))
        return None

    @property
    def _shares_device(self) -> bool:
        return self._cuda and self._config.model.share_weights

    def _share_on_device(self, decoder: Decoder, key: Sequence[object], fill: Callable[[], None]) -> bool:
        device = self._setup.device

        def fill_all() -> None:
            fill()
            torch.cuda.synchronize(device)  # before others read them

        card = torch.cuda.get_device_properties(device).uuid
        found = share_on_device(decoder, (*key, str(card), torch.__version__), fill_all, DeviceSpans())
        self._memory.share(sum(each.nbytes for each in decoder.parameters()), ours=not found)
        return found

    def _build_kernels(self, longest: int) -> None:
        if self._ahead is None:
            return
        setup = self._setup
        for op, dtype in STEP_SITES:
            self._kernels.choose(op, Facts(dtype))
        self._kernels.choose(GREEDY_TOKENS, Facts(setup.dtype))  # of logits as the head gives them
        sizes = Sizes(setup.spec, setup.dtype, setup.block_size, longest, setup.rows, setup.tokens_a_step)
        self._ahead.start(self._kernels, sizes, partial(gpu.prepare_kernels, setup.device))

    def _await_kernels(self, meanwhile: Callable[[], object]) -> None:
        sizes = product_sizes(self._setup.most_verified, self._setup.rows_a_step)
        # up to so many, kernels of our own: the threads build them
        ours = sizes[-1] if self._kernels.context.invariant else MOST_ROWS
        self._multiply([size for size in sizes if size > ours])
        if self._ahead is None:
            meanwhile()
        else:
            with waiting("Compiling GPU kernels, once for this machine", "Compiled GPU kernels"):
                self._ahead.finish(meanwhile)
        if self._head_start is not None and not (self._ahead is not None and self._ahead.coming):
            self._head_start.has_built()
        self._stages.done("kernels waited for")
        self._multiply([size for size in sizes if size <= ours])
        torch.cuda.empty_cache()

    def _multiply(self, sizes: Sequence[int]) -> None:
        with self._memory.explaining("activations"):
            for decoder in (self._decoder, *self._drafting.beside):
                warm_linears(decoder, self._setup.device, sizes, max_num_seqs=self._setup.most_verified)
        self._stages.done("matrix products")

    # --- what runs steps

    def _kinds_of_graphs(
        self, max_model_len: int, rows: Rows, kv_caches: Sequence[Tensor]
    ) -> Sequence[DecodeGraphs | PromptGraphs]:
        return self._create_graphs(max_model_len, rows, kv_caches, self._drafting.create_caches(kv_caches)).kinds

    def _create_graphs(
        self, max_model_len: int, rows: Rows, kv_caches: Sequence[Tensor], own: Sequence[Tensor]
    ) -> Graphs:
        """``own``: the draft model's caches."""
        setup, config = self._setup, self._config
        if not setup.captures or not self._kernels.graphable:
            return Graphs()
        entry = None
        if not setup.spec.embeds:
            most_rows = buckets_up_to(setup.most_verified)[-1]
            entry = torch.zeros((most_rows, setup.spec.hidden_size), dtype=setup.dtype, device=setup.device)
        stages = config.device.pipeline_parallel_size
        launches = Launches(joins=self._drafting.model is not None and stages == 1)  # others are told of drafts at once
        recorder = Recorder(self._decoder, self._kernels, rows, kv_caches, entry=entry, launches=launches)
        most: dict[str, Any] = {
            "max_num_seqs": setup.most_verified,
            "max_model_len": max_model_len,
            "max_logits_rows": config.scheduler.logits_rows,
        }
        decode = DecodeGraphs(recorder, **most, stages=stages) if setup.spec.pooling is None else None
        draft = self._drafting.create_graphs(rows, own, most, launches)
        if not config.device.prompt_graphs or stages > 1 or setup.share is not None:
            return Graphs(decode, None, draft)
        token_bytes = sum(each[0].nbytes / size for each, size in zip(kv_caches, rows.block_sizes, strict=True))
        bounds = Bounds(
            max_num_seqs=setup.most_rows,
            max_model_len=max_model_len,
            tokens_a_step=setup.tokens_a_step,
            products=multiplications(setup.spec),
            key_bytes=token_bytes / setup.spec.num_layers,
            prune=self._prunes,
        )
        hidden = torch.empty((bounds.most_wanted, setup.spec.hidden_size), dtype=setup.dtype, device=setup.device)
        return Graphs(decode, PromptGraphs(recorder, bounds, hidden), draft)

    def _create_runner(
        self, rows: Rows, kv_caches: Sequence[Tensor], own: Sequence[Tensor] | None = None, graphs: Graphs = _NO_GRAPHS
    ) -> ModelRunner:
        own = self._drafting.create_caches(kv_caches) if own is None else own
        passes = ForwardPasses(
            self._decoder,
            kv_caches,
            rows,
            self._kernels,
            padded=self._setup.padded,
            prune=self._prunes,
            graphs=graphs.decode,
            prompt_graphs=graphs.prompts,
            arena=self._arena,
            adapters=self._adapters,
            later=self._first_uses(),
        )
        return ModelRunner(
            passes,
            max_logits_rows=self._config.scheduler.logits_rows,
            pipe=self._pipe,
            clock=RealClock(),
            speculator=self._drafting.create_speculator(rows, kv_caches, own, graphs.draft),
        )

    def _first_uses(self) -> Iterator[int]:
        """On a card, where a kernel's first use waits until the device is idle."""
        setup = self._setup
        most = min(setup.most_verified, setup.config.scheduler.logits_rows)  # there is memory for so many logits
        found = warm_samples(self._decoder, setup.device, most)
        return found if setup.device.type == "cuda" and self._prunes else iter(())

    @property
    def _prunes(self) -> bool:
        """Whether the last layer's output is unused for tokens that are not sampled from."""
        pooling, tap = self._setup.spec.pooling, self._decoder.tap
        read = (pooling is not None and pooling.kind == "mean") or (tap is not None and not tap.layers)
        return self._config.device.last_layer_pruning and not read

    def _create_executor(self, memory: dict[str, int]) -> Executor:
        setup = self._setup
        info = ExecutorInfo(
            vocab_size=setup.spec.vocab_size,
            max_model_len=self._plan.max_model_len,
            max_num_seqs=setup.rows,
            kv_groups=self._plan.groups,
            device=_device_name(setup.device, setup.threads),
            memory=memory,
            padded=self._setup.padded,
            start_seconds=self._stages.seconds,
            stages=1 if self._pipe is None else self._pipe.stages,
            max_drafts=setup.speculative.most if setup.speculative is not None else 0,
            runs_ahead=self._runs_ahead,
            adapters=None if self._adapters is None else self._adapters.slots.layout.space,
            pooling=setup.spec.pooling,
        )
        parts: dict[str, Any] = {"adapters": self._adapters, "asleep": self._sleeping, "caches": self._movable()}
        if self._peers.experts is not None:
            parts["go_on"] = self._go_on
        if self._cuda:
            if self._sleeping is not None:
                self._sleeping.refill, self._sleeping.restore = self._fill_copies, self._memory.restore
            return DeviceExecutor(
                self._runner, info, restore=self._memory.restore, later=self._later_kernels(), **parts
            )
        if self._config.device.enable_sleep_mode:
            parts["asleep"] = HostPages([*self._kv_caches, *self._drafting.caches])
        return DeviceExecutor(self._runner, info, threads=setup.worker_threads, **parts)

    def _go_on(self) -> None:
        """Where a rank is gone, with those who are left: nothing may hold on to the group that is broken."""
        if not self._peers.experts.broken:
            return
        for kind in self._graphs.kinds:
            kind.forget()
        self._peers.experts.go_on()
        for kind in self._graphs.kinds if self._kernels.graphable else ():
            kind.capture_all()
        if self._cuda:
            self._memory.restore()

    @property
    def _runs_ahead(self) -> bool:
        """What the first stage guesses depends on what it has been told: its ranks must be told in step, which they are
        not where a thread of each computes while others collect."""
        in_step = not self._peers.groups or self._setup.worker_threads is None or self._cuda
        return self._pipe is not None and self._drafting.goes_on and in_step

    def _movable(self) -> list[list[Tensor]]:
        """Of each KV group what lies under a block's number: also a draft's, but where it has blocks of its own."""
        found = [[each] for each in self._kv_caches]
        for group, cache in self._drafting.shared_blocks:
            found[group].append(cache)
        return found

    def _later_kernels(self) -> PendingKernels | None:
        """What the start did not wait for."""
        if self._ahead is None or self._head_start is None or not self._ahead.coming:
            return None
        return self._ahead.hand_over(self._head_start.hand_over())

    def _decisions(self) -> Iterator[Decision]:
        if self._setup.captures and not self._kernels.graphable:
            yield Decision(
                "graphs",
                False,
                "a kernel that looks at the device in the middle of a step serves it, and no graph can hold that",
            )
        if self._ahead is not None:
            folder, problem = self._ahead.prepared
            yield Decision("kernel cache", folder, problem or "where Triton keeps what it compiled, by content")
        yield from self._drafting.decisions(self._plan.groups)
        if self._adapters is not None:
            yield _adapter_decision(self._adapters.slots.layout, self._config.cache.unified_paging)
        yield from self._formats
        yield from kernel_decisions(self._kernels)


def _sharing_keys(setup: Setup, keys: Group, *, near: bool) -> Setup:
    """``near``: all ranks are on one host. On all of them the cost model says alike what travels."""
    spec, said = setup.spec, Decision("keys or queries pass", "what is less", "the link between ranks is not known")
    windows = tuple(each.window for each in setup.target_kv_specs)
    share = KeyShare(keys.rank, keys.size, spec.num_heads // spec.num_kv_heads, windows=windows)
    if setup.device.type == "cuda" and near and (card := card_named(torch.cuda.get_device_name())) is not None:
        dtype, size = str(setup.dtype).removeprefix("torch."), setup.dtype.itemsize
        model = CostModel(spec, setup.target_kv_specs, card.profile, weight_bytes=size, dtype=dtype, link=card.link)
        share = replace(share, quicker=model.passes_keys)
        link = f"over {card.link.bandwidth / 1e9:.0f} GB/s, beside attention to a rank's own keys"
        said = replace(said, value="what is quicker", reason=link)
    return replace(setup, share=share, decisions=(*setup.decisions, said))


def _sharing_rows(setup: Setup, group: Group, *, near: bool) -> Sharing:
    """All steps where it is asked for, or as the cost model says where the link is known; all ranks say the same."""
    spec, device, size = setup.spec, setup.config.device, group.size
    held = [layer.moe for layer in spec.layers if layer.moe is not None and layer.moe.held is not None]
    top_k = held[0].top_k if held and device.expert_dispatch else 0
    if device.sequence_parallel is not None:
        return Sharing(size, size if top_k else None) if device.sequence_parallel else NONE_SHARED
    card = card_named(torch.cuda.get_device_name()) if setup.device.type == "cuda" and near else None
    takes_norms = size == 2 and group.max_onto_rows(spec.hidden_size, setup.dtype) > 0  # sums of many rows
    if card is None or device.batch_invariant or takes_norms:
        return NONE_SHARED
    facts = card.link, size, spec.hidden_size * setup.dtype.itemsize, card.profile.read_bandwidth
    dispatched = shared_rows(*facts, top_k) if top_k else None
    known = [each for each in (shared_rows(*facts), dispatched) if each is not None]
    return Sharing(min(known, default=None), dispatched)


def _said_of_pool(setup: Setup, pool: LayerPool) -> Decision:
    which = ", ".join(map(str, setup.pooled))
    reason = f"{pool.num_bytes / 2**20:.0f} MiB in the next stage's memory, fetched in each step; {pool.saved / 2**20:.0f} MiB less here"
    return Decision("pooled layers", which, reason)


def _adapter_decision(layout: Layout, unified_paging: bool) -> Decision:
    space, size = layout.space, layout.block * layout.element_bytes / 2**20
    value = f"up to {space.slots}, {space.most} in a step, of rank {layout.rank}"
    said = f"the largest takes {layout.largest} blocks of {size:.2f} MiB"
    if layout.is_shared:
        return Decision("adapters", value, f"{said} of the KV cache while it is there")
    own = f"{said}; {space.blocks} are reserved beside the KV cache"
    return Decision("adapters", value, f"{own}, whose blocks hold no factors" if unified_paging else own)


def _weight_formats(spec: DecoderSpec, source: ModelSource) -> tuple[Decision, ...]:
    """How many matrices are held in which format."""
    if source.dequantize_from is not None:
        return (
            Decision(
                "weight formats",
                "none",
                f"dequantized from {source.dequantize_from.get('quant_method')}, as --quantization none asks",
            ),
        )
    counts = Counter(
        form.label
        for weight in weights(spec)
        if not weight.tied
        for form in weight.formats
        for _ in range(math.prod(weight.stacked))
    )
    origin = "as the checkpoint stores them" if source.makes is None else "rounded while they are read"
    return tuple(Decision("weight format", label, f"{count} matrices, {origin}") for label, count in counts.items())


def _without_loss(setup: Setup) -> tuple[Setup, tuple[Decision, ...]]:
    """Weights in 12 bits, where this machine computes with them."""
    form, reason = lossless.Lossless(), lossless.missing(setup.dtype, setup.device)
    if not is_plain(setup.spec):
        reason = "weights are in a format of their own already"
    try:
        spec = (
            setup.spec if reason else with_formats(setup.spec, lambda module: None if ".experts." in module else form)
        )
    except ModelError as error:
        spec, reason = setup.spec, error.message
    said = Decision(
        "weight format", form.label if reason is None else "unquantised", reason or "compressed_weights is on"
    )
    return replace(setup, spec=spec), (said,)


def create_ahead(
    device: torch.device, *, builders: Builders | None = None, later: bool = True, **more: Any
) -> CompileAhead[tuple[str, str | None]] | None:
    """Threads that build kernels; None where no kernel is built at run time. ``builders``: processes that compile for
    them; without, nothing comes ``later``: steps and a compiler in one process take turns. Nor does it for ranks, which
    must compute alike. ``more``: as CompileAhead has it."""
    if device.type != "cuda" or gpu.missing(device) is not None:
        return None

    def prepare() -> tuple[str, str | None]:
        prepared = gpu.prepare_compiler()
        with suppress(Exception):  # ``start`` does it again, where an error is reported
            gpu.prepare_kernels(device)
        return prepared

    return CompileAhead(prepare, within=partial(gpu.built_by, builders), later=later and builders is not None, **more)


def _device_name(device: torch.device, threads: int) -> str:
    return f"cpu ({threads} threads)" if device.type == "cpu" else torch.cuda.get_device_name(device)


def kernel_decisions(kernels: Kernels) -> tuple[Decision, ...]:
    """Who carries out each operation, and why those before it do not; call sites that agree are said once."""
    said: dict[tuple[str, str, str], None] = {}
    for choice in (*kernels.choices, *kernels.passed):
        declined = "; ".join(f"{name} declined: {reason}" for name, reason in choice.declined)
        op = choice.op if choice.behind is None else f"{choice.op}, what {choice.behind} leaves"
        said[(op, choice.chosen, declined or "the first that serves this device")] = None
    return tuple(Decision(f"kernel {op}", chosen, reason) for op, chosen, reason in said)
