"""/v1/completions: a decoded body becomes a CompletionRequest, or an error that names the field; and the answer to it.

What lives here: this route's own fields, prompts of every form, the text_completion. What may not: what routes share
(body.py, generate.py).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from headrace.engine.inputs import model_defaults
from headrace.engine.output import RequestDelta
from headrace.errors import InvalidRequest
from headrace.request import Given, Json, Request
from headrace.server import generate
from headrace.server.dialects.body import (
    Count,
    GenerationRequest,
    OlderBody,
    asked,
    older_options,
    prompts_schema,
    read_prompts,
)
from headrace.server.exchange import Exchange
from headrace.server.generate import Delivery
from headrace.server.limits import TOKEN_BYTES
from headrace.server.service import Service
from headrace.server.wire import (
    HOLE,
    AnswerOptions,
    ChoicesAnswer,
    ChoiceState,
    PromptState,
    encode,
    encode_list,
    encode_object,
    joined_lists,
    quote,
)

MAX_PROMPTS = 1024
MAX_CHOICES = 2048  # prompts x n
MAX_ALLOWED_IDS = 2**20  # prompts x allowed_token_ids: each prompt carries its own to the engine
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class CompletionBody(OlderBody, kw_only=True):
    prompt: Annotated[Any, Meta(extra_json_schema=prompts_schema(MAX_PROMPTS))]
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationRequest[CompletionBody]):
    """``prompts`` holds texts and token ids. ``discard``: the one token that the engine makes for max_tokens 0 is not
    shown."""

    prompts: list[str | array[int]]
    discard: bool


def parse_completion(raw: Given, defaults: Given) -> CompletionRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = CompletionBody.read(raw)
    default = model_defaults(defaults).get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    limit = default if body.max_tokens is None else body.max_tokens
    discard = limit == 0 and body.echo
    values = {"max_tokens": 1 if discard else limit, "logprobs": body.logprobs}
    if body.echo and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    read = asked(body, defaults, **values)
    options = older_options(body, logprobs=body.logprobs is not None)
    prompts = read_prompts("prompt", body.prompt, MAX_PROMPTS)
    params = read["params"]
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n {params.n} make more than {MAX_CHOICES} choices; ask for fewer.", param="n"
        )
    allowed = len(params.allowed_token_ids or ())
    if len(prompts) * allowed > MAX_ALLOWED_IDS:
        told = f"{len(prompts)} prompts with {allowed} allowed ids each are too many; send fewer at once."
        raise InvalidRequest(told, param="allowed_token_ids")
    if body.stream and body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not given in streams; set stream to false.", param="echo")
    return CompletionRequest(**read, options=options, prompts=prompts, discard=discard)


async def completions(service: Service, exchange: Exchange) -> None:
    engine = service.model.engine
    request = await service.limits.bodies.read(exchange, partial(parse_completion, defaults=service.model.defaults))
    body, params, discard = request.body, request.params, request.discard
    stream, echo, truncate = body.stream, body.echo, body.truncate_prompt_tokens
    options = await generate.options_of(service, request)
    exchange.watch_disconnect()
    with service.limits.admit(exchange, len(request.prompts), body.user_name):
        prepared = list[Request]()
        for prompt in request.prompts:
            if prepared:
                await asyncio.sleep(0)  # there may be a thousand; of a burst of requests each goes on at once
            parsed = await generate.encode_prompt(service, exchange, prompt, body.add_special_tokens, truncate)
            prepared.append(await generate.prepare(service, exchange, request, "prompt", parsed, params))
        shown = request.prompts if truncate is None else [each.prompt_token_ids for each in prepared]
        states = [
            await _prompt_state(service, each, prompt, echo) for each, prompt in zip(prepared, shown, strict=True)
        ]
        prepared, cost = generate.priced(service, prepared, options, body, [state.text for state in states])
        answer = CompletionAnswer(options, states, params.n, engine.tokenizer, echo=echo, discard=discard)
        grammar_name = body.grammar_name
        del request, body, shown, parsed, prompt  # their texts may be large, and the answer may take long
        await Delivery(service, exchange, answer, prepared, grammar_name, stream=stream).run(cost)


async def _prompt_state(service: Service, request: Request, prompt: str | array[int], echo: bool) -> PromptState:
    """``text`` is what echo shows: the prompt as it was written, or as it reads after truncation."""
    ids, tokenizer = request.prompt_token_ids, service.model.any_engine.tokenizer
    if not echo or isinstance(prompt, str) or tokenizer is None:
        return PromptState(ids, prompt if echo and isinstance(prompt, str) else "")
    decode = partial(tokenizer.decode, ids, False)
    return PromptState(ids, await service.limits.threads.run(TOKEN_BYTES * len(ids), decode))


def _choice(index: int, text: str, logprobs: Json | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


class CompletionAnswer(ChoicesAnswer):
    """text_completion. ``echo`` puts the prompt first; ``discard`` shows nothing of what was generated (max_tokens
    0)."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(
        self,
        options: AnswerOptions,
        prompts: Sequence[PromptState],
        n: int,
        tokenizer: Any,
        *,
        echo: bool,
        discard: bool,
    ) -> None:
        super().__init__(options, prompts, n, tokenizer)
        self._echo, self._discard = echo, discard
        self._offsets = [len(choice.prompt.text) if echo else 0 for choice in self.choices]
        self._plain = [self._around(_choice(index, HOLE)) for index in range(len(self.choices))]

    def opening(self) -> Iterator[str]:
        for index, choice in enumerate(self.choices) if self._echo or self.options.token_ids else ():
            shown = _choice(index, choice.prompt.text if self._echo else "")
            if self.options.token_ids:
                shown["prompt_token_ids"] = list(choice.prompt.token_ids)
            yield self.event_of(shown)

    def event(self, choice: int, delta: RequestDelta) -> str:
        reason = delta.finish_reason
        if self._discard:
            self.choices[choice].num_tokens = 0
            delta = RequestDelta(delta.index, "", (), finish_reason="length")
            if reason is None:
                return ""
        if reason is None and self.options.plain:
            return quote(delta.text).join(self._plain[choice])
        ended = {} if reason is None else {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return self.event_of({**self._rich(choice, delta), **ended})

    def _rich(self, choice: int, delta: RequestDelta) -> Json:
        logprobs = None
        if self.options.logprobs and delta.logprobs:
            logprobs = self.format.completion(delta.logprobs, self._offsets[choice])
            self._offsets[choice] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        shown = _choice(choice, delta.text, logprobs)
        if self.options.token_ids:
            shown["token_ids"] = list(delta.token_ids)
        return shown

    def pieces(self) -> Iterator[bytes]:
        if self._discard:
            for choice in self.choices:
                choice.texts, choice.token_ids, choice.logprobs, choice.num_tokens = [], [], [], 0
                choice.finish_reason, choice.stop_reason = "length", None
        return super().pieces()

    def choice(self, index: int, choice: ChoiceState) -> Json:
        prompt = choice.prompt
        shown: Json = {
            "index": index,
            "text": self._text(choice),
            "logprobs": encode_object(self._logprobs(choice)) if self.options.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.options.prompt_logprobs:
            shown["prompt_logprobs"] = self._prompt_scores(prompt)
        if self.options.token_ids:
            shown["prompt_token_ids"], shown["token_ids"] = self._prompt_ids(prompt), encode_list(choice.token_ids)
        return shown

    def _text(self, choice: ChoiceState) -> Iterator[bytes]:
        prompt = choice.prompt
        yield b'"'
        if self._echo:
            yield prompt.once("text", lambda: encode(prompt.text)[1:-1])
        yield encode("".join(choice.texts))[1:]

    def _logprobs(self, choice: ChoiceState) -> Json:
        prompt = choice.prompt
        if not self._echo:
            return {name: encode_list(column) for name, column in self.format.columns(choice.logprobs, 0).items()}
        before, offset = prompt.once("columns", lambda: self._prompt_columns(prompt))
        own = self.format.columns(choice.logprobs, offset)
        return {name: joined_lists(before[name], b"".join(encode_list(own[name]))) for name in own}

    def _prompt_columns(self, prompt: PromptState) -> tuple[dict[str, bytes], int]:
        """And where the answer's own texts begin: behind those of the prompt's tokens, which need not be as long as its
        text."""
        columns = self.format.columns([None, *prompt.logprobs], 0, prompt.token_ids)
        return {name: b"".join(encode_list(column)) for name, column in columns.items()}, sum(
            map(len, columns["tokens"])
        )
