"""One model's engine in this process, put together: found, loaded, its cache sized, the core on top.

What lives here: ``create_engine`` and what it makes, an executor that can be given up and made again (deep sleep, level
2), whether a draft model was trained on conversations that look like the target's. What may not: asking it (llm.py,
loop.py), what level 1 moves (worker/asleep.py), scheduling, mathematics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.clock import RealClock
from headrace.config import Decision, DeviceConfig, EngineConfig
from headrace.cost.run_facts import facts_of, switches_of
from headrace.disagg.hand_over import HandOver
from headrace.engine.core import EngineCore
from headrace.engine.executor import AdapterOutcome, Control, Executor, ExecutorInfo, OpenStaging, Sleep, Ticket, Wake
from headrace.engine.grammar import Vocabulary, vocabulary_of
from headrace.engine.grammar_masks import GrammarMasks
from headrace.engine.info import EngineInfo
from headrace.engine.inputs import default_params
from headrace.engine.resolve import create_hash_executor, describe, find_source, resolve_config, resolve_pooling
from headrace.engine.template import CALL
from headrace.engine.tokenizer import Tokenizer, check_texts, load_tokenizer
from headrace.errors import ConfigError, InvalidRequest, ModelError, OutOfMemory
from headrace.lora.peft import read_adapter
from headrace.lora.registry import AdapterRegistry
from headrace.models.families import spec_from_config
from headrace.models.files import TokenizerFiles
from headrace.models.source import ModelSource, WeightFormat, find_model
from headrace.observe.metrics import StepRecorder
from headrace.observe.trace import StepTrace, TraceFile
from headrace.processes.builders import mark_of
from headrace.processes.garbage import collect_frozen, freeze_again, no_collections
from headrace.request import Json, SamplingParams, StepPlan, StepResult, TokenMasks
from headrace.spec import AdapterSpace
from headrace.speculative.settings import read_settings
from headrace.torch_environment import prepare_for_torch
from headrace.worker.head_start import HeadStart, Stages, begin_head_start
from headrace.worker.host import available_memory

if TYPE_CHECKING:
    from headrace.parallel.ranks import Ranks

KERNEL_PATIENCE = 120.0  # seconds


@dataclass(slots=True)
class Engine:
    """One model's engine in this process: the core and what stands around it."""

    core: EngineCore
    source: ModelSource
    tokenizer: Tokenizer | None
    info: EngineInfo
    default_params: SamplingParams
    recorder: StepRecorder
    masks: GrammarMasks
    trace: StepTrace | None = None

    def await_kernels(self, seconds: float = KERNEL_PATIENCE) -> bool:
        """Whether every kernel is there, within that time, also those that the start did not wait for: for whoever
        measures or compares steps from the first on. An executor whose start built them all has none of these."""
        later = getattr(self.core.executor, "later", None)
        return later is None or bool(later.wait(seconds))

    def prepare(self) -> None:
        """All that an idle server would do ahead, at once: for whoever measures what lasts. Nothing may be running."""
        while self.core.executor.prepare():
            pass

    def close(self) -> None:
        self.masks.close()
        self.core.executor.close()
        if self.trace is not None:
            self.trace.close()


def take_place(config: DeviceConfig, replica: int) -> None:
    """Which of several replicas this process is: it has devices of its own. Raises ConfigError where there are too few
    for all."""
    if config.data_parallel_size > 1 and config.executor == "model":
        prepare_for_torch()
        from headrace.parallel.device import take_gpus

        take_gpus(config, replica)


