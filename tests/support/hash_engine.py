"""Engines without a model, and the oracle that says what they must answer.

What lives here: builders and the oracle of the keyed-hash executor. What may not: assertions.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.clock import Clock, VirtualClock
from headrace.config import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.executor import Executor, ExecutorInfo, Ticket
from headrace.engine.grammar_masks import GrammarMasks
from headrace.engine.keyed_hash import KeyedHashExecutor, Links, _HashRow, _HashTicket, _mix, keyed_hash_info
from headrace.errors import StepFailed, StepLost
from headrace.request import Finished, Request, SamplingParams, SequenceOutput, StepPlan, StepResult

VOCAB = 512
EOS = 7
FIXED = '{"method": "ngram", "num_speculative_tokens": %d}'


def ids(values: Iterable[int]) -> array[int]:
    return array("i", values)


def request(request_id: int, prompt: Iterable[int], **fields: object) -> Request:
    """A request with greedy defaults; ``fields`` are split between Request and SamplingParams."""
    own = {
        name: fields.pop(name)
        for name in ("priority", "cache_salt", "adapter", "seed", "tenant", "expects", "arrival_time")
        if name in fields
    }
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})  # type: ignore[arg-type]
    return Request(request_id=request_id, prompt_token_ids=ids(prompt), params=params, **own)  # type: ignore[arg-type]


class CheckedExecutor(KeyedHashExecutor):
    """With ``check`` every slot of the context is compared with the chain of the row's own ids and the first difference
    raises. ``fault(plan)`` true makes that step fail, and those behind it, with an ``error``; where they are lost, so is
    the cache."""

    def __init__(
        self,
        info: ExecutorInfo,
        *,
        check: bool = False,
        fault: Callable[[StepPlan], bool] | None = None,
        error: type[StepFailed] = StepFailed,
        **further: Any,
    ) -> None:
        super().__init__(info, **further)
        self._check, self._fault, self._error = check, fault, error
        self._broken = False
        self._failed: set[int] = set()

    def submit(self, plan: StepPlan) -> Any:
        self._broken = self._broken or (self._fault is not None and self._fault(plan))
        if self._broken:
            self._failed.add(plan.step_id)
        return super().submit(plan)

    def _execute(self, plan: StepPlan) -> list[Links]:
        return [] if self._broken else super()._execute(plan)

    def drafts(self, ticket: Ticket) -> list[array[int]]:
        return [] if self._broken else super().drafts(ticket)

    def _sample(self, plan: StepPlan, heads: list[Links], allowed: Mapping[int, Sequence[int]]) -> StepResult:
        if not self._broken:
            return super()._sample(plan, heads, allowed)
        self._failed.add(plan.step_id)
        return StepResult(plan.step_id, [])

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, _HashTicket)
        failed = ticket.step_id in self._failed or ticket.result is None
        self._failed.discard(ticket.step_id)
        ticket.result = ticket.result or StepResult(ticket.step_id, [])
        result = super().collect(ticket)
        if failed:
            raise self._error(f"step {ticket.step_id} failed on purpose or follows one that did")
        return result

    def recover(self) -> None:
        super().recover()
        self._broken = False
        if self._error is StepLost:
            for block in (block for blocks in self._kv for block in blocks):
                block[:] = array("Q", [0]) * len(block)

    def _compute(self, row: _HashRow, start: int, count: int) -> int:
        head = super()._compute(row, start, count)
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


def create_core(
    executor: Executor,
    scheduler: SchedulerConfig,
    clock: Clock,
    *,
    cache: CacheConfig | None = None,
    ends: Iterable[int] = (),
    **more: Any,
) -> EngineCore:
    """``ends``: tokens that end an answer; ``more``: as EngineCore has it."""
    return EngineCore(
        executor,
        scheduler=scheduler,
        cache=cache or CacheConfig(),
        eos_token_ids=frozenset(ends),
        namespace=b"",
        clock=clock,
        **more,
    )


def engine(
    *,
    depth: int = 0,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 200,
    window: int | None = None,
    padded: bool = False,
    max_drafts: int = 0,
    info: ExecutorInfo | None = None,
    cache: CacheConfig | None = None,
    executor: KeyedHashExecutor | None = None,
    check: bool = True,
    masks: GrammarMasks | None = None,
    **scheduler: object,
) -> EngineCore:
    """A small core over a checking keyed-hash executor and a virtual clock."""
    clock = VirtualClock()
    info = info or keyed_hash_info(
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        window=window,
        max_drafts=max_drafts,
    )
    info = replace(info, padded=padded)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        speculative_config=FIXED % max_drafts if max_drafts else None,
        **scheduler,  # type: ignore[arg-type]
    )
    executor = executor or CheckedExecutor(info, clock=clock, check=check)
    return create_core(executor, config, clock, cache=cache, ends={EOS}, depth=depth, masks=masks)


def plans_of(core: EngineCore) -> list[StepPlan]:
    """Every plan that will be submitted from now on."""
    plans, submit = list[StepPlan](), core.executor.submit

    def keep(plan: StepPlan) -> Ticket:
        plans.append(plan)
        return submit(plan)

    core.executor.submit = keep  # type: ignore[method-assign]
    return plans


class Answers:
    """Collects outputs by (request id, index)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.scores: dict[tuple[int, int], list[object]] = {}
        self.logprobs: dict[tuple[int, int], list[object]] = {}

    def take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.finished, f"{key} got an output after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            self.scores.setdefault(key, []).extend(output.prompt_logprobs)
            self.logprobs.setdefault(key, []).extend(output.logprobs)
            if output.num_cached_tokens is not None:
                self.cached[key] = output.num_cached_tokens
            if output.finished is not None:
                self.finished[key] = output.finished


