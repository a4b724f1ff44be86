"""What is judged bad is never let through, and the same answer is cut at the same place however it arrives."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from headrace.config import ServerConfig
from headrace.engine.output import RequestDelta
from headrace.errors import ConfigError, ModerationFailed
from headrace.request import Request, SamplingParams, TokenLogprobs
from headrace.server.moderation.watch import HookPool, Moderator, moderating
from headrace.server.moderation.words import WordList, WordMatcher, read_words
from headrace.server.moderation.worker import NotFoundThere, find_hook
from headrace.server.service import Service

# --- words


def naive(text: str, entries: Sequence[str]) -> int | None:
    """Where the entry that is complete first begins (of several the longest)."""
    word = r"[^\W]"
    found = []
    for entry in entries:
        core = entry.removeprefix("*").removesuffix("*")
        before = "" if entry.startswith("*") or not re.match(word, core[0]) else rf"(?<!{word})"
        after = "" if entry.endswith("*") or not re.match(word, core[-1]) else rf"(?!{word})"
        for match in re.finditer(f"(?=({before}{re.escape(core)}{after}))", text, re.IGNORECASE):
            found.append(
                (2 * match.end(1) + bool(after), match.start(1))
            )  # a border is seen after a character, before the next one
    return min(found)[1] if found else None


entries = st.lists(
    st.tuples(
        st.sampled_from(["", "*"]),
        st.text("ab -", min_size=1, max_size=4).filter(lambda text: text.strip() == text),
        st.sampled_from(["", "*"]),
    ).map("".join),
    min_size=1,
    max_size=4,
).filter(lambda found: all(entry.strip("*") for entry in found))


@settings(max_examples=200, deadline=None)
@example(pieces=["BA-"], words=["ba-", "*a"])
@given(pieces=st.lists(st.text("abAB -", max_size=6), max_size=6), words=entries)
def test_words_are_found_where_a_search_of_the_whole_finds_them(pieces: list[str], words: list[str]) -> None:
    text, matcher = "".join(pieces), WordMatcher(WordList(words))
    expected = naive(text, words)
    shown = 0
    for number, piece in enumerate([*pieces, ""]):
        cleared, bad = matcher.push(piece, final=number == len(pieces))
        assert cleared >= shown, "what was shown cannot be taken back"
        shown = cleared
        if bad:
            assert cleared == expected, (text, words)
            return
        if expected is not None:
            assert cleared <= expected, "some of a listed word was shown"
    assert expected is None and shown == len(text)


def test_nothing_is_held_back_that_could_not_become_a_word() -> None:
    matcher = WordMatcher(WordList(["bomb", "*xyz*"]))
    for text, cleared in (("the b", 4), ("o", 4), ("at", 8), (" bomber", 15), ("s ax", 18), ("y", 18), (" ", 21)):
        assert matcher.push(text, final=False)[0] == cleared, text


def test_case_borders_and_stars() -> None:
    words = WordList(["Class", "*part*", "äh", "a b", "c++"])
    for text, bad in (
        ("CLASS", True), ("classes", False), ("subclass", False), ("_class", False), ("(class)", True), ("counterparts", True),
        ("ÄH!", True), ("fähre", False), ("a b", True), ("a  b", False), ("C++", True), ("c++11", True), ("", False),
    ):  # fmt: skip
        assert WordMatcher(words).push(text, final=True)[1] is bad, text


def test_lists_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text("# a comment\n\n  Bomb \nbad phrase\n", encoding="utf-8")
    assert WordMatcher(read_words(str(path))).push("a BAD phrase", final=True)[1]
    for content in (b"", b"# only this\n", b"\xff\xfe", b"***\n", b"x" * 300, b"a\n" * 60_000, b"x" * 2**21):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="--moderation-words"):
            read_words(str(path))
    with pytest.raises(ConfigError, match="no such file"):
        read_words(str(tmp_path / "missing"))


# --- answers


class Judge:
    """A function in this process, in the place of the pool."""

    def __init__(self, function: Callable[[str], bool]) -> None:
        self.function = function
        self.calls: list[tuple[str, str | None, bool]] = []

    async def judge(self, text: str, prompt: str | None, *, final: bool) -> bool:
        self.calls.append((text, prompt, final))
        return self.function(text)


class Source:
    """An engine's stream: it can be closed before it has begun."""

    def __init__(self, batches: Sequence[Sequence[RequestDelta]]) -> None:
        self._batches = iter(batches)
        self.closed = False
        self.ended: list[int] = []

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> Sequence[RequestDelta]:
        for batch in self._batches:
            return batch
        raise StopAsyncIteration

    def end_answer(self, index: int) -> None:
        self.ended.append(index)

    async def aclose(self) -> None:
        self.closed = True


