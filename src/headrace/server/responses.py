"""/v1/responses: answers as OpenAI's Responses API has them.

What lives here: the response object, its items, its events, the handlers. What may not: reading requests (protocol/responses.py),
generation, where responses are kept (stored.py).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from headrace.errors import HeadraceError, InvalidRequest, NotFound
from headrace.server import generate
from headrace.server.answers import PromptState, Shape
from headrace.server.exchange import Exchange
from headrace.server.messages import text_of
from headrace.server.parsing.segments import OutputParser
from headrace.server.parts import Kind, Part, PartsAnswer
from headrace.server.protocol.responses import ResponsesRequest, parse_responses
from headrace.server.service import CreateParser, Service, Tokenizer
from headrace.server.stored import Stored
from headrace.server.wire import ErrorShape, encode, error_object, quote

_INPUT_ITEMS = "/input_items"
_PAGE = 20  # items
_MOST_QUERIES = 16
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


async def responses(service: Service, exchange: Exchange) -> None:
    asked = _Asked(service, exchange)
    await generate.converse(service, exchange, parse_responses, asked.create_answer, "input", asked.complete)


class _Asked:
    """One request and what is kept of it."""

    def __init__(self, service: Service, exchange: Exchange) -> None:
        self._service, self._exchange = service, exchange
        self._items: bytes | None = None

    async def complete(self, request: ResponsesRequest) -> ResponsesRequest:
        """With the conversation before it."""
        if request.previous is not None:
            found = await _find(self._service, request.previous, self._exchange.tenant)
            if found is None:
                raise InvalidRequest(
                    f"There is no response {request.previous[:100]!r} of yours, or it is not kept any more; send the whole conversation as input.",
                    param="previous_response_id", code="previous_response_not_found",
                )  # fmt: skip
            request = await self._service.threads.run(found.size, lambda: request.after(_conversation(found)), self._exchange.tenant)
        if request.store:
            items = [{"id": f"item_{uuid.uuid4().hex}", **item} for item in request.items]
            self._items = await self._service.threads.run(sum(map(_length, request.messages)), lambda: encode(items), self._exchange.tenant)
        return request

    def create_answer(
        self, request: ResponsesRequest, shape: Shape, prompt: PromptState, tokenizer: Tokenizer | None, create_parser: CreateParser
    ) -> ResponseAnswer:
        answer = ResponseAnswer(shape, prompt, create_parser(), request.shown, self._keep)
        self._exchange.errors = ResponseErrors(answer)
        return answer

    def _keep(self, response: Mapping[str, Any]) -> None:
        if self._items is not None:
            self._service.stored.put(self._exchange.tenant, response["id"], Stored(self._items, encode(response)))


def _length(message: Mapping[str, Any]) -> int:
    return len(text_of(message["content"]))


def _conversation(stored: Stored) -> list[Any]:
    items: list[Any] = msgspec.json.decode(stored.items)
    return [*items, *msgspec.json.decode(stored.response)["output"]]


async def _find(service: Service, name: str, tenant: str) -> Stored | None:
    """This front end's or another's."""
    if (found := service.stored.find(tenant, name)) is not None:
        return found
    told = await service.commons.find_response(name, tenant)
    return None if told is None else Stored(*told)


async def _require(service: Service, exchange: Exchange) -> Stored:
    name = _name(exchange)
    found = await _find(service, name, exchange.tenant)
    if found is None:
        raise _unknown(name)
    return found


def _name(exchange: Exchange) -> str:
    return exchange.path.removeprefix("/v1/responses/").removesuffix(_INPUT_ITEMS)


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"There is no response {name[:100]!r} of yours, or it is not kept any more; store is for a day, within bounds.",
        param="response_id", code="response_not_found",
    )  # fmt: skip


async def show(service: Service, exchange: Exchange) -> None:
    found = await _require(service, exchange)
    await exchange.reply(200, found.response)


async def delete(service: Service, exchange: Exchange) -> None:
    name = _name(exchange)
    if not (service.stored.delete(exchange.tenant, name) or await service.commons.delete_response(name, exchange.tenant)):
        raise _unknown(name)
    await exchange.reply_json({"id": name, "object": "response", "deleted": True})


async def input_items(service: Service, exchange: Exchange) -> None:
    """Newest first, by default, and a page at a time."""
    found = await _require(service, exchange)
    query = dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1"), max_num_fields=_MOST_QUERIES))
    items: list[Any] = msgspec.json.decode(found.items)
    if query.get("order", "desc") == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    first = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    limit = int(query["limit"]) if re.fullmatch("[0-9]{1,3}", query.get("limit", "")) else _PAGE
    page = items[first : first + limit]
    more = first + limit < len(items)
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    await exchange.reply_json({"object": "list", "data": page, **ends, "has_more": more})


class ResponseAnswer(PartsAnswer):
    """One response, whole or as numbered events. ``shown``: request fields that it repeats. ``keep`` gets it once it has ended."""

    def __init__(
        self,
        shape: Shape,
        prompt: PromptState,
        parser: OutputParser | None,
        shown: Mapping[str, Any],
        keep: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        super().__init__(shape, prompt, parser)
        self._keep = keep
        self.id = self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._shown = shown
        self._number = 0
        self._failed = False
        self._item_ids: list[str] = []
        self._places: list[str] = []  # of each part, in the events about it

    # --- the object

    def whole(self) -> dict[str, Any]:
        return self._ended()

    def _ended(self) -> dict[str, Any]:
        reason = _INCOMPLETE.get(self.end_reason)
        response = self._response("completed" if reason is None else "incomplete", incomplete=reason)
        self._keep(response)
        return response

    def _response(self, status: str, *, incomplete: str | None = None, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        ended = status != "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": self.shape.model,
            "output": [self._item(index) for index in range(len(self.parts))] if ended else [],
            "service_tier": "default",
            "stop_reason": self.choice.stop_reason,
            "system_fingerprint": self.shape.fingerprint,
            "truncation": "disabled",
            "usage": self.usage() if ended else None,
            **self._shown,
            **self.extras(),
        }

    def _item(self, index: int) -> dict[str, Any]:
        part = self.parts[index]
        last = index == len(self.parts) - 1
        status = "in_progress" if not part.closed else "incomplete" if last and self._cut else "completed"
        item: dict[str, Any] = {"id": self._item_ids[index], "status": status}
        if part.custom:
            return {**item, "type": "custom_tool_call", "call_id": part.id, "name": part.name, "input": part.text}
        if part.kind is Kind.CALL:
            return {**item, "type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.text}
        content = [_content(part, part.text)] if part.closed else []
        if part.kind is Kind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    @property
    def _cut(self) -> bool:
        """The last item is not as the model would have ended it."""
        return self._failed or self.end_reason in _INCOMPLETE

    def usage(self) -> dict[str, Any]:
        prompt, written = self.prompts[0], self.choice.num_tokens
        read = len(prompt.token_ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": prompt.cached_tokens, "cache_write_tokens": 0},  # writing costs nothing
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": read + written,
        }

    # --- the events

    def begin(self) -> str:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def open(self, index: int, part: Part) -> str:
        item_id = f"{'ctc' if part.custom else _ID_PREFIXES[part.kind]}_{uuid.uuid4().hex}"
        self._item_ids.append(item_id)
        place = f'"item_id":"{item_id}","output_index":{index}'
        self._places.append(place if part.kind is Kind.CALL else f'{place},"content_index":0')
        events = self._event("response.output_item.added", output_index=index, item=self._item(index))
        return events if part.kind is Kind.CALL else events + self._content_part("added", index, "")

    def grow(self, index: int, part: Part, text: str) -> str:
        return self._about(index, f"{_stem(part)}.delta", "delta", quote(text))

    def close(self, index: int, part: Part) -> str:
        name = "input" if part.custom else "arguments" if part.kind is Kind.CALL else "text"
        named = f',"name":{quote(part.name)}' if part.kind is Kind.CALL and not part.custom else ""
        events = self._about(index, f"{_stem(part)}.done", name, quote(part.text) + named)
        if part.kind is not Kind.CALL:
            events += self._content_part("done", index, part.text)
        return events + self._event("response.output_item.done", output_index=index, item=self._item(index))

    def _content_part(self, change: str, index: int, text: str) -> str:
        return self._about(index, f"response.content_part.{change}", "part", encode(_content(self.parts[index], text)).decode())

    def closing(self) -> str:
        response = self._ended()
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: HeadraceError) -> str:
        """What a client sees last of a response that failed."""
        shown = error_object(error)["error"]
        self._failed = True
        for part in self.parts:
            part.closed = True
        response = self._response("failed", error={"code": "server_error", "message": error.message})
        flat = {"code": shown["code"], "message": shown["message"], "param": shown["param"]}
        return self._event("response.failed", response=response) + self._event("error", **flat, error=shown)

    def _event(self, kind: str, **fields: Any) -> str:
        shown = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {encode(shown).decode()}\n\n"

    def _about(self, index: int, kind: str, name: str, value: str) -> str:
        """An event about one part; ``value`` is JSON."""
        number, self._number = self._number, self._number + 1
        logprobs = ',"logprobs":[]' if kind.startswith("response.output_text") else ""
        return f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{self._places[index]},"{name}":{value}{logprobs}}}\n\n'


class ResponseErrors(ErrorShape):
    """Errors of a response that has begun."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer

    def event(self, error: HeadraceError) -> bytes:
        return self._answer.failure(error).encode("ascii")


def _content(part: Part, text: str) -> dict[str, Any]:
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _stem(part: Part) -> str:
    """Of the events about a part's text."""
    if part.custom:
        return "response.custom_tool_call_input"
    return {Kind.REASONING: "response.reasoning_text", Kind.TEXT: "response.output_text", Kind.CALL: "response.function_call_arguments"}[part.kind]