def create_engine(
    config: EngineConfig,
    *,
    wrap: Callable[[Executor, StepRecorder], Executor] | None = None,
    with_tokenizer: bool = True,
    watched: bool = True,
    texts: bool = False,
    lost: Callable[[str], None] | None = None,
    replica: int = 0,
    staging: int = -1,
) -> Engine:
    """Finds the model, loads it, sizes the cache, and puts the core on top. ``wrap`` goes around the executor.

    ``watched``: answers are read while they are written, so that the time between two tokens counts. ``lost``: is
    told, from a thread, why the engine's ranks are gone, where it has several; every later step raises EngineDead.
    ``texts``: the caller has nothing else to ask; a model without a tokenizer is refused before its weights are read.
    ``replica``: which of several; ``staging``: the file through which they hand over prompts, where they do.

    Raises ModelError, ConfigError or OutOfMemory.
    """
    # what cannot be written is said at once
    file = TraceFile(config.device.trace) if config.device.trace is not None else None
    source = find_source(config)
    tokenizer = None
    if with_tokenizer or not source.eos_token_ids:  # where the configs name no EOS, the tokenizer may
        tokenizer = load_tokenizer(source, config.model.tokenizer, **config.model.chat_options)
    if texts:
        check_texts(source, tokenizer)
    check_draft_templates(config, source)
    defaults = default_params(source.generation_defaults)
    config, executor, decisions, recorder = _create_executor(config, source, watched, lost)
    eos = source.eos_token_ids or (
        (tokenizer.eos_token_id,) if tokenizer is not None and tokenizer.eos_token_id is not None else ()
    )
    masks = GrammarMasks(partial(_vocabulary, config, source, tokenizer, executor.info.vocab_size, eos))
    if config.device.enable_sleep_mode:
        again = of_same_size(config, executor.info)
        executor = SleepingExecutor(executor, lambda: _create_executor(again, source, watched, lost)[1])
    executor = executor if wrap is None else wrap(executor, recorder)
    core = EngineCore(
        executor,
        scheduler=config.scheduler,
        cache=config.cache,
        eos_token_ids=frozenset(eos),
        clock=RealClock(),
        namespace=prefix_namespace(config, source, executor.info, decisions),
        depth=(config.device.overlap or 0) + config.device.pipeline_parallel_size - 1,
        observer=recorder,
        masks=masks,
        adapters=_create_registry(config, source, executor),
        forecast=recorder.floors,
        speed=recorder.speed,
    )
    if staging >= 0:
        _hand_over(core, config.device.staging_regions, replica, staging)
    info = describe(config, source, core, eos, decisions)
    engine = Engine(core, source, tokenizer, info, defaults, recorder, masks)
    if file is not None:
        engine.trace = _create_trace(file, config.device, engine)
        core.observe(engine.trace)
    return engine


def _hand_over(core: EngineCore, givers: int, replica: int, staging: int) -> None:
    core.hand_over = HandOver(core, replica)
    core.executor.control(OpenStaging(staging, givers, core.hand_over.widths, core.hand_over.slots))


def _create_registry(config: EngineConfig, source: ModelSource, executor: Executor) -> AdapterRegistry | None:
    """Raises ModelError for a folder of ``lora_modules`` that is no adapter of this model, ConfigError for a
    ``lora_dir`` that is none."""
    adapters, space = config.adapters, executor.info.adapters
    if space is None:
        return None
    if adapters.lora_dir is not None and not Path(adapters.lora_dir).is_dir():
        raise ConfigError(f"--lora-dir is {adapters.lora_dir!r}, which is no folder; check the path.")
    spec = spec_from_config(source.config)
    registry = AdapterRegistry(
        lambda folder: read_adapter(Path(folder), spec, adapters.max_lora_rank),
        executor.control,
        space.slots,
        adapters.lora_dir,
        _blocks_in_host_memory(config, space),
    )
    for name, folder in adapters.modules.items():
        registry.register(name, folder)
    return registry


