"""An answer on the wire, whole or in chunks: the shapes of chat completions and of completions.

What lives here: the two formats and what they add up. What may not: sending, timing, the engine.

A stream's constant JSON is rendered once a choice; a plain token then costs one look-up, one string escape and two joins.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from headrace.engine.output import RequestDelta
from headrace.request import TokenLogprobs
from headrace.server.logprobs import LogprobFormat
from headrace.server.wire import encode, encode_list, encode_object, joined_lists, quote

Rendered = TypeVar("Rendered")

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer carries besides text."""

    model: str
    fingerprint: str
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    include_usage: bool
    continuous_usage: bool = False  # in every chunk

    @property
    def plain(self) -> bool:
        return not (self.logprobs or self.token_ids)


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

    def add(self, delta: RequestDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)

    def count(self, delta: RequestDelta) -> None:
        """What every answer needs, streamed or whole."""
        self.num_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and delta.index == 0:
            self.prompt.cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs:
            self.prompt.logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Answer(Protocol):
    """A format bound to one request. ``choices[i]``: prompt-major, n to a prompt."""

    id: str
    choices: list[ChoiceState]
    prompts: Sequence[PromptState]
    explained: Mapping[str, Any] | None  # set before the end, where the request asked for it

    def usage(self) -> dict[str, Any]:
        """So far."""

    def opening(self) -> Iterable[str]:
        """Events before the first token."""

    def event(self, choice: int, delta: RequestDelta) -> str:
        """Events for one delta: one a token, and one for the end where the format wants it."""

    def closing(self) -> str:
        """Events after the last token."""

    def pieces(self) -> Iterator[bytes]:
        """The answer in one object of JSON. What it was made of may be gone afterwards."""


_NO_USAGE = ',"usage":null}\n\n'  # at the end of an event: no text in it can read so, for its quotes are escaped


def with_usage(events: str, usage: Mapping[str, Any]) -> str:
    """Events that have a place for it, with usage in it."""
    return events.replace(_NO_USAGE, f',"usage":{encode(usage).decode()}}}\n\n')


class _Base:
    """What both formats share: identity, usage, and the constant beginning and end of every event."""

    kind: str
    chunk_kind: str
    prefix: str
    explained: Mapping[str, Any] | None = None

    def __init__(self, shape: Shape, prompts: Sequence[PromptState], n: int, tokenizer: Any) -> None:
        self.shape = shape
        self.prompts = prompts
        self.choices = [ChoiceState(prompt) for prompt in prompts for _ in range(n)]
        self.format = LogprobFormat(tokenizer)
        self.created = int(time.time())
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = (
            f'data: {{"id":"{self.id}","object":"{self.chunk_kind}","created":{self.created},"model":{quote(shape.model)},'
            f'"system_fingerprint":"{shape.fingerprint}","choices":['
        )
        self._tail = "]" + (',"usage":null' if shape.include_usage else "") + "}\n\n"

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(state.token_ids) for state in self.prompts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(state.cached_tokens for state in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def closing(self) -> str:
        usage = f',"usage":{encode(self.usage()).decode()}' if self.shape.include_usage else ""
        explain = f',"explain":{encode(self.explained).decode()}' if self.explained is not None else ""
        return f"{self._head}]{usage}{explain}}}\n\n{DONE}" if usage or explain else DONE

    def event_of(self, choice: dict[str, Any], **extra: Any) -> str:
        """An event that is not worth prerendering."""
        further = "".join(f",{quote(name)}:{encode(value).decode()}" for name, value in extra.items())
        return f"{self._head}{encode(choice).decode()}]{further}{self._tail[1:]}"

    def pieces(self) -> Iterator[bytes]:
        """Choice by choice; the scores of one that is written are needed no more."""
        members = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.shape.model,
            "system_fingerprint": self.shape.fingerprint,
            "choices": self._choice_pieces(),
            "usage": self.usage(),
            **({} if self.explained is None else {"explain": self.explained}),
            **self._prompt_members(),
        }
        return encode_object(members)

    def _choice_pieces(self) -> Iterator[bytes]:
        for index, choice in enumerate(self.choices):
            yield b"," if index else b"["
            yield from encode_object(self.choice(index, choice))
            choice.logprobs, choice.texts = [], []
        yield b"]"

    def choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        """Members of one choice; those that may be long are pieces of JSON."""
        raise NotImplementedError

    def _prompt_members(self) -> dict[str, Any]:
        return {}

    def _prompt_scores(self, prompt: PromptState) -> Iterator[bytes]:
        yield prompt.once("scores", lambda: b"".join(self.format.prompt_pieces(prompt.logprobs)))

    @staticmethod
    def _prompt_ids(prompt: PromptState) -> Iterator[bytes]:
        yield prompt.once("ids", lambda: b"".join(encode_list(prompt.token_ids)))


