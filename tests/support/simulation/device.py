"""A device without a model that fails, dawdles and spoils rows when told to, and judges every plan before it computes it.

Beside the hash of each context, which the executor it extends compares with the row's own ids, it holds plans against its own account of
each row: tokens are computed once, one after the other, none beyond the last; what a step in flight reads or writes for one request is not
written for another.

What lives here: the executor. What may not: the scheduler's state (books.py).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tests.support.simulation.broken import Broken, hold
from tests.support.simulation.oracle import VOCAB
from tests.support.simulation.schedule import Setting

from headrace.clock import VirtualClock
from headrace.engine.executor import ExecutorInfo, KeyedHashExecutor, Ticket, _HashRow, _mix
from headrace.request import StepPlan, StepResult
from headrace.spec import KVGroup, KVKind, KVSpec

UNUSABLE = "the logits of this row were not finite"

Touched = list[dict[int, int]]  # of a step, by group: block → the request that it is read or written for


class JumpingClock(VirtualClock):
    """Virtual time that jumps, forward and back, but not before its origin."""

    def jump(self, seconds: float) -> None:
        self._now = max(0.0, self._now + seconds)


def info_of(setting: Setting) -> ExecutorInfo:
    groups = tuple(
        KVGroup(KVSpec((n,), KVKind.FULL if g.window is None else KVKind.SLIDING, g.block_size, 1, 1, 8, window=g.window), g.num_blocks)
        for n, g in enumerate(setting.groups)
    )
    return ExecutorInfo(VOCAB, setting.length, setting.rows, groups, "none (keyed hash)", padded=setting.padded)


class Forecast:
    """What a cost model would say: half of a step is its constant, the rest is for eight tokens that see ten keys each."""

    def __init__(self, setting: Setting) -> None:
        self.windows = tuple(group.window for group in setting.groups)
        self._half = setting.step_seconds / 2

    def floor_seconds(self, tokens: int, sampled: int, pairs: Sequence[float], keys: Sequence[float]) -> float:
        return self._half * (1.0 + (tokens + sum(pairs) / len(pairs) / 10) / 16)

    def step_seconds(self, rows: int, tokens: int, attended: int) -> float:
        return self._half * (1.0 + (tokens + attended / 10) / 16)


class Device(KeyedHashExecutor):
    """``told_rows``: called with every plan's new rows, before anything is computed. ``fallen``: whose tokens the step was to
    compute that was collected last, if it failed."""

    def __init__(self, setting: Setting, clock: VirtualClock, told_rows: Callable[[StepPlan], None]) -> None:
        super().__init__(info_of(setting), clock=clock, check=True)
        self._setting = setting
        self._told_rows = told_rows
        self.fail_next: str | None = None  # "before" or "after" it has written
        self.spoil_next: int | None = None
        self.delay_next = 0.0
        self.in_flight: deque[tuple[StepPlan, Touched]] = deque()
        self.fallen: set[int] = set()
        self._falling: deque[set[int]] = deque()  # as in flight
        self._owners: dict[int, int] = {}  # row → request, as planned
        self.written: list[set[int]] = [set() for _ in self._specs]  # by group, since somebody cleared it
        self.collected: StepPlan | None = None  # the last one
        self.result: StepResult | None = None  # its result
        self._computed: dict[int, int] = {}  # row → tokens whose keys are there; no entry: its first chunk says
        self._links: dict[int, array[int]] = {}  # row → the hash after each of its own ids, as far as they were needed

    @property
    def broken(self) -> bool:
        return self._broken

    # --- the protocol

    def submit(self, plan: StepPlan) -> Ticket:  # type: ignore[override]
        self._told_rows(plan)
        self._judge_sizes(plan)
        self._device_time, self.delay_next = self._setting.step_seconds + self.delay_next, 0.0
        failing, self.fail_next = self.fail_next, None
        self.in_flight.append((plan, [{} for _ in self._specs]))
        self._owners.update((new.row, new.sequence_id) for new in plan.rows_added)
        self._falling.append({self._owners[row] for row in (*plan.rows, *plan.sample_rows)})
        if failing == "after" and not self._broken:
            self._sample(plan, self._execute(plan), {})
        self._broken = self._broken or failing is not None
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        self.collected, self.fallen, self.result = self.in_flight.popleft()[0], self._falling.popleft(), None
        result = super().collect(ticket)
        if self.spoil_next is not None and self.spoil_next < len(result.tokens):
            result = replace(result, errors={**result.errors, self.spoil_next: UNUSABLE})
            self.spoil_next = None
        self.result = result
        return result

    def recover(self) -> None:
        super().recover()
        self._computed.clear()
        self._links.clear()

    # --- judging plans

    def _judge_sizes(self, plan: StepPlan) -> None:
        setting, counts = self._setting, plan.counts
        tokens = len(counts) * max(counts, default=0) if setting.padded else sum(counts)
        splits = setting.chunked_prefill and setting.kv_caching  # else a whole may exceed what a step should have, alone
        alone = len(counts) == 1 and not splits
        hold(tokens <= setting.budget or alone, "budget", f"{list(counts)} tokens in a step of {setting.budget}")
        hold(len(set(plan.rows)) == len(plan.rows) <= setting.rows, "rows", f"rows {list(plan.rows)} of {setting.rows}")
        scored = sum(counts[work] for work in plan.prompt_logprobs)
        whole = len(plan.prompt_logprobs) == 1 and not splits
        hold(scored <= setting.logits_rows or whole, "logits", f"{scored} positions are scored, {setting.logits_rows} may be")

    def _apply(self, plan: StepPlan) -> None:
        for new in plan.rows_added:
            self._computed.pop(new.row, None)
            self._links.pop(new.row, None)
        super()._apply(plan)
        for group, target in zip(plan.copy_group, plan.copy_target, strict=True):
            self.written[group].add(target)

    def _execute(self, plan: StepPlan) -> list[int]:
        self._apply(plan)
        heads, touched, takers = [], self.in_flight[-1][1], self._takers(plan)
        for work, (number, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            row, end = self._rows[number], start + count
            self._judge_work(number, row, start, end, takers.get(work, []))
            self._touch(row, start, end, touched)
            heads.append(self._compute(row, start, count))
        return heads

    def _takers(self, plan: StepPlan) -> dict[int, list[int]]:
        takers: dict[int, list[int]] = {}
        for work, target in zip(plan.sample_work, plan.sample_rows, strict=True):
            takers.setdefault(work, []).append(target)
        return takers

    def _judge_work(self, number: int, row: _HashRow, start: int, end: int, takers: list[int]) -> None:
        """Tokens are computed once and in order; the last known one is sampled from, and no other."""
        who = row.new.sequence_id
        due = self._computed.get(number, start) if self._setting.kv_caching else 0
        if start != due:
            raise Broken("chunk", f"request {who}: {due} tokens are computed, the step begins at {start}")
        if not start < end <= len(row.token_ids):
            raise Broken("chunk", f"request {who}: tokens {start} to {end} of {len(row.token_ids)}")
        if bool(takers) != (end == len(row.token_ids)):
            raise Broken("chunk", f"request {who}: {len(takers)} samples at token {end} of {len(row.token_ids)}")
        self._computed[number] = end
        for taker in takers:
            if len(self._rows[taker].token_ids) != end:
                raise Broken("chunk", f"request {who}: row {taker} has {len(self._rows[taker].token_ids)} tokens and gets one at {end}")
            self._computed[taker] = end

    def _touch(self, row: _HashRow, start: int, end: int, touched: Touched) -> None:
        """Notes what the step reads and writes, and looks whether somebody else's step still does."""
        who = row.new.sequence_id
        for group, (spec, table) in enumerate(zip(self._specs, row.tables, strict=True)):
            first = 0 if spec.window is None else max(0, start - spec.window + 1) // spec.block_size
            blocks = [table[index] for index in range(first, (end - 1) // spec.block_size + 1)]
            for block in blocks[start // spec.block_size - first :]:
                for plan, others in self.in_flight:
                    if others[group].get(block, who) != who:
                        user = f"step {plan.step_id} uses it for request {others[group][block]}"
                        raise Broken("in flight", f"block {block} is written for request {who} while {user}")
            touched[group].update(dict.fromkeys(blocks, who))
            self.written[group].update(blocks[start // spec.block_size - first :])

    def _sample(self, plan: StepPlan, heads: list[int], allowed: Mapping[int, array[int]]) -> StepResult:
        """Beside grammars, a request may have said what its tokens may be."""
        own: dict[int, array[int]] = {}
        for j, row in enumerate(plan.sample_rows):
            only = self._rows[row].new.params.allowed_token_ids
            if only is not None:
                own[j] = array("I", sum(1 << token for token in only).to_bytes(VOCAB // 8, "little"))
        return super()._sample(plan, heads, {**allowed, **own} if own else allowed)

    def _verify(self, row: _HashRow, start: int, end: int) -> None:
        """As the executor does, by whole blocks: every slot of the context holds the hash of the row's own ids."""
        links = self._links.setdefault(row.new.row, array("Q"))
        head = links[-1] if links else self._key
        for token in row.token_ids[len(links) : end]:
            head = _mix(head, token)
            links.append(head)
        for spec, kv, table in zip(self._specs, self._kv, row.tables, strict=True):
            size = spec.block_size
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for index in range(first // size, (end - 1) // size + 1):
                low, high = max(first, index * size), min(end, index * size + size)
                at = table[index] * size - index * size
                if kv[at + low : at + high] != links[low:high]:
                    raise Broken("contents", f"request {row.new.sequence_id}: block {table[index]} does not hold positions {low} to {high}")

    def contents(self, group: int, block: int) -> array[int]:
        size = self._specs[group].block_size
        return self._kv[group][block * size : (block + 1) * size]
