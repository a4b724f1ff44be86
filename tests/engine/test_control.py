"""What ends an answer or bans tokens, with a model: loops, bad words, allowed tokens, in streams and for every
answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace import LLM, SamplingParams
from headrace.request import RepetitionDetection

LOOPS = RepetitionDetection(min_count=3, min_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=256) as made:
        yield made


def test_a_loop_ends_with_its_reason_wanted_whole_or_streamed(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=(300,), max_tokens=60, n=2, logprobs=0, repetition_detection=LOOPS)
    answers = llm.generate("Once", params, use_tqdm=False)[0].outputs
    assert [
        (each.finish_reason, each.stop_reason, len(each.token_ids), len(each.logprobs or ())) for each in answers
    ] == [("stop", "repetition", 24, 24)] * 2
    single = SamplingParams(allowed_token_ids=(300,), max_tokens=60, repetition_detection=LOOPS)
    (whole,) = llm.generate("Once", single, use_tqdm=False)[0].outputs
    *deltas, last = llm.stream("Once", single)
    assert "".join(delta.text for delta in (*deltas, last)) == whole.text == answers[0].text
    assert (last.finish_reason, last.stop_reason, last.last) == ("stop", "repetition", True)


def test_a_stop_string_that_comes_first_wins(llm: LLM) -> None:
    token = llm.get_tokenizer().token_text(300)  # type: ignore[union-attr]
    params = SamplingParams(allowed_token_ids=(300,), max_tokens=60, stop=(token * 5,), repetition_detection=LOOPS)
    (answer,) = llm.generate("Once", params, use_tqdm=False)[0].outputs
    assert answer.stop_reason == token * 5 and len(answer.token_ids) == 5


def test_ordinary_answers_are_left_alone(llm: LLM) -> None:
    prompts = ["Once upon a time", "def f(x):\n    return", "| a | b |\n|---|---|\n| 1 | 2 |\n", "1, 2, 3, 4,"]
    params = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, repetition_detection=found)
        for found in (None, RepetitionDetection())
    ]
    without, detected = (llm.generate(prompts, each, use_tqdm=False) for each in params)
    assert [answer.outputs[0].token_ids for answer in without] == [answer.outputs[0].token_ids for answer in detected]


def test_banned_words_and_allowed_tokens_hold_in_streams_and_for_every_answer(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    word = max(llm.generate("Once upon a time", greedy, use_tqdm=False)[0].outputs[0].text.split(), key=len)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, bad_words=(word,), n=2)
    answers = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs
    assert all(word not in answer.text.split() for answer in answers)
    few = SamplingParams(
        temperature=1.0,
        max_tokens=20,
        ignore_eos=True,
        allowed_token_ids=(301, 302, 303),
        bad_words=("unlikely",),
        min_tokens=5,
    )
    assert {token for delta in llm.stream("Once", few) for token in delta.token_ids} <= {301, 302, 303}
