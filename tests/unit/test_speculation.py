"""Speculation without a model: what may be asked, what is looked up, how many are drafted, and that answers stay what
they are."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from headrace.clock import VirtualClock
from headrace.config import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.executor import Ticket
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.errors import ConfigError
from headrace.planner.drafts import Drafting
from headrace.planner.executor import ModelledExecutor
from headrace.planner.step_time import StepPrice
from headrace.request import StepPlan, StepResult
from headrace.speculative.ahead import RUNS
from headrace.speculative.length import AGAIN, FIRST, LEARN, PROBE, REST, DraftCounts, Speculation
from headrace.speculative.lookup import AnswerStore, Lookup, continued
from headrace.speculative.settings import MOST_DRAFTS, read_settings
from headrace.speculative.verify import accepted
from tests.support.hash_engine import (
    FIXED,
    Answers,
    assert_at_rest,
    check_books,
    engine,
    expected,
    plans_of,
    request,
    run,
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "give an object"),
        ("{}", "method is 'None'"),
        ('{"method": "medusa"}', "heads are not supported"),
        ('{"method": "eagle3"}', "needs the model that drafts"),
        ('{"method": "magic"}', "give one of ngram, suffix, draft_model"),
        ('{"method": "draft_model"}', "needs the model that drafts"),
        ('{"method": "ngram", "model": "a"}', "asks no model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', f"from 1 to {MOST_DRAFTS}"),
        ('{"method": "ngram", "num_speculative_tokens": true}', f"from 1 to {MOST_DRAFTS}"),
        ('{"method": "ngram", "prompt_lookup_min": 7}', "prompt_lookup_min is 7 and prompt_lookup_max 5"),
        ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size is 2"),
        ('{"model": 7}', "give the draft model's folder"),
        ('{"method": "mtp", "model": "a"}', "asks no model"),
        ('{"model": "a", "draft_memory": 1}', "whole number of bytes, or a share"),
        ('{"model": "a", "draft_memory": "1GiB"}', "whole number of bytes, or a share"),
        ('{"model": "a", "draft_memory": NaN}', "whole number of bytes, or a share"),
        ('{"method": "ngram", "draft_memory": 4096}', "but method is 'ngram'"),
        ('{"method": "ngram", "tree": 2}', "method ngram grows no trees"),
        ('{"model": "a", "quantization": "int3"}', "quantization is 'int3'; give one of auto, none, fp8"),
        ('{"method": "ngram", "quantization": "fp8"}', "of a draft model, but method is 'ngram'"),
        ('{"model": "a", "acceptance": 1.5}', "acceptance is 1.5; give a number from 0 to 1"),
        (
            '{"model": "a", "acceptance": [0.8, 2]}',
            "acceptance is [0.8, 2]; give a number from 0 to 1, or one for each",
        ),
        ('{"model": "a", "acceptance": []}', "acceptance is []; give a number from 0 to 1"),
        ('{"model": "a", "tree": 0}', "tree is 0; give a whole number from 1 to 32"),
        ('{"model": "a", "tree": 2, "num_speculative_tokens": 63}', "from 1 to 62"),
        ('{"model": "a", "num_speculative_tokens": 17}', f"from 1 to {MOST_DRAFTS}"),
    ],
)
def test_what_cannot_be_meant_is_said(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config") as error:
        read_settings(given)
    assert said in error.value.message


def test_settings_are_json_or_a_mapping() -> None:
    assert read_settings(None) is None
    config = SchedulerConfig(speculative_config={"model": "some/draft", "num_speculative_tokens": "auto"})  # type: ignore[arg-type]
    settings = read_settings(config.speculative_config)
    assert settings is not None and settings.method == "draft_model" and settings.num_speculative_tokens is None
    known = read_settings('{"method": "ngram", "prompt_lookup_max": 1, "draft_tensor_parallel_size": 1}')
    assert known is not None and known.prompt_lookup_min == 1
    defaults = read_settings('{"method": "ngram", "acceptance": null, "draft_cost": null, "quantization": null}')
    assert defaults == read_settings('{"method": "ngram"}')
    tree = read_settings('{"model": "some/draft", "tree": 3, "num_speculative_tokens": "auto"}')
    assert tree is not None and tree.fixed == tree.most == MOST_DRAFTS


def test_samples_count_up_to_the_first_wrong_draft() -> None:
    assert accepted([], [4]) == ([4], range(1, 1))
    assert accepted([5, 6], [5, 6, 7]) == ([5, 6, 7], range(1, 3))
    assert accepted([5, 9], [5, 6, 7]) == ([5, 6], range(1, 2))
    assert accepted([9, 6], [5, 6, 7]) == ([5], range(1, 1))
    assert accepted([5, 6], [5, None, 7]) == ([5], range(1, 1))  # the next step finds it out again
    assert accepted([5], [None, 7]) == ([], range(1, 0))


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_the_longest_match_is_continued() -> None:
    assert continued(_ids(1, 2, 3, 9, 2, 3, 8, 1, 2, 3), 2, 2, 3) == [9, 2]  # three before two, though that is nearer
    assert continued(_ids(2, 3, 9, 2, 3, 8, 2, 3), 1, 2, 2) == [8]  # of two the last
    assert continued(_ids(5, 5, 5), 4, 1, 3) == [5]
    assert continued(_ids(1, 2, 3), 4, 1, 3) == []
    assert continued(_ids(1, 2, 1, 3, 2), 4, 2, 3) == []
    assert continued(_ids(7), 4, 1, 3) == []


def test_drafts_do_not_run_from_one_answer_into_the_next() -> None:
    store = AnswerStore(64, (3, 2))
    store.add([1, 2, 3, 4])
    store.add([5, 6, 7])
    assert store.find(_ids(9, 2, 3), 5, 2) == [4]
    assert store.find(_ids(6, 7), 5, 2) == []
    for base in range(0, 1000, 10):
        store.add(list(range(base, base + 10)))
    assert store.find(_ids(991, 992, 993), 2, 3) == [994, 995]
    assert store.find(_ids(1, 2, 3), 2, 3) == [], "the oldest have gone"


def test_nobody_is_drafted_from_anothers_answers() -> None:
    lookup = Lookup(2, 3, capacity=100)
    lookup.keep(_ids(1, 2, 3, 4, 5), ("a", ""))
    assert lookup.propose(_ids(8, 2, 3), 2, ("a", "")) == [4, 5]
    assert lookup.propose(_ids(8, 2, 3), 2, ("b", "")) == []
    assert lookup.propose(_ids(8, 2, 3), 2, ("a", "salt")) == []


def _observed(speculation: Speculation, drafts: int, accept: int, seconds: float, rows: int = 1) -> None:
    tokens = [(1,) * (1 + accept)] * rows
    plan = StepPlan(
        0,
        rows=array("i", range(rows)),
        starts=array("i", [9] * rows),
        counts=array("i", [1 + drafts] * rows),
        sample_work=array("i", range(rows)),
        sample_rows=array("i", range(rows)),
        drafts=array("i", [drafts] * rows if drafts else []),
    )
    speculation.observe(plan, StepResult(0, tokens, device_seconds=seconds, drafted=[drafts] * rows if drafts else ()))


def _run(
    speculation: Speculation, steps: int, cost: float, chance: float, rows: int = 1, first: float = 0.0
) -> tuple[float, int]:
    """(tokens a second, steps with drafts), where one draft costs ``cost`` steps and is accepted ``chance`` of the
    time; ``first``: what the first step with drafts after others costs more."""
    tokens, seconds, drafting, due, before = 0.0, 0.0, 0, 0.0, 0
    for _ in range(steps):
        length, accept = speculation.length(rows), 0
        while accept < length:  # a fair share, without chance
            due += chance
            if due < 1.0:
                break
            due, accept = due - 1.0, accept + 1
        took, before = 1.0 + cost * length + first * (length > before == 0), length
        _observed(speculation, length, accept, took, rows)
        tokens, seconds, drafting = tokens + 1 + accept, seconds + took, drafting + (length > 0)
    return tokens / seconds, drafting


def test_drafts_that_pay_go_on_and_long() -> None:
    speculation = Speculation(8)
    speed, drafting = _run(speculation, 600, cost=0.05, chance=0.8)
    assert speed > 2.0 and drafting > 500
    assert speculation.length(1) >= 4


@pytest.mark.parametrize("rows", [1, 64])
def test_drafts_that_cost_are_left_and_tried_seldom(rows: int) -> None:
    speculation = Speculation(8)
    _run(speculation, 200, cost=0.9, chance=0.3, rows=rows)
    speed, drafting = _run(speculation, 4000, cost=0.9, chance=0.3, rows=rows)
    assert speed > 0.98 and 0 < drafting < 4000 * PROBE / REST


def test_a_probe_that_lost_much_is_paid_back_before_the_next() -> None:
    """As where a draft model has to catch up with hundreds of tokens of each row."""
    speculation = Speculation(8)
    speed, drafting = _run(speculation, 6000, cost=0.9, chance=0.3, rows=64, first=40.0)
    assert speed > 0.97 and PROBE < drafting < 5 * PROBE


def test_drafts_come_back_when_they_pay() -> None:
    speculation = Speculation(4)
    _run(speculation, 500, cost=0.3, chance=0.0)
    assert not speculation.length(1)
    _run(speculation, 2000, cost=0.1, chance=0.9)
    assert speculation.length(1) >= 3


def test_a_given_length_is_kept_and_a_batch_may_be_too_large() -> None:
    speculation = Speculation(3, fixed=3, rows_below=4)
    assert [speculation.length(rows) for rows in (0, 1, 3, 4, 9)] == [0, 3, 3, 0, 0]
    learning = Speculation(8)
    assert [learning.length(1) for _ in range(3)] == [0, 0, 0]
    for _ in range(LEARN):
        _observed(learning, 0, 0, 1.0)
    assert learning.length(1) >= FIRST and AGAIN > LEARN


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_answers_are_what_they_are_without_drafts(depth: int) -> None:
    core = engine(depth=depth, max_drafts=4, num_blocks=40)
    plans = plans_of(core)
    requests = [request(n, range(n, n + 5 + n), max_tokens=20 + n, n=1 + n % 2, seed=n) for n in range(5)]
    requests.append(request(7, range(40), max_tokens=30, speculative=False, stop_token_ids=(3, 5, 9, 11, 200)))
    for each in requests:
        core.add(each)
    answers = run(core, each_step=lambda core, _: check_books(core))
    for each in requests:
        for index in range(each.params.n):
            assert answers.tokens[each.request_id, index] == expected(each, index=index)
    assert_at_rest(core)
    assert max(max(plan.drafts, default=0) for plan in plans) == 4
    assert core.scheduler.speculation is not None and sum(core.scheduler.speculation.counts.accepted) > 20


def test_who_does_not_want_drafts_gets_none() -> None:
    core = engine(max_drafts=4)
    plans = plans_of(core)
    core.add(request(1, range(5), max_tokens=12, speculative=False))
    run(core)
    assert not any(any(plan.drafts) for plan in plans)


def test_unused_blocks_come_back() -> None:
    """One row, one block of four tokens at a time: what sixteen drafts were given is not kept when two are asked."""
    core = engine(max_drafts=12, num_blocks=12, block_size=4)
    core.add(request(1, range(4), max_tokens=24))
    most = [0]

    def look(core: object, _: Answers) -> None:
        for siblings in core.scheduler.requests.values():  # type: ignore[attr-defined]
            for sequence in siblings:
                most.append(sequence.kv.capacity - sequence.num_tokens)

    run(core, each_step=look)
    assert max(most) <= 12 + 1 + 4
    assert_at_rest(core)


def _modelled(drafts: int, given: Drafting) -> tuple[float, DraftCounts | None]:
    """Tokens a second of one stream, and what was counted."""
    info, clock = keyed_hash_info(max_drafts=drafts, max_model_len=4000, num_blocks=300), VirtualClock()
    executor = ModelledExecutor(info, lambda plan: StepPrice(0.01, 0.0, 0.0, 0.0), clock, drafting=given)
    config = SchedulerConfig(max_num_seqs=8, speculative_config=FIXED % drafts if drafts else None)
    core = EngineCore(
        executor, scheduler=config, cache=CacheConfig(), eos_token_ids=frozenset(), namespace=b"", clock=clock, depth=1
    )
    core.add(request(1, range(5), max_tokens=3000))
    answers = run(core)
    assert answers.tokens[1, 0] == list(executor.answer_ids(1, 5, 3000))
    return 3000 / clock.now(), core.stats().drafts


def test_a_modelled_device_accepts_as_often_as_it_is_told() -> None:
    plain, chain, tree = (
        _modelled(drafts, Drafting(0.8, 0.1, tree=wide))[0] for drafts, wide in ((0, 1), (4, 1), (8, 2))
    )
    assert abs(chain / plain / (sum(0.8**n for n in range(5)) / 1.4) - 1.0) < 0.05
    assert abs(tree / chain - 1.0) < 0.02, "as deep, and twice as wide"
    measured, counts = _modelled(4, Drafting((1.0, 0.0), 0.1))
    assert counts is not None and counts.accepted == [counts.drafted[0]], "by place"
    assert abs(measured / plain / (2.0 / 1.4) - 1.0) < 0.02


def _staged(acceptance: float, slowed: float, *, runs: bool = True) -> tuple[float, EngineCore]:
    """Tokens a second of one stream over two stages, whose steps take so many times as long where two are in flight."""
    info = keyed_hash_info(max_drafts=2, max_model_len=4000, num_blocks=300)
    clock, price = VirtualClock(), StepPrice(0.01, 0.0, 0.0, 0.0, stages=(0.005, 0.005))
    under_way: list[Ticket] = []
    executor = ModelledExecutor(
        replace(info, stages=2, runs_ahead=runs), lambda plan: price, clock, drafting=Drafting(acceptance, 0.1),
        ratio=lambda *_: slowed if under_way else 1.0,
    )  # fmt: skip
    submit, collect = executor.submit, executor.collect
    executor.submit = lambda plan: (ticket := submit(plan), under_way.append(ticket))[0]  # type: ignore[method-assign]
    executor.collect = lambda ticket: (collect(ticket), under_way.remove(ticket))[0]  # type: ignore[method-assign,func-returns-value]
    config = SchedulerConfig(max_num_seqs=8, speculative_config=FIXED % 2)
    core = EngineCore(
        executor, scheduler=config, cache=CacheConfig(), eos_token_ids=frozenset(), namespace=b"", clock=clock, depth=1
    )
    core.add(request(1, range(5), max_tokens=3000))
    answers = Answers()
    for _ in range(400):
        answers.take(core.step())
    said = core.explain(1)
    answers = run(core, answers=answers)
    assert answers.tokens[1, 0] == list(executor.answer_ids(1, 5, 3000))
    assert said is not None and runs == ("while they are verified" in said.drafts)
    return 3000 / clock.now(), core


@pytest.mark.parametrize(("acceptance", "slowed", "pays"), [
    (0.95, 1.0, 1.2), (0.95, 1.4, 0.0), (0.3, 1.0, 0.0),
])  # fmt: skip
def test_runs_in_flight_over_stages_are_decided_by_time(acceptance: float, slowed: float, pays: float) -> None:
    """They go on where they pay, and are tried and left where stages in flight slow each other down."""
    without, _ = _staged(acceptance, slowed, runs=False)
    speed, core = _staged(acceptance, slowed)
    kinds = [entry.kind for entry in core.scheduler.log.after(0) if entry.kind.startswith("runs")]
    if pays:
        assert speed / without > pays and kinds[0] == "runs_begin"
    else:
        assert speed / without > 0.94 and kinds in ([], ["runs_begin", "runs_end"])
    runs = core.scheduler.speculation and core.scheduler.speculation.runs
    assert runs is not None and runs.on == bool(pays) == (runs.speeds[0] > runs.speeds[1])


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_drafting_ahead_spares_what_was_right_and_costs_little_where_it_is_not(acceptance: float) -> None:
    waiting, none = _modelled(4, Drafting(acceptance, 0.1))
    ahead, counts = _modelled(4, Drafting(acceptance, 0.1, ahead=True))
    assert none is not None and not none.ahead and counts is not None
    right = acceptance**5
    if acceptance >= 0.9:
        step = right * 1.0 + (1 - right) * 1.45  # the passes, and half a one that is under way
        assert abs(ahead / waiting / (1.4 / step) - 1.0) < 0.04
        assert abs(counts.ahead["used"] / sum(counts.drafted) - right) < 0.08
    else:
        assert ahead / waiting > 0.99
    if acceptance <= 0.5:
        assert counts.ahead["refuted"] < RUNS * 5 * counts.steps / 16, "few runs are begun for nothing"
    on_its_own, _ = _modelled(4, Drafting(acceptance, 0.9, lambda rows, length: 0.001 * rows))
    assert abs(on_its_own / waiting - 1.0) < 0.001, "a tenth of a step, by its own device"


def test_a_request_is_told_why_nothing_of_it_is_drafted() -> None:
    core = engine(max_drafts=4)
    for number, wanted in ((1, None), (2, False)):
        core.add(request(number, range(5), max_tokens=30, speculative=wanted))
    for _ in range(4):
        core.step()
    states = [core.explain(number) for number in (1, 2)]
    assert [state.drafts for state in states if state is not None] == [
        "4 tokens a step",
        "none: the request asks for none",
    ]