def run(
    core: EngineCore,
    *,
    max_steps: int = 5000,
    each_step: Callable[[EngineCore, Answers], None] | None = None,
    answers: Answers | None = None,
) -> Answers:
    """Steps until there is no work; a core that never gets there fails."""
    answers = answers or Answers()
    for _ in range(max_steps):
        if not core.has_work:
            return answers
        answers.take(core.step())
        if each_step is not None:
            each_step(core, answers)
    raise AssertionError(f"still busy after {max_steps} steps: {core.stats()}")


def expected(request: Request, *, index: int = 0, max_model_len: int = 200, eos: int = EOS) -> list[int]:
    """The answer the keyed-hash model gives, computed alone and without any cache, from the executor run on one big
    block."""
    params = request.params
    info = keyed_hash_info(vocab_size=VOCAB, max_model_len=max_model_len, num_blocks=1, block_size=max_model_len)
    tokens = list(request.prompt_token_ids)
    out: list[int] = []
    limit = min(params.max_tokens or max_model_len, max_model_len - len(tokens))
    while len(out) < limit:
        out.append(next_token(info, tokens + out, request, index))
        if out[-1] in params.stop_token_ids or (out[-1] == eos and not params.ignore_eos):
            break
    return out


def next_token(info: ExecutorInfo, context: list[int], request: Request, index: int, width: int | None = None) -> int:
    """``width``: out of so many instead of the whole vocabulary."""
    from headrace.engine.keyed_hash import _mix  # the oracle shares the hash, not the tables

    head = _mix(0, 0x5EED)
    for token in context:
        head = _mix(head, token)
    seed = (request.seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    salt = seed if request.params.n > 1 else 0
    return _mix(head ^ salt, 0x70C) % (width or info.vocab_size)


def assert_at_rest(core: EngineCore) -> None:
    """Nothing runs, nothing is held: every block is free or merely remembered, every row is back."""
    stats = core.stats()
    assert not core.has_work, f"stuck: {stats}"
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0), stats
    assert core.scheduler.cache.num_leaving == 0
    assert len(core.scheduler.roster.free_rows) == core.scheduler.limits.max_num_seqs


def _check_adapters(core: EngineCore, holders: dict[int, int]) -> None:
    """Each has as many users as there are sequences that have it or leave it; while it has some, it holds its blocks,
    once."""
    books = core.scheduler.cache.adapters
    if books is None:
        return
    having = [each.kv.resident for siblings in core.scheduler.roster.requests.values() for each in siblings]
    users = Counter(id(each) for each in [*having, *(held for _, held in books._leaving)] if each is not None)
    known = {
        id(each): each for each in [*having, *books._resident.values(), *(held for _, held in books._leaving)] if each
    }
    slots = [each.slot for each in books._resident.values()]
    assert len({*slots, *books._free_slots}) == len(slots) + len(books._free_slots), "a slot has one adapter"
    own = holders if books.is_shared else dict[int, int]()
    for key, each in known.items():
        assert each.users == users[key], f"{each} has {users[key]} users"
        for block in each.blocks:
            own[block] = own.get(block, 0) + (each.users > 0)
            assert each.users or books.pool.is_cached(block) or books.pool.references(block) == 0
    for block, owner in books._owners.items():
        assert books._resident[owner.name] is owner and block in owner.blocks
    assert all(books.pool.references(block) == count for block, count in own.items() if not books.is_shared)


def check_books(core: EngineCore) -> None:
    """The invariants that hold between any two turns of the loop."""
    scheduler, cache = core.scheduler, core.scheduler.cache
    holders: list[dict[int, int]] = [{} for _ in cache.pools]
    for siblings in scheduler.roster.requests.values():
        for sequence in siblings:
            for group, table in enumerate(sequence.kv.tables):
                for block in table:
                    if block is not None:
                        holders[group][block] = holders[group].get(block, 0) + 1
    for _, group, block in cache._leaving:
        holders[group][block] = holders[group].get(block, 0) + 1
    _check_adapters(core, holders[0])
    for group, pool in enumerate(cache.pools):
        assert pool.num_used + pool.num_cached + len(pool._free) == pool.num_blocks
        assert len(set(pool._free)) == len(pool._free)
        for block in range(pool.num_blocks):
            assert pool.references(block) == holders[group].get(block, 0), (
                f"group {group} block {block}: references are not its holders"
            )
            assert not (pool.is_cached(block) and pool.references(block))
    for node in cache.tree.nodes():
        assert not node.detached and node.parent is not None
        for group, blocks in enumerate(node.blocks):
            for block in blocks or ():
                assert cache._node_of[group][block] is node
                assert block not in cache.pools[group]._free, "a named block is free"
