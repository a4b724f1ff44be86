"""An answer on the wire, whole or in chunks: what all formats have, what those with choices share, and completions.

What lives here: formats and what they add up, log probabilities. What may not: the formats of one API (dialects/),
sending, the engine.

A stream's constant JSON is rendered once a choice; a plain token then costs one look-up, one string escape and two
joins.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from headrace.engine.output import RequestDelta
from headrace.request import TokenLogprobs
from headrace.server.answer_types import CachedTokens, Usage
from headrace.server.wire import HOLE, around, encode, encode_list, encode_object, quote

Rendered = TypeVar("Rendered")

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer carries besides text."""

    model: str = ""
    fingerprint: str = ""
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk

    @property
    def plain(self) -> bool:
        return not (self.logprobs or self.token_ids)


TEXT_ALONE = Shape()


@dataclass(slots=True)
class PromptState:
    """One prompt of a request: its ids, and what came back about it. ``text`` is shown by echo."""

    token_ids: Sequence[int]
    text: str = ""
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _rendered: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, render: Callable[[], Rendered]) -> Rendered:
        """What all choices show of the prompt, as the first one has rendered it."""
        if name not in self._rendered:
            self._rendered[name] = render()
        found: Rendered = self._rendered[name]
        return found


@dataclass(slots=True)
class ChoiceState:
    """One choice as it grows. Texts, ids and logprobs are kept only for whole answers."""

    prompt: PromptState
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0

    def count(self, delta: RequestDelta) -> None:
        """What every answer needs, streamed or whole."""
        self.num_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and delta.index == 0:
            self.prompt.cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs:
            self.prompt.logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Answer(ABC):
    """A format bound to one request. ``choices[i]``: prompt-major, n to a prompt. ``explained`` is set before the end,
    where it is asked for."""

    prefix: str  # of its id
    explained: Mapping[str, Any] | None = None

    def __init__(self, shape: Shape, prompts: Sequence[PromptState], choices: Sequence[ChoiceState]) -> None:
        self.shape, self.prompts, self.choices = shape, prompts, choices
        self.created = int(time.time())
        self.id = f"{self.prefix}{uuid.uuid4().hex}"

    @abstractmethod
    def usage(self) -> Struct:
        """So far."""

    def add(self, choice: int, delta: RequestDelta) -> None:
        """Keeps a delta of an answer that is sent whole."""
        state = self.choices[choice]
        state.texts.append(delta.text)
        state.token_ids.extend(delta.token_ids)
        state.logprobs.extend(delta.logprobs)

    def opening(self) -> Iterable[str]:
        """Events before the first token."""
        return ()

    @abstractmethod
    def event(self, choice: int, delta: RequestDelta) -> str:
        """Events for one delta: one a token, and one for the end where the format wants it."""

    @abstractmethod
    def closing(self) -> str:
        """Events after the last token."""

    @abstractmethod
    def pieces(self) -> Iterator[bytes]:
        """The answer in one object of JSON. What it was made of may be gone afterwards."""

    def extras(self) -> dict[str, Any]:
        """What the API does not know, for those who asked for it."""
        return {} if self.explained is None else {"explain": self.explained}


_NO_USAGE = ',"usage":null}\n\n'  # at the end of an event: no text in it can read so, for its quotes are escaped


def with_usage(events: str, usage: Struct) -> str:
    """Events that have a place for it, with usage in it."""
    return events.replace(_NO_USAGE, f',"usage":{encode(usage).decode()}}}\n\n')


