"""What handlers are given: the model with its engine, the limits of all requests together, and what is observed of them;
and sleep over HTTP: its routes, under the names that vLLM's users know, and what a request does to a model that sleeps.

What lives here: state, and who may put a model to sleep, and when. What may not: parsing, processes and signals
(lifecycle.py changes the state), what sleeping is (the engine's), several models (members/).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeGuard, Unpack

from msgspec import Meta, Struct

from headrace.config import Decision, EngineConfig, ServerConfig
from headrace.engine.info import check_sleep
from headrace.engine.inputs import RequestAttributes
from headrace.engine.output import RequestDelta
from headrace.errors import EngineDead, HeadraceError, InvalidRequest, NotFound, Overloaded, Unavailable
from headrace.processes.garbage import freeze_start
from headrace.request import Given, Request, SamplingParams, StructuredOutputs
from headrace.server import inflight
from headrace.server.dialects.body import Conversation, GeneratingBody, read_query
from headrace.server.dialects.conversation import text_of
from headrace.server.exchange import Exchange, StreamPings
from headrace.server.exposition import CounterPage, Counters, Lines, ServerMetrics, most_places
from headrace.server.forced import constrain
from headrace.server.frontends.link import Peers
from headrace.server.http_errors import Forbidden
from headrace.server.limits import INLINE_BYTES, Bodies, Budget, IgnoredFields, Threads, cell_of, sees_all, tenant_of
from headrace.server.moderation.watch import Moderator
from headrace.server.parsing import PLAIN, AnswerFormat, answer_format
from headrace.server.parsing.choice import formats_of
from headrace.server.parsing.formats import Formats, ReasoningFormat
from headrace.server.stored import StoredResponses
from headrace.server.tools import functions_of
from headrace.server.wire import AnswerOptions

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM
    from headrace.engine.tokenizer import Tokenizer
    from headrace.server.dialects.pooling import PoolingBody

log = logging.getLogger("headrace.server")


class SleepQuery(Struct, forbid_unknown_fields=True):
    """``mode``: running requests are waited for, or end with an error."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1
    mode: Literal["wait", "abort"] = "wait"


async def sleep(service: Service, exchange: Exchange) -> None:
    query, engine = read_query(exchange.query, SleepQuery), service.model.engine
    check_operator(service.config, exchange)
    check_sleep(engine.info, query.level)
    if query.mode == "abort":
        end_running(service)
    await service.sleep(query.level)
    await exchange.reply_json({"status": "ok"})


def end_running(service: Service) -> None:
    told = "The model was put to sleep before this answer was complete; send the request again."
    service.limits.end_all(Unavailable(told))


async def wake_up(service: Service, exchange: Exchange) -> None:
    check_operator(service.config, exchange)
    check_sleep(service.model.engine.info)
    await service.wake()
    await exchange.reply_json({"status": "ok"})


