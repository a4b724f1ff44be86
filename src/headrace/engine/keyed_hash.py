"""``--executor keyed-hash``: a model without a model, so that control plane, server and clients can be run and judged
with nothing computed.

What lives here: that executor and what it offers. What may not: torch, scheduling.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

from headrace.clock import Clock, RealClock
from headrace.disagg.staging import Staging
from headrace.engine.executor import (
    AdapterOutcome,
    Control,
    DropAdapter,
    ExecutorInfo,
    ExportBlocks,
    ImportBlocks,
    LoadAdapter,
    OpenStaging,
    Sleep,
    Ticket,
)
from headrace.request import NO_SLOT, NewRow, StepPlan, StepResult, TokenLogprobs, TokenMasks
from headrace.spec import AdapterSpace, KVGroup, KVKind, KVSpec
from headrace.speculative.verify import accepted

_MASK = 2**64 - 1
Links = tuple[int, ...]  # of a chunk's chain: the last one, and before it one for each draft


def _mix(state: int, token: int) -> int:
    """One step of a 64-bit hash chain (constants of splitmix64, Steele et al. 2014)."""
    state = ((state ^ token) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ state >> 31


@dataclass(slots=True)
class _HashRow:
    new: NewRow
    token_ids: array[int]
    tables: list[dict[int, int]]  # one a group: index in the table → block


@dataclass(slots=True)
class _HashTicket(Ticket):
    result: StepResult | None  # None: it waits for its masks
    ready_at: float
    unsampled: tuple[StepPlan, list[Links]] | None = None


class KeyedHashExecutor:
    """A model without a model: the next token is a keyed hash of the context, *read through the block tables*.

    Each KV slot holds the hash chain up to its token, computed from the slot before it; so a wrong table, a missing
    copy or a block given away too early changes tokens, as it would with real keys and values. ``device_time``: seconds
    a step takes on the (one) device, so that steps in flight show. ``acceptance``: how likely a draft is right that it
    proposes, where a plan asks for some (by a hash of the context, too).
    """

    def __init__(
        self,
        info: ExecutorInfo,
        *,
        key: int = 0,
        device_time: float = 0.0,
        clock: Clock | None = None,
        acceptance: float = 0.7,
    ) -> None:
        self.info = info
        self._acceptance = int(acceptance * _MASK)
        self._key = _mix(key & _MASK, 0x5EED)
        self._device_time = device_time
        self._clock = clock or RealClock()
        self._rows: dict[int, _HashRow] = {}
        self._specs = [group.spec for group in info.kv_groups]
        self._kv = [
            [array("Q", bytes(8 * group.spec.block_size)) for _ in range(group.num_blocks)] for group in info.kv_groups
        ]
        self._busy_until = 0.0
        self._adapters: set[str] = set()  # in host memory
        self._slots: dict[int, tuple[str, tuple[int, ...]]] = {}  # the adapter of each, and its blocks
        own = 0 if info.adapters is None else info.adapters.blocks
        self._pages = [array("Q", (0,)) for _ in range(own)] if own else self._kv[0]  # where adapters lie
        self._outcomes: list[AdapterOutcome] = []
        self._staging: Staging | None = None

    def submit(self, plan: StepPlan) -> _HashTicket:
        self._busy_until = max(self._busy_until, self._clock.now()) + self._device_time
        plan = self._exact(plan)
        ticket, heads = _HashTicket(plan.step_id, None, self._busy_until), self._execute(plan)
        if plan.masked:
            ticket.unsampled = (plan, heads)
        else:
            ticket.result = self._sample(plan, heads, {})
        return ticket

    def drafts(self, ticket: Ticket) -> list[array[int]]:
        assert isinstance(ticket, _HashTicket) and ticket.unsampled is not None
        plan, heads = ticket.unsampled
        rows = (self._rows[row].token_ids for row in plan.sample_rows)
        return [ids[len(ids) + 1 - len(heads[work]) :] for work, ids in zip(plan.sample_work, rows, strict=True)]

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        assert isinstance(ticket, _HashTicket)
        if ticket.unsampled is not None:
            size, allowed = 4 * masks.words_each, dict[int, list[int]]()
            for place, j in enumerate(masks.samples):
                row = masks.words[size * place : size * (place + 1)]
                bits = int.from_bytes(row, "little") & ((1 << self.info.vocab_size) - 1)
                allowed.setdefault(j, []).append(bits)
            ticket.result = self._sample(*ticket.unsampled, allowed)
        ticket.unsampled = None

    def _exact(self, plan: StepPlan) -> StepPlan:
        """Chunks of rows that are shorter than planned begin where these really end; not every row has all the drafts
        it may have."""
        if not plan.drafts:
            return plan
        known = {number: row.token_ids for number, row in self._rows.items()} | {
            new.row: new.token_ids for new in plan.rows_added
        }
        starts, counts, drafts = plan.starts[:], plan.counts[:], plan.drafts[:]
        for work in set(plan.sample_work):
            ids = known.get(plan.rows[work], ())
            starts[work] -= starts[work] + counts[work] - drafts[work] - len(ids)
            missing = len(ids) % 5 if drafts[work] else 0
            drafts[work], counts[work] = max(0, drafts[work] - missing), counts[work] - min(drafts[work], missing)
        return replace(plan, starts=starts, counts=counts, drafts=drafts)

    def _execute(self, plan: StepPlan) -> list[Links]:
        self._apply(plan)
        drafts = plan.drafts or repeat(0)
        work = zip(plan.rows, plan.starts, plan.counts, drafts, strict=False)
        return [self._compute_drafting(self._rows[row], start, count, drafted) for row, start, count, drafted in work]

    def _compute_drafting(self, row: _HashRow, start: int, count: int, drafts: int) -> Links:
        links = [self._compute(row, start, count - drafts)]
        for position in range(start + count - drafts, start + count):
            wrong = _mix(links[-1], 0xACC) > self._acceptance
            row.token_ids.append((self._draw(links[-1], row) + wrong) % self.info.vocab_size)
            links.append(self._compute(row, position, 1))
        return tuple(links)

    def _draw(self, head: int, row: _HashRow, allowed: int | None = None) -> int:
        """Siblings differ, everything else depends on the context alone. ``allowed``: bits, at least one."""
        drawn, vocab = _mix(head ^ (row.new.seed if row.new.params.n > 1 else 0), 0x70C), self.info.vocab_size
        if allowed is None or allowed >> drawn % vocab & 1:
            return drawn % vocab
        return _set_bit(allowed, drawn % allowed.bit_count(), vocab)

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, _HashTicket)
        if self._device_time:
            self._clock.sleep_until(ticket.ready_at)
        assert ticket.result is not None, "it has been sampled"
        return ticket.result

    def recover(self) -> None:
        self._rows.clear()
        self._slots.clear()

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._rows.clear()

    def control(self, order: Control) -> None:
        if isinstance(order, LoadAdapter):
            self._adapters.add(order.name)
            self._outcomes.append(AdapterOutcome(order.name, blocks=adapter_blocks(order.name)))
        elif isinstance(order, Sleep):
            self._rows.clear()
            for blocks in self._kv:
                blocks[:] = [array("Q", b"\xff" * len(block) * 8) for block in blocks]
        elif isinstance(order, DropAdapter):
            self._adapters.discard(order.name)
        elif isinstance(order, OpenStaging):
            self._staging = Staging(order.fd, order.replicas, order.widths, order.slots)
        elif isinstance(order, ExportBlocks):
            self._move(order)

    def _move(self, order: ExportBlocks) -> None:
        staging, brings = self._staging, isinstance(order, ImportBlocks)
        assert staging is not None, "the memory for it is open"
        (staging.check if brings else staging.clear)(order)
        for slot, blocks in zip(order.slots, order.blocks, strict=True):
            for group, held in enumerate(blocks):
                at = staging.data(order.source, slot, group).cast("Q")
                for place, block in enumerate(held):
                    size = self._specs[group].block_size
                    part, own = at[place * size : (place + 1) * size], self._kv[group][block]
                    if brings:
                        own[:] = array("Q", part)
                    else:
                        part[:] = memoryview(own)
        (staging.check if brings else staging.seal)(order)

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        told, self._outcomes = self._outcomes, []
        return told

    def _start_of(self, row: _HashRow) -> int:
        """Of its chain: with an adapter it is another model's, which must still lie in all of its blocks."""
        if row.new.adapter_slot == NO_SLOT:
            return self._key
        name, blocks = self._slots[row.new.adapter_slot]
        right = [*map(partial(_mix, adapter_key(name)), range(len(blocks)))]
        held = [self._pages[block][-1] for block in blocks]
        assert held == right, f"adapter {name} does not lie in its blocks {blocks} any more"
        return _mix(self._key, adapter_key(name))

    def _apply(self, plan: StepPlan) -> None:
        for slot, name, blocks in plan.adapters:
            assert name in self._adapters, f"adapter {name} is not in host memory"
            self._slots[slot] = (name, blocks)
            for place, block in enumerate(blocks):
                self._pages[block][:] = array("Q", [_mix(adapter_key(name), place)] * len(self._pages[block]))
        for row in plan.rows_dropped:
            self._rows.pop(row, None)
        for new in plan.rows_added:
            kept = self._rows.get(new.row)
            self._rows[new.row] = _HashRow(new, new.token_ids[:], kept.tables if kept else [{} for _ in self._specs])
        for row, group, index, block in zip(
            plan.table_row, plan.table_group, plan.table_index, plan.table_block, strict=True
        ):
            if row in self._rows:  # a row dropped again within its own plan has no table to edit
                self._rows[row].tables[group][index] = block
        for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
            self._kv[group][target] = self._kv[group][source][:]

    def _compute(self, row: _HashRow, start: int, count: int) -> int:
        """Writes the chain of tokens [start, start + count) to every group; returns the last link."""
        head, ids, first = 0, row.token_ids, self._start_of(row)
        for spec, blocks, table in zip(self._specs, self._kv, row.tables, strict=True):
            size = spec.block_size
            head = blocks[table[(start - 1) // size]][(start - 1) % size] if start else first
            for position in range(start, start + count):
                blocks[table[position // size]][position % size] = head = _mix(head, ids[position])
        return head

    def _sample(self, plan: StepPlan, heads: list[Links], allowed: Mapping[int, Sequence[int]]) -> StepResult:
        """``allowed``: of samples that have masks, those at their first places; drafts beyond are refuted."""
        tokens: list[tuple[int, ...]] = []
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        errors: dict[int, str] = {}
        drafted: list[int] = []
        for j, (work, target) in enumerate(zip(plan.sample_work, plan.sample_rows, strict=True)):
            row = self._rows[target]
            position = plan.starts[work] + plan.counts[work] - len(heads[work]) + 1
            masks = allowed.get(j) or (None,) * len(heads[work])
            drafted.append(len(masks) - 1)
            if masks[0] == 0:
                tokens.append(())
                errors[j] = "no token is allowed"
                row.token_ids[position:] = array("i", (0,))  # the step after, if it is there already, finds some token
                continue
            drawn = [self._draw(head, row, mask) for head, mask in zip(heads[work], masks, strict=False)]
            taken, _ = accepted(row.token_ids[position : position + len(drawn) - 1], drawn)
            row.token_ids[position:] = array("i", taken)
            tokens.append(tuple(taken))
            if row.new.params.logprobs is not None:
                logprobs[j] = tuple(self._logprobs(token, row.new.params.logprobs) for token in taken)
        scored = {index: self._scores(plan, index) for index in plan.prompt_logprobs}
        return StepResult(
            plan.step_id, tokens, logprobs, scored, errors, device_seconds=self._device_time,
            drafted=drafted if plan.drafts else (),
        )  # fmt: skip

    def _logprobs(self, token: int, k: int) -> TokenLogprobs:
        """Made-up but well-formed: the chosen token first and most probable."""
        best = [(token + rank) % self.info.vocab_size for rank in range(k)]
        return TokenLogprobs((token, *best), (-0.5, *(-0.5 - rank for rank in range(k))), 1)

    def _scores(self, plan: StepPlan, index: int) -> tuple[TokenLogprobs, ...]:
        row = self._rows[plan.rows[index]]
        start, end = plan.starts[index], plan.starts[index] + plan.counts[index]
        k = row.new.params.prompt_logprobs or 0
        return tuple(
            self._logprobs(token, k) for token in row.token_ids[start + 1 : min(end + 1, row.new.num_prompt_tokens)]
        )


def adapter_key(name: str) -> int:
    return zlib.crc32(name.encode())


def adapter_blocks(name: str) -> int:
    """That it takes."""
    return 1 + adapter_key(name) % 3


def _set_bit(bits: int, number: int, width: int) -> int:
    """Where the so many-th of the set bits is."""
    place = 0
    while width > 1:
        half = width // 2
        low = bits & ((1 << half) - 1)
        if number < low.bit_count():
            bits, width = low, half
        else:
            bits, width, place, number = bits >> half, width - half, place + half, number - low.bit_count()
    return place


def keyed_hash_info(
    *,
    vocab_size: int = 512,
    max_model_len: int = 4096,
    max_num_seqs: int = 256,
    num_blocks: int = 4096,
    block_size: int = 16,
    window: int | None = None,
    max_drafts: int = 0,
    adapters: AdapterSpace | None = None,
) -> ExecutorInfo:
    """A one-group executor's facts, for an engine without a model."""
    kind = KVKind.FULL if window is None else KVKind.SLIDING
    spec = KVSpec((0,), kind, block_size, num_kv_heads=1, head_dim=1, dtype_bytes=8, window=window)
    return ExecutorInfo(
        vocab_size, max_model_len, max_num_seqs, (KVGroup(spec, num_blocks),), "none (keyed hash)",
        max_drafts=max_drafts, adapters=adapters,
    )  # fmt: skip