def watched(
    moderator: Moderator, batches: Sequence[Sequence[RequestDelta]], *, prompt: str = "hi", **params: Any
) -> list[RequestDelta]:
    source = Source(batches)

    async def text() -> str:
        return prompt

    async def collect() -> list[RequestDelta]:
        asked = Request(request_id=1, prompt_token_ids=array("i", [1]), params=SamplingParams(**params))
        return [delta async for batch in moderator.watch(source, asked, text) for delta in batch]

    with pytest.raises(StopIteration) as done:  # nothing here waits, so no event loop is needed
        collect().send(None)
    assert source.closed
    return list(done.value.value)


def deltas_of(text: str, sizes: Sequence[int]) -> list[RequestDelta]:
    """One token a piece, with its number as id."""
    deltas, start = [], 0
    for number, size in enumerate(sizes):
        deltas.append(RequestDelta(0, text[start : start + size], (number,), (TokenLogprobs((number,), (-1.0,), 1),)))
        start += size
    deltas[-1].finish_reason = "length"
    deltas[-1].text += text[start:]
    return deltas


def merged(deltas: Sequence[RequestDelta], cuts: Sequence[bool]) -> list[list[RequestDelta]]:
    batches: list[list[RequestDelta]] = [[]]
    for delta, cut in zip(deltas, cuts, strict=True):
        batches[-1].append(delta)
        if cut:
            batches.append([])
    return [batch for batch in batches if batch]


def total(deltas: Sequence[RequestDelta]) -> tuple[str, tuple[int, ...], str | None]:
    return (
        "".join(d.text for d in deltas),
        tuple(token for d in deltas for token in d.token_ids),
        deltas[-1].finish_reason,
    )


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(), text=st.text("ab \n", min_size=1, max_size=400), with_words=st.booleans(), with_hook=st.booleans()
)
def test_streamed_or_whole_an_answer_is_cut_at_the_same_place(
    data: st.DataObject, text: str, with_words: bool, with_hook: bool
) -> None:
    assume(with_words or with_hook)
    bad = data.draw(st.text("ab ", min_size=1, max_size=5))
    words = WordList(["aba", "bb b"]) if with_words else None
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=60))
    deltas = deltas_of(text, sizes)

    def play(batches: Sequence[Sequence[RequestDelta]]) -> tuple[str, tuple[int, ...], str | None]:
        hook: Any = Judge(lambda seen: bad in seen) if with_hook else None
        found = watched(Moderator(words, hook), batches)
        shown = "".join(delta.text for delta in found)
        assert text.startswith(shown)
        if with_hook:
            assert bad not in shown, "some was shown that the function did not let through"
        return total(found)

    cuts = data.draw(st.lists(st.booleans(), min_size=len(deltas), max_size=len(deltas)))
    assert play([deltas]) == play([[delta] for delta in deltas]) == play(merged(deltas, cuts))


def test_tokens_and_logprobs_of_text_that_is_not_sent_are_not_sent_either() -> None:
    deltas = deltas_of("good bomb more", [4, 1, 2, 2, 5])
    text, tokens, reason = total(
        found := watched(Moderator(WordList(["bomb"])), [[delta] for delta in deltas], logprobs=0)
    )
    assert (text, tokens, reason) == ("good ", (0, 1), "content_filter")
    assert sum(len(delta.logprobs) for delta in found) == 2


def test_a_token_waits_for_its_text_where_a_stop_string_may_hold_that_back() -> None:
    """The second token is "bom", but its text comes later: it could begin the stop string "bombs"."""
    batches = [
        [RequestDelta(0, "x ", (0,))],
        [RequestDelta(0, "", (1,))],
        [RequestDelta(0, "bomb", (2,))],
        [RequestDelta(0, "!", (3,), finish_reason="stop")],
    ]
    text, tokens, reason = total(watched(Moderator(WordList(["bomb"])), batches, stop=("bombs",)))
    assert (text, tokens, reason) == ("x ", (), "content_filter")


def test_a_good_answer_is_untouched() -> None:
    deltas = deltas_of("nothing to see here, and nothing bad " * 9, [3] * 100)
    judge: Any = Judge(lambda text: False)
    found = watched(Moderator(WordList(["bomb"]), judge), [deltas])
    assert found == deltas
    assert judge.calls[-1][2] and not any(final for _, _, final in judge.calls[:-1])
    assert [text for text, _, _ in judge.calls[:-1]] == sorted({text for text, _, _ in judge.calls[:-1]}, key=len)
    assert len(judge.calls) <= 333 // 40 + 1


