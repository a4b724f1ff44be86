"""A bound on reasoning: where it cuts, what is written there, and that the answer goes on as one."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headrace.config import ModelConfig
from headrace.engine.output import RequestDelta
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import InvalidRequest
from headrace.models.source import find_model
from headrace.request import Request, SamplingParams, StructuredOutputs
from headrace.server.dialects.chat import parse_chat
from headrace.server.dialects.messages import parse_messages
from headrace.server.dialects.responses import parse_responses
from headrace.server.thinking import Bound, BoundedStream, _BoundedAnswer
from tests.server.fake_engine import SPOKEN
from tests.support.serving import Server, events_of

CLOSING = "\n</think>\n\n"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(find_model(ModelConfig()))
    assert found is not None
    return found


class Source:
    """Streams of answers, cut into batches at random; some deltas of one answer are summed up as those of a slow reader
    are."""

    def __init__(self, answers: Sequence[Sequence[RequestDelta]], draw: random.Random) -> None:
        self.closed = False
        self.ended: set[int] = set()
        self._left = [list(answer) for answer in answers]
        self._draw = draw

    async def __aiter__(self) -> AsyncIterator[Sequence[RequestDelta]]:
        while any(self._left) and not self.closed:
            await asyncio.sleep(0)
            batch = []
            for answer in self._draw.sample(self._left, len(self._left)):
                taken, answer[:] = answer[: (count := self._draw.randint(0, 4))], answer[count:]
                summed = self._draw.random() < 0.5
                for later in taken[1:] if summed else ():
                    taken[0].absorb(later)
                batch += [each for each in (taken[:1] if summed else taken) if each.index not in self.ended]
            if batch:
                yield batch

    def end_answer(self, index: int) -> None:
        self.ended.add(index)

    async def aclose(self) -> None:
        self.closed = True


def spoken(tokenizer: Tokenizer, texts: Sequence[str], *, reason: str = "stop") -> list[list[RequestDelta]]:
    answers = []
    for index, text in enumerate(texts):
        decoder, ids = tokenizer.stream_decoder(False), tokenizer.encode(text, False)
        deltas = [RequestDelta(index, decoder.push([token]), (token,)) for token in ids]
        deltas[0].num_cached_tokens = 3
        answers.append(
            [*deltas, RequestDelta(index, decoder.flush(), (), finish_reason=reason, last=index == len(texts) - 1)]
        )
    return answers


def answered(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    tokens: int,
    rest: str = "so.",
    *,
    opened: bool = True,
    seed: int = 0,
    **params: Any,
) -> tuple[list[str], list[list[RequestDelta]], list[tuple[list[int], SamplingParams]]]:
    """Each answer's text and deltas, and what was asked of the engine further."""
    further: list[tuple[list[int], SamplingParams]] = []
    draw = random.Random(seed)
    given = SamplingParams(**{"max_tokens": 500, "n": len(texts), **params})
    closing = tokenizer.encode(CLOSING, False)
    bound = Bound(
        tokens=tokens, most=(given.max_tokens or 0) - len(closing) - 1,
        begin="<think>", end="</think>", opened=opened, closing_text=CLOSING, closing=closing,
    )  # fmt: skip
    request = Request(request_id=1, prompt_token_ids=array("i", [5, 6]), params=given, seed=11)

    async def go_on(ids: Any, given: SamplingParams) -> Any:
        further.append((list(ids), given))
        return Source(spoken(tokenizer, [rest]), draw)

    async def read() -> list[RequestDelta]:
        stream = BoundedStream(
            Source(spoken(tokenizer, texts), draw), request, bound, lambda ids: tokenizer.decode(ids, False), go_on
        )
        return [delta async for batch in stream for delta in batch]

    deltas = asyncio.run(read())
    own = [[delta for delta in deltas if delta.index == index] for index in range(len(texts))]
    assert [delta.finish_reason is not None for each in own for delta in each] == [
        delta is each[-1] for each in own for delta in each
    ]
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return ["".join(delta.text for delta in each) for each in own], own, further


