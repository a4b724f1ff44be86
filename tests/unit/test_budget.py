"""What a request may cost: prices, the budget they count against, whole answers in pieces, and long texts of which only
the end is wanted."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest

from headrace.config import ModelConfig
from headrace.engine.client import Stream
from headrace.engine.info import EngineInfo
from headrace.engine.inputs import InputProcessor, attributes_of
from headrace.engine.output import RequestDelta
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import InvalidRequest, Unavailable
from headrace.models.source import find_model
from headrace.request import NO_EXPECTATIONS, Request, SamplingParams, TokenLogprobs
from headrace.server.dialects.chat import ChatAnswer
from headrace.server.dialects.completions import CompletionAnswer
from headrace.server.generate import ChatContext
from headrace.server.limits import Budget, price, shortened
from headrace.server.wire import AnswerOptions, PromptState, encode_list, encode_object, joined_lists

PLAIN = AnswerOptions("m", "f", logprobs=False, prompt_logprobs=False, token_ids=False, include_usage=False)
SCORED = replace(PLAIN, logprobs=True, prompt_logprobs=True, token_ids=True)


def asked(tokens: int = 10, prompts: int = 1, **fields: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 16, **fields})
    return [
        Request(request_id=number, prompt_token_ids=array("i", range(tokens)), params=params)
        for number in range(prompts)
    ]


@pytest.mark.parametrize(
    ("requests", "shape", "echo", "field", "words"),
    [
        (asked(4000, n=128, prompt_logprobs=20), SCORED, [0], "n", "n 128 × "),
        (asked(4000, 16, n=128), PLAIN, [64_000] * 16, "n", "n 128 × 1024000 bytes of echo"),
        (asked(100_000, prompt_logprobs=20), SCORED, [0], "prompt_logprobs", "bytes of prompt_logprobs"),
        (asked(max_tokens=100_000, logprobs=20), SCORED, [0], "logprobs", "max_tokens 100000 with logprobs 20"),
        (asked(prompts=100, max_tokens=100_000), PLAIN, [0] * 100, "max_tokens", "max_tokens 100000 × 100 prompts"),
    ],
)
def test_what_multiplies_is_priced_before_it_is_built_and_named(
    requests: list[Request], shape: AnswerOptions, echo: list[int], field: str, words: str
) -> None:
    budget = Budget(64 << 20, 256 << 20, 1024)
    with pytest.raises(InvalidRequest, match="--max-answer-bytes") as caught:
        budget.check(price(requests, shape, stream=False, echo=echo))
    assert caught.value.param == field and words in caught.value.message and "MB" in caught.value.message


def test_what_is_usual_is_far_below() -> None:
    budget = Budget(64 << 20, 256 << 20, 1024)
    many = asked(n=128, logprobs=20, max_tokens=100)
    for requests, shape in ((asked(100_000, max_tokens=30_000), PLAIN), (many, SCORED), (asked(4000, 128), PLAIN)):
        budget.check(price(requests, shape, stream=False, echo=[0] * len(requests)))
    streamed = price(asked(n=128, logprobs=20, max_tokens=100_000), SCORED, stream=True, echo=[0])
    assert streamed.tokens == 0  # they leave as they come


def test_who_named_no_number_of_tokens_gets_as_many_as_fit() -> None:
    requests = asked(max_tokens=100_000, logprobs=20)
    shorter = shortened(requests, price(requests, SCORED, stream=False, echo=[0]), 64 << 20)
    assert 30_000 < (shorter[0].params.max_tokens or 0) < 45_000
    Budget(64 << 20, 256 << 20, 1024).check(price(shorter, SCORED, stream=False, echo=[0]))
    assert shortened(shorter, price(shorter, SCORED, stream=False, echo=[0]), 64 << 20) == shorter


def test_large_answers_wait_for_room_and_small_ones_never_do() -> None:
    budget = Budget(60, 100, 10)
    first = budget.reserve(60)
    with pytest.raises(Unavailable, match="try again in 2 s") as caught:
        budget.reserve(41)
    assert caught.value.retry_after == 2 and budget.held == 60
    small = [budget.reserve(10) for _ in range(5)]  # free: a hundredth for each place in the queue
    growing = small[0]
    with pytest.raises(Unavailable):
        growing.grow(11)
    first.set(5)
    growing.grow(40)
    for each in (first, *small):
        each.release()
    assert budget.held == 0


def test_ids_that_a_request_names_are_held_without_an_object_each() -> None:
    params = SamplingParams(allowed_token_ids=[5, 3, 5, 9])  # type: ignore[arg-type]
    assert params.allowed_token_ids is not None and list(params.allowed_token_ids) == [3, 5, 9]
    assert params.allowed_token_ids.packed == array("i", [3, 5, 9]).tobytes() and len(params.allowed_token_ids) == 3
    assert params == SamplingParams(allowed_token_ids=array("i", [9, 5, 3])) == replace(params, n=1)  # type: ignore[arg-type]
    params.check_token_ids(10)
    with pytest.raises(InvalidRequest, match="token id 9"):
        params.check_token_ids(9)
    for wrong in ([-1], [2**31], [1.5], [True], ["1"], "12", 5, [None]):
        with pytest.raises(InvalidRequest, match="allowed_token_ids"):
            SamplingParams(allowed_token_ids=wrong)  # type: ignore[arg-type]


def test_lists_and_objects_in_pieces_are_the_same_json() -> None:
    for items in ([], [1], list(range(1000)), [{"a": [1, None]}] * 300):
        assert json.loads(b"".join(encode_list(items))) == items
        for cut in (0, len(items) // 2, len(items)):
            parts = [b"".join(encode_list(part)) for part in (items[:cut], items[cut:])]
            assert json.loads(b"".join(joined_lists(*parts))) == items
    value = {"a": 1, "b": {"c": None}}
    assert json.loads(b"".join(encode_object({**value, "d": encode_list([1, 2])}))) == {**value, "d": [1, 2]}
    assert b"".join(encode_object({})) == b"{}"


def entries(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs((token + 1, token + 2), (-1.0, float("-inf")), 1) for token in range(count)]


def test_scores_of_a_prompt_are_written_once_for_all_choices() -> None:
    prompt = PromptState(array("i", range(600)), "é" * 3, logprobs=entries(599))
    answer = CompletionAnswer(SCORED, [prompt], 3, None, echo=True, discard=False)
    for choice in answer.choices:
        choice.texts, choice.token_ids, choice.logprobs, choice.num_tokens = ["x"], [7], entries(1), 1
    alone = answer.format.completion([None, *entries(599), *entries(1)], 0, [0])
    pieces = list(answer.pieces())
    large = [piece for piece in pieces if len(piece) > 10_000]
    assert len({id(piece) for piece in large}) < len(large)  # the same bytes again
    for shown in json.loads(b"".join(pieces))["choices"]:
        assert shown["text"] == "éééx" and shown["token_ids"] == [7] and shown["prompt_token_ids"] == list(range(600))
        assert (
            shown["logprobs"] == alone and len(shown["prompt_logprobs"]) == 600 and shown["prompt_logprobs"][0] is None
        )
    assert all(not choice.logprobs for choice in answer.choices)


def test_no_piece_is_large() -> None:
    request: Any = None  # nothing of it is shown
    answer = ChatAnswer(ChatContext(request, SCORED, PromptState(array("i", [1])), None, [None, None], ""))
    for choice in answer.choices:
        choice.logprobs, choice.token_ids = entries(5000), list(range(5000))
    pieces = list(answer.pieces())
    assert max(map(len, pieces)) < 100_000 and [
        len(each["logprobs"]["content"]) for each in json.loads(b"".join(pieces))["choices"]
    ] == [5000, 5000]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(find_model(ModelConfig()))
    assert found is not None
    return found


def inputs_of(tokenizer: Tokenizer, length: int = 128) -> InputProcessor:
    info = EngineInfo(
        model="m", served_names=("m",), max_model_len=length, max_sequence_tokens=length, vocab_size=tokenizer.vocab_size, max_num_seqs=4,
        eos_token_ids=(), device="none", dtype="none",
    )  # fmt: skip
    return InputProcessor(info, tokenizer, 0)


def test_what_goes_on_from_a_request_is_placed_as_that_was() -> None:
    where: Any = {
        "priority": 3,
        "cache_salt": "salt",
        "adapter": "a",
        "explain": True,
        "tenant": "ann",
        "expects": NO_EXPECTATIONS,
    }
    assert attributes_of(replace(asked()[0], **where)) == where


@pytest.mark.parametrize(
    "text", ["a cat sat on the mat. " * 8000, "größer 日本語 🙂 " * 9000, "if x:\n" + "        y = 1\n" * 9000]
)
def test_the_end_of_a_long_text_is_tokenised_as_in_the_whole(tokenizer: Tokenizer, text: str) -> None:
    inputs = inputs_of(tokenizer)
    whole = tokenizer.encode(text)
    for keep in (1, 10, 127, -1):
        assert (
            inputs.encode(text, truncate=keep)[-(127 if keep == -1 else keep) :]
            == whole[-(127 if keep == -1 else keep) :]
        )


class Counting:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return self.tokenizer.encode(text, add_special_tokens)


def test_little_more_than_what_is_wanted_is_tokenised(tokenizer: Tokenizer) -> None:
    inputs, counting = inputs_of(tokenizer), Counting(tokenizer)
    inputs.tokenizer = counting  # type: ignore[assignment]
    inputs.encode("word " * 1_000_000, truncate=10)
    assert counting.characters < 100_000
    with pytest.raises(InvalidRequest, match="maximum context length is 128 tokens"):
        inputs.encode("word " * 1_000_000)
    assert counting.characters < 200_000
    for wrong in (0, 128, -2, True):
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
            inputs.encode("word " * 1_000_000, truncate=wrong)


class Engine:
    """What a stream needs of one."""

    def __init__(self) -> None:
        self.forgotten = 0

    def forget(self, request_id: int) -> None:
        self.forgotten += 1


@pytest.mark.parametrize(("whole", "ended"), [(True, 0), (False, 1)])
def test_only_who_reads_can_be_too_slow(whole: bool, ended: int) -> None:
    request = asked(n=128, logprobs=20)[0]
    engine = Engine()
    stream = Stream(engine, request, None, whole)  # type: ignore[arg-type]
    scores = TokenLogprobs(tuple(range(21)), (-1.0,) * 21, 1)
    for step in range(100):
        for index in range(128):
            stream.put(RequestDelta(index, "x", (1,), (scores,)))
        if step == 10:
            assert not engine.forgotten  # a few steps at once are nobody's fault
    assert engine.forgotten == ended
    stream.done = True