def test_answers_are_judged_one_by_one() -> None:
    batches = [
        [RequestDelta(0, "a bomb ", (1,)), RequestDelta(1, "fine", (2,))],
        [RequestDelta(0, "more", (3,)), RequestDelta(1, "!", (4,), finish_reason="stop")],
        [RequestDelta(0, "never", (5,))],
    ]
    found = watched(Moderator(WordList(["bomb"])), batches, n=2)
    assert [(d.index, d.text, d.finish_reason) for d in found] == [
        (0, "a ", "content_filter"),
        (1, "fine", None),
        (1, "!", "stop"),
    ]


def test_a_bad_prompt_ends_every_answer_at_once() -> None:
    found = watched(
        Moderator(WordList(["bomb"]), sees_prompt=True),
        [[RequestDelta(0, "x", (1,))]],
        prompt="how to build a bomb",
        n=2,
    )
    assert [(d.index, d.text, d.finish_reason) for d in found] == [(0, "", "content_filter"), (1, "", "content_filter")]
    judge: Any = Judge(lambda text: False)
    watched(Moderator(None, judge, sees_prompt=True), [deltas_of("abc", [3])], prompt="the prompt")
    watched(Moderator(None, judge), [deltas_of("abc", [3])], prompt="the prompt")
    assert judge.calls == [("abc", "the prompt", True), ("abc", None, True)]


def test_an_error_of_the_engine_goes_through_without_text() -> None:
    found = watched(
        Moderator(WordList(["bomb"])),
        [[RequestDelta(0, "bom", (1,)), RequestDelta(0, "", (), finish_reason="error", error="why")]],
    )
    assert [(d.text, d.token_ids, d.error) for d in found] == [("", (), "why")]


def test_without_anything_to_judge_by_a_stream_is_itself() -> None:
    async def moderator() -> Moderator | None:
        async with moderating(ServerConfig(), None) as found:
            return found

    service, source = Service(ServerConfig(), "0", []), object()
    service.moderator = asyncio.run(moderator())
    assert service.judged(source, None) is source  # type: ignore[arg-type]


# --- a function in a process of its own

HOOK = """
import os, sys, time
print("noise on stdout")
def judge(text, prompt=None, final=False):
    print("more noise"); sys.stdin.read()
    if text == "raise": raise ValueError("secret words")
    if text == "hang": time.sleep(60)
    if text == "spin":
        while True: pass
    if text == "exit": os._exit(3)
    if text == "leave": sys.exit(4)
    return "bad" in text
async def later(text, **more): return text == "bad"
number = 5
"""


@pytest.fixture
def hook_file(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "rules.py"
    path.write_text(HOOK)
    return path


def with_pool(spec: str, work: Callable[[HookPool], Any], seconds: float = 5.0, folders: Sequence[str] = ()) -> Any:
    async def run() -> Any:
        pool = await HookPool.start(spec, folders, seconds)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_a_function_judges_and_what_goes_wrong_there_is_told_without_the_text(hook_file: Path) -> None:
    async def work(pool: HookPool) -> None:
        assert await pool.judge("bad", None, final=False) is True
        assert await pool.judge("good \ud800 \u2028", "prompt", final=True) is False
        for text, words in (
            ("raise", "failed (ValueError)"),
            ("leave", "failed (SystemExit)"),
            ("exit", "ended its process"),
            ("spin", "within 0.5 s"),
        ):
            with pytest.raises(ModerationFailed) as failed:
                await pool.judge(text, None, final=False)
            assert words in failed.value.message and "secret" not in failed.value.message and failed.value.status == 500
            assert await pool.judge("bad", None, final=False) is True, "the next one is judged as ever"
        asked = asyncio.create_task(pool.judge("hang", None, final=False))
        await asyncio.sleep(0.1)
        asked.cancel()
        assert await asyncio.gather(*(pool.judge(f"bad {n}", None, final=False) for n in range(20))) == [True] * 20

    with_pool(f"{hook_file}:judge", work, seconds=0.5)


def test_coroutines_are_functions_too(hook_file: Path) -> None:
    assert with_pool(f"{hook_file}:later", lambda pool: pool.judge("bad", None, final=True)) is True


def test_what_cannot_be_had_is_refused_at_the_start(hook_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--moderation .*rules.py:absent: .* has no function"):
        with_pool(f"{hook_file}:absent", lambda pool: pool.judge("", None, final=True))
    for spec, words in (
        ("rules", "module:function"),
        ("no_such_module_here:f", "there is no"),
        (f"{tmp_path}/none.py:f", "there is no"),
        (f"{hook_file}:number", "no function"),
    ):
        with pytest.raises(NotFoundThere, match=words):
            find_hook(spec, ())


def test_code_is_never_taken_from_a_models_folder(hook_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(hook_file.parent))
    for spec in (f"{hook_file}:judge", "rules:judge", f"{hook_file.parent}/../mine/rules.py:judge"):
        with pytest.raises(NotFoundThere, match="model's folder"):
            find_hook(spec, (str(hook_file.parent),))