async def is_sleeping(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json({"is_sleeping": service.model.any_engine.asleep})


def check_operator(config: ServerConfig, exchange: Exchange) -> None:
    if not sees_all(config, exchange.key_name):
        raise Forbidden("This is for operators; ask with a key that --operator-key names.", code="operators_only")


async def _sleep(engine: AsyncLLM, level: int) -> None:
    await engine.sleep(level)
    if engine.num_streams:  # some came before it was known that it would sleep
        engine.used()


class WakeOnUse:
    """Called with each request that is submitted. One that comes to a model that sleeps waits in its engine, unless
    ``when_asleep`` says otherwise."""

    def __init__(self, engine: AsyncLLM, when_asleep: str) -> None:
        self._engine, self._when = engine, when_asleep
        self._waking: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        if not self._engine.asleep or self._when == "wait":
            return
        if self._when == "refuse":
            raise Unavailable("The model sleeps; wake it with POST /wake_up, or try again later.", retry_after=10)
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        try:
            await self._engine.wake_up()
        except HeadraceError as error:
            log.error("The model could not be woken: %s", error.message)


_NAMED = 20  # models and adapters, at most, where one is asked for that is not there
_BEFORE, _AFTER = "Thinking of it.", "Having thought."  # in a conversation that shows what stands between


class DeltaStream(Protocol):
    """One request's deltas in lists of what has arrived. Closing it before its end aborts the request."""

    def __aiter__(self) -> AsyncIterator[Sequence[RequestDelta]]: ...

    async def aclose(self) -> None: ...


class EngineStream(DeltaStream, Protocol):
    """As it comes from the engine."""

    def end_answer(self, index: int) -> None:
        """Nothing more of this answer comes, nor is computed."""


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Model:
    """The model that is served: its engine once it is there, its names, what it writes."""

    def __init__(self, config: ServerConfig, engine_config: EngineConfig, version: str, threads: Threads) -> None:
        self._config = config
        self._version = version
        self._threads = threads
        self.engine_config = engine_config
        self.state = State.LOADING
        self.fingerprint = f"headrace-{version}"
        self.decisions: tuple[Decision, ...] = ()  # choices of the server's own
        self._formats = Formats()
        self._special_markers: frozenset[str] = frozenset()
        self._closing: str | None = None  # of reasoning, once a request needs it
        self.found: AsyncLLM | None = None  # the engine, whatever its state; None while it loads

    def attach(self, engine: AsyncLLM) -> None:
        """The engine has loaded."""
        self.found = engine
        facts = repr((self._version, engine.info.model, engine.info.dtype, engine.info.device, engine.info.vocab_size))
        self.fingerprint = f"headrace-{self._version}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
        if engine.tokenizer is not None:
            engine.tokenizer.warm_up()
        self.state = State.READY

    def learn_formats(self, tokenizer: Tokenizer) -> None:
        """How the model writes calls and reasoning. Renders its template: not for an event loop."""
        self._formats, self.decisions = formats_of(
            tokenizer, self._config.tool_call_parser, self._config.reasoning_parser
        )
        self._special_markers = frozenset(filter(tokenizer.is_special, self._formats.names))

    def answer_format(
        self, prompt: str, conversation: Conversation, wanted: StructuredOutputs | None
    ) -> tuple[AnswerFormat, StructuredOutputs | None]:
        """What answers are made of, and what they are held to. ``prompt``: its end. Raises InvalidRequest."""
        tools, choice = conversation.tools, conversation.choice
        asked, reasoning = wanted is not None or choice.forced or choice.customs, self._formats.reasoning
        if not (asked or tools or reasoning):
            return PLAIN, None
        if conversation.continue_final_message and reasoning is not None:  # a text outside of reasoning is past it
            said = text_of(conversation.messages[-1]["content"])
            prompt = max((reasoning.end, reasoning.begin), key=said.rfind)
        format = answer_format(
            self._formats, prompt, functions_of(tools) if tools else {}, parallel=choice.parallel, only=choice.only
        )
        return constrain(format, tools, choice, wanted, self._special_markers) if asked else (format, None)

    @property
    def reasons(self) -> bool:
        """How its model reasons is known, if it does."""
        return self._formats.reasoning is not None

    async def closing(self, reasoning: ReasoningFormat) -> str:
        """What the family writes from the end of its reasoning to the answer: as its template shows it, or lines."""
        if self._closing is None:
            thought = {"role": "assistant", "content": _AFTER, "reasoning_content": _BEFORE}
            said = [{"role": "user", "content": "a"}, thought]
            render = partial(self.any_engine.inputs.chat_prompt, said, add_generation_prompt=False)
            shown = ""
            with contextlib.suppress(InvalidRequest):
                shown = (await self._threads.run(INLINE_BYTES + 1, render)).text or ""
            between = shown.partition(_BEFORE)[2].partition(_AFTER)[0]
            self._closing = between if reasoning.end in between else f"\n{reasoning.end}\n\n"
        return self._closing

    def parsed_params(self, params: SamplingParams) -> SamplingParams:
        """A parser must see the markers, also those that decoding would leave out."""
        return replace(params, skip_special_tokens=False) if self._special_markers else params

    @property
    def scheduling_policy(self) -> str:
        return self.engine_config.scheduler.scheduling_policy

    @property
    def engine(self) -> AsyncLLM:
        """Raises Unavailable while loading or draining, EngineDead after the engine's death."""
        self.check_open()
        return self.any_engine

    def check_open(self) -> None:
        """Raises Unavailable while draining."""
        if self.state is State.DRAINING:
            told = "The server is shutting down and takes no new requests; try another or wait."
            raise Unavailable(told, retry_after=5)

    @property
    def any_engine(self) -> AsyncLLM:
        """As ``engine``, while draining too."""
        if self.found is None:
            raise Unavailable("The model is still loading; wait for /ready.", retry_after=2)
        if self.state is State.DEAD or not self.found.alive:
            raise EngineDead("The engine does not answer; if it does not recover, the server ends.")
        return self.found

    @property
    def names(self) -> Sequence[str]:
        """The first is reported. Of one that has not loaded, those that it was given."""
        return self.engine_config.model.served_model_name if self.found is None else self.found.info.served_names

    @property
    def name(self) -> str:
        return next(iter(self.names), "")

    def condition(self) -> str:
        return "asleep" if self.found is not None and self.found.asleep else "awake"

    @property
    def defaults(self) -> Given:
        """What holds where a request says nothing: the model's own, and the server's."""
        model = self.any_engine.generation_defaults
        return {**model, "repetition_detection": True} if self._config.repetition_detection else model

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest for one that would change nothing."""
        if priority and self.scheduling_policy != "priority":
            told = "priority needs a server started with --scheduling-policy priority; leave it out."
            raise InvalidRequest(told, param="priority")

    def check_model(self, name: str | None) -> str:
        """The model's name as answers show it. Raises NotFound for one that is not served."""
        served = self.any_engine.info.served_names
        if name is None:
            return served[0]
        if name not in served and self.adapter_of(name) is None:
            raise unknown_model(name, [*served, *self.any_engine.adapter_names])
        return name

    def check_task(self, *tasks: str) -> None:
        """Raises NotFound where the model is for something else."""
        try:
            self.any_engine.inputs.check_task(*tasks)
        except InvalidRequest as error:
            raise NotFound(error.message, param="model", code=error.code) from None

    def _may_be_adapter(self, name: str | None) -> TypeGuard[str]:
        own = name is None or name in self.any_engine.info.served_names
        return not own and self.engine_config.adapters.enable_lora

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request's model names; None: it names the base."""
        return name if self._may_be_adapter(name) and self.any_engine.has_adapter(name) else None

    async def learn(self, name: str | None) -> None:
        """Where the name is not known here, another front end may have loaded it."""
        if self._may_be_adapter(name) and not self.any_engine.has_adapter(name):
            await self.any_engine.adapters()

    async def named(self, options: AnswerOptions, name: str | None) -> AnswerOptions:
        """With the model that is asked for. Raises NotFound."""
        await self.learn(name)
        return replace(options, model=self.check_model(name), fingerprint=self.fingerprint)


def unknown_model(name: str, known: Sequence[str]) -> NotFound:
    others = f" or one of {len(known) - _NAMED} others (/v1/models)" if len(known) > _NAMED else ""
    told = f"The model {name[:100]!r} is not served here; use {', '.join(known[:_NAMED])}{others}."
    return NotFound(told, param="model", code="model_not_found")


class Limits:
    """What all requests together may take of this front end, and of the queue, which all front ends share."""

    def __init__(
        self, config: ServerConfig, counters: Counters, page: CounterPage, ignored: IgnoredFields | None
    ) -> None:
        self._config = config
        self.counters = counters
        self.page = page
        self.threads = Threads()
        self.budget = Budget(config.max_answer_bytes, config.max_answers_bytes // len(counters.pages), config.max_queue)
        self.bodies = Bodies(config.max_body_bytes, self.threads, ignored)
        self.max_queue = config.max_queue
        self.exchanges: set[Exchange] = set()  # those that hold requests of the engine
        self._mean_seconds = 1.0  # of recent requests, for Retry-After

    @contextlib.contextmanager
    def admit(
        self, exchange: Exchange, count: int, user: str = "", *, a_place: int = 1, param: str = "prompt"
    ) -> Iterator[None]:
        """Holds a place of the queue for every ``a_place`` of ``count`` prompts. Raises Overloaded when there are not so
        many for this tenant."""
        cell = cell_of(self._config, exchange.key_name, user)
        most = most_places(self.max_queue, cell)
        prompts, count = count, -(-count // a_place)
        if count > most:
            whose = "the whole queue takes" if cell is None else "one client gets of the queue"
            told = f"{prompts} prompts are more than {whose} ({most * a_place}); send fewer at once."
            raise InvalidRequest(told, param=param)
        if not self.counters.try_hold(self.page, count, self.max_queue, cell):
            raise self._overloaded(cell)
        begun = time.perf_counter()
        self.exchanges.add(exchange)
        try:
            yield
        finally:
            self.counters.give_back(self.page, count, cell)
            self.exchanges.discard(exchange)
            self._mean_seconds += 0.1 * (time.perf_counter() - begun - self._mean_seconds)

    def _overloaded(self, cell: int | None) -> Overloaded:
        """Of this tenant's own share, where the queue itself has room."""
        wait, live = min(max(math.ceil(self._mean_seconds), 1), 30), self.counters.live
        held = 0 if cell is None else self.counters.held_by(cell)
        told = f"The queue is full ({live} of {self.max_queue} requests)"
        if held and live < self.max_queue:
            told = f"Your share of the queue is full ({held} of {self.max_queue} requests are yours, {live} in all; the rest is kept for others)"
        return Overloaded(f"{told}; try again in {wait} s.", retry_after=wait)

    def end_all(self, cause: HeadraceError) -> None:
        for exchange in list(self.exchanges):
            exchange.end(cause)


class Observed:
    """What is counted and told of requests. ``routes``: of the route table."""

    def __init__(
        self, routes: Sequence[str], counters: Counters, page: CounterPage, find_engine: Callable[[], AsyncLLM | None]
    ) -> None:
        self._pages = counters.pages
        self.metrics = ServerMetrics(routes, page)
        self.shared = Peers(find_engine, self.total)
        self.inflight = inflight.Inflight()
        self.pings = StreamPings()

    def total(self) -> ServerMetrics:
        """What all front ends have counted."""
        return self.metrics if len(self._pages) == 1 else self.metrics.summed(self._pages)


class Service:
    """One front end: what handlers are given."""

    def __init__(
        self,
        config: ServerConfig,
        version: str,
        routes: Sequence[str],
        *,
        engine_config: EngineConfig | None = None,
        counters: Counters | None = None,
        number: int = 0,
    ) -> None:
        """``number``: which of the counters' pages is its own."""
        counters = counters or Counters.private()
        page = counters.pages[number]
        self.config = config
        self.version = version
        self.routes = routes
        self.created = int(time.time())
        self.observed = Observed(routes, counters, page, lambda: self.model.found)
        ignored = IgnoredFields(self.observed.metrics.count_ignored) if config.unknown_fields == "ignore" else None
        self.limits = Limits(config, counters, page, ignored)
        self.model = Model(config, engine_config or EngineConfig(), version, self.limits.threads)
        self.moderator: Moderator | None = None  # where answers are judged
        self.stored = StoredResponses()
        self.sleep: Callable[[int], Awaitable[None]]  # at a level, and the end of it; once there is an engine
        self.wake: Callable[[], Awaitable[None]]
        self.condition: Callable[[], str] = self.model.condition
        self.wake_status: Callable[[], str] | None = None  # in words, where models take turns

    def attach(self, engine: AsyncLLM) -> None:
        """The engine has loaded."""
        self.model.attach(engine)
        engine.used = WakeOnUse(engine, self.config.when_asleep)
        self.sleep, self.wake = partial(_sleep, engine), engine.wake_up
        self.limits.page.served = True
        freeze_start()

    @property
    def services(self) -> Sequence[Service]:
        """One for each model."""
        return (self,)

    async def find(self, name: str) -> Service:
        """Of the model that is called so, or has an adapter of that name. Raises NotFound."""
        await self.model.learn(name)
        self.model.check_model(name)
        return self

    def show_budget(self, page: Lines) -> None:
        """Metrics of memory that models take turns with."""

    def check_alive(self) -> None:
        """Raises HeadraceError while it is not."""
        _ = self.model.any_engine

    def check_ready(self) -> None:
        """Raises what ``engine`` does, and Unavailable until every front end has served: one that is replaced later
        speaks for itself alone."""
        _ = self.model.engine
        if not all(page.served for page in self.limits.counters.pages):
            raise Unavailable("Another front end is still loading; wait for /ready.", retry_after=2)

    async def others(self, what: str, *about: Any) -> list[Any]:
        """What the other front ends know."""
        return await self.observed.shared.others(what, *about)

    async def known(self, what: str, *about: Any) -> Any:
        """For another service, whose client asks; None: nothing is known of it here."""
        match what, *about:
            case "list_requests", tenant:
                return inflight.running(self, tenant)
            case "find_request", name, tenant:
                return await inflight.progress_of(self, name, tenant)
            case "find_response", name, tenant:
                found = self.stored.find(tenant, name)
                return None if found is None else (found.items, found.response)
            case "delete_response", name, tenant:
                return self.stored.delete(tenant, name) or None

    async def first(self, what: str, *about: Any) -> Any:
        """What is known of it here, or else elsewhere."""
        return await self.known(what, *about) or next(iter(await self.others(what, *about)), None)

    def judged(self, stream: EngineStream, request: Request) -> DeltaStream:
        """The stream as moderation lets it through."""

        async def prompt_text() -> str:
            tokenizer, ids = self.model.any_engine.tokenizer, request.prompt_token_ids
            if tokenizer is None:
                return ""
            return await self.limits.threads.run(len(ids), partial(tokenizer.decode, ids, False))

        return stream if self.moderator is None else self.moderator.watch(stream, request, prompt_text)

    def request_attributes(
        self, exchange: Exchange, body: GeneratingBody | PoolingBody, user: str, **more: Unpack[RequestAttributes]
    ) -> RequestAttributes:
        adapter = self.model.adapter_of(body.model)
        return {
            **more,
            "priority": body.priority,
            "cache_salt": self.cache_salt(exchange, body.cache_salt),
            "adapter": adapter,
            "tenant": tenant_of(self.config, exchange.key_name, user, adapter),
        }

    def cache_salt(self, exchange: Exchange, salt: str) -> str:
        """The namespace of cached prefixes: the tenant's, within it the one that the client asks for."""
        return f"{exchange.tenant}:{salt}" if exchange.tenant and self.config.prefix_sharing == "key" else salt
