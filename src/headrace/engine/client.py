"""The asyncio side of an engine in its own process: ``AsyncLLM``.

What lives here: requests in, streams out. What may not: torch, HTTP, the process's start and its socket
(connection.py).

Buffering is bounded by construction: a stream keeps at most MAX_PENDING deltas, then it merges new ones into the last
of the same answer; over MAX_PENDING_COST units (about bytes), or LATE_STEPS steps of all its answers, its reader counts
as gone: the request is aborted and the stream raises. Who wants the answer whole (``whole``) has no reader yet, and
keeps all of it anyway.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Unpack

from headrace.config import EngineConfig
from headrace.engine import connection as frames
from headrace.engine.connection import EngineSocket, JoinedEngine
from headrace.engine.grammar_check import create_grammar_check
from headrace.engine.info import EngineInfo, check_sleep
from headrace.engine.inputs import (
    InputProcessor,
    Message,
    ParsedPrompt,
    Prompt,
    RequestOptions,
    default_params,
    parse_prompt,
)
from headrace.engine.output import OutputCollector, OutputProcessor, RequestDelta
from headrace.engine.replicas import Replicas, launch_engine
from headrace.engine.resolve import create_config, find_source
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import ConfigError, EngineDead, HeadraceError, InvalidRequest, NotFound, StepFailed, Unavailable
from headrace.lora.registry import adapter_folder, adapter_names
from headrace.models.source import ModelSource
from headrace.processes.child import Begun
from headrace.processes.messages import Question
from headrace.request import Json, Request, RequestOutput, SamplingParams

MAX_PENDING = 256  # deltas
MAX_PENDING_COST = 1 << 20
LATE_STEPS = 16
_DELTA_COST, _TOKEN_COST, _LOGPROB_COST = 200, 40, 100  # about bytes
_LONG_TEXT = 1 << 14  # characters; longer prompts are tokenised in a thread


class Stream:
    """One request's deltas: ``async for deltas in stream`` gives lists of what has arrived since, never empty.

    Raises EngineDead when the engine is gone, Unavailable when the reader fell too far behind. ``aclose()`` (or
    dropping the stream) before its end aborts the request.
    """

    __slots__ = ("__weakref__", "_cost", "_error", "_llm", "_most", "_pending", "_waiter", "done", "name", "request")

    def __init__(self, llm: AsyncLLM, request: Request, name: str | None, whole: bool = False) -> None:
        self.request = request
        self.name = name  # the caller's own; two streams may share one
        self.done = False  # nothing more will arrive
        self._llm = llm
        self._pending: list[RequestDelta] = []
        self._cost = 0
        self._most = math.inf if whole else max(MAX_PENDING_COST, LATE_STEPS * _step_cost(request.params))
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[RequestDelta]:
        if not self._pending and not self.done:
            self._waiter = self._llm.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pending:
            deltas, self._pending, self._cost = self._pending, [], 0
            return deltas
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Ends the request now; what has arrived can still be read."""
        if not self.done:
            self._llm.forget(self.request.request_id)
            self.end(None)

    def end_answer(self, index: int) -> None:
        """Ends one of the n answers; its deltas stop, without a last one."""
        if not self.done:
            self._llm.end_answer(self.request.request_id, index)

    def __del__(self) -> None:
        if not self.done:
            self._llm.forget_soon(self.request.request_id)

    def put(self, delta: RequestDelta) -> None:
        """From the connection: one more delta."""
        pending = self._pending
        self._cost += _DELTA_COST + len(delta.text) + _TOKEN_COST * len(delta.token_ids) + _scores_cost(delta)
        earlier = _last_of(pending, delta.index) if len(pending) >= MAX_PENDING else None
        if earlier is None:
            pending.append(delta)
        else:
            earlier.absorb(delta)
        if delta.last:
            self.done = True
        self._wake()
        if self._cost > self._most and not self.done:
            self._llm.forget(self.request.request_id)
            self.end(
                Unavailable("the stream was read too slowly and has been ended; read faster or ask for fewer tokens.")
            )

    def end(self, error: HeadraceError | None) -> None:
        self._error = error
        self.done = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _step_cost(params: SamplingParams) -> int:
    scores = 0 if params.logprobs is None else 1 + params.logprobs
    return params.n * (_DELTA_COST + _TOKEN_COST + _LOGPROB_COST * scores)


