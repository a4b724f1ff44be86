"""Answers under moderation: nothing is let through before it has been judged, and a bad answer ends with
``content_filter``.

What lives here: which part of a text is judged when, what of a stream may go on, how an answer ends, and a user's
function in processes of its own from the side that asks. What may not: words (words.py), the function (worker.py).

A function is asked at places that the text alone decides (the end of a word, after some forty characters, later fewer
times), so that the same answer is cut at the same place however it arrived. What it lets through is sent up to there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.config import ServerConfig
from headrace.engine.output import RequestDelta
from headrace.errors import ConfigError, ModerationFailed
from headrace.processes.sandbox import START_SECONDS, Reply, SandboxPool, json_line
from headrace.request import Request
from headrace.server.moderation.words import WordList, WordMatcher, read_words

if TYPE_CHECKING:
    from headrace.server.service import EngineStream

STRIDE = 40  # characters between two questions to a function, at least
MAX_PROMPT = 100_000  # characters of a prompt that a function is shown: the last ones
PROCESSES = 2  # that judge side by side
CONTENT_FILTER = "content_filter"
_SPACE = re.compile(r"\s")

Deltas = AsyncGenerator[Sequence[RequestDelta], None]
PromptText = Callable[[], Awaitable[str]]


class HookPool:
    """Up to PROCESSES workers; one that fails to answer in ``seconds`` is killed, and the next asker gets a new one."""

    def __init__(self, spec: str, model_folders: Sequence[str], seconds: float) -> None:
        self._spec, self._seconds = spec, seconds
        opening = {"spec": spec, "folders": list(model_folders)}
        self._pool = SandboxPool(
            "headrace.server.moderation.worker", opening, self._check, most=PROCESSES, trusted=True
        )
        self._threads = ThreadPoolExecutor(PROCESSES, "headrace-moderation")

    @classmethod
    async def start(cls, spec: str, model_folders: Sequence[str], seconds: float) -> HookPool:
        """Raises ConfigError when the function cannot be had."""
        pool = cls(spec, model_folders, seconds)
        try:
            await asyncio.get_running_loop().run_in_executor(pool._threads, pool._pool.check)
        except BaseException:
            await pool.close()
            raise
        return pool

    def _check(self, said: Reply | None) -> None:
        why = (
            f"importing it takes longer than {START_SECONDS:g} s, or ends the process"
            if said is None
            else said.get("error")
        )
        if why is not None:
            raise ConfigError(f"--moderation {self._spec}: {why}.")

    async def judge(self, text: str, prompt: str | None, *, final: bool) -> bool:
        """Whether the function wants the answer ended. Raises ModerationFailed when it raises, hangs or ends its
        process."""
        line = json_line({"text": text, "prompt": prompt, "final": final})
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, line)

    def _ask(self, line: bytes) -> bool:
        try:
            with self._pool.borrowed() as worker:
                said = worker.request(line, self._seconds)
                if said is None:
                    worker.close()
        except TimeoutError:
            raise ModerationFailed(
                f"The moderation function did not answer within {self._seconds:g} s, so the answer cannot be sent."
            ) from None
        except ConfigError as error:
            raise ModerationFailed(f"The moderation function cannot be started again: {error.message}") from None
        if said is None:
            raise ModerationFailed("The moderation function ended its process, so the answer cannot be sent.")
        if "error" in said:
            raise ModerationFailed(f"The moderation function failed ({said['error']}), so the answer cannot be sent.")
        return bool(said["bad"])

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()


class Moderator:
    """What a server's answers are judged by: words, a function, or both. ``sees_prompt``: prompts are, too."""

    def __init__(self, words: WordList | None, hook: HookPool | None = None, *, sees_prompt: bool = False) -> None:
        self._words = words
        self._hook = hook
        self._sees_prompt = sees_prompt

    async def watch(self, source: EngineStream, request: Request, prompt_text: PromptText) -> Deltas:
        """The same stream, judged."""
        async with contextlib.aclosing(source):
            prompt = (await prompt_text())[-MAX_PROMPT:] if self._sees_prompt else None
            if prompt is not None and self._words is not None and WordMatcher(self._words).push(prompt, final=True)[1]:
                yield [_end(index, "", request.params.n) for index in range(request.params.n)]
                return
            answers = [
                _JudgedAnswer(index, request, self._words, self._hook, prompt) for index in range(request.params.n)
            ]
            async for batch in source:
                passed: list[RequestDelta] = []
                for answer in answers:
                    own = [delta for delta in batch if delta.index == answer.index and not answer.ended]
                    passed += await answer.push(own) if own else ()
                    if own and answer.ended and own[-1].finish_reason is None:
                        source.end_answer(answer.index)
                if passed:
                    yield passed
                if all(answer.ended for answer in answers):
                    return


