"""Fair shares: the bound of the paper over random loads, the lift, what is charged, tenants that flood, and weights
that make no sense."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError
from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies.fair import _KEPT, Fair
from tests.support.hash_engine import engine, request

PROMPT, ANSWER = 24, 10  # the longest
INPUT, OUTPUT = 1.0, 2.0  # prices


def fair_engine(**options: object) -> EngineCore:
    return engine(scheduling_policy="fair", **options)  # type: ignore[arg-type]


def policy_of(core: EngineCore) -> Fair:
    assert isinstance(core.scheduler.policy, Fair)
    return core.scheduler.policy


def counters(core: EngineCore) -> dict[str, float]:
    policy = policy_of(core)
    return {tenant: policy.counter(tenant) for tenant in ("a", "b", "c")}


class Ledger:
    """Service by tenant, seen from outside: prompts from when their sequence was admitted, answers as they come."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.requests: dict[int, Request] = {}
        self.prompts: dict[int, int] = {}
        self.tokens: dict[int, int] = {}

    def add(self, tenant: str, prompt: int, answer: int, **fields: object) -> None:
        number = len(self.requests)
        ids = [(number * 37 + position * position) % 500 + 8 for position in range(prompt)]
        self.requests[number] = request(number, ids, max_tokens=answer, tenant=tenant, **fields)
        self.core.add(self.requests[number])

    def step(self) -> None:
        for output in self.core.step():
            number = output.request_id
            self.tokens[number] = self.tokens.get(number, 0) + len(output.token_ids)
            if output.num_cached_tokens is not None:
                self._begin(number, output.num_cached_tokens)
        for sequence in self.core.scheduler.roster:
            if sequence.first_scheduled is not None:
                self._begin(sequence.request_id, sequence.num_cached_tokens)

    def _begin(self, number: int, cached: int) -> None:
        self.prompts.setdefault(number, len(self.requests[number].prompt_token_ids) - cached)

    def service(self, tenant: str) -> float:
        own = [number for number, made in self.requests.items() if made.tenant == tenant]
        return sum(INPUT * self.prompts.get(number, 0) + OUTPUT * self.tokens.get(number, 0) for number in own)

    def waiting(self) -> set[str]:
        return {sequence.request.tenant for sequence in self.core.scheduler.roster.waiting}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.sampled_from([1, 2, 5]),
    depth=st.sampled_from([0, 1]),
    blocks=st.sampled_from([16, 64]),
    weights=st.sampled_from([(1.0, 1.0), (1.0, 3.0), (0.5, 2.0)]),
)
def test_backlogged_tenants_are_served_within_the_bound(
    seed: int, rows: int, depth: int, blocks: int, weights: tuple[float, float]
) -> None:
    """The theorem: while both have requests waiting, their services by weight differ by at most 2 U, whatever the third
    does."""
    rng, by_name = random.Random(seed), dict(zip("ab", weights, strict=True))
    core = fair_engine(
        depth=depth,
        max_num_seqs=rows,
        num_blocks=blocks,
        budget=16,
        tenant_weight=tuple(f"{name}={weight}" for name, weight in by_name.items()),
    )
    ledger, start = Ledger(core), {"a": 0.0, "b": 0.0}
    bound = 2 * (INPUT * PROMPT + OUTPUT * rows * ANSWER) / min(*weights, 1.0)
    sizes = {"a": (PROMPT, ANSWER), "b": (rng.randint(1, PROMPT), rng.randint(1, ANSWER)), "c": (3, 9)}
    for _ in range(80):
        for tenant in "aabbc" if rng.random() < 0.6 else "abc" if rng.random() < 0.5 else "":
            ledger.add(tenant, rng.randint(1, sizes[tenant][0]), rng.randint(1, sizes[tenant][1]))
        ledger.step()
        if not {"a", "b"} <= ledger.waiting():
            start = {tenant: ledger.service(tenant) for tenant in "ab"}
        got = {tenant: (ledger.service(tenant) - start[tenant]) / by_name[tenant] for tenant in "ab"}
        assert abs(got["a"] - got["b"]) <= bound, f"{got} differ by more than {bound}"


def test_a_flood_of_one_takes_half_from_nobody() -> None:
    """One tenant sends a hundred at once, another now and then: with fcfs the second waits behind all of them, with
    fair behind none."""

    def waits(policy: str) -> list[int]:
        core = engine(scheduling_policy=policy, max_num_seqs=2, num_blocks=64)
        ledger = Ledger(core)
        for _ in range(100):
            ledger.add("flood", 10, 4)
        steps = []
        for _ in range(5):
            number = len(ledger.requests)
            ledger.add("quiet", 10, 4)
            for step in range(1000):
                ledger.step()
                if ledger.tokens.get(number, 0) == 4:
                    steps.append(step)
                    break
        return steps

    assert max(waits("fair")) <= 12
    assert min(waits("fcfs")[:1]) > 150


def test_weights_divide_the_service() -> None:
    core = fair_engine(max_num_seqs=4, num_blocks=128, tenant_weight=("a=3",))
    ledger = Ledger(core)
    for _ in range(120):
        ledger.add("a", 8, 8)
        ledger.add("b", 8, 8)
    for _ in range(200):
        ledger.step()
    assert ledger.waiting() == {"a", "b"}
    assert ledger.service("a") / ledger.service("b") == pytest.approx(3.0, rel=0.1)


