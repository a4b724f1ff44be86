"""The offline API over an engine in this process: prompts in, RequestOutputs out.

What lives here: ``LLM``. What may not: putting the engine together (assembly.py), the server, asyncio (client.py).
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, cast

import numpy as np

from headrace.config import EngineConfig
from headrace.engine.assembly import Engine, create_engine
from headrace.engine.grammar_check import create_grammar_check
from headrace.engine.info import EngineInfo, check_sleep
from headrace.engine.inputs import InputProcessor, Message, ParsedPrompt, Prompt, RequestOptions, parse_prompt
from headrace.engine.output import OutputCollector, OutputProcessor, RequestDelta
from headrace.engine.pooled import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    embedding,
    paired,
    score,
)
from headrace.engine.resolve import create_config
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError, EngineDead, InvalidRequest, ModelError, StepFailed
from headrace.observe.progress import Progress, ProgressLine
from headrace.processes.garbage import collect_now_and_then, no_collections
from headrace.request import Given, Json, LoRARequest, Request, RequestOutput, SamplingParams

Sink = Callable[[RequestDelta], None]
Bar = bool | Callable[..., Progress]  # whether one is drawn, or what draws it
Sampling = SamplingParams | Sequence[SamplingParams] | None
Conversation = Sequence[Message]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
Prepared = tuple[ParsedPrompt, Request]


class LLM:
    """A model and an engine in this process.

    ``model``: folder, .gguf file or hub id; None is the bundled demo. Keywords are the fields of the config classes by
    name (dtype, max_model_len, gpu_memory_utilization, max_num_seqs, enable_prefix_caching, seed, …); ``technique``
    maps switches to values: ``technique={"chunked_prefill": False}``. Raises ConfigError or ModelError. Calls from
    several threads take turns.

    An answer whose step failed in the engine has finish_reason "error" and the cause as its stop_reason; others are not
    affected.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        technique: Given | None = None,
        **keywords: Any,
    ) -> None:
        self._open(create_config(model, technique=technique, **keywords))

    @classmethod
    def from_config(cls, config: EngineConfig, *, texts: bool = False) -> LLM:
        """An LLM from a whole config, as commands have it. ``texts``: it is of no use to the caller without a
        tokenizer."""
        llm = cls.__new__(cls)
        llm._open(config, texts=texts)
        return llm

    @staticmethod
    def _create(config: EngineConfig, texts: bool) -> Engine:
        if config.device.data_parallel_size == 1:
            return create_engine(config, watched=False, texts=texts)
        from headrace.engine.replicated import create_replicated  # and with it msgspec, which one engine can do without

        return cast(Engine, create_replicated(config, texts))

    def _open(self, config: EngineConfig, *, texts: bool = False) -> None:
        self._engine: Engine | None = None
        engine = self._engine = self._create(config, texts)
        self._inputs = InputProcessor(
            engine.info, engine.tokenizer, config.model.seed, create_grammar_check(engine.tokenizer), _all_below
        )
        self._outputs = OutputProcessor(engine.tokenizer, engine.core.finish)
        self._sinks: dict[int, Sink] = {}
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
        sampling_params: Sampling = None,
        *,
        use_tqdm: Bar = True,
        priority: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Completes prompts, in the order asked: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or a list
        of those.

        Which of them begins first is the engine's choice (technique longest_first). ``truncate_prompt_tokens`` keeps
        that many tokens at the end of each prompt (-1: as many as the context allows). ``lora_request``: the adapter of
        all prompts, or of each. Raises InvalidRequest before anything runs when one cannot be served, naming its index.
        """

        def read() -> list[Prepared]:
            parsed = _for_each(_as_list(prompts), parse_prompt)
            return self._requests(parsed, sampling_params, priority, truncate_prompt_tokens, lora_request)

        return self._run(read, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
        *,
        use_tqdm: Bar = True,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Given | None = None,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template.

        ``continue_final_message``: the model goes on with the last message; otherwise it begins one
        (``add_generation_prompt``).
        """
        single = isinstance(messages, str) or (bool(messages) and isinstance(messages[0], Mapping))
        conversations = cast("list[Conversation]", [messages] if single else list(messages))

        def render(conversation: Conversation) -> ParsedPrompt:
            ending = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
            return self._inputs.chat_prompt(conversation, tools=tools, **ending, **(chat_template_kwargs or {}))

        return self._run(
            lambda: self._requests(_for_each(conversations, render), sampling_params, priority, lora=lora_request),
            use_tqdm,
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Bar = True,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts, in the order asked. ``truncate_prompt_tokens`` keeps that many tokens at the beginning
        of each (-1: as many as fit). Raises InvalidRequest, also for a model that does not embed."""
        self._inputs.check_task("embed")
        pooling, params = self._inputs.pooling, pooling_params or PoolingParams()
        params.check(pooling.width)
        found = self._pooled(_for_each(_as_list(prompts), parse_prompt), truncate_prompt_tokens, use_tqdm, lora_request)
        return [
            EmbeddingRequestOutput(
                each.request_id, EmbeddingOutput(embedding(each.pooled, pooling, params).tolist()),
                each.prompt_token_ids, each.num_cached_tokens,
            )
            for each in found
        ]  # fmt: skip

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Bar = True,
        lora_request: Adapters = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts belong together: one with each of several, or pair by pair. A reranker reads both at once; of
        a model that embeds, the cosine. ``activation`` off: a reranker's logit."""
        self._inputs.check_task("embed", "score")
        pairs = paired(data_1, data_2)
        run: Json = {"truncate": truncate_prompt_tokens, "use_tqdm": use_tqdm, "lora": lora_request}
        if self.info.task == "embed":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            found = dict(zip(texts, self._pooled([ParsedPrompt(text, None) for text in texts], **run), strict=True))
            both = [(found[first], found[second]) for first, second in pairs]
            return [
                ScoringRequestOutput(
                    second.request_id, ScoringOutput(cosine(array("f", first.pooled), array("f", second.pooled))),
                    first.prompt_token_ids + second.prompt_token_ids,
                )
                for first, second in both
            ]  # fmt: skip
        options: Json = {"instruction": instruction, "truncate_prompt_tokens": truncate_prompt_tokens}
        prompts = _for_each(pairs, lambda pair: self._inputs.pair(*pair, **options))
        return [
            ScoringRequestOutput(
                each.request_id,
                ScoringOutput(score(each.pooled, self._inputs.pooling, activation)),
                each.prompt_token_ids,
            )
            for each in self._pooled(prompts, **{**run, "truncate": None})
        ]

    def _pooled(
        self,
        prompts: list[ParsedPrompt],
        truncate: int | None,
        use_tqdm: Bar,
        lora: Adapters = None,
    ) -> list[RequestOutput]:
        loras = _one_each("lora_request", lora, LoRARequest, len(prompts))

        def request(job: tuple[ParsedPrompt, LoRARequest | None]) -> Prepared:
            adapter = None if job[1] is None else self._adapter(job[1])
            made = self._inputs.pooling_request(
                job[0], truncate_prompt_tokens=truncate, adapter=adapter, param="prompt"
            )
            return job[0], made

        found = self._run(lambda: _for_each(list(zip(prompts, loras, strict=True)), request), use_tqdm)
        failed = next((each.outputs[0] for each in found if not each.pooled), None)
        if failed is not None:
            raise StepFailed(str(failed.stop_reason or "The step that computed this request failed; send it again."))
        return found

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        clamp: bool = False,
        lora_request: LoRARequest | None = None,
        **chat_options: Any,
    ) -> Generator[RequestDelta, None, None]:
        """One prompt (or one conversation), delta by delta. Closing the generator early aborts the request.

        ``clamp``: max_tokens may shrink to what the context leaves, instead of being refused.
        """
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        if is_list and prompt and isinstance(cast(Conversation, prompt)[0], Mapping):
            parsed = self._inputs.chat_prompt(cast(Conversation, prompt), **chat_options)
        else:
            parsed = parse_prompt(cast(Prompt, prompt))
        return self._stream(self._request(parsed, sampling_params, clamp=clamp, lora=lora_request))

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, clamp: bool = False
    ) -> OutputCollector:
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
        with self._lock, _deferred_interrupts():
            for request_id, delta in self._outputs.process(self.engine.core.step()):
                self._sinks[request_id](delta)
                if delta.last:  # only now: another thread may wait for that
                    del self._sinks[request_id]

    def sleep(self, level: int = 1) -> None:
        """Gives up memory until ``wake_up``: 1 moves weights to host memory, 2 gives up all that the start made; cached
        prefixes are gone. Requests that run are finished first. Raises InvalidRequest without
        ``enable_sleep_mode``, OutOfMemory where host memory is short."""
        core = self.engine.core
        check_sleep(self.engine.info, level)
        core.sleep(level)
        while core.falls_asleep:
            self.turn()
        core.check_asleep()

    def wake_up(self) -> None:
        """Raises OutOfMemory where the memory is taken by now; it sleeps on."""
        with self._lock, _deferred_interrupts():
            self.engine.core.wake()

    @property
    def is_sleeping(self) -> bool:
        return self.engine.core.asleep > 0

    def shutdown(self) -> None:
        """Frees the model. The LLM cannot be used afterwards."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._inputs.close()
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, read: Callable[[], list[Prepared]], use_tqdm: Bar) -> list[RequestOutput]:
        """Every answer is a stream that is collected."""
        with no_collections():
            given = read()
            bar, turns = _progress(use_tqdm, len(given)), itertools.count(1)
            try:
                collectors = self._enter(given, bar)
                for _, request in given:
                    while request.request_id in self._sinks:
                        self.turn()
                        collect_now_and_then(next(turns))
            finally:
                self._leave([request.request_id for _, request in given])
                if bar is not None:
                    bar.close()
            return [collectors[request.request_id].output() for _, request in given]

    def _enter(self, given: list[Prepared], bar: Progress | None) -> dict[int, OutputCollector]:
        """All requests of a call. The first of them that fill a step begin, and the others come in while that is
        computed."""
        core = self.engine.core
        collectors, prompts = {}, {request.request_id: prompt for prompt, request in given}
        order = core.batch_order([request for _, request in given])
        begin = len(order)
        if core.begins_in_order:
            begin = first_part(order, tokens=core.step_tokens, rows=core.executor.info.max_num_seqs)
        for part in (order[:begin], order[begin:]):
            with self._lock, _deferred_interrupts():
                for request in part:
                    collectors[request.request_id] = mine = self._collector(prompts[request.request_id], request)
                    self._add(request, _counted(mine.add, bar), whole=bar is None)
            if begin < len(order):
                self.turn()
        return collectors

    def _stream(self, request: Request) -> Generator[RequestDelta, None, None]:
        arrived: deque[RequestDelta] = deque()  # filled by whichever thread takes a turn
        self._submit(request, arrived.append)
        try:
            while request.request_id in self._sinks or arrived:  # in this order: another thread may take the last turn
                while not arrived:
                    self.turn()
                yield arrived.popleft()
        finally:
            self._leave((request.request_id,))

    def _request(
        self,
        prompt: ParsedPrompt,
        params: SamplingParams | None,
        *,
        clamp: bool = False,
        priority: int = 0,
        truncate: int | None = None,
        lora: LoRARequest | None = None,
    ) -> Request:
        chosen = self.get_default_sampling_params() if params is None else params
        adapter = None if lora is None else self._adapter(lora)
        options: RequestOptions = {"priority": priority, "truncate_prompt_tokens": truncate, "adapter": adapter}
        return self._inputs.request(prompt, chosen, clamp=clamp or params is None, **options)

    def _adapter(self, lora: LoRARequest) -> str:
        """Its name, by which the engine knows it from now on."""
        registry = self.engine.core.adapters
        if registry is None:
            raise InvalidRequest(
                f"lora_request names {lora.lora_name!r}, but this engine serves no adapters; set enable_lora (--enable-lora)."
            )
        try:
            registry.load(lora.lora_name, lora.lora_path, lora.load_inplace or None)
        except (ModelError, ConfigError) as error:
            raise InvalidRequest(error.message, param="lora_request") from error
        return lora.lora_name

    def _collected(self, prompt: ParsedPrompt, params: SamplingParams | None, *, clamp: bool) -> OutputCollector:
        request = self._request(prompt, params, clamp=clamp)
        collector = self._collector(prompt, request)
        self._submit(request, collector.add)
        return collector

    def _collector(self, prompt: ParsedPrompt, request: Request) -> OutputCollector:
        given = prompt.given or ()
        return OutputCollector(str(request.request_id), prompt.text, request, self.engine.tokenizer, given)

    def _requests(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: Sampling,
        priority: Sequence[int] | None,
        truncate: int | None = None,
        lora: Adapters = None,
    ) -> list[Prepared]:
        """All validated before the first one runs."""
        count = len(prompts)
        jobs = zip(
            prompts,
            _one_each("sampling_params", sampling_params, SamplingParams, count),
            _one_each("priority", priority, int, count),
            _one_each("lora_request", lora, LoRARequest, count),
            strict=True,
        )
        return _for_each(
            list(jobs),
            lambda job: (job[0], self._request(job[0], job[1], priority=job[2] or 0, truncate=truncate, lora=job[3])),
        )

    def _submit(self, request: Request, sink: Sink) -> None:
        with self._lock, _deferred_interrupts():
            self._add(request, sink, whole=False)

    def _add(self, request: Request, sink: Sink, *, whole: bool) -> None:
        if self.is_sleeping:
            raise InvalidRequest("this LLM sleeps; call wake_up() first.")
        self._sinks[request.request_id] = sink
        self._outputs.add(request, whole=whole)
        self.engine.core.add(request)

    def _leave(self, request_ids: Iterable[int]) -> None:
        """Aborts those of these requests that have not ended. Once no caller waits any more the steps in flight may end,
        so that blocks and rows are free again."""
        with self._lock, _deferred_interrupts():
            for request_id in request_ids:
                if self._sinks.pop(request_id, None) is not None:
                    self._outputs.drop(request_id)
                    if self._engine is not None:
                        self._engine.core.abort(request_id)
            while not self._sinks and self._engine is not None and self._engine.core.has_work:
                self._engine.core.step()


def _all_below(ids: array[int], limit: int) -> bool:
    """Of at least one id: as numbers without a sign, negative ones are large."""
    return bool(np.frombuffer(ids, dtype=np.uintc).max() < limit)


def _counted(sink: Sink, bar: Progress | None) -> Sink:
    """The same, and what it takes is shown."""
    if bar is None:
        return sink

    def count(delta: RequestDelta) -> None:
        sink(delta)
        if isinstance(bar, ProgressLine):
            bar.add_tokens(len(delta.token_ids))
        if delta.last:
            bar.update(1)

    return count


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a list of one; a list of ids is one prompt."""
    if (
        isinstance(prompts, (str, Mapping))
        or not isinstance(prompts, Sequence)
        or (prompts and isinstance(prompts[0], int))
    ):
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


