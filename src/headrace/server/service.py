"""What all handlers share: the engine once it is there, the state of the server, the queue bound, the names of the model.

What lives here: state. What may not: HTTP, parsing, processes and signals (lifecycle.py changes the state).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, Protocol

from headrace.config import Decision, EngineConfig, ServerConfig
from headrace.engine.info import EngineInfo
from headrace.engine.inputs import InputProcessor, ParsedPrompt
from headrace.engine.output import RequestDelta
from headrace.errors import EngineDead, HeadraceError, InvalidRequest, NotFound, Overloaded, Unavailable
from headrace.garbage import freeze_start
from headrace.request import Request
from headrace.sampling_params import NO_EXPECTATIONS, Expectations, SamplingParams, StructuredOutputs
from headrace.server.bodies import Bodies
from headrace.server.budget import Budget
from headrace.server.commons import Alone, Commons
from headrace.server.exchange import Exchange
from headrace.server.exposition import ServerMetrics
from headrace.server.forced import hold
from headrace.server.ignored_fields import IgnoredFields
from headrace.server.inflight import Inflight
from headrace.server.ledger import Ledger, most_places
from headrace.server.moderation.watch import Moderator
from headrace.server.parsing import Form, form_of
from headrace.server.parsing.choice import dialect_of
from headrace.server.parsing.formats import Dialect, ReasoningFormat
from headrace.server.parsing.segments import OutputParser
from headrace.server.stored import StoredResponses
from headrace.server.stream import Pulse
from headrace.server.tenants import cell_of
from headrace.server.threads import INLINE_BYTES, Threads
from headrace.server.tools import Tool, ToolChoice, functions_of


class Tokenizer(Protocol):
    """What the routes need of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    @property
    def description(self) -> Mapping[str, Any]:
        """Its configuration, as JSON."""

    def is_special(self, text: str) -> bool:
        """It is one token that decoding leaves out."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, tools: Sequence[Any] | None, add_generation_prompt: bool) -> str: ...

    def warm_up(self) -> None: ...

    def boundary_fault(self) -> str | None: ...

    def template_fault(self) -> str | None:
        """Why conversations will be refused; may take a second."""


_BEFORE, _AFTER = "Thinking of it.", "Having thought."  # in a conversation that shows what stands between

CreateParser = Callable[[], OutputParser | None]


class DeltaStream(Protocol):
    """One request's deltas in lists of what has arrived. Closing it before its end aborts the request."""

    def __aiter__(self) -> AsyncIterator[Sequence[RequestDelta]]: ...

    async def aclose(self) -> None: ...


class EngineStream(DeltaStream, Protocol):
    """As it comes from the engine."""

    def end_answer(self, index: int) -> None:
        """Nothing more of this answer comes, nor is computed."""


