"""One process, one device: a model loaded, memory divided, an executor that runs plans on it.

What lives here: the order in which a worker comes to be. What may not: the parts themselves (settings, memory, runner, executor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.builders import Builders
from headrace.clock import RealClock
from headrace.config import Decision, DeviceConfig, EngineConfig
from headrace.cost.shapes import multiplications
from headrace.engine.executor import Executor, ExecutorInfo
from headrace.errors import ConfigError
from headrace.head_start import HeadStart
from headrace.kernels import Kernels
from headrace.kernels.ahead import CompileAhead
from headrace.kernels.around import MOST_ROWS
from headrace.kernels.candidate import Sizes, plainly_empty
from headrace.kernels.cpu import candidates as cpu
from headrace.kernels.cuda import candidates as cuda
from headrace.kernels.cuda import gated_candidates as gated
from headrace.kernels.cuda import ring_candidates as ring
from headrace.kernels.cuda import rope_candidates as rope
from headrace.kernels.triton import candidates as triton
from headrace.kernels.vendor import candidates as vendor
from headrace.models import families, loader
from headrace.models.checkpoint import open_checkpoint
from headrace.models.decoder import Decoder
from headrace.models.source import ModelSource, WeightFormat
from headrace.progress import waiting
from headrace.spec import DecoderSpec
from headrace.worker.allotment import Allotment, allocate_kv, create_demand
from headrace.worker.arena import create_arena
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.host import process_memory
from headrace.worker.later import LaterKernels
from headrace.worker.local_executor import LocalExecutor
from headrace.worker.memory import KVPlan, row_bytes
from headrace.worker.model_runner import ModelRunner
from headrace.worker.prompt_graphs import Bounds, PromptGraphs
from headrace.worker.queued_executor import QueuedExecutor
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Rows
from headrace.worker.settings import check_kv_dtype, device_kind, resolve_dtype, resolve_threads
from headrace.worker.stages import Stages
from headrace.worker.warm_up import product_sizes, warm_linears, warm_up

# Call sites outside the decoder (rows.py, inputs.py, graphs.py, sampler.py), known before they exist so that their kernels are built in time.
STEP_SITES = (
    ("write_rows", torch.int32),
    ("gather_inputs", torch.int32),
    ("greedy_tokens", torch.float32),
    ("pick_tokens", torch.float32),
    ("score_tokens", torch.float32),
    ("store_tokens", torch.int32),
    ("fetch_step", torch.int32),
)

Graphs = tuple[()] | tuple[DecodeGraphs] | tuple[DecodeGraphs, PromptGraphs]


def create_executor(
    config: EngineConfig,
    source: ModelSource,
    head_start: HeadStart | None = None,
    stages: Stages | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Executor, tuple[Decision, ...]]:
    """Loads the model, sizes the KV cache and takes the first step. ``stages``: of the start so far. ``meanwhile`` is called once on a
    GPU, where the start waits for the last of its kernels and the device has nothing to do.

    ``max_num_batched_tokens`` and ``overlap`` must be resolved. Raises ConfigError, ModelError, OutOfMemory or StrictKernelError.
    """
    start = _Start(config, source, head_start, stages or Stages(RealClock()), meanwhile)
    try:
        return start.run()
    finally:
        start.close()


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


def _disabled(config: DeviceConfig) -> frozenset[str]:
    """Kernel candidates never to choose: those named, and those whose technique is off."""
    off = {
        vendor.TUNED: config.tuned_products,
        gated.GATED: config.gated_products,
        triton.FLAT: config.flat_gemm,
        triton.FUSED: config.flat_gemm and config.deep_fusion,
        ring.RING: config.flat_gemm and config.deep_fusion and config.early_weights,
        triton.CASCADE: config.cascade_attention,
        rope.ROPE: config.fused_rope_attention,
        rope.ROPE_CASCADE: config.fused_rope_attention and config.cascade_attention,
        cuda.PERSISTENT: config.persistent_decode,
    }
    return frozenset(config.disabled_kernels) | {name for name, on in off.items() if not on}


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


class _Start:
    """One start, in its order: device, decoder, [kernels begin to build], weights, products, [kernels waited for], memory divided, rows and
    KV, first steps, graphs. What is in brackets goes on in threads, on a GPU alone."""

    def __init__(
        self, config: EngineConfig, source: ModelSource, head_start: HeadStart | None, stages: Stages, meanwhile: Callable[[], object]
    ) -> None:
        self._config = config
        self._meanwhile = meanwhile
        self._source = source
        self._process = process_memory()
        self._stages = stages
        self._spec = families.spec_from_config(source.config)
        self._setting = setting = _resolve(config, self._spec)
        self._cuda = setting.device.type == "cuda"
        self._head_start = head_start
        self._arena = create_arena(setting.device) if config.device.activation_arena else None
        self._kernels = Kernels(
            setting.device,
            strict=config.device.strict_kernels,
            disabled=_disabled(config.device),
            asked=frozenset({cpu.COMPRESSED} if config.device.compressed_weights else ()),
            batch_invariant=config.device.batch_invariant,
            programmatic=config.device.programmatic_launch,
            unified_maximum=config.device.unified_maximum,
            cuda_prefill=config.device.cuda_prefill,
            cuda_decode=rope.ROPE not in _disabled(config.device),
            empty=plainly_empty if self._arena is None else self._arena.empty,
        )
        self._demand = create_demand(
            config, self._spec, setting.device, setting.dtype, tokens_a_step=setting.tokens_a_step, block_size=setting.block_size
        )
        builders = None if head_start is None else head_start.builders
        self._ahead = create_ahead(setting.device, strict=config.device.strict_kernels, builders=builders)
        try:
            self._allotment = Allotment(self._demand, head_start)
        except BaseException:
            self.close()  # who did not come to be cannot be closed by others
            raise
        self._stages.done("device")

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def run(self) -> tuple[Executor, tuple[Decision, ...]]:
        draft = self._allotment.draft()
        decoder = self._load(draft.max_model_len)
        plan = self._settle(decoder, draft)
        rows, kv_caches = self._allocate(plan)
        graphs = self._create_graphs(decoder, plan.max_model_len, rows, kv_caches)
        runner = self._create_runner(decoder, rows, kv_caches, *graphs)
        self._allotment.set_aside()
        self._stages.done("rows and KV")
        loaded = process_memory()
        self._warm_up(runner, plan, graphs)
        first_step = max(0, process_memory() - loaded)  # what it leaves: threads, generated code, scratch
        memory = self._allotment.account(decoder, plan, rows, process=self._process, kernels=first_step)
        return self._create_executor(runner, plan, memory), (*self._setting.decisions, *plan.decisions, *self._decisions())

    # --- parts, in order

    def _load(self, max_model_len: int) -> Decoder:
        setting = self._setting
        with self._allotment.explaining("weights"):
            decoder = Decoder(self._spec, kernels=self._kernels, dtype=setting.dtype, device=setting.device, max_model_len=max_model_len)
        self._build_kernels(max_model_len)
        self._stages.done("decoder")
        with self._allotment.explaining("weights"):
            self._fill(decoder)
        with torch.inference_mode(), self._allotment.explaining("weights"), waiting("Packing weights for this device", "Packed weights"):
            decoder.finish_loading()
        self._build_kernels(max_model_len)  # of what layers chose now that they have their weights
        if self._cuda:
            torch.cuda.synchronize(setting.device)
        self._stages.done("weights")
        return decoder

    def _fill(self, decoder: Decoder) -> None:
        if self._source.weights is WeightFormat.DUMMY:
            with waiting("Making random weights", "Made random weights"):
                loader.fill_dummy(decoder, self._config.model.seed)
            return
        checkpoint = open_checkpoint(self._source)
        try:
            rules, ignored = families.weight_rules(self._spec), families.ignored_keys(self._spec)
            loader.load_weights(decoder, checkpoint, rules, ignored, self._setting.dtype)
        finally:
            checkpoint.close()

    def _build_kernels(self, max_model_len: int) -> None:
        if self._ahead is None:
            return
        for op, dtype in STEP_SITES:
            self._kernels.choose(op, dtype=dtype)
        self._kernels.choose("greedy_tokens", dtype=self._setting.dtype)  # of logits as the head gives them
        setting, seqs = self._setting, self._config.scheduler.rows
        sizes = Sizes(self._spec, setting.dtype, setting.block_size, max_model_len, seqs, setting.tokens_a_step)
        self._ahead.start(self._kernels, sizes, partial(triton.prepare_kernels, setting.device))

    def _settle(self, decoder: Decoder, draft: KVPlan) -> KVPlan:
        """On a GPU: what steps need besides weights is measured, once nothing else allocates."""
        if not self._cuda:
            return draft
        sizes = product_sizes(self._demand.most_rows, self._setting.tokens_a_step)
        ours = sizes[-1] if self._kernels.batch_invariant else MOST_ROWS  # up to so many, kernels of our own: the threads build them
        self._multiply(decoder, [size for size in sizes if size > ours])
        if self._ahead is None:
            self._meanwhile()
        else:
            with waiting("Compiling GPU kernels, once for this machine", "Compiled GPU kernels"):
                self._ahead.finish(self._meanwhile)
        if self._head_start is not None and not (self._ahead is not None and self._ahead.coming):
            self._head_start.has_built()
        self._stages.done("kernels waited for")
        self._multiply(decoder, [size for size in sizes if size <= ours])
        torch.cuda.empty_cache()
        create_runner, create_graphs = partial(self._create_runner, decoder), partial(self._create_graphs, decoder)
        plan = self._allotment.settle(decoder, draft.max_model_len, create_runner, create_graphs)
        self._stages.done("largest steps")
        return plan

    def _multiply(self, decoder: Decoder, sizes: Sequence[int]) -> None:
        with self._allotment.explaining("activations"):
            warm_linears(decoder, self._setting.device, sizes, max_num_seqs=self._demand.most_rows)
        self._stages.done("matrix products")

    def _allocate(self, plan: KVPlan) -> tuple[Rows, list[Tensor]]:
        setting, allotment, seqs = self._setting, self._allotment, self._config.scheduler.rows
        block_sizes = [group.spec.block_size for group in plan.groups]
        with allotment.explaining("rows", row_bytes(seqs, plan.max_model_len, self._spec.vocab_size, block_sizes)):
            write = self._kernels.choose("write_rows", dtype=torch.int32)
            rows = Rows(seqs, plan.max_model_len, self._spec.vocab_size, block_sizes, setting.device, write)
        with allotment.explaining("KV blocks", plan.num_bytes):
            return rows, [allocate_kv(group, setting.dtype, setting.device) for group in plan.groups]

    def _create_graphs(self, decoder: Decoder, max_model_len: int, rows: Rows, kv_caches: Sequence[Tensor]) -> Graphs:
        """Decode steps' are captured first; prompts' find their memory."""
        if not self._demand.graphs or not self._kernels.graphable:
            return ()
        recorder, most = Recorder(self._setting.device), self._demand.most_rows
        lengths = {"max_num_seqs": most, "max_model_len": max_model_len}
        decode = DecodeGraphs(decoder, self._kernels, rows, kv_caches, recorder, **lengths, max_logits_rows=self._config.scheduler.logits_rows)
        if not self._config.device.prompt_graphs:
            return (decode,)
        bounds = Bounds(
            **lengths, tokens_a_step=self._setting.tokens_a_step, products=multiplications(self._spec), prune=self._config.device.last_layer_pruning
        )
        hidden = torch.empty((bounds.most_wanted, self._spec.hidden_size), dtype=self._setting.dtype, device=self._setting.device)
        return decode, PromptGraphs(decoder, self._kernels, rows, kv_caches, recorder, bounds, hidden)

    def _create_runner(
        self,
        decoder: Decoder,
        rows: Rows,
        kv_caches: Sequence[Tensor],
        graphs: DecodeGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
    ) -> ModelRunner:
        return ModelRunner(
            decoder,
            kv_caches,
            rows,
            self._kernels,
            max_logits_rows=self._config.scheduler.logits_rows,
            padded=not self._config.device.token_concatenation,
            prune=self._config.device.last_layer_pruning,
            clock=RealClock(),
            graphs=graphs,
            prompt_graphs=prompt_graphs,
            arena=self._arena,
        )

    def _warm_up(self, runner: ModelRunner, plan: KVPlan, graphs: Graphs) -> None:
        warm_up(runner, plan.groups, plan.max_model_len, thorough=self._cuda and self._config.scheduler.rows > 1)
        self._stages.done("first steps")
        if graphs and self._kernels.graphable:
            with self._allotment.capturing(), waiting("Capturing graphs", "Captured graphs"):
                for kind in graphs:
                    kind.capture_all()
            self._stages.done("graphs")

    def _decisions(self) -> Iterator[Decision]:
        if self._demand.graphs and not self._kernels.graphable:
            yield Decision("graphs", False, "a torch twin that looks at the device stands in for a kernel, and no graph can hold that")
        if self._ahead is not None:
            folder, problem = self._ahead.prepared
            yield Decision("kernel cache", folder, problem or "where Triton keeps what it compiled, by content")
        yield from _kernel_decisions(self._kernels)

    def _create_executor(self, runner: ModelRunner, plan: KVPlan, memory: dict[str, int]) -> Executor:
        info = ExecutorInfo(
            vocab_size=self._spec.vocab_size,
            max_model_len=plan.max_model_len,
            max_num_seqs=self._config.scheduler.rows,
            kv_groups=plan.groups,
            device=_device_name(self._setting.device, self._setting.threads),
            memory=memory,
            padded=not self._config.device.token_concatenation,
            start_seconds=self._stages.seconds,
        )
        if self._cuda:
            return QueuedExecutor(runner, info, self._allotment.restore, self._later_kernels())
        return LocalExecutor(runner, info, overlap=self._setting.overlap, threads=self._setting.threads)

    def _later_kernels(self) -> LaterKernels | None:
        """What the start did not wait for."""
        if self._ahead is None or self._head_start is None or not self._ahead.coming:
            return None
        return LaterKernels(self._ahead.hand_over(self._head_start.hand_over()))


def create_ahead(device: torch.device, *, strict: bool, builders: Builders | None = None) -> CompileAhead[tuple[str, str | None]] | None:
    """Threads that build kernels; None where no kernel is built at run time. ``builders``: processes that compile for them; without, nothing
    comes later: steps and a compiler in one process take turns."""
    if device.type != "cuda" or triton.missing(device) is not None:
        return None

    def prepare() -> tuple[str, str | None]:
        prepared = triton.prepare_compiler()
        with suppress(Exception):  # ``start`` does it again, where there is somebody to hear of it
            triton.prepare_kernels(device)
        return prepared

    return CompileAhead(prepare, strict=strict, within=partial(triton.built_by, builders), later=builders is not None)


def _device_name(device: torch.device, threads: int) -> str:
    return f"cpu ({threads} threads)" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _kernel_decisions(kernels: Kernels) -> tuple[Decision, ...]:
    """Who carries out each operation, and why those before it do not; call sites that agree are said once."""
    said: dict[tuple[str, str, str], None] = {}
    for choice in (*kernels.choices, *kernels.passed):
        declined = "; ".join(f"{name} declined: {reason}" for name, reason in choice.declined)
        op = choice.op if choice.behind is None else f"{choice.op}, what {choice.behind} leaves"
        said[(op, choice.chosen, declined or "the first that serves this device")] = None
    return tuple(Decision(f"kernel {op}", chosen, reason) for op, chosen, reason in said)