def test_idling_earns_no_credit() -> None:
    """Whoever comes late is lifted to those who wait: it shares from now on and catches nothing up."""
    core = fair_engine(max_num_seqs=2, num_blocks=64)
    ledger = Ledger(core)
    for _ in range(60):
        ledger.add("a", 8, 6)
    for _ in range(60):
        ledger.step()
    before = ledger.service("a")
    for _ in range(30):
        ledger.add("b", 8, 6)
    for _ in range(60):
        ledger.step()
    assert ledger.service("b") == pytest.approx(ledger.service("a") - before, abs=2 * (8 + 2 * 2 * 6))


def test_when_nobody_waits_the_one_who_comes_is_lifted_to_the_last_who_did() -> None:
    core = fair_engine(max_num_seqs=2)
    ledger = Ledger(core)
    ledger.add("a", 8, 6)
    while core.has_work:
        ledger.step()
    assert counters(core) == {"a": 8 + 2 * 6, "b": 0.0, "c": 0.0}
    ledger.add("b", 4, 1)
    while core.has_work:
        ledger.step()
    assert counters(core)["b"] == 20 + 4 + 2


def test_a_long_answer_counts_while_it_is_written() -> None:
    core = fair_engine(max_num_seqs=2, num_blocks=64)
    ledger = Ledger(core)
    ledger.add("a", 4, 100)
    for _ in range(40):
        ledger.add("a", 4, 5)
        ledger.add("b", 4, 5)
    for _ in range(80):
        ledger.step()
    assert ledger.tokens[0] == 80
    assert abs(ledger.service("a") - ledger.service("b")) <= 2 * (4 + 2 * 5)


def test_prompts_found_in_the_cache_are_free() -> None:
    core = fair_engine()
    for number, tenant in enumerate("ab"):
        core.add(request(number, range(20, 36), max_tokens=3, tenant=tenant))
        while core.has_work:
            core.step()
    assert counters(core) == {
        "a": 16 + 2 * 3,
        "b": (16 + 2 * 3) + (16 - 12) + 2 * 3,
        "c": 0.0,
    }  # lifted, then three blocks of four are found


@pytest.mark.parametrize("depth", [0, 2])
def test_what_is_computed_again_is_not_charged_again(depth: int) -> None:
    core = fair_engine(depth=depth, num_blocks=10, block_size=4)
    for number, tenant in enumerate("abc"):
        core.add(request(number, range(number * 20 + 20, number * 20 + 32), max_tokens=12, tenant=tenant))
    while core.has_work:
        core.step()
    assert core.stats().counters.preemptions > 0
    assert sum(counters(core).values()) == 3 * (12 + 2 * 12)


def test_answers_of_one_prompt_are_charged_each_and_the_prompt_once() -> None:
    core = fair_engine()
    core.add(request(0, range(10, 20), max_tokens=5, n=3, tenant="a"))
    while core.has_work:
        core.step()
    assert policy_of(core).counter("a") == 10 + 2 * 15


def test_tenants_who_left_are_forgotten_when_it_makes_no_difference() -> None:
    core = fair_engine()
    for number in range(400):
        core.add(request(number, [5 + number % 400, 9], max_tokens=1, tenant=f"user{number}"))
        while core.has_work:
            core.step()
    assert len(policy_of(core)._counters) < 100
    assert not policy_of(core)._accounts
    assert not policy_of(core)._waiting


def test_a_waiting_request_that_leaves_is_nobodys() -> None:
    core = fair_engine(max_num_seqs=1)
    for number in range(4):
        core.add(request(number, range(10, 20), max_tokens=5, tenant="ab"[number % 2]))
    core.step()
    core.abort(1)
    core.abort(3)
    while core.has_work:
        core.step()
    assert policy_of(core).counter("b") == 0.0
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in policy_of(core)._accounts)


@pytest.mark.parametrize("entry", ["a", "=2", "a=", "a=0", "a=-1", "a=nan", "a=inf", "a=1e9", "a=1e-9", "a=two"])
def test_weights_that_make_no_sense_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="tenant_weight has"):
        SchedulerConfig(tenant_weight=(entry,))


@pytest.mark.parametrize("prices", [(0.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0), (-1.0, 2.0)])
def test_prices_that_make_no_sense_are_refused(prices: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="fair_input_price"):
        SchedulerConfig(fair_input_price=prices[0], fair_output_price=prices[1])


def test_a_tenant_has_one_weight() -> None:
    with pytest.raises(ConfigError, match="twice"):
        SchedulerConfig(tenant_weight=("a=1", "a=2"))


def test_of_many_who_came_once_only_those_above_the_floor_are_remembered() -> None:
    """A tenant with a long answer behind it stays above the others however many come and go; its next request waits for
    theirs."""
    ledger = Ledger(fair_engine(max_num_seqs=1))
    policy = policy_of(ledger.core)
    ledger.add("hog", PROMPT, 200)
    ledger.step()
    ledger.add("b", 1, 1)  # it waits meanwhile, and so keeps its place
    while "hog" in policy._live:
        ledger.step()
    before = policy.counter("hog")
    for number in range(100):
        ledger.add("b", 1, 1)
        ledger.add(f"once{number}", 1, 1)
        for _ in range(3):
            ledger.step()
    assert policy.counter("b") < policy.counter("hog") == before > 100 * OUTPUT
    assert len(policy._counters) <= _KEPT + 2 * len(policy._live) + 1


def test_who_is_here_and_who_was_last_are_remembered_below_the_floor_too() -> None:
    """Forgotten, they would begin again at nothing and go before all others."""
    policy = policy_of(fair_engine())
    policy._live, policy._waiting, policy._last = {"waits": 1, "runs": 1}, {"waits": 1}, "last"
    policy._counters = {"waits": 5.0, "runs": 4.0, "last": 3.0, "gone": 5.0, "above": 9.0}
    policy._forget()
    assert policy._counters == {"waits": 5.0, "runs": 4.0, "last": 3.0, "above": 9.0}