@pytest.mark.parametrize("seed", range(8))
def test_reasoning_ends_at_the_bound_and_the_answer_goes_on(tokenizer: Tokenizer, seed: int) -> None:
    thought = "one two three four five six seven eight nine ten"
    ids = tokenizer.encode(thought, False)
    (text,), (deltas,), ((prompt, params),) = answered(tokenizer, [thought + "</think>yes"], 6, seed=seed, min_tokens=9)
    closing = tokenizer.encode(CLOSING, False)
    assert text == tokenizer.decode(ids[:6], False) + CLOSING + "so."
    assert prompt == [5, 6, *ids[:6], *closing]
    assert [token for delta in deltas for token in delta.token_ids] == [
        *ids[:6],
        *closing,
        *tokenizer.encode("so.", False),
    ]
    written = 6 + len(closing)
    assert (params.n, params.max_tokens, params.min_tokens) == (1, 500 - written, max(0, 9 - written))
    assert [delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None] == [3]


def test_white_space_before_reasoning_is_looked_at_once(tokenizer: Tokenizer) -> None:
    (blank,) = tokenizer.encode("\n", False)
    looked: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        looked.append(len(ids))
        return tokenizer.decode(ids, False)

    bound = Bound(tokens=3, most=9000, begin="<think>", end="</think>", opened=False, closing_text="", closing=())
    answer = _BoundedAnswer(bound, decode)
    for _ in range(500):
        answer.push(RequestDelta(0, "\n", (blank,)))
        assert answer.find_cut() is None
    assert sum(looked) <= 500
    words = tokenizer.encode("<think>one two three four five", False)
    for token in words[:-1]:
        answer.push(RequestDelta(0, "", (token,)))
    assert answer.find_cut() == 500 + len(tokenizer.encode("<think>", False)) + 3


@pytest.mark.parametrize("seed", range(4))
def test_what_ends_by_itself_is_left_alone(tokenizer: Tokenizer, seed: int) -> None:
    short = "one</think>a long answer that goes on and on and on"
    for text, opened in (
        (short, True),
        ("no reasoning at all, but very many words", False),
        ("<think>" + short, False),
        ("one two", True),
    ):
        (got,), _, further = answered(
            tokenizer, [text], len(tokenizer.encode("one</think>", False)), opened=opened, seed=seed
        )
        assert got == text and not further
    for text in ("one </think>two", "one <three four"):
        ids = tokenizer.encode(text, False)
        for tokens in range(1, len(ids)):  # the end is never cut in its middle
            (got,), _, further = answered(tokenizer, [text], tokens, seed=seed)
            assert (
                got.count("</think>") == 1
                and "</" not in got.replace("</think>", "")
                and (got == text or bool(further))
            )
    exactly = "one two three"
    (got,), (deltas,), further = answered(tokenizer, [exactly], len(tokenizer.encode(exactly, False)), seed=seed)
    assert got.startswith(exactly) and deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_reasoning_that_the_answer_begins_is_counted_from_there(tokenizer: Tokenizer, seed: int) -> None:
    (text,), _, further = answered(tokenizer, ["<think>one two three four"], 1, opened=False, seed=seed)
    first = tokenizer.decode(
        tokenizer.encode("<think>one two three four", False)[: len(tokenizer.encode("<think>", False)) + 1], False
    )
    assert text == first + CLOSING + "so." and len(further) == 1
    (text,), _, further = answered(tokenizer, ["one two"], 0, seed=seed)
    assert text == CLOSING + "so." and further[0][0][:2] == [5, 6]


@pytest.mark.parametrize("seed", range(6))
def test_each_of_several_answers_has_its_own_bound(tokenizer: Tokenizer, seed: int) -> None:
    long, short = "one two three four five six seven eight", "one</think>fine"
    texts, _, further = answered(tokenizer, [long, short, long], 5, seed=seed)
    cut = tokenizer.decode(tokenizer.encode(long, False)[:5], False) + CLOSING + "so."
    assert texts == [cut, short, cut]
    assert len({params.seed for _, params in further}) == 2  # different noise for each
    assert answered(tokenizer, [long, short, long], 5, seed=seed + 50)[0] == texts  # however it arrives


def test_characters_are_not_cut(tokenizer: Tokenizer) -> None:
    for tokens in range(1, 8):
        (text,), _, _ = answered(tokenizer, ["\U0001f600\U0001f601\U0001f602\U0001f603"], tokens)
        assert "\ufffd" not in text and text.endswith(CLOSING + "so.")


def test_nothing_reasons_before_the_rest_of_a_structure(tokenizer: Tokenizer) -> None:
    held = StructuredOutputs(regex="a+", preface="start: @answer")
    _, _, ((_, params),) = answered(tokenizer, ["one two three four"], 2, structured_outputs=held)
    assert params.structured_outputs == StructuredOutputs(regex="a+")


