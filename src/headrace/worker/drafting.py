"""What drafts for a worker's model: a draft model, a draft head or a lookup in the text, with KV caches, graphs and the
speculator that verifies.

A draft model can have a device or a thread of its own: the checks, its type and threads, how many blocks it has room for.

What lives here: making these, in the phases of a worker. What may not: whether a draft fits its target (draft_setup.py),
how it drafts (draft_model.py, apart_drafts.py, speculator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.config import Decision
from headrace.errors import ConfigError, OutOfMemory
from headrace.kernels import Kernels
from headrace.kernels.build import gpu
from headrace.kernels.candidate import Facts
from headrace.kernels.operations import WRITE_ROWS
from headrace.layers.context import LayerContext
from headrace.models import loader
from headrace.models.decoder import Decoder, Tap
from headrace.models.draft_head import DraftHead
from headrace.models.source import ModelSource, WeightFormat
from headrace.parallel.pipeline import Pipe
from headrace.spec import DecoderSpec, KVGroup
from headrace.speculative.lookup import Lookup
from headrace.speculative.settings import SpeculativeSettings
from headrace.techniques import in_use
from headrace.worker.allocation import allocate_kv
from headrace.worker.apart_drafts import ApartDrafts, DraftSide
from headrace.worker.draft_blocks import DraftBlocks
from headrace.worker.draft_model import AHEAD, MOST_DRAFTING, DraftModel, HeadDrafter, draft_tables
from headrace.worker.draft_setup import DraftPlace, DraftSetup, draft_memory, load_head
from headrace.worker.draft_tree import TreeDrafts
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.host import available_memory
from headrace.worker.judge import Coins, Judge
from headrace.worker.launches import Launches
from headrace.worker.memory import GIB, KVPlan, bounds, buckets_up_to, row_bytes
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Rows
from headrace.worker.settings import Setup, device_kind, resolve_dtype
from headrace.worker.speculator import LookupProposer, Proposer, Speculator
from headrace.worker.staged_drafts import StagedSpeculator

_FIELD = "speculative_config.device"
_HOST_SHARE = 0.5  # of available memory that keys and values of drafts may take on a CPU whose target is elsewhere


def place_draft(setup: Setup) -> Setup:
    """With the place of a draft model that was given a device. Raises ConfigError where it cannot be there."""
    settings, draft = setup.speculative, setup.draft
    if settings is None or settings.device is None or draft is None:
        return setup
    kind, own = device_kind(settings.device, _FIELD), setup.device.type
    _check_alone(setup, elsewhere=kind != own)
    if kind == own == "cuda":
        said = Decision("draft device", kind, "the target's own: its steps are queued beside the target's")
        return replace(setup, decisions=(*setup.decisions, said))
    if kind == own:
        return _threaded(setup, draft)
    dtype, why = resolve_dtype(setup.config.model.dtype, draft.spec.checkpoint_dtype, kind)
    place = DraftPlace(torch.device(kind), dtype, setup.threads, elsewhere=True)
    said = Decision("draft device", kind, f"asked for, the target computes on {own}; in {why.value}, {why.reason}")
    return replace(setup, draft=replace(draft, place=place), decisions=(*setup.decisions, said))


def _check_alone(setup: Setup, *, elsewhere: bool) -> None:
    device = setup.config.device
    if device.num_devices > 1:
        raise ConfigError(
            f"{_FIELD} is for a target on one device, but this one has {device.num_devices} ranks, which draft beside it; leave it out."
        )
    if elsewhere and device.enable_sleep_mode:
        raise ConfigError(
            f"{_FIELD} puts the draft where --enable-sleep-mode does not reach it; leave out one of the two."
        )


def _threaded(setup: Setup, draft: DraftSetup) -> Setup:
    """Beside a target on the same CPU: its threads are divided, as the two read weights."""
    theirs, drafts = count_read(setup)
    threads = min(max(1, round(setup.threads * drafts / (theirs + drafts))), max(1, setup.threads - 1))
    rest = max(1, setup.threads - threads)
    torch.set_num_threads(rest)
    place = DraftPlace(setup.device, setup.dtype, threads, elsewhere=False)
    said = Decision(
        "draft device", "cpu", f"a thread of its own: {threads} of {setup.threads} threads draft, {rest} verify"
    )
    return replace(setup, draft=replace(draft, place=place), threads=rest, decisions=(*setup.decisions, said))


def count_read(setup: Setup) -> tuple[int, int]:
    """Bytes of weights that a step of the target reads, and drafts for it."""
    assert setup.draft is not None and setup.speculative is not None
    size = setup.dtype.itemsize
    target = bounds(setup.spec, setup.config, size)["weights"]
    return target, setup.draft.weight_bytes(size) * setup.speculative.most


def places_elsewhere(setup: Setup, max_model_len: int) -> int:
    """Blocks that the draft's own device has room for, before anything of it is there. Raises OutOfMemory,
    ConfigError."""
    draft, settings = setup.draft, setup.speculative
    assert draft is not None and draft.place is not None and settings is not None
    place, size = draft.place, draft.place.dtype.itemsize
    available = _available(setup, place)
    rows = row_bytes(setup.rows, max_model_len, draft.spec.vocab_size, setup.block_sizes)
    needed = bounds(draft.spec, setup.config, size)
    held = needed["weights"]
    left = available - held - needed["activations"] - rows
    each = sum(spec.bytes_per_block for spec in setup.draft_kv_specs)
    if settings.draft_memory is not None:
        bounded = draft.bounded_blocks(settings.draft_memory, available - held, held, setup.draft_kv_specs)
        left = min(left, bounded * each)
    if left < each:
        raise OutOfMemory(
            f"The draft model {draft.source.name} does not fit where {_FIELD} puts it ({place.device.type}): of {available / GIB:.2f} GiB, its "
            f"weights take {held / GIB:.2f} GiB, its largest step {needed['activations'] / GIB:.2f} GiB and rows {rows / GIB:.2f} GiB. "
            f"Use a smaller draft model, or draft on the other device."
        )
    return left // each


def _available(setup: Setup, place: DraftPlace) -> int:
    if place.device.type == "cpu":
        return int(available_memory() * _HOST_SHARE)
    free, total = torch.cuda.mem_get_info(place.device)
    return min(free, int(total * setup.config.cache.gpu_memory_utilization))


class Drafting:
    """Of a worker, whether it drafts or not. ``kernels``: the target's. A draft that has a thread of its own (``place``)
    has its own."""

    def __init__(self, setup: Setup, kernels: Kernels, disabled: frozenset[str], pipe: Pipe | None) -> None:
        self._setup, self._draft, self._pipe = setup, setup.draft, pipe
        self._place = place = None if setup.draft is None else setup.draft.place
        self._device, self._kernels = setup.device, kernels
        if place is not None:
            self._device = place.device
            if place.device.type == "cuda" and gpu.missing(place.device) is None:
                gpu.prepare_compiler()
                gpu.prepare_kernels(place.device)
            techniques = in_use(setup.config.device) - {"batch_invariant", "programmatic_launch"}  # drafts may vary
            self._kernels = Kernels(place.device, techniques=techniques, disabled=disabled)
        self.goes_on = setup.config.device.drafts_ahead  # while a target verifies
        self.model: Decoder | None = None
        self._head: DraftHead | None = None
        self._tap: Tap | None = None
        self._num_blocks: int | None = None  # of the caches, once they are known to be fewer than the target's
        self._blocks: tuple[DraftBlocks, ...] = ()
        self.caches: list[Tensor] = []

    @property
    def modules(self) -> tuple[Decoder | DraftHead, ...]:
        """What has weights."""
        return tuple(each for each in (self.model, self._head) if each is not None)

    @property
    def beside(self) -> tuple[Decoder | DraftHead, ...]:
        """Those that compute in the target's thread."""
        return self.modules if self._place is None else ()

    def count_blocks(self, longest: int) -> None:
        """Of a draft with memory of its own, while that is still free."""
        if self._place is not None and self._place.elsewhere:
            self._num_blocks = places_elsewhere(self._setup, longest)

    def create(self, target: Decoder, longest: int) -> None:
        """The target leaves its hidden states for a head from now on, but where nothing is ever drafted."""
        setup, draft = self._setup, self._draft
        if draft is None:
            return
        if draft.head is None:
            draft.check_length(longest)
            how: dict[str, Any] = {"kernels": self._kernels, "dtype": setup.draft_dtype, "device": self._device}
            self.model = Decoder(draft.spec, max_model_len=longest, drafts=True, **how)
        elif not setup.padded:
            out = torch.zeros(setup.most_tapped, draft.head.tapped, dtype=setup.dtype, device=setup.device)
            self._tap = target.tap = Tap(out, draft.head.taps)
            context = LayerContext(setup.dtype, setup.device, self._kernels)
            self._head = DraftHead(draft.head, target, context, longest)

    def load(self, fill: Callable[[Decoder, ModelSource, DecoderSpec], None]) -> None:
        """``fill``: loads a decoder."""
        if self._draft is not None and self.model is not None:
            fill(self.model, self._draft.source, self._draft.spec)
        if self._draft is None or self._head is None:
            return
        if self._draft.source.weights is WeightFormat.DUMMY:
            loader.fill_dummy(self._head, self._setup.config.model.seed)
        else:
            load_head(self._head, self._draft.source, self._setup.dtype)

    def allocate(self, plan: KVPlan, rows: Rows) -> KVPlan:
        """Which blocks of the target's have one here; the plan with how many there are, where these are fewer."""
        if self._num_blocks is not None:
            fewer = self._num_blocks < max(group.num_blocks for group in plan.groups)
            plan = replace(plan, draft_blocks=self._num_blocks if fewer else None)
        self._num_blocks = count = plan.draft_blocks
        if self._draft is not None and count is not None:
            tables, sizes = {at: rows.tables[at].to(self._device) for at in self._draft.groups}, rows.block_sizes
            blocks = [group.num_blocks for group in plan.groups]
            self._blocks = tuple(DraftBlocks(at, blocks[at], count, tables[at], sizes[at]) for at in tables)
        return plan

    def create_caches(self, kv_caches: Sequence[Tensor]) -> list[Tensor]:
        """With as many blocks as those of the target that they lie beside, if no bound is set."""
        setup, draft = self._setup, self._draft
        if draft is None:
            return []
        counts = (kv_caches[at].shape[0] if self._num_blocks is None else self._num_blocks for at in draft.groups)
        groups = (KVGroup(spec, count) for spec, count in zip(setup.draft_kv_specs, counts, strict=True))
        found = [allocate_kv(group, setup.draft_dtype, self._device) for group in groups]
        if setup.device.type == "cuda" and draft.head is not None:  # what was never written may be seen: no NaN
            for cache in found:
                cache.zero_()
        return found

    @property
    def shared_blocks(self) -> list[tuple[int, Tensor]]:
        """(KV group of the target, cache) where blocks have the target's numbers."""
        if self._draft is None or self._blocks or self._place is not None:
            return []
        return list(zip(self._draft.groups, self.caches, strict=True))

    def create_graphs(
        self, rows: Rows, caches: Sequence[Tensor], most: dict[str, Any], launches: Launches
    ) -> DecodeGraphs | None:
        """``most``, ``launches``: as DecodeGraphs of the target have them."""
        setup, draft = self._setup, self._draft
        if draft is None or not self.beside:
            return None
        count, entry, ahead = min(setup.most_verified, MOST_DRAFTING), None, 0
        if draft.head is not None:
            shape, ahead = (buckets_up_to(count)[-1], draft.head.carried), AHEAD
            entry = torch.zeros(shape, dtype=setup.dtype, device=setup.device)
        tables = draft_tables(rows, self._blocks)
        recorder = Recorder(self.beside[0], self._kernels, rows, caches, draft.groups, tables, entry, ahead, launches)
        passes = setup.speculative.most + 1 if setup.speculative is not None else 1  # the first is written twice
        return DecodeGraphs(recorder, **most | {"max_num_seqs": count, "built": False, "passes": passes})

    def create_speculator(
        self, rows: Rows, kv_caches: Sequence[Tensor], caches: Sequence[Tensor], graphs: DecodeGraphs | None
    ) -> Speculator | None:
        """``kv_caches``: the target's; ``caches``: the draft's."""
        settings = self._setup.speculative
        proposer = None if settings is None else self._create_proposer(settings, rows, caches, graphs)
        if proposer is None or settings is None:
            return None
        judge = Judge()
        if settings.acceptance is not None and self._setup.config.model.load_format == "dummy":
            judge = Coins(settings.acceptance, *rows.token_ids.shape)
        if self._pipe is None:
            return Speculator(rows, proposer, kv_caches, self._setup.kv, judge)
        return StagedSpeculator(rows, proposer, self._pipe, judge)

    def _create_proposer(
        self, settings: SpeculativeSettings, rows: Rows, caches: Sequence[Tensor], graphs: DecodeGraphs | None
    ) -> Proposer | None:
        """None: nothing is ever drafted."""
        setup, draft, place = self._setup, self._draft, self._place
        if self._pipe is not None and self._pipe.stage:
            return Proposer()
        if draft is None:
            suffix = settings.suffix_tokens if settings.method == "suffix" else 0
            return LookupProposer(rows, Lookup(settings.prompt_lookup_min, settings.prompt_lookup_max, suffix))
        own = rows  # as the draft has them
        if place is not None:
            write = self._kernels.choose(WRITE_ROWS, Facts(torch.int32))
            rows_count, length = rows.token_ids.shape
            own = Rows(rows_count, length, setup.spec.vocab_size, rows.block_sizes, self._device, write)
        common = own, self._kernels, setup.config.scheduler.logits_rows, self._blocks, graphs
        if self._head is not None and self._tap is not None:
            return HeadDrafter(self._head, self._tap, caches[0], draft.groups[0], *common)
        if self.model is None:
            return None
        parts, ahead = (self.model, caches, draft.groups, *common), settings.tree is None and place is not None
        model = DraftModel(*parts, told=ahead) if settings.tree is None else TreeDrafts(*parts, topk=settings.tree)
        if place is None:
            return model
        size = min(setup.block_sizes[group] for group in draft.groups)
        side = DraftSide(model, own, size, ahead=ahead and self.goes_on)
        return ApartDrafts(rows, side, threads=place.threads, most_tokens=setup.tokens_a_step)

    def decisions(self, groups: Sequence[KVGroup]) -> Iterator[Decision]:
        """``groups``: the target's."""
        setup, settings = self._setup, self._setup.speculative
        if self._draft is not None:
            if self._draft.said is not None:
                yield self._draft.said
            weights = self._draft.weight_bytes(setup.draft_dtype.itemsize)
            elsewhere = self._device.type if setup.beside is None else None
            yield draft_memory(weights, setup.draft_state_bytes, self.caches, groups, self._num_blocks, elsewhere)
        if settings is not None and settings.tree is not None:
            said = f"{settings.most} tokens, {settings.tree} continuations of each"
            yield Decision("draft tree", said, "the most probable; with penalties, biases or a grammar it is a chain")
