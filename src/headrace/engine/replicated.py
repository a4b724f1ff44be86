"""Replicas under ``LLM``: processes of their own behind the face that it knows of an engine in this process.

What lives here: that face. What may not: replicas themselves (replicas.py).

There is no thread: the event loop that the replicas' sockets need turns while a step is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.clock import RealClock
from headrace.config import EngineConfig
from headrace.engine import connection as frames
from headrace.engine.info import EngineInfo
from headrace.engine.inputs import default_params
from headrace.engine.replicas import Replicas
from headrace.engine.resolve import find_source
from headrace.engine.tokenizer import Tokenizer, check_texts, load_tokenizer
from headrace.errors import ConfigError, EngineDead, HeadraceError
from headrace.models.source import ModelSource
from headrace.observe.metrics import StepRecorder
from headrace.processes.messages import Question
from headrace.request import Finished, FinishReason, Request, SamplingParams, SequenceOutput

Result = TypeVar("Result")


class ReplicatedCore:
    """What LLM uses of an EngineCore. An answer whose replica dies ends with an error."""

    begins_in_order = False
    clock = RealClock()

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._arrived: list[SequenceOutput] = []
        self._news = asyncio.Event()
        self._open: dict[int, set[int]] = {}  # answers that have not ended, by request
        self.adapters = self if config.adapters.enable_lora else None
        try:
            self.engine = self._run(self._start(config))
        except BaseException:
            self._loop.close()
            raise

    async def _start(self, config: EngineConfig) -> Replicas:
        engine = await Replicas.launch(config)
        try:
            await engine.started()
        except BaseException:
            await engine.close(0.0)
            raise
        engine.listen(self._hear, self._lost)
        return engine

    def _run(self, task: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(task)

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def batch_order(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests

    def add(self, request: Request) -> None:
        """Raises EngineDead."""
        if self.engine.death is not None:
            raise self.engine.death
        self._open[request.request_id] = set(range(request.params.n))
        self.engine.submit(request)

    def step(self) -> Sequence[SequenceOutput]:
        """What has come from any replica, once there is something; nothing where no request is open."""
        if not self._arrived and self._open:
            self._news.clear()
            self._run(self._news.wait())
        outputs, self._arrived = self._arrived, []
        return outputs

    def finish(self, request_id: int, index: int, num_tokens: int) -> None:
        self.engine.finish(request_id, index, num_tokens)
        self._end(request_id, index)

    def _end(self, request_id: int, index: int) -> None:
        """What still comes of this answer is dropped."""
        if (left := self._open.get(request_id)) is not None:
            left.discard(index)
            if not left:
                del self._open[request_id]

    def abort(self, request_id: int) -> None:
        if self._open.pop(request_id, None) is not None:
            self.engine.abort(request_id)

    def require(self, name: str, folder: str) -> None:
        """Raises ConfigError for what is no adapter of this model."""
        try:
            self._tell(frames.LoadAdapter, name, folder)
        except HeadraceError as error:
            raise ConfigError(error.message) from None

    # --- sleep: asked, it comes back once all sleep

    falls_asleep = False

    @property
    def asleep(self) -> int:
        return self.engine.asleep

    def sleep(self, level: int) -> None:
        self._tell(frames.Sleep, level)

    def wake(self) -> None:
        self._tell(frames.Wake)

    def check_asleep(self) -> None:
        pass

    def _tell(self, question: type[Question], *about: Any) -> None:
        if (error := self._run(self.engine.ask(question, *about)).get("error")) is not None:
            raise HeadraceError(error)

    def close(self) -> None:
        self._run(self.engine.close())
        self._loop.close()

    def _hear(self, frame: frames.Step) -> None:
        self._take([each for each in frames.unpack_step(frame) if each.request_id in self._open])

    def _lost(self, error: EngineDead, request_ids: Collection[int] | None) -> None:
        gone = Finished(FinishReason.ERROR, message=error.message)
        ids = list(self._open) if request_ids is None else request_ids
        self._take(
            [SequenceOutput(each, index, (), finished=gone) for each in ids for index in self._open.get(each, ())]
        )

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for each in outputs:
            if each.finished is not None:
                self._end(each.request_id, each.index)
        self._arrived += outputs
        if outputs:
            self._news.set()


@dataclass(slots=True)
class ReplicatedEngine:
    """What LLM uses of an Engine; the recorder has seen nothing, steps are the replicas' own."""

    core: ReplicatedCore
    source: ModelSource
    tokenizer: Tokenizer | None
    info: EngineInfo
    default_params: SamplingParams
    recorder: StepRecorder

    def await_kernels(self, seconds: float = 0.0) -> bool:
        return True

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        self.core.close()


def create_replicated(config: EngineConfig, texts: bool = False) -> ReplicatedEngine:
    """``texts``: as ``create_engine``. Raises what kept a replica from starting."""
    source = find_source(config)
    tokenizer = load_tokenizer(source, config.model.tokenizer, **config.model.chat_options)
    if texts:
        check_texts(source, tokenizer)
    core = ReplicatedCore(config)
    return ReplicatedEngine(
        core, source, tokenizer, core.engine.info, default_params(source.generation_defaults), StepRecorder()
    )
