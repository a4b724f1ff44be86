"""What the host does before a batch's first step: little for each id, nothing for requests that step does not need, no
collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from headrace.engine.executor import Ticket
from headrace.engine.keyed_hash import KeyedHashExecutor
from headrace.engine.llm import LLM
from headrace.errors import InvalidRequest
from headrace.processes import garbage
from headrace.processes.garbage import no_collections
from headrace.request import SamplingParams, StepPlan

FOUR = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)


def create(**keywords: Any) -> LLM:
    return LLM(
        executor="keyed-hash",
        **{"max_model_len": 4096, "num_blocks": 4096, "overlap": 1, "max_num_batched_tokens": 64, **keywords},
    )


@pytest.fixture
def llm() -> Iterator[LLM]:
    with create() as made:
        yield made


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [(number * 31 + place * place) % 8000 for place in range(length)]}
        for number in range(count)
    ]


class AtFirstStep:
    """What ``look`` finds when the first step of a call is submitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
        self.found: list[Any] = []
        submit = KeyedHashExecutor.submit

        def stamped(executor: KeyedHashExecutor, plan: StepPlan) -> Ticket:
            if not self.found:
                self.found.append(look())
            return submit(executor, plan)

        monkeypatch.setattr(KeyedHashExecutor, "submit", stamped)


def test_calls_before_the_first_step_do_not_grow_with_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, so that a slow machine is no failure: a loop over ids in Python shows as calls, of generators too."""

    def calls(length: int) -> int:
        asked, count = prompts(8, length), 0

        def note(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        with monkeypatch.context() as patch:
            AtFirstStep(patch, lambda: sys.setprofile(None))
            sys.setprofile(note)
            try:
                llm.generate(asked, FOUR, use_tqdm=False)
            finally:
                sys.setprofile(None)
        return count

    calls(64)  # what is made once
    short, long = calls(64), calls(2048)
    assert 0 < long < short + 50 * 8, "some calls for each block of the first prompts, not for each id"


def test_the_first_step_begins_when_its_tokens_are_there(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of all, but no less than fills it."""
    for count, begun in ((5, 2), (8, 2), (9, 3), (40, 10)):
        with monkeypatch.context() as patch:
            seen = AtFirstStep(patch, lambda: llm._outputs.num_live)
            outputs = llm.generate(prompts(count, 32), FOUR, use_tqdm=False)
        assert seen.found == [begun]
    with create(overlap=0) as whole:
        expected = whole.generate(prompts(40, 32), FOUR, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]
    assert [each.prompt_token_ids for each in outputs] == [each["prompt_token_ids"] for each in prompts(40, 32)]


