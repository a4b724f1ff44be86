"""Token ids to text: stop strings, segmentation, logprobs, ends."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import output
from headrace.engine.output import OutputCollector, OutputProcessor, RequestDelta, StopMatcher
from headrace.request import (
    Finished,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    TokenOutputs,
)

STOP_CALL = tuple[int, int, int]
TIMES = RequestTimes(1.0, 2.0, 3.0, 4.0)


class Letters:
    """A tokenizer whose token i is the i-th letter; 100 + b is the raw byte b, 99 a special token without text."""

    def stream_decoder(self, skip_special_tokens: bool = True, /) -> LetterDecoder:
        return LetterDecoder(skip_special_tokens)

    def token_text(self, token: int, /) -> str:
        return f"<{token}>"


class LetterDecoder:
    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self._bytes = b""

    def push(self, ids: Sequence[int]) -> str:
        for i in ids:
            self._bytes += (
                b""
                if i == 99 and self._skip
                else b"[eos]"
                if i == 99
                else bytes([i - 100])
                if i >= 100
                else bytes([97 + i])
            )
        whole = self._bytes.decode("utf-8", "ignore")
        self._bytes = self._bytes[len(whole.encode()) :]
        return whole

    def flush(self) -> str:
        tail, self._bytes = self._bytes, b""
        return tail.decode("utf-8", "replace")


def request(**params: object) -> Request:
    return Request(
        request_id=5, prompt_token_ids=array("i", [1, 2]), params=SamplingParams(**{"max_tokens": 100, **params})
    )  # type: ignore[arg-type]


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs((token, 50, token), (-1.0, -0.5, -1.0), 2)


def play(
    asked: Request, groups: Sequence[Sequence[int]], reason: FinishReason = FinishReason.LENGTH
) -> tuple[RequestOutput, list[RequestDelta], list[STOP_CALL]]:
    """Tokens in the given groups, the last one with ``finished``; what came out, and what the core was told."""
    calls: list[STOP_CALL] = []
    processor = OutputProcessor(Letters(), lambda *call: calls.append(call))
    processor.add(asked)
    collector = OutputCollector("r", None, asked, Letters())
    deltas = []
    for number, group in enumerate(groups):
        end = Finished(reason, times=TIMES) if number == len(groups) - 1 else None
        scores = tuple(score(i) for i in group) if asked.params.logprobs is not None else ()
        for _, delta in processor.process([SequenceOutput(5, 0, tuple(group), scores, finished=end)]):
            deltas.append(delta)
            collector.add(delta)
    assert processor.num_live == 0
    return collector.output(), deltas, calls


def ids(text: str) -> list[int]:
    return [ord(c) - 97 for c in text]


# --- the matcher


def first_complete(text: str, words: Sequence[str], armed_from: int) -> tuple[int, str] | None:
    """Oracle: the smallest end of a match beyond ``armed_from``, the longest word that ends there."""
    for end in range(armed_from + 1, len(text) + 1):
        complete = [word for word in words if text[:end].endswith(word)]
        if complete:
            return end, max(complete, key=len)
    return None


def longest_beginning(text: str, words: Sequence[str]) -> int:
    return max(
        k for k in range(len(text) + 1) if k == 0 or any(len(word) > k and word.startswith(text[-k:]) for word in words)
    )


letters = st.text("ab", max_size=12)
stop_words = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@settings(max_examples=600, deadline=None)
@given(pieces=st.lists(letters, max_size=8), words=stop_words, include=st.booleans(), unarmed=st.integers(0, 3))
def test_matcher_cuts_at_the_first_complete_string_and_holds_back_no_more_than_it_must(
    pieces: list[str], words: tuple[str, ...], include: bool, unarmed: int
) -> None:
    matcher = StopMatcher(words, include)
    shown = whole = ""
    armed_from = len("".join(pieces[:unarmed]))
    for number, piece in enumerate(pieces):
        whole += piece
        expected = first_complete(whole, words, min(armed_from, len(whole)))
        text, word = matcher.push(piece, armed=number >= unarmed)
        shown += text
        if expected is not None:
            end, stop = expected
            assert (shown, word) == (whole[: end if include else end - len(stop)], stop)
            return
        assert word is None
        held = 0 if include else longest_beginning(whole, words)
        assert shown == whole[: len(whole) - held]
    assert shown + matcher.flush() == whole


def test_a_match_may_begin_inside_a_failed_one() -> None:
    """Every word of seven letters in every text of nine: the fallbacks within a word are all walked."""
    for word in map("".join, itertools.product("ab", repeat=7)):
        for text in map("".join, itertools.product("ab", repeat=9)):
            shown, found = StopMatcher((word,), False).push(text, True)
            where = text.find(word)
            assert (found is not None, shown) == ((True, text[:where]) if where >= 0 else (False, shown)), (word, text)


def test_failure_links_are_the_longest_borders() -> None:
    for word in map("".join, itertools.product("ab", repeat=11)):
        borders = [
            max(k for k in range(end) if word[:end].startswith(word[end - k : end])) for end in range(1, len(word) + 1)
        ]
        assert list(output._failure_links(word)) == borders, word


def test_matcher_cost_does_not_grow_with_the_length_of_stop_strings() -> None:
    """A text that almost matches long strings again and again: work a character stays constant (counted, not timed)."""
    steps = 0

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, index: object) -> str:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return str.__getitem__(self, index)  # type: ignore[index]

    matcher = StopMatcher((Counted("a" * 1000 + "b"),), False)
    for _ in range(300):
        matcher.push("a" * 10 + "c", True)
    assert steps < 20_000


# --- the processor

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)
FINAL = st.sampled_from([FinishReason.LENGTH, FinishReason.STOP])


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    sequence=tokens,
    words=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
    reason=FINAL,
    include=st.booleans(),
)
def test_any_segmentation_gives_the_same_answer(
    data: st.DataObject, sequence: list[int], words: tuple[str, ...], reason: FinishReason, include: bool
) -> None:
    asked = request(stop=words, include_stop_str_in_output=include, min_tokens=data.draw(st.integers(0, 4)), logprobs=1)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sequence) - 1)))) if len(sequence) > 1 else []
    groups = [sequence[a:b] for a, b in zip([0, *cuts], [*cuts, len(sequence)], strict=True)]
    whole, _, _ = play(asked, [sequence], reason)
    parts, deltas, calls = play(asked, groups, reason)
    single, _, _ = play(asked, [[i] for i in sequence], reason)
    assert strip(whole) == strip(parts) == strip(single)
    answer = parts.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    assert "".join(delta.text for delta in deltas) == answer.text
    if answer.stop_reason is not None:
        assert answer.finish_reason == "stop"
        assert calls == ([(5, 0, len(answer.token_ids))] if sum(map(len, groups[:-1])) >= len(answer.token_ids) else [])
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def strip(output: RequestOutput) -> tuple[object, ...]:
    answer = output.outputs[0]
    return answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason, answer.cumulative_logprob


def test_a_stop_string_ends_text_ids_and_logprobs_and_surplus_is_never_seen() -> None:
    output, _, calls = play(request(stop=("cd",), logprobs=1), [ids("ab"), ids("cdef"), ids("gh")])
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason) == (
        "ab",
        ids("abcd"),
        "stop",
        "cd",
    )
    assert len(answer.logprobs or []) == 4 and answer.cumulative_logprob == -4.0
    assert calls == [(5, 0, 4)]


def test_the_string_that_is_complete_first_wins_and_of_two_at_once_the_longer() -> None:
    assert play(request(stop=("bcd", "c")), [ids("abcd"), ids("z")])[0].outputs[0].text == "ab"
    output, _, _ = play(request(stop=("c", "bc")), [ids("abcd"), ids("z")])
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("a", "bc")


def test_min_tokens_text_is_not_searched_but_may_begin_a_match() -> None:
    assert play(request(stop=("b",), min_tokens=2), [ids("abab"), ids("x")])[0].outputs[0].text == "aba"
    assert play(request(stop=("bc",), min_tokens=2), [ids("ab"), ids("c"), ids("x")])[0].outputs[0].text == "a"


def test_the_token_that_stops_has_no_text_unless_asked_for() -> None:
    for include, text in ((False, "ab"), (True, "abc")):
        answer = play(
            request(stop_token_ids=[2], include_stop_str_in_output=include), [ids("ab"), ids("c")], FinishReason.STOP
        )[0].outputs[0]
        assert (answer.text, answer.token_ids) == (text, ids("abc"))
    assert (
        play(request(skip_special_tokens=False), [ids("ab"), [99]], FinishReason.LENGTH)[0].outputs[0].text == "ab[eos]"
    )


def test_half_a_character_waits_and_is_flushed_at_the_end() -> None:
    euro = [100 + b for b in "€".encode()]
    output, deltas, _ = play(request(), [[0], euro[:1], euro[1:2], euro[2:], euro[:2]])
    assert [delta.text for delta in deltas] == ["a", "", "", "€", "\N{REPLACEMENT CHARACTER}"]
    assert output.outputs[0].text == "a€\N{REPLACEMENT CHARACTER}"


def test_logprobs_name_the_chosen_token_first_and_no_token_twice() -> None:
    entry = play(request(logprobs=2), [[3]])[0].outputs[0].logprobs
    assert entry is not None
    assert [(token, e.logprob, e.rank, e.decoded_token) for token, e in entry[0].items()] == [
        (3, -1.0, 2, "<3>"),
        (50, -0.5, 1, "<50>"),
    ]


def test_answers_end_one_by_one_and_the_request_with_the_last() -> None:
    calls: list[STOP_CALL] = []
    processor = OutputProcessor(Letters(), lambda *call: calls.append(call))
    asked = request(n=2, stop=("b",))
    processor.add(asked)
    collector = OutputCollector("r", None, asked, Letters())
    steps = [
        SequenceOutput(5, 0, (0,)),
        SequenceOutput(5, 1, (1,)),
        SequenceOutput(5, 1, (2,)),
        SequenceOutput(5, 0, (2,), finished=Finished(FinishReason.LENGTH)),
    ]
    seen = []
    for _, delta in processor.process(steps):
        collector.add(delta)
        seen.append((delta.index, delta.text, delta.last))
    assert seen == [(0, "a", False), (1, "", False), (0, "c", True)]
    assert calls == [(5, 1, 1)]
    assert [each.finish_reason for each in collector.output().outputs] == ["length", "stop"]


def test_a_failed_step_says_why_and_shows_what_was_held_back() -> None:
    asked = request(stop=("abc",))
    processor = OutputProcessor(Letters(), lambda *call: None)
    processor.add(asked)
    collector = OutputCollector("r", None, asked, Letters())
    for _, delta in processor.process(
        [
            SequenceOutput(5, 0, (0, 1)),
            SequenceOutput(5, 0, (), finished=Finished(FinishReason.ERROR, message="broken")),
        ]
    ):
        collector.add(delta)
    answer = collector.output().outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "error", "broken")


def test_dropped_and_unknown_requests_are_ignored() -> None:
    processor = OutputProcessor(Letters(), lambda *call: pytest.fail("the core was told of a request nobody wants"))
    processor.add(request(stop=("a",)))
    processor.drop(5)
    assert list(processor.process([SequenceOutput(5, 0, (0,)), SequenceOutput(6, 0, (0,))])) == []


def test_without_a_tokenizer_ids_come_without_text() -> None:
    asked = request(detokenize=False)
    processor = OutputProcessor(None, lambda *call: None)
    processor.add(asked)
    delta = processor.feed(SequenceOutput(5, 0, (1, 2)))
    assert delta is not None and (delta.text, delta.token_ids) == ("", (1, 2))


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 6))
def test_absorbed_deltas_add_up_to_the_same_answer(cut: int) -> None:
    """What a slow reader gets (deltas merged) is what a fast one gets."""
    asked = request(logprobs=1)
    output, deltas, _ = play(asked, [[i] for i in ids("abcdefg")])
    merged = deltas[:cut]
    if cut < len(deltas):
        last = deltas[cut]
        for later in deltas[cut + 1 :]:
            last.absorb(later)
        merged.append(last)
    collector = OutputCollector("r", None, asked, Letters())
    for delta in merged:
        collector.add(delta)
    assert strip(collector.output()) == strip(output) and collector.finished


def test_an_answer_wanted_whole_comes_in_two_pieces_and_is_the_same() -> None:
    """The first tokens (their time counts) and all the rest at the end; what could end the answer, or is scored, is
    never held back."""
    outputs = [
        SequenceOutput(5, 0, (i,), finished=Finished(FinishReason.LENGTH, times=TIMES) if i == 5 else None)
        for i in range(6)
    ]
    for params, pieces in (({}, 2), ({"stop": ("zz",)}, 6), ({"logprobs": 1}, 6)):
        processor = OutputProcessor(Letters(), lambda *call: None)
        processor.add(request(**params), whole=True)
        deltas = [delta for _, delta in processor.process(outputs)]
        assert len(deltas) == pieces
        assert "".join(delta.text for delta in deltas) == "abcdef"
        assert [token for delta in deltas for token in delta.token_ids] == list(range(6))
        assert processor.num_live == 0 and not processor._held


def test_a_dropped_request_holds_nothing() -> None:
    processor = OutputProcessor(Letters(), lambda *call: None)
    processor.add(request(), whole=True)
    assert len(list(processor.process([SequenceOutput(5, 0, (1,)), SequenceOutput(5, 0, (2,))]))) == 1
    processor.drop(5)
    assert list(processor.process([SequenceOutput(5, 0, (3,))])) == [] and not processor._held


def test_the_last_token_of_a_loop_has_its_text() -> None:
    """A stop token has none; a loop ends with a token like any other."""
    asked = request()
    processor = OutputProcessor(Letters(), lambda *call: None)
    processor.add(asked, whole=True)
    collector = OutputCollector("r", None, asked, Letters())
    ends = [None, None, Finished(FinishReason.STOP, "repetition")]
    for _, delta in processor.process([SequenceOutput(5, 0, (i,), finished=end) for i, end in enumerate(ends)]):
        collector.add(delta)
    answer = collector.output().outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abc", "stop", "repetition")


@pytest.mark.parametrize("most", [1, 3, 64])
def test_columns_of_tokens_reach_everybody(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some wait for their whole answer, some look at each token; some leave, some end."""
    monkeypatch.setattr(output, "_MOST_KEPT", most)
    seen: dict[int, list[int]] = {}
    processor = OutputProcessor(None, lambda *_: None)
    for number in range(5):
        processor.add(replace(request(detokenize=False), request_id=number), whole=number < 4)

    def take(outputs: Sequence[SequenceOutput]) -> None:
        for request_id, delta in processor.process(outputs):
            seen.setdefault(request_id, []).extend(delta.token_ids)

    ids = [0, 1, 2, 3]
    sent: dict[int, list[int]] = {number: [] for number in range(5)}
    for step in range(30):
        if step == 8:
            processor.drop(1)
        if step in (12, 20):
            ids = [3, 0] if step == 12 else [4, 3, 0]
        tokens = [(100 * step + number,) for number in ids]
        for number, new in zip(ids, tokens, strict=True):
            sent[number] += new
        columns = TokenOutputs(ids, [0] * len(ids), tokens)
        take(list(columns) if step in (0, 5, 17) else columns)
        if step == 11:
            sent[2] += [7]
            take([SequenceOutput(2, 0, (7,), finished=Finished(FinishReason.LENGTH))])
    take([SequenceOutput(number, 0, (), finished=Finished(FinishReason.LENGTH)) for number in (0, 3, 4)])
    assert {number: seen[number] for number in (0, 2, 3, 4)} == {number: sent[number] for number in (0, 2, 3, 4)}
    assert seen[1] == sent[1][:1] and processor.num_live == 0