def _one_each(name: str, given: Any, kind: type, count: int) -> list[Any]:
    """``given``: None, or one of this ``kind`` for all, or one for each."""
    if isinstance(given, str | Mapping):
        raise InvalidRequest(f"{name} is a {type(given).__name__}; give a {kind.__name__}.", param=name)
    values = [given] * count if given is None or isinstance(given, kind) else list(given)
    if len(values) != count:
        raise InvalidRequest(
            f"{name} has {len(values)} entries for {count} prompts; give one for all or one for each.", param=name
        )
    return values


def _progress(use_tqdm: Bar, total: int) -> Progress | None:
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Processed prompts")
    return ProgressLine(total, "Processed prompts") if use_tqdm else None


# of which the first step is given one: simulated at an H200's prices, a sixth to a half of 256 requests that share a
# prefix do well
SHARE = 4


def first_part(requests: Sequence[Request], *, tokens: int, rows: int) -> int:
    """How many of them, in their order, the first step is made of: as many as fill so many rows, or so many tokens if
    nothing of their prompts is cached. But a share of all at least, for prompts that begin alike are computed once; a
    step of little work would be done before the others are planned."""
    least = len(requests) / SHARE
    for count, request in enumerate(requests, start=1):
        tokens -= len(request.prompt_token_ids)
        rows -= request.params.n
        if rows <= 0 or (tokens <= 0 and count >= least):
            return count
    return len(requests)


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """A first Ctrl-C inside is raised as KeyboardInterrupt on leaving, so that state is whole; a second one at once.

    Only where Python's own handler is in place, in the main thread: an application that handles SIGINT itself keeps
    doing so.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt
