"""A device without a model that fails, dawdles and spoils rows when told to, and judges every plan before it computes
it.

Beside the hash of each context, which the executor it extends compares with the row's own ids, it holds plans against
its own account of each row: tokens are computed once, one after the other, none beyond the last; what a step in flight
reads or writes for one request is not written for another.

What lives here: the executor. What may not: the scheduler's state (books.py).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from headrace.clock import VirtualClock
from headrace.engine.executor import AdapterOutcome, Control, DropAdapter, ExecutorInfo, LoadAdapter, Ticket
from headrace.engine.keyed_hash import Links, _HashRow, _mix
from headrace.request import NO_SLOT, StepPlan, StepResult, TokenMasks
from headrace.spec import AdapterSpace, KVGroup, KVKind, KVSpec
from tests.support.simulation.broken import Broken, hold
from tests.support.simulation.oracle import ADAPTERS, VOCAB, root
from tests.support.simulation.rank import Choosing, Rank
from tests.support.simulation.schedule import Setting

ADAPTER = -1  # whoever reads one: no request
UNUSABLE = "the logits of this row were not finite"
DAMAGED = "its file is damaged"

Touched = list[dict[int, int]]  # of a step, by group: block → the request that it is read or written for


class JumpingClock(VirtualClock):
    """Virtual time that jumps, forward and back, but not before its origin."""

    def jump(self, seconds: float) -> None:
        self._now = max(0.0, self._now + seconds)


def info_of(setting: Setting) -> ExecutorInfo:
    groups = tuple(
        KVGroup(
            KVSpec((n,), KVKind.FULL if g.window is None else KVKind.SLIDING, g.block_size, 1, 1, 8, window=g.window),
            g.num_blocks,
        )
        for n, g in enumerate(setting.groups)
    )
    return ExecutorInfo(
        VOCAB,
        setting.length,
        setting.rows,
        groups,
        "none (keyed hash)",
        padded=setting.padded,
        max_drafts=setting.drafts,
        adapters=AdapterSpace(slots_of(setting), setting.adapters, setting.own_blocks) if setting.adapters else None,
    )


def slots_of(setting: Setting) -> int:
    """For adapters, on the device and in host memory."""
    return max(setting.held, setting.adapters) if setting.held else len(ADAPTERS)


class Forecast:
    """What a cost model would say: half of a step is its constant, the rest is for eight tokens that see ten keys
    each."""

    def __init__(self, setting: Setting) -> None:
        self.windows = tuple(group.window for group in setting.groups)
        self._half = setting.step_seconds / 2

    def floor_seconds(self, tokens: int, sampled: int, pairs: Sequence[float], keys: Sequence[float]) -> float:
        return self._half * (1.0 + (tokens + sum(pairs) / len(pairs) / 10) / 16)


@dataclass(slots=True)
class _Account:
    """Of one row. ``links``: by group, the hash after each of its own ids, in blocks, as far as they were needed;
    ``linked``: so many; ``head``: the last of them. ``computed``: tokens whose keys are there; None: its first chunk
    says."""

    links: list[list[array[int]]]
    head: int
    linked: int = 0
    computed: int | None = None

    def forget(self, count: int, sizes: Sequence[int]) -> None:
        """Links beyond so many tokens."""
        if count >= self.linked:
            return
        for size, blocks in zip(sizes, self.links, strict=True):
            del blocks[-(-count // size) :]
            if blocks and count % size:
                del blocks[-1][count % size :]
        self.linked, self.head = count, self.links[0][-1][-1]


class Device(Choosing):
    """``told_rows``: called with every plan's new rows, before anything is computed. ``fallen``: whose tokens the step
    was to compute that was collected last, if it failed."""

    def __init__(self, setting: Setting, clock: VirtualClock, told_rows: Callable[[StepPlan], None]) -> None:
        super().__init__(info_of(setting), clock=clock, acceptance=setting.acceptance)
        self._setting = setting
        self._second = Rank(self.info, setting.acceptance) if setting.ranks else None
        self._sizes = [spec.block_size for spec in self._specs]
        self._told_rows = told_rows
        self.fail_next: str | None = None  # "before" or "after" it has written
        self.spoil_next: int | None = None
        self.delay_next = 0.0
        self.in_flight: deque[tuple[StepPlan, Touched]] = deque()
        self.fallen: set[int] = set()
        self._falling: deque[set[int]] = deque()  # as in flight
        self._writes: deque[dict[int, set[tuple[int, int]]]] = deque()  # as in flight: by row, (group, block)
        self.unusable: set[tuple[int, int]] = set()  # blocks that an unusable row has written last
        self._owners: dict[int, int] = {}  # row → request, as planned
        self.written: list[set[int]] = [set() for _ in self._specs]  # by group, since somebody cleared it
        self.collected: StepPlan | None = None  # the last one
        self.result: StepResult | None = None  # its result
        self._accounts: dict[int, _Account] = {}  # by row
        self.reading: list[tuple[str, int, bool]] = []  # key, turns that it still takes, whether it can be read
        self.damage_next = False
        self.damaged: set[str] = set()  # that could not be read

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
        self._writes.append({})
        self._owners.update((new.row, new.sequence_id) for new in plan.rows_added)
        self._falling.append({self._owners[row] for row in (*plan.rows, *plan.sample_rows)})
        if failing == "after" and not self._broken:
            exact = self._exact(plan)
            self._sample(exact, self._execute(exact), {})
        self._broken = self._broken or failing is not None
        if self._second is not None:
            self._second.submit(plan, broken=self._broken)
        return super().submit(plan)

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        if self._second is not None:
            self._second.sample(ticket, masks)
        super().sample(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        self.collected, self.fallen, self.result = self.in_flight.popleft()[0], self._falling.popleft(), None
        writes = self._writes.popleft()
        second = None if self._second is None else self._second.collect(ticket)
        result = super().collect(ticket)
        if self._second is not None:
            same = second is not None and replace(second, device_seconds=result.device_seconds) == result
            hold(same, "rank", f"step {ticket.step_id}: {second}, of the first {result}")
        if self.spoil_next is not None and self.spoil_next < len(result.tokens):
            result = replace(result, errors={**result.errors, self.spoil_next: UNUSABLE})
            self.unusable |= writes.get(self.collected.sample_rows[self.spoil_next], set())
            self.spoil_next = None
        self.result = result
        return result

    def recover(self) -> None:
        super().recover()
        if self._second is not None:
            self._second.executor.recover()
        self._accounts.clear()

    def lose_rows(self) -> None:
        """With nothing in flight; adapters keep their slots."""
        ranks = [self, *([] if self._second is None else [self._second.executor])]
        kept = [dict(each._slots) for each in ranks]
        self.recover()
        for each, slots in zip(ranks, kept, strict=True):
            each._slots.update(slots)

    # --- adapters, read one after the other

    def control(self, order: Control) -> None:
        if isinstance(order, LoadAdapter):
            self.reading.append((order.name, self._setting.reads, not self.damage_next))
            self.damage_next = False
        else:
            self._tell(order)

    def _tell(self, order: Control) -> None:
        if self._second is not None and isinstance(order, LoadAdapter | DropAdapter):
            self._second.control(order)
        super().control(order)

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        while self.reading:
            key, left, whole = self.reading.pop(0)
            if left:
                self.reading.insert(0, (key, left - 1, whole))
                break
            if whole:
                self._tell(LoadAdapter(key, ""))
            else:
                self.damaged.add(key)
                self._outcomes.append(AdapterOutcome(key, DAMAGED))
        return super().outcomes(wait)

    def holds_adapter(self, key: str) -> bool:
        """In host memory."""
        return key in self._adapters

    @property
    def num_adapters(self) -> int:
        """In host memory, or on their way there."""
        return len(self._adapters) + len(self.reading)

    # --- judging plans

    def _judge_sizes(self, plan: StepPlan) -> None:
        setting, counts = self._setting, plan.counts
        tokens = len(counts) * max(counts, default=0) if setting.padded else sum(counts)
        splits = (
            setting.chunked_prefill and setting.kv_caching
        )  # else a whole may exceed what a step should have, alone
        if tokens > setting.budget and (splits or len(counts) != 1):
            raise Broken("budget", f"{list(counts)} tokens in a step of {setting.budget}")
        if not len(set(plan.rows)) == len(plan.rows) <= setting.rows:
            raise Broken("rows", f"rows {list(plan.rows)} of {setting.rows}")
        scored = sum([counts[work] for work in plan.prompt_logprobs])
        if scored > setting.logits_rows and (splits or len(plan.prompt_logprobs) != 1):
            raise Broken("logits", f"{scored} positions are scored, {setting.logits_rows} may be")

    def _apply(self, plan: StepPlan) -> None:
        self._judge_adapters(plan)
        coming = {slot: (name, blocks) for slot, name, blocks in plan.adapters}
        for new in plan.rows_added:
            kept = self._accounts.get(new.row) if new.row in self._rows and new.row not in plan.rows_dropped else None
            self._accounts[new.row] = _Account(
                [[] for _ in self._specs],
                root(None if new.adapter_slot == NO_SLOT else {**self._slots, **coming}[new.adapter_slot][0]),
                computed=kept.computed if kept else None,
            )
        super()._apply(plan)
        for group, target in zip(plan.copy_group, plan.copy_target, strict=True):
            self.written[group].add(target)
            self.unusable.discard((group, target))

    def _judge_adapters(self, plan: StepPlan) -> None:
        """Blocks that one is brought into are read by no step in flight."""
        for _, name, blocks in plan.adapters:
            for other, touched in self.in_flight:
                if not self._setting.own_blocks and other is not plan and not touched[0].keys().isdisjoint(blocks):
                    raise Broken(
                        "in flight", f"adapter {name} comes into {blocks}, some of which step {other.step_id} uses"
                    )
            if not self._setting.own_blocks:
                self.written[0].update(blocks)

    def _execute(self, plan: StepPlan) -> list[Links]:
        if self._broken:
            return []
        self._apply(plan)
        heads, touched, takers = [], self.in_flight[-1][1], self._takers(plan)
        for work, (number, start, count, drafts) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, plan.drafts or repeat(0), strict=False)
        ):
            row, account, end = self._rows[number], self._accounts[number], start + count
            self._judge_work(row, account, start, end - drafts, takers.get(work, ()))
            seen = self._touch(row, start, end, touched)
            self._writes[-1][number] = own = self._own_blocks(row, start, end)
            self.unusable -= own
            heads.append(self._compute_drafting(row, start, count, drafts))
            self._judge_contents(row, account, end, seen)
        return heads

    def _own_blocks(self, row: _HashRow, start: int, end: int) -> set[tuple[int, int]]:
        tables = enumerate(zip(self._sizes, row.tables, strict=True))
        return {
            (group, table[index])
            for group, (size, table) in tables
            for index in range(start // size, (end - 1) // size + 1)
        }

    def _takers(self, plan: StepPlan) -> dict[int, list[int]]:
        takers: dict[int, list[int]] = {}
        for work, target in zip(plan.sample_work, plan.sample_rows, strict=True):
            if work in takers:
                takers[work].append(target)
            else:
                takers[work] = [target]
        return takers

    def _judge_work(self, row: _HashRow, account: _Account, start: int, end: int, takers: Sequence[int]) -> None:
        """Tokens are computed once and in order; the last known one is sampled from, and no other."""
        who, known = row.new.sequence_id, len(row.token_ids)
        due = account.computed if self._setting.kv_caching else 0
        if start != due and due is not None:
            raise Broken("chunk", f"request {who}: {due} tokens are computed, the step begins at {start}")
        if not start < end <= known:
            raise Broken("chunk", f"request {who}: tokens {start} to {end} of {known}")
        if bool(takers) != (end == known):
            raise Broken("chunk", f"request {who}: {len(takers)} samples at token {end} of {known}")
        account.computed = end
        for taker in takers:
            if len(self._rows[taker].token_ids) != end:
                raise Broken(
                    "chunk",
                    f"request {who}: row {taker} has {len(self._rows[taker].token_ids)} tokens and gets one at {end}",
                )
            self._accounts[taker].computed = end

    def _settle(self, plan: StepPlan, result: StepResult) -> None:
        """Drafts that were right are computed, others are not; nor are those that a grammar refuted."""
        for work, tokens in zip(plan.sample_work, result.tokens, strict=True):
            account = self._accounts[plan.rows[work]]
            if plan.drafts[work] and account.computed is not None:
                account.computed += max(0, len(tokens) - 1)
                account.forget(account.computed, self._sizes)

    def _touch(self, row: _HashRow, start: int, end: int, touched: Touched) -> list[tuple[int, list[int]]]:
        """Notes what the step reads and writes, and looks whether somebody else's step still does. Returns, by group,
        the first of the table's blocks that it sees, and all of them."""
        who, seen = row.new.sequence_id, []
        for group, (spec, table) in enumerate(zip(self._specs, row.tables, strict=True)):
            size = spec.block_size
            first = 0 if spec.window is None else max(0, start - spec.window + 1) // size
            blocks = [*map(table.__getitem__, range(first, (end - 1) // size + 1))]
            own = blocks[start // size - first :]
            for plan, others in self.in_flight:
                users = others[group]
                for block in own:
                    if users.get(block, who) != who:
                        user = f"step {plan.step_id} uses it for request {users[block]}"
                        raise Broken("in flight", f"block {block} is written for request {who} while {user}")
            touched[group].update(dict.fromkeys(blocks, who))
            self.written[group].update(own)
            seen.append((first, blocks))
        if row.new.adapter_slot != NO_SLOT and not self._setting.own_blocks:
            touched[0].update(dict.fromkeys(self._slots[row.new.adapter_slot][1], ADAPTER))
        return seen

    def _sample(self, plan: StepPlan, heads: list[Links], allowed: Mapping[int, Sequence[int]]) -> StepResult:
        result = super()._sample(plan, heads, allowed)
        if result.drafted:
            self._settle(plan, result)
        return result

    def _judge_contents(self, row: _HashRow, account: _Account, end: int, seen: list[tuple[int, list[int]]]) -> None:
        """Every block that the step sees holds the hash of the row's own ids, up to the last one that is computed."""
        if account.linked < end:
            self._link(account, row.token_ids[account.linked : end])
        for spec, kv, (first, blocks), right in zip(self._specs, self._kv, seen, account.links, strict=True):
            held, wanted, over = (
                [*map(kv.__getitem__, blocks)],
                right[first : first + len(blocks)],
                end % spec.block_size,
            )
            if over:
                held[-1], wanted[-1] = held[-1][:over], wanted[-1][:over]
            if held != wanted:
                at = next(index for index, (have, want) in enumerate(zip(held, wanted, strict=True)) if have != want)
                low = (first + at) * spec.block_size
                text = f"block {blocks[at]} does not hold positions {low} to {min(end, low + spec.block_size)}"
                raise Broken("contents", f"request {row.new.sequence_id}: {text}")

    def _link(self, account: _Account, token_ids: Sequence[int]) -> None:
        head, at = account.head, account.linked
        for token in token_ids:
            head = _mix(head, token)
            for size, blocks in zip(self._sizes, account.links, strict=True):
                if at % size:
                    blocks[-1].append(head)
                else:
                    blocks.append(array("Q", (head,)))
            at += 1
        account.linked, account.head = at, head

    def contents(self, group: int, block: int) -> array[int]:
        return self._kv[group][block]
