"""What runs a step. The core knows only this protocol: a worker, a simulation and a test double look the same to it.

What lives here: the protocol and the keyed-hash executor (no model). What may not: torch, scheduling.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace.clock import Clock, RealClock
from headrace.errors import StepFailed
from headrace.request import NewRow, StepPlan, StepResult, TokenLogprobs, TokenMasks
from headrace.spec import KVGroup, KVKind, KVSpec


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor offers; the scheduler and the validators are sized by it."""

    vocab_size: int  # width of the logits
    max_model_len: int  # tokens a sequence may have
    max_num_seqs: int  # rows
    kv_groups: tuple[KVGroup, ...]
    device: str
    memory: dict[str, int] = field(default_factory=dict)  # bytes by purpose: weights, kv_cache, activations, …
    padded: bool = False  # a step costs its longest chunk times its chunks, not their sum
    start_seconds: dict[str, float] = field(default_factory=dict)  # by stage, in order


@dataclass(slots=True)
class Ticket:
    """A submitted step."""

    step_id: int


class Executor(Protocol):
    """``submit`` returns at once or after the work (an inline executor); tickets are collected in order of submission.

    A plan with ``masked`` samples is computed by ``submit`` and sampled by ``sample``, which must follow before anything else is
    submitted, once every earlier step is collected; other plans are sampled at once.
    ``collect`` raises StepFailed when the whole step failed. From then on every plan fails *without touching rows or blocks*
    (its deltas build on what was lost), until the core, with nothing in flight, calls ``recover``: rows are forgotten, and
    the plans that follow build them anew. Nothing between submit and collect may read results on the host.
    ``prepare``, with nothing in flight and nothing to do: some milliseconds' worth of what later steps will want; whether there may be more.
    """

    info: ExecutorInfo

    def submit(self, plan: StepPlan) -> Ticket: ...

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def recover(self) -> None: ...

    def prepare(self) -> bool: ...

    def close(self) -> None: ...


_MASK = 2**64 - 1


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
    result: StepResult | None  # None: the step failed, or waits for its masks
    ready_at: float
    unsampled: tuple[StepPlan, list[int]] | None = None  # with the last link of each chain


