"""The whole control plane as a hypothesis state machine, at depth 0, 1 and 2, over the checking keyed-hash executor.

After every event: blocks and references add up (``check_books``). At the end: everybody ended exactly once, nothing is held,
and every answer equals the one computed alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.support.grammars import CONSTRAINTS, create_masks, expected_under_grammar
from tests.support.hash_engine import Answers, assert_at_rest, check_books, engine, expected, request

from headrace.config import CacheConfig
from headrace.engine.core import EngineCore
from headrace.request import FinishReason, Request, StepPlan, StructuredOutputs
from headrace.scheduler.policies import POLICIES

PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
LENGTH = 60


class ControlPlane(RuleBasedStateMachine):
    depth = 0

    @initialize(
        num_blocks=st.sampled_from([16, 24, 64]),
        block_size=st.sampled_from([2, 4]),
        rows=st.sampled_from([2, 4, 8]),
        budget=st.sampled_from([3, 8, 64]),
        window=st.sampled_from([None, None, 9]),
        policy=st.sampled_from(sorted(POLICIES)),
        chunked=st.booleans(),
        padded=st.booleans(),
        continuous=st.booleans(),
        switches=st.fixed_dictionaries({name: st.booleans() for name in ("enable_prefix_caching", "paged_allocation", "kv_caching")}),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        rows: int,
        budget: int,
        window: int | None,
        policy: str,
        chunked: bool,
        padded: bool,
        continuous: bool,
        switches: dict[str, bool],
    ) -> None:
        self.failing = False
        self.core: EngineCore = engine(
            depth=self.depth,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=rows,
            budget=budget,
            max_model_len=LENGTH,
            window=window,
            padded=padded,
            scheduling_policy=policy,
            chunked_prefill=chunked,
            continuous_batching=continuous,
            max_logits_rows=4,
            masks=create_masks(),
            cache=CacheConfig(**switches),
        )
        self.core.executor._fault = self._fault  # type: ignore[attr-defined]
        self.rows = rows
        self.limit = self.core.scheduler.max_sequence_tokens
        self.requests: dict[int, Request] = {}
        self.answers = Answers()
        self.gone: set[int] = set()  # aborted
        self.cut: dict[tuple[int, int], int] = {}  # ended by us, after so many tokens
        self.faults = 0

    def _fault(self, plan: StepPlan) -> bool:
        failing, self.failing = self.failing, False
        self.faults += failing
        return failing

    @rule(
        shared=st.integers(0, len(PREFIX)),
        own=st.lists(st.integers(8, 400), min_size=1, max_size=10),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 3]),
        priority=st.integers(0, 2),
        seed=st.integers(0, 2**64 - 1),
        ignore_eos=st.booleans(),
        scored=st.sampled_from([None, None, 1]),
        salt=st.sampled_from(["", "other"]),
        stops=st.lists(st.integers(0, 511), max_size=12),
        min_tokens=st.sampled_from([0, 0, 6]),
        wanted=st.sampled_from([None, None, *CONSTRAINTS]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        seed: int,
        ignore_eos: bool,
        scored: int | None,
        salt: str,
        stops: list[int],
        min_tokens: int,
        wanted: StructuredOutputs | None,
    ) -> None:
        request_id = len(self.requests)
        prompt = (PREFIX[:shared] + own)[: self.limit - 1]
        made = request(
            request_id,
            prompt,
            max_tokens=max_tokens,
            n=min(n, self.rows),
            priority=priority,
            tenant=str(priority),
            seed=seed,
            ignore_eos=ignore_eos,
            prompt_logprobs=scored,
            cache_salt=salt,
            stop_token_ids=stops,
            min_tokens=0 if wanted is None else min(min_tokens, max_tokens),  # elsewhere it is the sampler that holds back ends
            structured_outputs=wanted,
        )
        self.requests[request_id] = made
        self.core.add(made)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._take_step()

    def _take_step(self) -> None:
        outputs = self.core.step()
        self.answers.take(o for o in outputs if o.request_id not in self.gone and (o.request_id, o.index) not in self.cut)

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        if self.requests:
            request_id = data.draw(st.sampled_from(sorted(self.requests)))
            self.core.abort(request_id)
            self.gone.add(request_id)

    @rule(data=st.data())
    def stop_string(self, data: Any) -> None:
        live = [key for key, tokens in self.answers.tokens.items() if tokens and key not in self.answers.finished]
        if live:
            key = data.draw(st.sampled_from(sorted(live)))
            self.cut[key] = data.draw(st.integers(1, len(self.answers.tokens[key])))
            self.core.finish(*key, self.cut[key])

    @rule()
    def fail_next(self) -> None:
        self.failing = True

    @rule()
    def lose_rows(self) -> None:
        if not self.core.scheduler.in_flight:
            self.core.scheduler.rebuild_rows()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            check_books(self.core)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.failing = False
        for _ in range(3000):
            if not self.core.has_work:
                break
            self._take_step()
            check_books(self.core)
        assert_at_rest(self.core)
        for made in self.requests.values():
            if made.request_id not in self.gone:
                self._check_answer(made)

    def _check_answer(self, made: Request) -> None:
        for index in range(made.params.n):
            key = (made.request_id, index)
            oracle = expected if made.params.structured_outputs is None else expected_under_grammar
            want, got = oracle(made, index=index, max_model_len=self.limit), self.answers.tokens.get(key, [])
            ended = self.answers.finished.get(key)
            if key in self.cut:
                assert got[: self.cut[key]] == want[: self.cut[key]]
            elif ended is None or ended.reason is FinishReason.ERROR:
                assert ended is not None, f"{key} never ended"
                assert self.faults and got == want[: len(got)]
            else:
                assert got == want
                scored = made.params.prompt_logprobs is not None and index == 0
                assert len(self.answers.scores[key]) == (len(made.prompt_token_ids) - 1 if scored else 0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_control_plane(depth: int) -> None:
    machine = type("ControlPlaneAtDepth", (ControlPlane,), {"depth": depth})
    quick = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    run_state_machine_as_test(machine, settings=quick)


def test_a_planted_reference_leak_is_found() -> None:
    """The negative control: a pool that forgets one release turns ``check_books`` red."""
    core = engine()
    core.add(request(0, range(10, 30)))
    for _ in range(4):
        core.step()
    core.scheduler.cache.pools[0].acquire(next(b for b in core.scheduler.roster.running[0].kv.tables[0] if b is not None))
    with pytest.raises(AssertionError, match="references"):
        check_books(core)


def test_a_planted_wrong_table_is_found() -> None:
    """The negative control of the checking executor: a block table that points elsewhere is noticed at once."""
    core = engine()
    core.add(request(0, range(10, 30)))
    core.step()
    row = core.executor._rows[core.scheduler.roster.running[0].row]  # type: ignore[attr-defined]
    row.tables[0][0] = row.tables[0][1]
    with pytest.raises(AssertionError, match="does not hold"):
        core.step()


def test_results_are_frozen() -> None:
    core = engine()
    core.add(request(0, [1, 2, 3]))
    plan = core.scheduler.schedule(0.0, core._events)
    assert plan is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step_id = 5  # type: ignore[misc]