class ChatAnswer(_Base):
    """chat.completion and chat.completion.chunk. ``echo``: what contents begin with, that the model did not write."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, shape: Shape, prompt: PromptState, n: int, tokenizer: Any, *, echo: str = "") -> None:
        super().__init__(shape, [prompt], n, tokenizer)
        self._echo = echo
        self._plain_heads = [f'{self._head}{{"index":{index},"delta":{{"content":' for index in range(n)]
        self._plain_tail = '},"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self) -> Iterator[str]:
        delta = {"role": "assistant", "content": self._echo}
        extra = {"prompt_token_ids": list(self.prompts[0].token_ids)} if self.shape.token_ids else {}
        for index in range(len(self.choices)):
            yield self.event_of({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, **(extra if index == 0 else {}))

    def event(self, choice: int, delta: RequestDelta) -> str:
        if self.shape.plain:
            text = f"{self._plain_heads[choice]}{quote(delta.text)}{self._plain_tail}" if delta.text or delta.finish_reason is None else ""
        else:
            text = self._rich(choice, delta) if delta.text or delta.token_ids or delta.finish_reason is None else ""
        return text if delta.finish_reason is None else text + self.end(choice, delta.finish_reason, delta.stop_reason)

    def _rich(self, choice: int, delta: RequestDelta) -> str:
        logprobs = self.format.chat(delta.logprobs) if self.shape.logprobs else None
        shown: dict[str, Any] = {"index": choice, "delta": {"content": delta.text}, "logprobs": logprobs, "finish_reason": None}
        if self.shape.token_ids:
            shown["token_ids"] = list(delta.token_ids)
        return self.event_of(shown)

    def end(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> str:
        return self.event_of({"index": choice, "delta": {}, "logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason})

    def _prompt_members(self) -> dict[str, Any]:
        prompt, members = self.prompts[0], dict[str, Any]()
        if self.shape.token_ids:
            members["prompt_token_ids"] = self._prompt_ids(prompt)
        if self.shape.prompt_logprobs:
            members["prompt_logprobs"] = self._prompt_scores(prompt)
        return members

    def choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": self._echo + "".join(choice.texts), "refusal": None},
            "logprobs": self.format.chat_pieces(choice.logprobs) if self.shape.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.shape.token_ids:
            shown["token_ids"] = encode_list(choice.token_ids)
        return shown


class CompletionAnswer(_Base):
    """text_completion. ``echo`` puts the prompt first; ``discard`` shows nothing of what was generated (max_tokens 0)."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, shape: Shape, prompts: Sequence[PromptState], n: int, tokenizer: Any, *, echo: bool, discard: bool) -> None:
        super().__init__(shape, prompts, n, tokenizer)
        self._n = n
        self._echo = echo
        self._discard = discard
        self._offsets = [len(choice.prompt.text) if echo else 0 for choice in self.choices]
        self._plain_heads = [f'{self._head}{{"index":{index},"text":' for index in range(len(self.choices))]
        self._plain_tail = ',"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self) -> Iterator[str]:
        if self._echo or self.shape.token_ids:
            for index, choice in enumerate(self.choices):
                yield self.event_of(self._opening_choice(index, choice))

    def _opening_choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": index, "text": choice.prompt.text if self._echo else "", "logprobs": None, "finish_reason": None}
        if self.shape.token_ids:
            shown["prompt_token_ids"] = list(choice.prompt.token_ids)
        return shown

    def event(self, choice: int, delta: RequestDelta) -> str:
        if self._discard:
            self.choices[choice].num_tokens = 0
            return self._end(choice, RequestDelta(delta.index, "", (), finish_reason="length")) if delta.finish_reason is not None else ""
        if delta.finish_reason is not None:
            return self._end(choice, delta)
        if self.shape.plain:
            return f"{self._plain_heads[choice]}{quote(delta.text)}{self._plain_tail}"
        return self.event_of(self._rich(choice, delta))

    def _end(self, choice: int, delta: RequestDelta) -> str:
        return self.event_of({**self._rich(choice, delta), "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})

    def _rich(self, choice: int, delta: RequestDelta) -> dict[str, Any]:
        logprobs = None
        if self.shape.logprobs and delta.logprobs:
            logprobs = self.format.completion(delta.logprobs, self._offsets[choice])
            self._offsets[choice] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        shown: dict[str, Any] = {"index": choice, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
        if self.shape.token_ids:
            shown["token_ids"] = list(delta.token_ids)
        return shown

    def pieces(self) -> Iterator[bytes]:
        if self._discard:
            for choice in self.choices:
                choice.texts, choice.token_ids, choice.logprobs, choice.num_tokens = [], [], [], 0
                choice.finish_reason, choice.stop_reason = "length", None
        return super().pieces()

    def choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        prompt = choice.prompt
        shown: dict[str, Any] = {
            "index": index,
            "text": self._text(choice),
            "logprobs": encode_object(self._logprobs(choice)) if self.shape.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.shape.prompt_logprobs:
            shown["prompt_logprobs"] = self._prompt_scores(prompt)
        if self.shape.token_ids:
            shown["prompt_token_ids"], shown["token_ids"] = self._prompt_ids(prompt), encode_list(choice.token_ids)
        return shown

    def _text(self, choice: ChoiceState) -> Iterator[bytes]:
        prompt = choice.prompt
        yield b'"'
        if self._echo:
            yield prompt.once("text", lambda: encode(prompt.text)[1:-1])
        yield encode("".join(choice.texts))[1:]

    def _logprobs(self, choice: ChoiceState) -> dict[str, Any]:
        prompt = choice.prompt
        if not self._echo:
            return {name: encode_list(column) for name, column in self.format.columns(choice.logprobs, 0).items()}
        before, offset = prompt.once("columns", lambda: self._prompt_columns(prompt))
        own = self.format.columns(choice.logprobs, offset)
        return {name: joined_lists(before[name], b"".join(encode_list(own[name]))) for name in own}

    def _prompt_columns(self, prompt: PromptState) -> tuple[dict[str, bytes], int]:
        """And where the answer's own texts begin: behind those of the prompt's tokens, which need not be as long as its text."""
        columns = self.format.columns([None, *prompt.logprobs], 0, prompt.token_ids)
        return {name: b"".join(encode_list(column)) for name, column in columns.items()}, sum(map(len, columns["tokens"]))
