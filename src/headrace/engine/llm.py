"""The offline API over an engine in this process: prompts in, RequestOutputs out.

What lives here: ``LLM``. What may not: putting the engine together (assembly.py), the server, asyncio (client.py).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

import numpy as np

from headrace.config import EngineConfig
from headrace.engine.assembly import Engine, create_engine
from headrace.engine.batch import first_part
from headrace.engine.grammar_check import create_grammar_check
from headrace.engine.info import EngineInfo
from headrace.engine.inputs import InputProcessor, Message, ParsedPrompt, Prompt, parse_prompt
from headrace.engine.interrupts import deferred_interrupts
from headrace.engine.keywords import create_config
from headrace.engine.output import OutputCollector, OutputProcessor, RequestDelta
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import EngineDead, InvalidRequest
from headrace.garbage import collect_now_and_then, no_collections
from headrace.progress import Progress, ProgressLine
from headrace.request import Request, RequestOutput
from headrace.sampling_params import SamplingParams

Sink = Callable[[RequestDelta], None]
Conversation = Sequence[Message]
Given = tuple[ParsedPrompt, Request]


@dataclass(slots=True)
class _Batch:
    """The requests of one call, and what becomes of them by their ids. ``running``: those that have come in and not ended."""

    given: list[Given]
    bar: Progress | None
    collectors: dict[int, OutputCollector] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)

    def sink(self, prompt: ParsedPrompt, request: Request, tokenizer: Tokenizer | None) -> Sink:
        """Of one that comes in now."""
        request_id, bar, running = request.request_id, self.bar, self.running
        collector = self.collectors[request_id] = _collector(prompt, request, tokenizer)
        running.add(request_id)

        def sink(delta: RequestDelta) -> None:
            collector.add(delta)
            if isinstance(bar, ProgressLine):
                bar.add_tokens(len(delta.token_ids))
            if delta.last:
                running.discard(request_id)
                if bar is not None:
                    bar.update(1)

        return sink


class LLM:
    """A model and an engine in this process.

    ``model``: folder, .gguf file or hub id; None is the bundled demo. Keywords are the fields of the config classes by name
    (dtype, max_model_len, gpu_memory_utilization, max_num_seqs, enable_prefix_caching, seed, …); ``technique`` maps switches
    to values: ``technique={"chunked_prefill": False}``. Raises ConfigError or ModelError. Calls from several threads take turns.

    An answer whose step failed in the engine has finish_reason "error" and the cause as its stop_reason; others are not affected.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, technique: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        self._open(create_config(model, technique=technique, **keywords))

    @classmethod
    def from_config(cls, config: EngineConfig, *, texts: bool = False) -> LLM:
        """An LLM from a whole config, as commands have it. ``texts``: it is of no use to the caller without a tokenizer."""
        llm = cls.__new__(cls)
        llm._open(config, texts=texts)
        return llm

    def _open(self, config: EngineConfig, *, texts: bool = False) -> None:
        self._engine: Engine | None = None
        engine = create_engine(config, watched=False, texts=texts)
        self._engine = engine
        self._inputs = InputProcessor(engine.info, engine.tokenizer, config.model.seed, create_grammar_check(engine.tokenizer), _all_below)
        self._outputs = OutputProcessor(engine.tokenizer, engine.core.finish)
        self._sinks: dict[int, Sink] = {}
        self._ids = itertools.count()
        self._lock = threading.RLock()

    @property
    def engine(self) -> Engine:
        """Raises EngineDead after shutdown()."""
        if self._engine is None:
            raise EngineDead("this LLM has been shut down; make a new one.")
        return self._engine

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def get_tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (generation_config.json)."""
        return self.engine.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Progress] = True,
        priority: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, in the order asked: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or a list of those.

        Which of them begins first is the engine's choice (technique longest_first).
        ``truncate_prompt_tokens`` keeps that many tokens at the end of each prompt (-1: as many as the context allows).
        Raises InvalidRequest before anything runs when one cannot be served, naming its index.
        """

        def read() -> list[Given]:
            parsed = _for_each(_as_list(prompts), parse_prompt)
            return self._requests(parsed, sampling_params, priority, truncate_prompt_tokens)

        return self._run(read, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Progress] = True,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template.

        ``continue_final_message``: the model goes on with the last message; otherwise it begins one (``add_generation_prompt``).
        """
        single = isinstance(messages, str) or (bool(messages) and isinstance(messages[0], Mapping))
        conversations = cast("list[Conversation]", [messages] if single else list(messages))

        def render(conversation: Conversation) -> ParsedPrompt:
            ending = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
            return self._inputs.chat_prompt(conversation, tools=tools, **ending, **(chat_template_kwargs or {}))

        return self._run(lambda: self._requests(_for_each(conversations, render), sampling_params, priority), use_tqdm)

    def stream(
        self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None = None, *, clamp: bool = False, **chat_options: Any
    ) -> Generator[RequestDelta, None, None]:
        """One prompt (or one conversation), delta by delta. Closing the generator early aborts the request.

        ``clamp``: max_tokens may shrink to what the context leaves, instead of being refused.
        """
        is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        parsed = self._inputs.chat_prompt(cast(Conversation, prompt), **chat_options) if is_chat else parse_prompt(cast(Prompt, prompt))
        return self._stream(self._request(parsed, sampling_params, clamp=clamp))

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, clamp: bool = False) -> OutputCollector:
        """Queues one prompt; ``turn()`` until its collector is ``finished``, then take its ``output()``."""
        return self._collected(parse_prompt(prompt), sampling_params, clamp=clamp)

    def submit_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        clamp: bool = False,
        cache_salt: str = "",
        priority: int = 0,
        **chat_options: Any,
    ) -> OutputCollector:
        """Queues one conversation; see ``submit``."""
        parsed = self._inputs.chat_prompt(messages, **chat_options)
        parsed.cache_salt, parsed.priority = cache_salt, priority
        return self._collected(parsed, sampling_params, clamp=clamp)

    def turn(self) -> None:
        """One step of the engine, and everything it produced handed to whoever waits for it."""
        with self._lock, deferred_interrupts():
            for request_id, delta in self._outputs.process(self.engine.core.step()):
                sink = self._sinks.pop(request_id) if delta.last else self._sinks[request_id]
                sink(delta)

    def shutdown(self) -> None:
        """Frees the model. The LLM cannot be used afterwards."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._inputs.close()
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.shutdown()

    def _run(self, read: Callable[[], list[Given]], use_tqdm: bool | Callable[..., Progress]) -> list[RequestOutput]:
        with no_collections():
            given = read()
            bar = _progress(use_tqdm, len(given))
            batch = _Batch(given, bar)
            try:
                self._enter(batch)
                for turn in itertools.count(1):
                    if not batch.running:
                        break
                    self.turn()
                    collect_now_and_then(turn)
            finally:
                self._leave(batch.running)
                if bar is not None:
                    bar.close()
            return [batch.collectors[request.request_id].output() for _, request in given]

    def _enter(self, batch: _Batch) -> None:
        """All requests of a call. The first of them that fill a step begin, and the others come in while that is computed."""
        core, tokenizer = self.engine.core, self.engine.tokenizer
        prompts = {request.request_id: prompt for prompt, request in batch.given}
        order = core.batch_order([request for _, request in batch.given])
        begin = first_part(order, tokens=core.step_tokens, rows=core.executor.info.max_num_seqs) if core.begins_in_order else len(order)
        for part in (order[:begin], order[begin:]):
            with self._lock, deferred_interrupts():
                for request in part:
                    self._add(request, batch.sink(prompts[request.request_id], request, tokenizer), whole=batch.bar is None)
            if begin < len(order):
                self.turn()

    def _stream(self, request: Request) -> Generator[RequestDelta, None, None]:
        arrived: deque[RequestDelta] = deque()  # filled by whichever thread takes a turn
        self._submit(request, arrived.append)
        last = False
        try:
            while not last:
                while not arrived:
                    self.turn()
                delta = arrived.popleft()
                last = delta.last
                yield delta
        finally:
            self._leave(() if last else (request.request_id,))

    def _request(
        self, prompt: ParsedPrompt, params: SamplingParams | None, *, clamp: bool = False, priority: int = 0, truncate: int | None = None
    ) -> Request:
        return self._inputs.request(
            next(self._ids),
            prompt,
            self.get_default_sampling_params() if params is None else params,
            arrival_time=time.perf_counter(),
            priority=priority,
            truncate_prompt_tokens=truncate,
            clamp=clamp or params is None,
        )

    def _collected(self, prompt: ParsedPrompt, params: SamplingParams | None, *, clamp: bool) -> OutputCollector:
        request = self._request(prompt, params, clamp=clamp)
        collector = _collector(prompt, request, self.engine.tokenizer)
        self._submit(request, collector.add)
        return collector

    def _requests(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        truncate: int | None = None,
    ) -> list[Given]:
        """All validated before the first one runs."""
        count = len(prompts)
        single = sampling_params is None or isinstance(sampling_params, SamplingParams)
        params = [sampling_params] * count if single else list(cast("Sequence[SamplingParams]", sampling_params))
        jobs = zip(
            prompts,
            _one_each("sampling_params", params, count),
            _one_each("priority", [0] * count if priority is None else list(priority), count),
            strict=True,
        )
        return _for_each(list(jobs), lambda job: (job[0], self._request(job[0], job[1], priority=job[2], truncate=truncate)))

    def _submit(self, request: Request, sink: Sink) -> None:
        with self._lock, deferred_interrupts():
            self._add(request, sink, whole=False)

    def _add(self, request: Request, sink: Sink, *, whole: bool) -> None:
        self._sinks[request.request_id] = sink
        self._outputs.add(request, whole=whole)
        self.engine.core.add(request)

    def _leave(self, request_ids: Iterable[int]) -> None:
        """Aborts these requests. Once nobody waits any more the steps in flight may end, so that blocks and rows are free again."""
        with self._lock, deferred_interrupts():
            for request_id in request_ids:
                self._sinks.pop(request_id, None)
                self._outputs.drop(request_id)
                if self._engine is not None:
                    self._engine.core.abort(request_id)
            while not self._sinks and self._engine is not None and self._engine.core.has_work:
                self._engine.core.step()


def _all_below(ids: array[int], limit: int) -> bool:
    """Of at least one id: as numbers without a sign, negative ones are large."""
    return bool(np.frombuffer(ids, dtype=np.uintc).max() < limit)


def _collector(prompt: ParsedPrompt, request: Request, tokenizer: Tokenizer | None) -> OutputCollector:
    return OutputCollector(str(request.request_id), prompt.text, request, tokenizer, prompt.given)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a list of one; a list of ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _for_each(items: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """``work`` on every item; an error says at which index it happened (where there are several)."""
    done = []
    for index, item in enumerate(items):
        try:
            done.append(work(item))
        except InvalidRequest as error:
            if len(items) > 1:
                error.message = f"prompt {index}: {error.message}"
                error.args = (error.message,)
            raise
    return done


def _one_each(name: str, values: list[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} entries for {count} prompts; give one for all or one for each.", param=name)
    return values


def _progress(use_tqdm: bool | Callable[..., Progress], total: int) -> Progress | None:
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Processed prompts")
    return ProgressLine(total, "Processed prompts") if use_tqdm else None