@contextlib.asynccontextmanager
async def moderating(config: ServerConfig, model: str | None) -> AsyncIterator[Moderator | None]:
    """While a server runs; None where nothing is to be judged. ``model``: that is served, as it was named.

    Raises ConfigError for a list that cannot be read and a function that cannot be had.
    """
    words = read_words(config.moderation_words) if config.moderation_words is not None else None
    hook = (
        await HookPool.start(config.moderation, _model_folders(model), config.moderation_timeout)
        if config.moderation is not None
        else None
    )
    try:
        yield None if words is None and hook is None else Moderator(words, hook, sees_prompt=config.moderation_prompt)
    finally:
        if hook is not None:
            await hook.close()


def _model_folders(model: str | None) -> tuple[str, ...]:
    """Where models lie: the one that is served, and the hub's cache."""
    hub = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    if model is None or not os.path.exists(model):
        return (hub,)
    return (model if os.path.isdir(model) else os.path.dirname(model) or ".", hub)


def _end(index: int, text: str, n: int) -> RequestDelta:
    return RequestDelta(index, text, (), finish_reason=CONTENT_FILTER, last=index == n - 1)


class _JudgedAnswer:
    """One answer: its deltas wait until all their text has been judged.

    A token's text may come later than the token, when it could begin a stop string; so deltas wait for that much text
    more.
    """

    def __init__(
        self, index: int, request: Request, words: WordList | None, hook: HookPool | None, prompt: str | None
    ) -> None:
        self.index = index
        self.ended = False
        self._n = request.params.n
        self._lag = max(map(len, request.params.stop), default=0)
        self._matcher = WordMatcher(words) if words is not None else None
        self._judge = _Judge(hook, prompt) if hook is not None else None
        self._waiting: deque[tuple[int, RequestDelta]] = deque()  # with where its text ends
        self._length = 0
        self._sent = 0  # characters
        self._held = ""  # cleared by the words, not yet given to the function

    async def push(self, deltas: Sequence[RequestDelta]) -> list[RequestDelta]:
        """What may go on now. Raises ModerationFailed."""
        if deltas[-1].finish_reason == "error":
            self.ended = True
            return [replace(deltas[-1], text="", token_ids=(), logprobs=())]
        for delta in deltas:
            self._length += len(delta.text)
            self._waiting.append((self._length, delta))
        final = deltas[-1].finish_reason is not None
        cleared, bad = await self._look("".join(delta.text for delta in deltas), final)
        passed = self._passed(cleared if bad or not final else cleared + self._lag)
        if bad:
            passed.append(self._cut(cleared))
        self.ended = bad or final
        return passed

    async def _look(self, text: str, final: bool) -> tuple[int, bool]:
        cleared, bad = (self._length, False) if self._matcher is None else self._matcher.push(text, final=final)
        if self._judge is None:
            return cleared, bad
        self._held += text
        given = self._held[: cleared - self._judge.length]
        self._held = self._held[len(given) :]
        judged, refused = await self._judge.push(given, final=final or bad)
        return judged, refused or bad

    def _passed(self, cleared: int) -> list[RequestDelta]:
        passed = []
        while self._waiting and self._waiting[0][0] + self._lag <= cleared:
            end, delta = self._waiting.popleft()
            self._sent = end
            passed.append(delta)
        return passed

    def _cut(self, cleared: int) -> RequestDelta:
        """The end of a bad answer, with the text that was good and not sent."""
        text = "".join(delta.text for _, delta in self._waiting)[: max(0, cleared - self._sent)]
        self._waiting.clear()
        return _end(self.index, text, self._n)


class _Judge:
    """One answer's questions to the function."""

    def __init__(self, hook: HookPool, prompt: str | None) -> None:
        self._hook = hook
        self._prompt = prompt
        self._text = ""
        self._good = 0  # characters that have been judged

    @property
    def length(self) -> int:
        return len(self._text)

    async def push(self, text: str, *, final: bool) -> tuple[int, bool]:
        """As WordMatcher.push."""
        self._text += text
        while (place := self._next_place()) is not None:
            if await self._hook.judge(self._text[:place], self._prompt, final=False):
                return self._good, True
            self._good = place
        if final:
            if await self._hook.judge(self._text, self._prompt, final=True):
                return self._good, True
            self._good = len(self._text)
        return self._good, False

    def _next_place(self) -> int | None:
        """The end of the first word that ends a stride from here on; a text without spaces is cut at four strides."""
        stride = max(STRIDE, self._good // 16)
        first, last = self._good + stride, self._good + 4 * stride
        space = _SPACE.search(self._text, first - 1, last)
        if space is not None:
            return space.end()
        return last if len(self._text) >= last else None
