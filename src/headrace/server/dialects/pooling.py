"""Models that pool: /v1/embeddings as OpenAI's, /v1/rerank as Jina's and Cohere's, /v1/score as vLLM's; each a decoded
body, or an error that names the field, and its answer.

What lives here: these routes' fields, what is asked of the engine for them, their answers. What may not: pooling,
cosines (engine/pooled.py), what all routes share (generate.py).
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.engine import pooled
from headrace.engine.inputs import ParsedPrompt
from headrace.engine.output import RequestDelta
from headrace.engine.pooled import PoolingParams, cosine, paired
from headrace.errors import InvalidRequest
from headrace.request import Given, Json, Request
from headrace.server.answer_types import PooledUsage
from headrace.server.dialects.body import (
    MAX_USER,
    Body,
    Count,
    Label,
    Priority,
    Salt,
    Truncate,
    check_count,
    prompts_schema,
    read_prompts,
    texts_schema,
)
from headrace.server.exchange import Exchange
from headrace.server.generate import Delivery
from headrace.server.limits import Price
from headrace.server.service import Service
from headrace.server.wire import TEXT_ONLY, Answer, AnswerOptions, ChoiceState, PromptState, encode_list, encode_object

MAX_INPUTS = 2048  # OpenAI's
_A_PLACE = 8  # prompts that take one place of the queue: each is done with once it is computed
_FLOAT_BYTES = 24  # of a number in JSON, at most; base64 takes less

Texts = Annotated[Any, Meta(extra_json_schema=texts_schema(MAX_INPUTS))]


Pairs = list[tuple[str, str]]
Show = Callable[["PooledAnswer"], Json]


class TextDocument(Struct):
    text: str


Documents = Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]


class PoolingBody(Body):
    """What the three routes share."""

    model: str | None = None
    truncate_prompt_tokens: Truncate | None = None
    priority: Priority = 0
    cache_salt: Salt = ""
    user: Label = ""


class EmbeddingBody(PoolingBody, kw_only=True):
    input: Annotated[Any, Meta(extra_json_schema=prompts_schema(MAX_INPUTS))]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None


class PairsBody(PoolingBody):
    instruction: str | None = None
    activation: bool | None = None


class RerankBody(PairsBody, kw_only=True):
    query: str
    documents: Documents
    top_n: Count = 0
    return_documents: bool = True


class ScoreBody(PairsBody, kw_only=True):
    """Under any of the names that vLLM has had for the two texts."""

    aliases = {
        "queries": "text_1", "data_1": "text_1", "documents": "text_2", "data_2": "text_2"
    }  # fmt: skip
    text_1: Texts
    text_2: Texts


@dataclass(slots=True)
class Job:
    """What is asked of the engine: a prompt for each vector or score."""

    prompts: Sequence[Callable[[], ParsedPrompt]]  # to be made beside the event loop
    sizes: Sequence[int]  # characters of each
    param: str
    truncate: int | None = None


def parse_embedding(raw: Given) -> tuple[EmbeddingBody, list[str | array[int]]]:
    """Raises InvalidRequest naming the field."""
    body = EmbeddingBody.read(raw)
    return body, read_prompts("input", body.input, MAX_INPUTS)


def parse_rerank(raw: Given) -> tuple[RerankBody, Pairs]:
    """Raises InvalidRequest naming the field."""
    body = RerankBody.read(raw)
    return body, [(body.query, each if isinstance(each, str) else each.text) for each in body.documents]


def parse_score(raw: Given) -> tuple[ScoreBody, Pairs]:
    """Raises InvalidRequest naming the field."""
    body = ScoreBody.read(raw)
    for name, texts in (("text_1", body.text_1), ("text_2", body.text_2)):
        if not isinstance(texts, str | list):
            raise InvalidRequest(f"{name} must be a text or a list of texts.", param=name, code="invalid_type")
        check_count(name, len(texts) if isinstance(texts, list) else 1, MAX_INPUTS)
    return body, paired(body.text_1, body.text_2, ("text_1", "text_2"))


# --- handlers


async def embeddings(service: Service, exchange: Exchange) -> None:
    body, given = await service.limits.bodies.read(exchange, parse_embedding)
    service.model.check_task("embed")
    spec = service.model.any_engine.inputs.pooling
    params = PoolingParams(dimensions=body.dimensions)
    params.check(spec.width)
    encode: Callable[[array[float]], Any] = array.tolist if body.encoding_format == "float" else _base64

    def item(index: int, result: bytes) -> Json:
        return {"object": "embedding", "index": index, "embedding": encode(pooled.embedding(result, spec, params))}

    truncate = body.truncate_prompt_tokens
    job = Job([partial(_plain, each) for each in given], [len(each) for each in given], "input", truncate)
    size = _FLOAT_BYTES * (body.dimensions or spec.width)
    await _deliver(service, exchange, body, job, "embd-", lambda answer: answer.listed(answer.each(item)), size)


async def rerank(service: Service, exchange: Exchange) -> None:
    """Best first, of those that are equally good the first one asked about."""
    body, pairs = await service.limits.bodies.read(exchange, parse_rerank)
    top_n, documents = body.top_n or None, [{"text": document} for _, document in pairs]

    def show(answer: PooledAnswer, scores: list[float]) -> Json:
        ordered = sorted(enumerate(scores), key=lambda each: -each[1])[:top_n]
        results = [
            {
                "index": index,
                **({"document": documents[index]} if body.return_documents else {}),
                "relevance_score": score,
            }
            for index, score in ordered
        ]
        return {
            "id": answer.id, "model": answer.options.model, "usage": answer.usage(), "results": encode_list(results),
        }  # fmt: skip

    await _score(service, exchange, body, pairs, "rerank-", show, "documents")


async def score(service: Service, exchange: Exchange) -> None:
    body, pairs = await service.limits.bodies.read(exchange, parse_score)

    def show(answer: PooledAnswer, scores: list[float]) -> Json:
        return answer.listed({"index": at, "object": "score", "score": each} for at, each in enumerate(scores))

    await _score(service, exchange, body, pairs, "score-", show, "text_2")


async def _score(
    service: Service, exchange: Exchange, body: PairsBody, pairs: Pairs, prefix: str,
    show: Callable[[PooledAnswer, list[float]], Json], param: str,
) -> None:  # fmt: skip
    """A reranker reads both texts of a pair at once; of a model that embeds, each text is embedded once."""
    service.model.check_task("embed", "score")
    inputs, truncate, activation = service.model.any_engine.inputs, body.truncate_prompt_tokens, body.activation
    if inputs.info.task == "score":
        options: Json = {"instruction": body.instruction, "truncate_prompt_tokens": truncate}
        prompts = [partial(inputs.pair, *pair, **options) for pair in pairs]
        job = Job(prompts, [len(first) + len(second) for first, second in pairs], param)

        def scores(results: Sequence[bytes]) -> list[float]:
            return [pooled.score(each, inputs.pooling, activation) for each in results]

    else:
        for name in ("instruction", "activation"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"{name} is for rerankers, but this model embeds texts; leave it out.", param=name)
        texts = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        places = [(texts[first], texts[second]) for first, second in pairs]
        job = Job([partial(_plain, text) for text in texts], [len(text) for text in texts], param, truncate)

        def scores(results: Sequence[bytes]) -> list[float]:
            vectors = [array("f", each) for each in results]
            return [cosine(vectors[first], vectors[second]) for first, second in places]

    size = _FLOAT_BYTES + max(len(document) for _, document in pairs) * 6
    await _deliver(service, exchange, body, job, prefix, lambda answer: show(answer, scores(answer.results)), size)


def _plain(given: str | array[int]) -> ParsedPrompt:
    return ParsedPrompt(given, None) if isinstance(given, str) else ParsedPrompt(None, given, given=given)


async def _deliver(
    service: Service, exchange: Exchange, body: PoolingBody, job: Job, prefix: str, show: Show, bytes_each: int
) -> None:
    """Checks every prompt, has all of them computed, and answers. ``bytes_each``: of the answer, for each prompt."""
    options = await service.model.named(TEXT_ONLY, body.model)
    service.model.check_priority(body.priority)
    count = len(job.prompts)
    cost = Price(bytes_each * count, 0, 0, 0, (job.param, f"{count} prompts of {bytes_each} bytes each"))
    service.limits.budget.check(cost)
    exchange.watch_disconnect()
    with service.limits.admit(exchange, count, body.user[:MAX_USER], a_place=_A_PLACE, param=job.param):
        requests = list[Request]()
        for make, size in zip(job.prompts, job.sizes, strict=True):
            if requests:
                await asyncio.sleep(0)  # there may be thousands
            prepare = partial(_request, service, exchange, body, job, make)
            requests.append(await service.limits.threads.run(size, prepare, exchange.tenant))
        answer = PooledAnswer(options, [PromptState(each.prompt_token_ids) for each in requests], prefix, show)
        del body, job  # their texts may be large
        await Delivery(service, exchange, answer, requests, "", stream=False).run(cost)


def _request(service: Service, exchange: Exchange, body: PoolingBody, job: Job, make: Any) -> Request:
    inputs, attributes = (
        service.model.any_engine.inputs,
        service.request_attributes(exchange, body, body.user[:MAX_USER]),
    )
    return inputs.pooling_request(make(), param=job.param, truncate_prompt_tokens=job.truncate, **attributes)


# --- answers


class PooledAnswer(Answer):
    """A result for each prompt, once, and usage. ``show``: the answer's members, once all results are there."""

    def __init__(self, options: AnswerOptions, prompts: Sequence[PromptState], prefix: str, show: Show) -> None:
        self.prefix, self._show = prefix, show
        super().__init__(options, prompts, [ChoiceState(prompt) for prompt in prompts])
        self.results: list[bytes] = [b""] * len(prompts)

    def add(self, choice: int, delta: RequestDelta) -> None:
        self.results[choice] = delta.pooled or self.results[choice]

    def usage(self) -> PooledUsage:
        tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return PooledUsage(tokens, tokens)

    def pieces(self) -> Iterator[bytes]:
        return encode_object(self._show(self))

    def each(self, item: Callable[[int, bytes], Json]) -> Iterator[Json]:
        """Results are let go as they are shown."""
        for index, result in enumerate(self.results):
            self.results[index] = b""
            yield item(index, result)

    def listed(self, data: Iterable[Json]) -> Json:
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.options.model}
        return {**head, "data": encode_list(data), "usage": self.usage()}


def _base64(values: array[float]) -> str:
    if sys.byteorder == "big":  # little-endian float32, as OpenAI's
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