class KeyedHashExecutor:
    """A model without a model: the next token is a keyed hash of the context, *read through the block tables*.

    Each KV slot holds the hash chain up to its token, computed from the slot before it; so a wrong table, a missing copy or a
    block given away too early changes tokens, as it would with real keys and values. With ``check`` every slot of the
    context is compared with the chain of the row's own ids and the first difference raises.
    ``device_time``: seconds a step takes on the (one) device, so that overlap shows.
    ``fault(plan)`` true makes that step fail.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        *,
        key: int = 0,
        device_time: float = 0.0,
        clock: Clock | None = None,
        check: bool = False,
        fault: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        self.info = info
        self._key = _mix(key & _MASK, 0x5EED)
        self._device_time = device_time
        self._clock = clock or RealClock()
        self._check = check
        self._fault = fault
        self._broken = False
        self._rows: dict[int, _HashRow] = {}
        self._specs = [group.spec for group in info.kv_groups]
        self._kv = [[array("Q", bytes(8 * group.spec.block_size)) for _ in range(group.num_blocks)] for group in info.kv_groups]
        self._busy_until = 0.0

    def submit(self, plan: StepPlan) -> _HashTicket:
        self._broken = self._broken or (self._fault is not None and self._fault(plan))
        self._busy_until = max(self._busy_until, self._clock.now()) + self._device_time
        ticket = _HashTicket(plan.step_id, None, self._busy_until)
        if not self._broken:
            heads = self._execute(plan)
            if plan.masked:
                ticket.unsampled = (plan, heads)
            else:
                ticket.result = self._sample(plan, heads, {})
        return ticket

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        assert isinstance(ticket, _HashTicket)
        if ticket.unsampled is not None and not self._broken:
            size = 4 * masks.words_each
            rows = (masks.words[size * place : size * (place + 1)] for place in range(len(masks.samples)))
            allowed = {j: int.from_bytes(row, "little") & ((1 << self.info.vocab_size) - 1) for j, row in zip(masks.samples, rows, strict=True)}
            ticket.result = self._sample(*ticket.unsampled, allowed)
        ticket.unsampled = None

    def _execute(self, plan: StepPlan) -> list[int]:
        self._apply(plan)
        return [self._compute(self._rows[row], start, count) for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)]

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, _HashTicket)
        if self._device_time:
            self._clock.sleep_until(ticket.ready_at)
        if ticket.result is None:
            raise StepFailed(f"step {ticket.step_id} failed on purpose or follows one that did")
        return ticket.result

    def recover(self) -> None:
        self._rows.clear()
        self._broken = False

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._rows.clear()

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.rows_dropped:
            self._rows.pop(row, None)
        for new in plan.rows_added:
            self._rows[new.row] = _HashRow(new, new.token_ids[:], [{} for _ in self._specs])
        for row, group, index, block in zip(plan.table_row, plan.table_group, plan.table_index, plan.table_block, strict=True):
            if row in self._rows:  # a row dropped again within its own plan has no table to edit
                self._rows[row].tables[group][index] = block
        for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
            self._kv[group][target] = self._kv[group][source][:]

    def _compute(self, row: _HashRow, start: int, count: int) -> int:
        """Writes the chain of tokens [start, start + count) to every group; returns the last link."""
        head, ids = 0, row.token_ids
        for spec, blocks, table in zip(self._specs, self._kv, row.tables, strict=True):
            size = spec.block_size
            head = blocks[table[(start - 1) // size]][(start - 1) % size] if start else self._key
            for position in range(start, start + count):
                blocks[table[position // size]][position % size] = head = _mix(head, ids[position])
        if self._check:
            self._verify(row, start, start + count)
        return head

    def _verify(self, row: _HashRow, start: int, end: int) -> None:
        chain, head = [], self._key
        for token in row.token_ids[:end]:
            head = _mix(head, token)
            chain.append(head)
        for spec, blocks, table in zip(self._specs, self._kv, row.tables, strict=True):
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in range(first, end):
                block, offset = table[position // spec.block_size], position % spec.block_size
                assert blocks[block][offset] == chain[position], (
                    f"sequence {row.new.sequence_id}: block {block} does not hold position {position}"
                )

    def _sample(self, plan: StepPlan, heads: list[int], allowed: Mapping[int, int]) -> StepResult:
        vocab = self.info.vocab_size
        tokens: list[tuple[int, ...]] = []
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        errors: dict[int, str] = {}
        for j, (work, target) in enumerate(zip(plan.sample_work, plan.sample_rows, strict=True)):
            row = self._rows[target]
            salt = row.new.seed if row.new.params.n > 1 else 0  # siblings differ, everything else depends on the context alone
            count = allowed[j].bit_count() if j in allowed else vocab
            position = plan.starts[work] + plan.counts[work]
            if not count:
                tokens.append(())
                errors[j] = "no token is allowed"
                row.token_ids[position:] = array("i", (0,))  # the step behind, if it is there already, finds some token
                continue
            drawn = _mix(heads[work] ^ salt, 0x70C) % count
            token = _set_bit(allowed[j], drawn, vocab) if j in allowed else drawn
            row.token_ids[position:] = array("i", (token,))
            tokens.append((token,))
            if row.new.params.logprobs is not None:
                logprobs[j] = (self._logprobs(token, row.new.params.logprobs),)
        scored = {index: self._scores(plan, index) for index in plan.prompt_logprobs}
        return StepResult(plan.step_id, tokens, logprobs, scored, errors, device_seconds=self._device_time)

    def _logprobs(self, token: int, k: int) -> TokenLogprobs:
        """Made-up but well-formed: the chosen token first and most probable."""
        best = [(token + rank) % self.info.vocab_size for rank in range(k)]
        return TokenLogprobs((token, *best), (-0.5, *(-0.5 - rank for rank in range(k))), 1)

    def _scores(self, plan: StepPlan, index: int) -> tuple[TokenLogprobs, ...]:
        row = self._rows[plan.rows[index]]
        start, end = plan.starts[index], plan.starts[index] + plan.counts[index]
        k = row.new.params.prompt_logprobs or 0
        return tuple(self._logprobs(token, k) for token in row.token_ids[start + 1 : min(end + 1, row.new.num_prompt_tokens)])


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
) -> ExecutorInfo:
    """A one-group executor's facts, for an engine without a model."""
    kind = KVKind.FULL if window is None else KVKind.SLIDING
    spec = KVSpec((0,), kind, block_size, num_kv_heads=1, head_dim=1, dtype_bytes=8, window=window)
    return ExecutorInfo(vocab_size, max_model_len, max_num_seqs, (KVGroup(spec, num_blocks),), "none (keyed hash)")