def _blocks_in_host_memory(config: EngineConfig, space: AdapterSpace) -> int | None:
    """Of adapters, where no flag says how many of these: a quarter of what is available."""
    if config.adapters.max_loras or config.adapters.max_cpu_loras or not space.block_bytes:
        return None
    return max(1, available_memory() // (4 * space.block_bytes * config.device.devices_here))


def _create_trace(file: TraceFile, config: DeviceConfig, engine: Engine) -> StepTrace:
    """Writes this engine's steps down. ``config`` is resolved; nothing is running."""
    core, recorder, floors = engine.core, engine.recorder, engine.recorder.floors
    name = f"headrace: {engine.info.model}, {engine.info.device}"
    if floors is None:
        return StepTrace(file, recorder, core.stats, name=name)
    from headrace import __version__
    from headrace.cost.sharing import shared_blocks

    facts = facts_of(floors, config, model=engine.source.name, engine=__version__)
    groups = [group.spec for group in core.executor.info.kv_groups]
    sharing = shared_blocks(config, facts.device.kind, floors.spec, facts.dtype, groups)
    return StepTrace(file, recorder, core.stats, name=name, facts=facts, sharing=sharing)


def trace_into(path: str, engine: Engine, config: DeviceConfig) -> StepTrace:
    """An observer that writes an idle engine's steps from now on into a file of its own. ``config`` is resolved. Raises
    ConfigError."""
    return _create_trace(TraceFile(path), config, engine)


def prefix_namespace(
    config: EngineConfig, source: ModelSource, info: ExecutorInfo, decisions: Sequence[Decision]
) -> bytes:
    """Equal only where the same prefix has the same keys and values in the same layout: model, revision, precision, KV
    groups."""
    dtype = next((str(each.value) for each in decisions if each.name == "dtype"), config.model.dtype)
    groups = [group.spec for group in info.kv_groups]
    weights = f"random, seed {config.model.seed}" if source.weights is WeightFormat.DUMMY else source.revision
    facts = (source.config, weights, dtype, config.cache.kv_cache_dtype, groups)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def _vocabulary(
    config: EngineConfig, source: ModelSource, tokenizer: Tokenizer | None, width: int, eos: Sequence[int]
) -> Vocabulary:
    """An engine that leaves texts to its front ends loads a tokenizer when the first grammar comes."""
    if tokenizer is None:
        tokenizer = load_tokenizer(source, config.model.tokenizer, **config.model.chat_options)
    return vocabulary_of(tokenizer, width, eos)


def _create_executor(
    config: EngineConfig, source: ModelSource, watched: bool, lost: Callable[[str], None] | None
) -> tuple[EngineConfig, Executor, tuple[Decision, ...], StepRecorder]:
    if config.device.executor == "keyed-hash":
        config, decisions = resolve_config(config, "none")
        return config, create_hash_executor(config, source), decisions, StepRecorder()
    mark = mark_of(config, source.config) if config.device.device != "cpu" else None
    ranks = _begin_ranks(config, source, mark, lost) if config.device.num_ranks > 1 else None
    prepare_for_torch(little_scratch=config.model.share_weights)
    try:
        with (begin_head_start(mark) if mark is not None else None) or nullcontext() as head_start:
            return _load(config, source, watched, head_start, ranks)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _begin_ranks(
    config: EngineConfig, source: ModelSource, mark: Path | None, lost: Callable[[str], None] | None
) -> Ranks:
    """One rank alone loads none of this."""
    from headrace.parallel.ranks import begin_ranks

    return begin_ranks(config, spec_from_config(source.config), source.fingerprint, str(mark or ""), lost)


def _load(
    config: EngineConfig, source: ModelSource, watched: bool, head_start: HeadStart | None, ranks: Ranks | None
) -> tuple[EngineConfig, Executor, tuple[Decision, ...], StepRecorder]:
    stages = Stages(RealClock())
    with no_collections():  # torch makes 170,000 objects that stay
        from headrace.parallel.leader import create_executor
        from headrace.worker.profile import create_recorder, resolve_profile
        from headrace.worker.settings import resolve_device, takes_long_steps

    stages.done("imports")
    device, found = resolve_device(config.device.device)
    spec = spec_from_config(source.config)
    config, pooled = resolve_pooling(config, spec)
    config, decisions = resolve_config(
        config,
        device,
        long_steps=not watched and takes_long_steps(device, source.config),
        least_tokens=(config.model.max_model_len or spec.max_positions) if spec.whole_prompts else 0,
    )
    limits = cache(
        partial(resolve_profile, device, shared=config.model.share_weights)
    )  # once, when they are first asked for
    executor, loaded = create_executor(config, source, head_start, stages, meanwhile=limits, ranks=ranks)
    dtype = next(str(each.value) for each in loaded if each.name == "dtype")
    promise, switches = config.scheduler.max_step_seconds, switches_of(config.device)
    told: Json = {"device": device, "dtype": dtype, "promise": promise, "switches": switches}
    recorder, profile = create_recorder(source.config, executor.info, limits(), **told, ranks=config.device)
    return config, executor, (*(() if found is None else (found,)), *pooled, *decisions, *loaded, profile), recorder


_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
_USER, _SYSTEM = {"role": "user", "content": "Where is it?"}, {"role": "system", "content": "You are brief."}
_CONVERSATIONS: tuple[tuple[Sequence[Any], Sequence[Any] | None], ...] = (
    ((_USER,), None),
    ((_SYSTEM, _USER, {"role": "assistant", "content": "There."}, {"role": "user", "content": "Two\nlines of <text>."}), None),
    ((_USER,), (_TOOL,)),
    ((_SYSTEM, _USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "seen"}), (_TOOL,)),
)  # fmt: skip


