"""/v1/responses: answers as OpenAI's Responses API has them.

What lives here: the response object, its items, its events, the handlers. What may not: reading requests
(responses_body.py), generation, where responses are kept (stored.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from headrace.errors import HeadraceError, InvalidRequest, NotFound
from headrace.request import Given, Json
from headrace.server import generate
from headrace.server.answer_types import (
    Deleted,
    Incomplete,
    Item,
    ReadTokens,
    Response,
    ResponseUsage,
    WrittenTokens,
)
from headrace.server.dialects.body import read_query
from headrace.server.dialects.conversation import text_of
from headrace.server.dialects.parts import Kind, Part, PartsAnswer, event_of
from headrace.server.dialects.responses_body import ResponsesRequest, parse_responses
from headrace.server.exchange import Exchange
from headrace.server.generate import ChatContext
from headrace.server.parsing.parser import OutputParser
from headrace.server.service import Service
from headrace.server.stored import Stored
from headrace.server.wire import HOLE, AnswerOptions, ErrorFormat, PromptState, around, encode, error_object, quote

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_STEMS = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text", Kind.CALL: "function_call_arguments"}
_ID_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


class Shown(Struct, forbid_unknown_fields=True):
    stream: Literal["false"] = "false"  # it has ended, and is shown whole


async def responses(service: Service, exchange: Exchange) -> None:
    asked = _ResponseRoute(service, exchange)
    await generate.converse(service, exchange, parse_responses, asked.create_answer, "input", asked.complete)


class _ResponseRoute:
    """One request and what is kept of it."""

    def __init__(self, service: Service, exchange: Exchange) -> None:
        self._service, self._exchange = service, exchange
        self._items: bytes | None = None

    async def complete(self, request: ResponsesRequest) -> ResponsesRequest:
        """With the conversation before it."""
        previous = request.body.previous_response_id
        if previous is not None:
            found = await _find(self._service, previous, self._exchange.tenant)
            if found is None:
                raise InvalidRequest(
                    f"There is no response {previous[:100]!r} of yours, or it is not kept any more; send the whole conversation as input.",
                    param="previous_response_id", code="previous_response_not_found",
                )  # fmt: skip
            request = await self._service.limits.threads.run(
                found.size, lambda: request.after(_conversation(found)), self._exchange.tenant
            )
        if request.body.store:
            items = request.items
            size = sum(len(text_of(message["content"])) for message in request.conversation.messages)
            self._items = await self._service.limits.threads.run(size, lambda: encode(items), self._exchange.tenant)
        return request

    def create_answer(self, context: ChatContext[ResponsesRequest]) -> ResponseAnswer:
        answer = ResponseAnswer(context.options, context.prompt, context.parsers[0], context.request.shown, self._keep)
        self._exchange.errors = ResponseErrors(answer)
        return answer

    def _keep(self, response: Response) -> None:
        if self._items is not None:
            self._service.stored.put(self._exchange.tenant, response.id, Stored(self._items, encode(response)))


def _conversation(stored: Stored) -> list[Any]:
    items: list[Any] = msgspec.json.decode(stored.items)
    return [*items, *msgspec.json.decode(stored.response)["output"]]


async def _find(service: Service, name: str, tenant: str) -> Stored | None:
    """This front end's or another's."""
    found = await service.first("find_response", name, tenant)
    return None if found is None else Stored(*found)


async def _require(service: Service, exchange: Exchange) -> Stored:
    found = await _find(service, exchange.named, exchange.tenant)
    if found is None:
        raise _unknown(exchange.named)
    return found


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"There is no response {name[:100]!r} of yours, or it is not kept any more; store is for a day, within bounds.",
        param="response_id", code="response_not_found",
    )  # fmt: skip


async def show(service: Service, exchange: Exchange) -> None:
    found = await _require(service, exchange)
    read_query(exchange.query, Shown)
    await exchange.reply(200, found.response)


async def delete(service: Service, exchange: Exchange) -> None:
    if not await service.first("delete_response", exchange.named, exchange.tenant):
        raise _unknown(exchange.named)
    await exchange.reply_json(Deleted(exchange.named))


class ResponseAnswer(PartsAnswer):
    """One response, whole or as numbered events. ``shown``: request fields that it repeats. ``keep`` gets it once it
    has ended."""

    prefix = "resp_"

    def __init__(
        self,
        options: AnswerOptions,
        prompt: PromptState,
        parser: OutputParser | None,
        shown: Given,
        keep: Callable[[Response], None] = lambda _: None,
    ) -> None:
        super().__init__(options, prompt, parser)
        self._keep = keep
        self._shown = shown
        self._number = 0
        self._failed = False
        self._growth: list[list[str]] = []  # each part's deltas, but for their numbers and texts
        self._places: list[Json] = []  # of each part, in the events about it

    # --- the object

    def whole(self) -> Response:
        """It has ended."""
        reason = _INCOMPLETE.get(self.end_reason)
        response = self._response("completed" if reason is None else "incomplete", reason)
        self._keep(response)
        return response

    def _response(self, status: Any, incomplete: Any = None, error: Json | None = None) -> Response:
        ended = status != "in_progress"
        return Response(
            id=self.id,
            created_at=self.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=None if incomplete is None else Incomplete(incomplete),
            model=self.options.model,
            output=[self._item(index) for index in range(len(self.parts))] if ended else [],
            stop_reason=self.choice.stop_reason,
            system_fingerprint=self.options.fingerprint,
            usage=self.usage() if ended else None,
            **self._shown,
            **self.extras(),
        )

    def _item(self, index: int) -> Item:
        part = self.parts[index]
        last = index == len(self.parts) - 1
        status: Any = "in_progress" if not part.closed else "incomplete" if last and self._cut else "completed"
        make = partial(Item, self._places[index]["item_id"], status)
        if part.custom:
            return make("custom_tool_call", call_id=part.id, name=part.name, input=part.text)
        if part.kind is Kind.CALL:
            return make("function_call", call_id=part.id, name=part.name, arguments=part.text)
        content = [_content(part, part.text)] if part.closed else []
        if part.kind is Kind.REASONING:
            return make("reasoning", summary=[], content=content)
        return make("message", role="assistant", content=content)

    @property
    def _cut(self) -> bool:
        """The last item is not as the model would have ended it."""
        return self._failed or self.end_reason in _INCOMPLETE

    def usage(self) -> ResponseUsage:
        prompt, written = self.prompts[0], self.choice.num_tokens
        read, reasoned = len(prompt.token_ids), WrittenTokens(self.reasoning_tokens)
        return ResponseUsage(read, ReadTokens(prompt.cached_tokens), written, reasoned, read + written)

    # --- the events

    def begin(self) -> str:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def open(self, index: int, part: Part) -> str:
        item_id = f"{'ctc' if part.custom else _ID_PREFIXES[part.kind]}_{uuid.uuid4().hex}"
        place: Json = {"item_id": item_id, "output_index": index}
        self._places.append(place if part.kind is Kind.CALL else {**place, "content_index": 0})
        kind = f"{_stem(part)}.delta"
        self._growth.append(around({"type": kind, "sequence_number": HOLE, **self._about(index, kind, delta=HOLE)}))
        events = self._event("response.output_item.added", output_index=index, item=self._item(index))
        return events if part.kind is Kind.CALL else events + self._content_part("added", index, "")

    def grow(self, index: int, part: Part, text: str) -> str:
        number, self._number = self._number, self._number + 1
        head, middle, tail = self._growth[index]
        return f"event: {_stem(part)}.delta\ndata: {head}{number}{middle}{quote(text)}{tail}\n\n"

    def close(self, index: int, part: Part) -> str:
        name = "input" if part.custom else "arguments" if part.kind is Kind.CALL else "text"
        named = {"name": part.name} if part.kind is Kind.CALL and not part.custom else {}
        kind = f"{_stem(part)}.done"
        events = self._event(kind, **self._about(index, kind, **{name: part.text}, **named))
        if part.kind is not Kind.CALL:
            events += self._content_part("done", index, part.text)
        return events + self._event("response.output_item.done", output_index=index, item=self._item(index))

    def _content_part(self, change: str, index: int, text: str) -> str:
        kind = f"response.content_part.{change}"
        return self._event(kind, **self._about(index, kind, part=_content(self.parts[index], text)))

    def closing(self) -> str:
        response = self.whole()
        return self._event(f"response.{response.status}", response=response)

    def failure(self, error: HeadraceError) -> str:
        """What a client sees last of a response that failed."""
        shown = error_object(error).error
        self._failed = True
        for part in self.parts:
            part.closed = True
        response = self._response("failed", error={"code": "server_error", "message": error.message})
        flat = {"code": shown.code, "message": shown.message, "param": shown.param}
        return self._event("response.failed", response=response) + self._event("error", **flat, error=shown)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event_of(kind, sequence_number=self._number - 1, **fields)

    def _about(self, index: int, kind: str, **fields: Any) -> Json:
        """What an event about one part says."""
        logprobs: Json = {"logprobs": []} if kind.startswith("response.output_text") else {}
        return {**self._places[index], **fields, **logprobs}


class ResponseErrors(ErrorFormat):
    """Errors of a response that has begun."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer

    def event(self, error: HeadraceError) -> bytes:
        return self._answer.failure(error).encode("ascii")


def _content(part: Part, text: str) -> Json:
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _stem(part: Part) -> str:
    """Of the events about a part's text."""
    return f"response.{'custom_tool_call_input' if part.custom else _STEMS[part.kind]}"