def _scores_cost(delta: RequestDelta) -> int:
    """Of the answer's tokens alone: the prompt's are as many as the prompt is long, and one step may bring more than a
    reader may owe."""
    return _LOGPROB_COST * sum(len(entry.token_ids) for entry in delta.logprobs) if delta.logprobs else 0


def _last_of(pending: list[RequestDelta], index: int) -> RequestDelta | None:
    return next((delta for delta in reversed(pending) if delta.index == index), None)


async def _load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    return await asyncio.to_thread(load_tokenizer, source, config.model.tokenizer, **config.model.chat_options)


class AsyncLLM:
    """An engine in a process of its own, for one event loop. ``await AsyncLLM.start(config)`` makes one.

    ``info``: what the engine says about itself. ``tokenizer``: None when the model has none. ``generation_defaults``:
    the model's own sampling defaults; ``default_params`` the same as SamplingParams.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams,
        connection: EngineSocket | Replicas,
        *,
        serial: int = 0,
    ) -> None:
        self.config = config
        self.source = source
        self.tokenizer = tokenizer
        self.generation_defaults = source.generation_defaults
        self.default_params = defaults
        self.loop = asyncio.get_running_loop()
        self.info: EngineInfo = connection.info
        grammars, ids = create_grammar_check(tokenizer), itertools.count(serial << frames.SERIAL_SHIFT)
        self.inputs = InputProcessor(connection.info, tokenizer, config.model.seed, grammars, ids=ids)
        self._connection = connection
        self._outputs = OutputProcessor(tokenizer, self._finish)
        # dropped streams abort themselves
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._closing = False
        self.used: Callable[[], None] = lambda: None  # with each request; may raise and refuse it
        self._adapters = frozenset(config.adapters.modules)
        self.adapter_names: Sequence[str] = sorted(self._adapters)  # as they were told last
        connection.listen(self._on_step, self._on_death)

    @classmethod
    async def start(
        cls, config: EngineConfig | None = None, *, begun: Begun | None = None, **keywords: Any
    ) -> AsyncLLM:
        """Returns when the engine can serve. Raises what the engine's start raised (ModelError, ConfigError,
        OutOfMemory …).

        Without a config the ``keywords`` are those of ``LLM(...)``. ``begun``: the engine's process, if it was started
        already.

        The tokenizer is loaded here while the process starts; a hub model is fetched once, before both.
        """
        if config is None:
            config = create_config(**keywords)
        elif keywords:
            raise ConfigError(f"a config and keywords ({', '.join(keywords)}) were given; put them into the config.")
        source = await asyncio.to_thread(find_source, config)
        defaults = default_params(source.generation_defaults)
        connection = await launch_engine(config, begun=begun)
        try:
            tokenizer = await _load_tokenizer(config, source)
            await connection.started()
        except BaseException:
            await connection.close(0.0)
            raise
        return cls(config, source, tokenizer, defaults, connection)

    @classmethod
    async def join(
        cls, config: EngineConfig, connect: Callable[[], Awaitable[JoinedEngine | Replicas]], serial: int
    ) -> AsyncLLM:
        """One of several front ends of an engine that was launched with this config. Returns when it can serve."""
        source = await asyncio.to_thread(find_source, config)
        tokenizer = await _load_tokenizer(config, source)
        connection = await connect()
        await connection.started()
        return cls(config, source, tokenizer, default_params(source.generation_defaults), connection, serial=serial)

    # --- requests

    def stream(
        self,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        param: str = "prompt",
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Checks and submits at once: InvalidRequest is raised here, not at the first delta. ``request_id`` is only for
        ``abort``."""
        self._check_ready()
        parsed = prompt if isinstance(prompt, ParsedPrompt) else parse_prompt(prompt, param)
        chosen = self.default_params if params is None else params
        return self.submit(
            self.inputs.request(parsed, chosen, param=param, clamp=params is None, **options), request_id
        )

    def submit(self, request: Request, name: str | None = None, *, whole: bool = False) -> Stream:
        """A request that ``inputs`` has made. ``whole``: its reader adds all of it up, and is never too slow."""
        self._check_ready()
        self.used()
        stream = Stream(self, request, name, whole)
        self._outputs.add(request)
        self._streams[request.request_id] = stream
        self._connection.submit(request)
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """The answer so far, again and again, until it is finished. Leaving the iterator aborts the request.

        Raises InvalidRequest, Overloaded (turned away), StepFailed (this request's step), EngineDead. After
        ``abort(request_id)`` the last output is finished with finish_reason "abort".
        """
        parsed = await self.tokenized(parse_prompt(prompt), options.get("truncate_prompt_tokens"))
        await self.inputs.check_grammar_soon(self.default_params if params is None else params)
        stream = self.stream(parsed, params, request_id=request_id, **options)
        collector = OutputCollector(
            request_id or str(stream.request.request_id), parsed.text, stream.request, self.tokenizer
        )
        try:
            async for deltas in stream:
                for delta in deltas:
                    collector.add(delta)
                    if delta.error is not None:
                        raise delta.refusal or StepFailed(delta.error)
                yield collector.output()
            if not collector.finished:
                yield collector.aborted()
        finally:
            stream.abort()

    async def tokenized(self, prompt: ParsedPrompt, truncate_prompt_tokens: int | None = None) -> ParsedPrompt:
        """The prompt with its token ids if it is long: long texts are tokenised beside the event loop."""
        if prompt.token_ids is not None or prompt.text is None or len(prompt.text) < _LONG_TEXT:
            return prompt
        return await asyncio.to_thread(self.inputs.tokenized, prompt, truncate_prompt_tokens)

    async def render_chat(self, messages: Sequence[Message], **options: Any) -> ParsedPrompt:
        """A conversation through the chat template, beside the event loop: ``tools``, ``add_generation_prompt``,
        template variables."""
        return await asyncio.to_thread(self.inputs.chat_prompt, messages, **options)

    async def abort(self, request_id: str) -> None:
        """Ends every stream that was started under this name; unknown names are no error."""
        for stream in [each for each in self._streams.values() if each.name == request_id]:
            stream.abort()

    # --- state

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return self._outputs.num_live

    @property
    def ailment(self) -> str | None:
        """Why the engine cannot be trusted to make progress, or None: dead, silent, or stuck in one turn of its
        loop."""
        return self._connection.ailment

    @property
    def dead(self) -> bool:
        """The engine process is gone for good; an engine that is only silent may come back."""
        return self._connection.death is not None

    @property
    def alive(self) -> bool:
        return self.ailment is None

    async def stats(self) -> Json:
        """Gauges and counters of the engine: see EngineSocket."""
        return await self._connection.stats()

    async def recent(self, step: int, decision: int) -> Json:
        """The same, with what happened after this step and this decision."""
        return await self._connection.recent(step, decision)

    async def explain(self, streams: Sequence[Stream]) -> Json:
        """Where these requests stand (``predicted_start`` of each, None once it has ended) and what their steps were,
        for those that asked."""
        ids = [stream.request.request_id for stream in streams[: frames.MAX_ASKED]]
        return await self._connection.ask(frames.AskRequests, ids)

    async def reset_prefix_cache(self) -> None:
        """Requests that begin from now on reuse nothing computed before; those that run go on. Returns when it is
        so."""
        await self._connection.ask(frames.ForgetPrefixes)

    # --- sleep

    @property
    def asleep(self) -> bool:
        """It sleeps, or is about to: requests wait."""
        return self._connection.asleep > 0

    async def sleep(self, level: int = 1) -> None:
        """As ``LLM.sleep``; requests that come from now on wait."""
        check_sleep(self.info, level)
        await self._ask_or_raise(frames.Sleep, level)

    async def wake_up(self) -> None:
        """As ``LLM.wake_up``. Requests that have waited begin."""
        check_sleep(self.info)
        await self._ask_or_raise(frames.Wake)

    async def _ask_or_raise(self, order: type[Question], *about: Any) -> None:
        if (error := (await self._connection.ask(order, *about)).get("error")) is not None:
            raise Unavailable(error)

    # --- adapters

    def has_adapter(self, name: str) -> bool:
        """As far as is known here: others may have loaded or unloaded some."""
        folder = self.config.adapters.lora_dir
        return name in self._adapters or (folder is not None and adapter_folder(Path(folder), name) is not None)

    async def adapters(self) -> list[str]:
        """All names that a request may give now."""
        if not self.config.adapters.enable_lora:
            return []
        self._adapters = frozenset((await self._connection.ask(frames.AskAdapters))["names"])
        folder = self.config.adapters.lora_dir
        found = [] if folder is None else await asyncio.to_thread(adapter_names, Path(folder))
        self.adapter_names = sorted(self._adapters.union(found))
        return self.adapter_names

    async def load_adapter(self, name: str, folder: str, *, in_place: bool) -> None:
        """Returns once it is in host memory. Raises InvalidRequest for what is no adapter of this model, and for a name
        that is taken, unless ``in_place``."""
        await self._tell(frames.LoadAdapter, name, folder, in_place)

    async def unload_adapter(self, name: str) -> None:
        """New requests are refused, those that have it go on. Raises NotFound for an unknown name."""
        await self._tell(frames.UnloadAdapter, name, refused=NotFound)

    async def _tell(
        self, question: type[Question], *about: Any, refused: type[InvalidRequest | NotFound] = InvalidRequest
    ) -> None:
        if not self.config.adapters.enable_lora:
            raise InvalidRequest("This server serves no adapters; start it with --enable-lora.")
        if (error := (await self._connection.ask(question, *about)).get("error")) is not None:
            raise refused(error, param="lora_name")
        await self.adapters()

    async def shutdown(self, timeout: float = 0.0, *, kill_after: float = 5.0) -> None:
        """New requests are refused, running ones get ``timeout`` seconds, then the process ends. May be called again.

        ``kill_after``: seconds that the process gets to end by itself; a step in progress is waited for no longer.
        """
        self._closing = True
        deadline = time.perf_counter() + timeout
        while self.num_streams and self._connection.death is None and (left := deadline - time.perf_counter()) > 0:
            await asyncio.sleep(min(left, 0.02))
        for stream in list(self._streams.values()):
            stream.end(Unavailable("the server is shutting down; try again later."))
        self.inputs.close()
        await self._connection.close(kill_after)

    # --- from streams and from the connection

    def forget(self, request_id: int) -> None:
        """Nothing more is wanted of a request."""
        self._streams.pop(request_id, None)
        self._outputs.drop(request_id)
        self._connection.abort(request_id)

    def end_answer(self, request_id: int, index: int) -> None:
        self._outputs.end_answer(request_id, index)

    def forget_soon(self, request_id: int) -> None:
        """The same from wherever the garbage collector runs."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.forget, request_id)

    def _finish(self, request_id: int, index: int, num_tokens: int) -> None:
        self._connection.finish(request_id, index, num_tokens)

    def _on_step(self, frame: frames.Step) -> None:
        feed, streams = self._outputs.feed, self._streams
        for out in frames.unpack_step(frame):
            delta = feed(out)
            stream = streams.get(out.request_id) if delta is not None else None
            if delta is not None and stream is not None:
                stream.put(delta)

    def _on_death(self, error: EngineDead, request_ids: Collection[int] | None) -> None:
        """``request_ids``: the requests that have ended by it; None: all."""
        for stream in list(self._streams.values()):
            if request_ids is None or stream.request.request_id in request_ids:
                self._outputs.drop(stream.request.request_id)
                stream.end(error)

    def _check_ready(self) -> None:
        if self._connection.death is not None:
            raise self._connection.death
        if self._closing:
            raise Unavailable("the server is shutting down; try again later.")