class Engine(Protocol):
    """What the server needs of AsyncLLM."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def inputs(self) -> InputProcessor: ...

    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...

    @property
    def alive(self) -> bool:
        """It makes progress."""

    @property
    def ailment(self) -> str | None:
        """Why it makes none."""

    @property
    def dead(self) -> bool:
        """It is gone for good."""

    def stream(
        self,
        prompt: ParsedPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        explain: bool = False,
        tenant: str = "",
        expects: Expectations = NO_EXPECTATIONS,
        whole: bool = False,
    ) -> EngineStream:
        """Submits at once. ``whole``: nothing of it is shown before its end. The stream raises EngineDead when the engine is gone."""

    async def stats(self) -> Mapping[str, Any]: ...

    async def recent(self, step: int, decision: int) -> Mapping[str, Any]:
        """``stats()`` with the steps and decisions that came after these."""

    async def explain(self, streams: Sequence[Any]) -> Mapping[str, Any]:
        """Where these streams' requests stand, and the steps of those that asked: AsyncLLM.explain."""

    async def reset_prefix_cache(self) -> None:
        """Requests that begin from now on reuse nothing that was computed before."""

    async def shutdown(self, timeout: float = 0.0, *, kill_after: float = 5.0) -> None:
        """Ends its process, by force after ``kill_after`` seconds."""


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Service:
    """One front end's state."""

    def __init__(
        self,
        config: ServerConfig,
        version: str,
        routes: Sequence[str],
        *,
        engine_config: EngineConfig | None = None,
        ledger: Ledger | None = None,
        number: int = 0,
    ) -> None:
        """``number``: which of the ledger's pages is its own."""
        self.config = config
        self.version = version
        self.engine_config = engine_config or EngineConfig()
        self.state = State.LOADING
        self.ledger = ledger or Ledger.private()
        self.page = self.ledger.pages[number]
        self.metrics = ServerMetrics(routes, self.page)
        self.commons: Commons = Alone(lambda: self._engine, self.total_metrics)
        self.pulse = Pulse()
        self.threads = Threads()
        ignored = IgnoredFields(self.metrics.count_ignored) if config.unknown_fields == "ignore" else None
        share = config.max_answers_bytes // len(self.ledger.pages)
        self.budget = Budget(config.max_answer_bytes, share, config.max_queue)
        self.bodies = Bodies(config.max_body_bytes, self.threads, ignored)
        self.inflight = Inflight()
        self.moderator = Moderator()
        self.stored = StoredResponses()
        self.exchanges: set[Exchange] = set()  # those that hold requests of the engine
        self.created = int(time.time())
        self.fingerprint = f"headrace-{version}"
        self.max_queue = config.max_queue
        self.decisions: tuple[Decision, ...] = ()  # choices of the server's own
        self._dialect = Dialect()
        self._special_markers: frozenset[str] = frozenset()
        self._closing: str | None = None  # of reasoning, once somebody has asked
        self._engine: Engine | None = None
        self._mean_seconds = 1.0  # of recent requests, for Retry-After

    def attach(self, engine: Engine) -> None:
        """The engine has loaded."""
        self._engine = engine
        facts = repr((self.version, engine.info.model, engine.info.dtype, engine.info.device, engine.info.vocab_size))
        self.fingerprint = f"headrace-{self.version}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
        if engine.tokenizer is not None:
            engine.tokenizer.warm_up()
        self.state = State.READY
        freeze_start()

    def learn_dialect(self, tokenizer: Tokenizer) -> None:
        """How the model writes calls and reasoning. Renders its template: not for an event loop."""
        self._dialect, self.decisions = dialect_of(tokenizer, self.config.tool_call_parser, self.config.reasoning_parser)
        self._special_markers = frozenset(filter(tokenizer.is_special, self._dialect.names))

    def form(
        self, prompt: str, tools: Sequence[Tool] | None, choice: ToolChoice, wanted: StructuredOutputs | None, continued: str | None = None
    ) -> tuple[Form, StructuredOutputs | None]:
        """What answers to ``prompt`` are made of, and what they are held to. ``continued``: a text that they go on with. Raises InvalidRequest."""
        reasoning = self._dialect.reasoning
        if continued is not None and reasoning is not None:  # a text outside of reasoning is past it
            prompt = reasoning.begin if continued.rfind(reasoning.begin) > continued.rfind(reasoning.end) else reasoning.end
        form = form_of(self._dialect, prompt, functions_of(tools), parallel=choice.parallel, only=choice.only)
        return hold(form, tools, choice, wanted, self._special_markers)

    @property
    def reasons(self) -> bool:
        """How its model reasons is known, if it does."""
        return self._dialect.reasoning is not None

    async def closing(self, reasoning: ReasoningFormat) -> str:
        """What the family writes from the end of its reasoning to the answer: as its template shows it, or lines."""
        if self._closing is None:
            said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _AFTER, "reasoning_content": _BEFORE}]
            render = partial(self.any_engine().inputs.chat_prompt, said, add_generation_prompt=False)
            shown = ""
            with contextlib.suppress(InvalidRequest):
                shown = (await self.threads.run(INLINE_BYTES + 1, render)).text or ""
            between = shown.partition(_BEFORE)[2].partition(_AFTER)[0]
            self._closing = between if reasoning.end in between else f"\n{reasoning.end}\n\n"
        return self._closing

    def parsed_params(self, params: SamplingParams, create_parser: CreateParser) -> SamplingParams:
        """A parser must see the markers, also those that decoding would leave out."""
        hidden = bool(self._special_markers) and params.skip_special_tokens and create_parser() is not None
        return replace(params, skip_special_tokens=False) if hidden else params

    @property
    def scheduling_policy(self) -> str:
        return self.engine_config.scheduler.scheduling_policy

    @property
    def engine(self) -> Engine:
        """Raises Unavailable while loading or draining, EngineDead after the engine's death."""
        if self.state is State.DRAINING:
            raise Unavailable("The server is shutting down and takes no new requests; try another or wait.", retry_after=5)
        return self.any_engine()

    def any_engine(self) -> Engine:
        """As ``engine``, while draining too."""
        if self._engine is None:
            raise Unavailable("The model is still loading; wait for /ready.", retry_after=2)
        if self.state is State.DEAD or not self._engine.alive:
            raise EngineDead("The engine does not answer; if it does not recover, the server ends.")
        return self._engine

    @property
    def found_engine(self) -> Engine | None:
        """Whatever its state; None while it loads."""
        return self._engine

    def total_metrics(self) -> ServerMetrics:
        """What all front ends have counted."""
        return self.metrics if len(self.ledger.pages) == 1 else self.metrics.summed(self.ledger.pages)

    @property
    def model_name(self) -> str:
        """The name that is reported."""
        return self._engine.info.served_names[0] if self._engine is not None else ""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """What holds where a request says nothing: the model's own, and the server's."""
        model = self.any_engine().generation_defaults
        return {**model, "repetition_detection": True} if self.config.repetition_detection else model

    def check_model(self, name: str | None) -> str:
        """The model's name as answers show it. Raises NotFound for one that is not served."""
        served = self.any_engine().info.served_names
        if name is None:
            return served[0]
        if name not in served:
            raise NotFound(f"The model {name[:100]!r} is not served here; use {' or '.join(served)}.", param="model", code="model_not_found")
        return name

    @contextlib.contextmanager
    def admit(self, exchange: Exchange, count: int, user: str = "") -> Iterator[None]:
        """Holds ``count`` places of the queue. Raises Overloaded when there are not so many for this tenant."""
        cell = cell_of(self.config, exchange.key_name, user)
        most = most_places(self.max_queue, cell)
        if count > most:
            whose = "the whole queue takes" if cell is None else "one client gets of the queue"
            raise InvalidRequest(f"{count} prompts are more than {whose} ({most}); send fewer at once.", param="prompt")
        if not self.ledger.try_hold(self.page, count, self.max_queue, cell):
            raise self._overloaded(cell)
        begun = time.perf_counter()
        self.exchanges.add(exchange)
        try:
            yield
        finally:
            self.ledger.give_back(self.page, count, cell)
            self.exchanges.discard(exchange)
            self._mean_seconds += 0.1 * (time.perf_counter() - begun - self._mean_seconds)

    def _overloaded(self, cell: int | None) -> Overloaded:
        """Of this tenant's own share, where the queue itself has room."""
        wait, live = min(max(math.ceil(self._mean_seconds), 1), 30), self.ledger.live
        held = 0 if cell is None else self.ledger.held_by(cell)
        told = f"The queue is full ({live} of {self.max_queue} requests)"
        if held and live < self.max_queue:
            told = f"Your share of the queue is full ({held} of {self.max_queue} requests are yours, {live} in all; the rest is kept for others)"
        return Overloaded(f"{told}; try again in {wait} s.", retry_after=wait)

    def judged(self, stream: EngineStream, request: Request) -> DeltaStream:
        """The stream as moderation lets it through."""

        async def prompt_text() -> str:
            tokenizer, ids = self.any_engine().tokenizer, request.prompt_token_ids
            return "" if tokenizer is None else await self.threads.run(len(ids), lambda: tokenizer.decode(ids, False))

        return self.moderator.watch(stream, request, prompt_text)

    def cache_salt(self, exchange: Exchange, salt: str) -> str:
        """The namespace of cached prefixes: the tenant's, within it the one that the client asks for."""
        return f"{exchange.tenant}:{salt}" if exchange.tenant and self.config.prefix_sharing == "key" else salt

    def end_all(self, cause: HeadraceError) -> None:
        for exchange in list(self.exchanges):
            exchange.end(cause)