@pytest.mark.parametrize(
    "keywords",
    [
        {"overlap": 0},
        {"scheduling_policy": "priority"},
        {"technique": {"continuous_batching": False}},
        {"max_num_batched_tokens": 4096},
    ],
)
def test_where_the_first_step_depends_on_all_it_waits_for_all(
    keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with create(**keywords) as llm:
        seen = AtFirstStep(monkeypatch, lambda: llm._outputs.num_live)
        llm.generate(prompts(40, 32), FOUR, use_tqdm=False)
    assert seen.found == [40]


def test_rows_are_enough_for_a_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with create(max_num_seqs=4) as llm:
        seen = AtFirstStep(monkeypatch, lambda: llm._outputs.num_live)
        llm.generate(prompts(40, 2), SamplingParams(max_tokens=4, n=2, ignore_eos=True), use_tqdm=False)
    assert seen.found == [2]


def test_collections_of_their_own_accord_wait_for_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = AtFirstStep(monkeypatch, gc.isenabled)
    llm.generate(prompts(40, 32), FOUR, use_tqdm=False)
    assert seen.found == [False] and gc.isenabled()
    with pytest.raises(InvalidRequest):
        llm.generate([*prompts(3, 32), {"prompt_token_ids": [8192]}], FOUR, use_tqdm=False)
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled(), "who has switched them off keeps them off"
    finally:
        gc.enable()


@pytest.mark.parametrize("ours", [True, False])
def test_what_a_call_leaves_behind_begins_no_collection_of_everything(ours: bool) -> None:
    """A collection of everything is due, and much has been made: the first few objects made afterwards must not pay for
    it. (Without us they do.)"""
    if not ours and sys.version_info >= (3, 14):
        pytest.skip("collections of everything come piece by piece there")
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and gc.isenabled():
            generations.append(info["generation"])

    threshold = gc.get_threshold()
    gc.collect()
    kept: list[list[int]] = []
    try:
        gc.disable()
        gc.set_threshold(700, 1, 1)
        for _ in range(3):  # survivors, more than a quarter of all that has survived a full collection
            kept += [[] for _ in range(len(gc.get_objects()) // 4)]
            gc.collect(1)
        gc.enable()
        gc.callbacks.append(note)
        if ours:
            with no_collections():
                kept += [[] for _ in range(2000)]
        else:
            gc.disable()
            kept += [[] for _ in range(2000)]
            gc.enable()
        kept += [[] for _ in range(20)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*threshold)
        gc.enable()
    assert generations == ([] if ours else [2])


@pytest.mark.parametrize(("lately", "everything", "expected"), [(256, 8192, []), (4, 16, [1, 1, 1, 2, 1, 1, 1, 2])])
def test_a_long_call_is_looked_through_now_and_then(
    lately: int, everything: int, expected: list[int], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "_LATELY", lately)
    monkeypatch.setattr(garbage, "_EVERYTHING", everything)
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        llm.generate(prompts(2, 8), SamplingParams(max_tokens=34, ignore_eos=True), use_tqdm=False)
    finally:
        gc.callbacks.remove(note)
    assert generations[: len(expected)] == expected and len(generations) <= len(expected) + 1


def test_the_last_of_many_is_refused_before_anything_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = AtFirstStep(monkeypatch, lambda: 1)
    for bad in (True, 1.0, -1, 8192, 2**31, "7"):
        with pytest.raises(InvalidRequest, match="prompt 40: prompt"):
            llm.generate([*prompts(40, 32), {"prompt_token_ids": [1, bad, 2]}], FOUR, use_tqdm=False)
    assert not seen.found and not llm._sinks


def test_an_answer_shows_the_ids_that_were_given(llm: LLM) -> None:
    """The caller's list is looked at when it is given and not afterwards."""
    ids, shown = list(range(50)), SamplingParams(max_tokens=2)
    (cut,) = llm.generate([ids], shown, truncate_prompt_tokens=7, use_tqdm=False)
    assert cut.prompt_token_ids == list(range(43, 50)) and type(cut.prompt_token_ids) is list
    (tupled,) = llm.generate([{"prompt_token_ids": tuple(ids)}], shown, use_tqdm=False)
    assert tupled.prompt_token_ids == ids and type(tupled.prompt_token_ids) is list
    waiting = llm.submit(ids, shown)
    ids[0] = 99
    while not waiting.finished:
        llm.turn()
    assert waiting.output().prompt_token_ids == list(range(50))


def test_the_longest_answers_begin_first_and_results_come_as_asked() -> None:
    """Of one call: what is submitted by itself goes in turn. ``n`` answers of one request begin together."""
    lengths = [3, 9, 3, 30, 9, 17]
    params = [
        SamplingParams(max_tokens=length, n=1 + (length == 17), seed=length, ignore_eos=True) for length in lengths
    ]
    answers = []
    for on in (True, False):
        with create(max_num_seqs=2, technique={"longest_first": on}) as llm:
            outputs = llm.generate(prompts(6, 40), params, use_tqdm=False)
            begun = [output.metrics.first_scheduled or 0.0 for output in outputs if output.metrics is not None]
            assert sorted(range(6), key=begun.__getitem__) == ([3, 5, 1, 4, 0, 2] if on else [0, 1, 2, 3, 4, 5])
            waiting = [llm.submit(prompt, each) for prompt, each in zip(prompts(6, 40), params, strict=True)]
            while not all(each.finished for each in waiting):
                llm.turn()
            alone = [each.output().metrics for each in waiting]
            assert [times.first_scheduled for times in alone if times] == sorted(
                times.first_scheduled or 0.0 for times in alone if times
            )
        answers.append([[each.token_ids for each in output.outputs] for output in outputs])
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert answers[0] == answers[1]


def test_one_answer_that_may_end_early_leaves_the_order_as_given() -> None:
    params = [SamplingParams(max_tokens=length, ignore_eos=length != 9) for length in (3, 9, 30)]
    with create(max_num_seqs=1) as llm:
        outputs = llm.generate(prompts(3, 40), params, use_tqdm=False)
    begun = [output.metrics.first_scheduled or 0.0 for output in outputs if output.metrics is not None]
    assert begun == sorted(begun)