class ChoicesAnswer(Answer):
    """What chat completions and completions share: a list of choices, usage, and the constant beginning and end of
    every event."""

    kind: str
    chunk_kind: str

    def __init__(self, shape: Shape, prompts: Sequence[PromptState], n: int, tokenizer: Any) -> None:
        super().__init__(shape, prompts, [ChoiceState(prompt) for prompt in prompts for _ in range(n)])
        self.format = LogprobFormat(tokenizer)
        self._head, self._tail = self._around(HOLE)

    def _around(self, choice: Any) -> list[str]:
        """What every event of this kind begins and ends with."""
        further = {"usage": None} if self.shape.include_usage else {}
        parts = around({**self._of_answer(self.chunk_kind), "choices": [choice], **further})
        parts[0] = f"data: {parts[0]}"
        parts[-1] += "\n\n"
        return parts

    def _of_answer(self, kind: str) -> dict[str, Any]:
        shown = {"id": self.id, "object": kind, "created": self.created, "model": self.shape.model}
        return {**shown, "system_fingerprint": self.shape.fingerprint}

    def usage(self) -> Usage:
        prompt = sum(len(state.token_ids) for state in self.prompts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(state.cached_tokens for state in self.prompts)
        return Usage(prompt, completion, prompt + completion, CachedTokens(cached))

    def closing(self) -> str:
        told = {"usage": self.usage()} if self.shape.include_usage else {}
        members = encode({**told, **self.extras()}).decode()
        return f"{self._head}],{members[1:]}\n\n{DONE}" if members != "{}" else DONE

    def event_of(self, choice: dict[str, Any], **extra: Any) -> str:
        """An event that is not worth prerendering."""
        further = "".join(f",{quote(name)}:{encode(value).decode()}" for name, value in extra.items())
        return f"{self._head}{encode(choice).decode()}]{further}{self._tail[1:]}"

    def pieces(self) -> Iterator[bytes]:
        """Choice by choice; the scores of one that is written are needed no more."""
        members = {**self._of_answer(self.kind), "choices": self._choice_pieces(), "usage": self.usage()}
        return encode_object({**members, **self.extras(), **self._prompt_members()})

    def _choice_pieces(self) -> Iterator[bytes]:
        for index, choice in enumerate(self.choices):
            yield b"," if index else b"["
            yield from encode_object(self.choice(index, choice))
            choice.logprobs, choice.texts = [], []
        yield b"]"

    @abstractmethod
    def choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        """Members of one choice; those that may be long are pieces of JSON."""

    def _prompt_members(self) -> dict[str, Any]:
        return {}

    def _prompt_scores(self, prompt: PromptState) -> Iterator[bytes]:
        yield prompt.once("scores", lambda: b"".join(self.format.prompt_pieces(prompt.logprobs)))

    @staticmethod
    def _prompt_ids(prompt: PromptState) -> Iterator[bytes]:
        yield prompt.once("ids", lambda: b"".join(encode_list(prompt.token_ids)))


LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts(Protocol):
    """What logprobs need of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class LogprobFormat:
    """``tokenizer`` None: tokens are shown as ``token_id:N``."""

    def __init__(self, tokenizer: TokenTexts | None) -> None:
        self._tokenizer = tokenizer

    def chat(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """``choices[].logprobs`` of chat completions."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        chosen, *best = zip(entry.token_ids, entry.logprobs, strict=True)
        return {**self._token(*chosen), "top_logprobs": [self._token(*each) for each in best]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer is not None else None
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": raw}

    def chat_pieces(self, entries: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """As ``chat``, encoded."""
        return encode_object({"content": encode_list(map(self._chat_entry, entries)), "refusal": None})

    def completion(
        self, entries: Sequence[TokenLogprobs | None], offset: int, prompt_ids: Iterable[int] = ()
    ) -> dict[str, list[Any]]:
        """``choices[].logprobs`` of completions. ``offset``: characters of text before. An entry of None is a prompt's
        first token."""
        return {name: list(column) for name, column in self.columns(entries, offset, prompt_ids).items()}

    def columns(
        self, entries: Sequence[TokenLogprobs | None], offset: int, prompt_ids: Iterable[int] = ()
    ) -> dict[str, Iterable[Any]]:
        first = next(iter(prompt_ids), 0)
        texts = [self.text(first if entry is None else entry.token_ids[0]) for entry in entries]
        return {
            "text_offset": itertools.accumulate(map(len, texts[:-1]), initial=offset) if texts else (),
            "token_logprobs": (None if entry is None else finite(entry.logprobs[0]) for entry in entries),
            "tokens": texts,
            "top_logprobs": (None if entry is None else self._by_text(entry) for entry in entries),
        }

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """The k best and the chosen one; of tokens with equal text the more probable."""
        found: dict[str, float] = {}
        for token_id, logprob in (
            *zip(entry.token_ids[1:], entry.logprobs[1:], strict=True),
            (entry.token_ids[0], entry.logprobs[0]),
        ):
            found.setdefault(self.text(token_id), finite(logprob))
        return found

    def prompt_pieces(self, entries: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """``prompt_logprobs``, encoded: nothing for the first token, then by token id: logprob, rank and text."""
        return encode_list(itertools.chain([None], map(self._by_id, entries)))

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        pairs = zip(entry.token_ids, entry.logprobs, strict=True)
        found: dict[str, Any] = {}
        for place, (token_id, logprob) in enumerate(pairs):
            rank = place or entry.rank
            found.setdefault(
                str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}
            )
        return found

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