def check_draft_templates(config: EngineConfig, target: ModelSource) -> None:
    """Raises ConfigError where the templates of a draft model and its target make different texts of a conversation; a
    model without one is taken at its word, and one that is not found is for the worker to name."""
    settings = read_settings(config.scheduler.speculative_config)
    if settings is None or settings.model is None:
        return
    try:
        draft = find_model(replace(config.model, model=settings.model, load_format="dummy", quantization=None))
    except ModelError:
        return
    own, wanted = draft.tokenizer_files(), target.tokenizer_files()
    if own is None or wanted is None or not own.templates or not wanted.templates or own.templates == wanted.templates:
        return
    for mine, theirs in zip(_rendered(own), _rendered(wanted), strict=True):
        if mine != theirs:
            raise ConfigError(
                f"speculative_config.model {draft.name} has another chat template than {target.name}: of the same conversation it makes "
                f"{_around(mine, theirs)}, the target {_around(theirs, mine)}; give a draft of its family."
            )


def _rendered(files: TokenizerFiles) -> Iterator[str]:
    """Each conversation, or why there is none."""
    tokenizer = Tokenizer(files)
    try:
        for messages, tools in _CONVERSATIONS:
            try:
                yield tokenizer.apply_chat_template(messages, tools)
            except (InvalidRequest, ModelError):
                yield "nothing"
    finally:
        tokenizer.close()


def _around(text: str, other: str) -> str:
    """Where the first difference is."""
    at = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[max(0, at - 10) : at + 20])


def of_same_size(config: EngineConfig, info: ExecutorInfo) -> EngineConfig:
    """By which an executor is made once more with the same blocks and rows, whatever memory there is by then.
    ``config`` is resolved."""
    size = sum(group.num_blocks * group.spec.bytes_per_block for group in info.kv_groups)
    counted = config.cache.num_blocks is not None or not size  # an encoder has no KV
    cache = config.cache if counted else replace(config.cache, kv_cache_memory=size)
    return replace(config, cache=cache, model=replace(config.model, max_model_len=info.max_model_len))


class SleepingExecutor:
    """``create`` makes the inner one again."""

    def __init__(self, inner: Executor, create: Callable[[], Executor]) -> None:
        self.info: ExecutorInfo = inner.info
        self._create = create
        self._wake(inner)

    @property
    def later(self) -> Any:
        """As the inner one has it (Engine.await_kernels)."""
        return getattr(self._inner, "later", None)

    def _wake(self, inner: Executor) -> None:
        self._inner: Executor | None = inner
        self.submit: Callable[[StepPlan], Ticket] = inner.submit
        self.drafts: Callable[[Ticket], Sequence[Sequence[int]]] = inner.drafts
        self.sample: Callable[[Ticket, TokenMasks], None] = inner.sample
        self.collect: Callable[[Ticket], StepResult] = inner.collect
        self.recover: Callable[[], None] = inner.recover

    def prepare(self) -> bool:
        return self._inner is not None and self._inner.prepare()

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        return [] if self._inner is None else self._inner.outcomes(wait)

    def control(self, order: Control) -> None:
        if isinstance(order, Sleep) and order.level > 1:
            self.close()
        elif isinstance(order, Wake) and self._inner is None:
            self._wake(self._made_again())
            freeze_again()
        elif self._inner is not None:
            self._inner.control(order)

    def _made_again(self) -> Executor:
        inner = self._create()
        if inner.info.kv_groups != self.info.kv_groups:
            inner.close()
            blocks = [[group.num_blocks for group in info.kv_groups] for info in (self.info, inner.info)]
            raise OutOfMemory(
                f"There were {blocks[0]} KV blocks, and now there is room for {blocks[1]}. Free memory and wake it again."
            )
        return inner

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            del self.submit, self.drafts, self.sample, self.collect, self.recover
            inner.close()
            del inner
            collect_frozen()
