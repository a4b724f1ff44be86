"""One process, one device: a model loaded, memory divided, an executor that runs plans on it.

What lives here: the order in which a worker comes to be. What may not: the parts themselves (settings, memory, runner, executor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.clock import RealClock
from headrace.config import Decision, EngineConfig
from headrace.engine.executor import Executor, ExecutorInfo
from headrace.errors import ConfigError
from headrace.kernels import Kernels
from headrace.kernels.ahead import CompileAhead
from headrace.kernels.candidate import Sizes
from headrace.kernels.triton import candidates as triton
from headrace.models import families, loader
from headrace.models.checkpoint import open_checkpoint
from headrace.models.decoder import Decoder
from headrace.models.source import ModelSource, WeightFormat
from headrace.spec import DecoderSpec
from headrace.worker.allotment import Allotment, allocate_kv, create_demand
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.host import process_memory
from headrace.worker.local_executor import LocalExecutor
from headrace.worker.memory import KVPlan, row_bytes
from headrace.worker.model_runner import ModelRunner
from headrace.worker.queued_executor import QueuedExecutor
from headrace.worker.rows import Rows
from headrace.worker.settings import check_kv_dtype, device_kind, resolve_dtype, resolve_threads
from headrace.worker.stages import Stages
from headrace.worker.warm_up import warm_linears, warm_up

__all__ = ["create_executor", "device_kind"]

# Call sites outside the decoder (inputs.py, graphs.py, sampler.py), known before they exist so that their kernels are built in time.
STEP_SITES = (
    ("gather_inputs", torch.int32),
    ("greedy_tokens", torch.float32),
    ("pick_tokens", torch.float32),
    ("score_tokens", torch.float32),
    ("store_tokens", torch.int32),
)


def create_executor(config: EngineConfig, source: ModelSource) -> tuple[Executor, tuple[Decision, ...]]:
    """Loads the model, sizes the KV cache and takes the first step.

    ``max_num_batched_tokens`` and ``overlap`` must be resolved. Raises ConfigError, ModelError, OutOfMemory or StrictKernelError.
    """
    before, stages = process_memory(), Stages(RealClock())
    spec = families.spec_from_config(source.config)
    setting = _resolve(config, spec)
    ahead = _compile_ahead(config, setting.device)
    try:
        demand = create_demand(config, spec, setting.device, setting.dtype, tokens_a_step=setting.tokens_a_step, block_size=setting.block_size)
        allotment = Allotment(demand)
        plan = allotment.draft()
        stages.done("device")
        decoder, kernels = _create_decoder(config, spec, setting, plan.max_model_len)
        start_building = _builder(ahead, kernels, spec, setting, config, plan.max_model_len)
        start_building()
        stages.done("decoder")
        _load(config, source, spec, setting, decoder)
        start_building()  # what the layers chose now that they have their weights
        stages.done("weights")
        if setting.device.type == "cuda":
            seqs = config.scheduler.max_num_seqs
            warm_linears(decoder, setting.device, max_num_seqs=seqs, max_num_batched_tokens=setting.tokens_a_step)
            stages.done("matrix products")
        if ahead is not None:
            ahead.finish()
            torch.cuda.empty_cache()
            stages.done("kernels, waited for")
    finally:
        if ahead is not None:
            ahead.close()
    if setting.device.type == "cuda":
        plan = allotment.settle(decoder, plan.max_model_len, lambda rows, caches: _create_runner(config, decoder, kernels, rows, caches))
        stages.done("largest steps")
    block_sizes = [group.spec.block_size for group in plan.groups]
    rows = Rows(config.scheduler.max_num_seqs, plan.max_model_len, spec.vocab_size, block_sizes, setting.device)
    kv_caches = [allocate_kv(group, setting.dtype, setting.device) for group in plan.groups]
    graphs = _create_graphs(config, plan, decoder, kernels, rows, kv_caches) if demand.graphs else None
    runner = _create_runner(config, decoder, kernels, rows, kv_caches, graphs)
    allotment.set_aside()
    stages.done("rows and KV")
    loaded = process_memory()
    warm_up(runner, plan.groups, plan.max_model_len, thorough=setting.device.type == "cuda" and config.scheduler.max_num_seqs > 1)
    stages.done("first steps")
    if graphs is not None and kernels.graphable:
        with allotment.capturing():
            graphs.capture_all()
        stages.done("graphs")
    first_step = max(0, process_memory() - loaded)  # what it leaves: threads, generated code, scratch
    memory = allotment.account(decoder, plan, rows, process=before, kernels=first_step)
    info = ExecutorInfo(
        vocab_size=spec.vocab_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        kv_groups=plan.groups,
        device=_device_name(setting.device, setting.threads),
        memory=memory,
        padded=not config.device.token_concatenation,
        start_seconds=stages.seconds,
    )
    executor: Executor = LocalExecutor(runner, info, overlap=setting.overlap, threads=setting.threads)
    if setting.device.type == "cuda":
        executor = QueuedExecutor(runner, info)
    return executor, (*setting.decisions, *plan.decisions, *_graph_decisions(graphs, kernels), *_kernel_decisions(kernels))


def _create_graphs(config: EngineConfig, plan: KVPlan, decoder: Decoder, kernels: Kernels, rows: Rows, kv_caches: Sequence[Tensor]) -> DecodeGraphs:
    return DecodeGraphs(decoder, kernels, rows, kv_caches, max_num_seqs=config.scheduler.max_num_seqs, max_model_len=plan.max_model_len)


def _create_runner(
    config: EngineConfig, decoder: Decoder, kernels: Kernels, rows: Rows, kv_caches: Sequence[Tensor], graphs: DecodeGraphs | None = None
) -> ModelRunner:
    return ModelRunner(
        decoder,
        kv_caches,
        rows,
        kernels,
        max_logits_rows=config.scheduler.max_logits_rows,
        padded=not config.device.token_concatenation,
        clock=RealClock(),
        graphs=graphs,
    )


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a worker computes on and in."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    overlap: int
    tokens_a_step: int
    block_size: int
    decisions: tuple[Decision, ...]


def _resolve(config: EngineConfig, spec: DecoderSpec) -> _Setting:
    tokens_a_step, overlap, block_size = config.scheduler.max_num_batched_tokens, config.device.overlap, config.cache.block_size
    if tokens_a_step is None or overlap is None or block_size is None:
        raise ConfigError("max_num_batched_tokens, overlap and block_size must be resolved before a worker is made; resolve the config first.")
    device = torch.device(device_kind(config.device.device))
    threads, threads_decision = resolve_threads(config.device.threads)
    torch.set_num_threads(threads)
    dtype, dtype_decision = resolve_dtype(config.model.dtype, spec.checkpoint_dtype, device.type)
    check_kv_dtype(config.cache.kv_cache_dtype, dtype)
    decisions = (dtype_decision,) if threads_decision is None else (dtype_decision, threads_decision)
    return _Setting(device, dtype, threads, overlap, tokens_a_step, block_size, decisions)


def _load(config: EngineConfig, source: ModelSource, spec: DecoderSpec, setting: _Setting, max_model_len: int) -> tuple[Decoder, Kernels]:
    kernels = Kernels(
        setting.device,
        strict=config.device.strict_kernels,
        disabled=frozenset(config.device.disabled_kernels),
        batch_invariant=config.device.batch_invariant,
    )
    decoder = Decoder(spec, kernels=kernels, dtype=setting.dtype, device=setting.device, max_model_len=max_model_len)
    if source.weights is WeightFormat.DUMMY:
        loader.fill_dummy(decoder, config.model.seed)
    else:
        checkpoint = open_checkpoint(source)
        try:
            loader.load_weights(decoder, checkpoint, families.weight_rules(spec), families.ignored_keys(spec), setting.dtype)
        finally:
            checkpoint.close()
    with torch.inference_mode():
        decoder.finish_loading()
    return decoder, kernels


def _device_name(device: torch.device, threads: int) -> str:
    return f"cpu ({threads} threads)" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _kernel_decisions(kernels: Kernels) -> tuple[Decision, ...]:
    """Who carries out each operation, and why those before it do not; call sites that agree are said once."""
    said: dict[tuple[str, str, str], None] = {}
    for choice in kernels.choices:
        declined = "; ".join(f"{name} declined: {reason}" for name, reason in choice.declined)
        said[(choice.op, choice.chosen, declined or "the first that serves this device")] = None
    return tuple(Decision(f"kernel {op}", chosen, reason) for op, chosen, reason in said)