def test_a_bound_that_leaves_no_room_for_an_answer_is_none(tokenizer: Tokenizer) -> None:
    text, closing = "one two three four five six", len(tokenizer.encode(CLOSING, False))
    for opened, begun in ((True, 0), (False, len(tokenizer.encode("<think>", False)))):
        for room in (0, 1):
            said = text if opened else "<think>" + text
            (got,), _, further = answered(tokenizer, [said], 4, opened=opened, max_tokens=begun + 4 + closing + room)
            assert (got == said, [params.max_tokens for _, params in further]) == ((True, []), (False, [1]))[room]


def test_a_reader_that_leaves_closes_all(tokenizer: Tokenizer) -> None:
    sources: list[Source] = []

    def source(text: str) -> Any:
        sources.append(Source(spoken(tokenizer, [text]), random.Random(0)))
        return sources[-1]

    async def go_on(ids: Any, given: SamplingParams) -> Any:
        return source("and so on and so on and so on and so on")

    async def leave() -> None:
        bound = Bound(
            tokens=2, most=50, begin="<think>", end="</think>", opened=True, closing_text=CLOSING, closing=(1,)
        )
        request = Request(request_id=1, prompt_token_ids=array("i", [5]), params=SamplingParams(max_tokens=90))
        stream = BoundedStream(
            source("one two three four"), request, bound, lambda ids: tokenizer.decode(ids, False), go_on
        )
        async for batch in stream:
            if any(CLOSING in delta.text for delta in batch):
                break
        await stream.aclose()

    asyncio.run(leave())
    assert [each.closed for each in sources] == [True, True]


# --- on the wire

SAYS = {"role": "user", "content": "⟦<think>one two three four five six seven</think>first⟧ ⟦second⟧"}


def test_a_budget_on_every_route(scripted: Server) -> None:
    chat = {"messages": [SAYS], "seed": SPOKEN, "max_tokens": 90}
    free = scripted.ask("POST", "/v1/chat/completions", chat).json["choices"][0]["message"]
    assert (free["reasoning"], free["content"]) == ("one two three four five six seven", "first")
    bounded = {**chat, "thinking_token_budget": 4}
    whole = scripted.ask("POST", "/v1/chat/completions", {**bounded, "n": 2, "logprobs": True}).json
    for choice in whole["choices"]:
        message = choice["message"]
        assert free["reasoning"].startswith(message["reasoning"]) and 0 < len(message["reasoning"]) < len(
            free["reasoning"]
        )
        assert (message["content"], choice["finish_reason"]) == ("second", "stop")
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    events = events_of(scripted.ask("POST", "/v1/chat/completions", {**bounded, "stream": True}).body)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    body = {"messages": [SAYS], "seed": SPOKEN, "max_tokens": 90, "thinking": {"type": "enabled", "budget_tokens": 4}}
    claude = scripted.ask("POST", "/v1/messages", body).json
    assert [block.get("thinking", block.get("text")) for block in claude["content"]] == [message["reasoning"], "second"]
    asked = {"input": [SAYS], "seed": SPOKEN, "max_output_tokens": 90, "thinking_token_budget": 4}
    items = scripted.ask("POST", "/v1/responses", asked).json["output"]
    assert [item["content"][0]["text"] for item in items] == [message["reasoning"], "second"]


def test_a_budget_without_known_reasoning(demo: Server) -> None:
    answer = demo.ask("POST", "/v1/chat/completions", {"messages": [USER], "max_tokens": 4, "thinking_token_budget": 2})
    assert (answer.status, answer.error["param"]) == (
        400,
        "thinking_token_budget",
    ) and "--reasoning-parser" in answer.error["message"]
    body = {
        "messages": [USER],
        "max_tokens": 4,
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    }
    assert demo.ask("POST", "/v1/messages", body).status == 200  # clients of that API always send it


@pytest.mark.parametrize("bad", [-1, 2**31, True, "5", 1.5, [1]])
def test_budgets_are_checked_alike(bad: Any) -> None:
    message: dict[str, Any] = {"messages": [USER], "max_tokens": 9}
    for parse, body in (
        (parse_chat, {"messages": [USER]}),
        (parse_responses, {"input": "hi"}),
        (parse_messages, message),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse({**body, "thinking_token_budget": bad}, {})
        assert caught.value.param == "thinking_token_budget"
    for thinking, param in (
        ({"type": "enabled", "budget_tokens": bad}, "thinking.budget_tokens"),
        ({"type": "adaptive", "budget_tokens": 5}, None),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse_messages({**message, "thinking": thinking}, {})
        assert caught.value.param == (param or "thinking.budget_tokens")
