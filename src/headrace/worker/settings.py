"""Automatic choices about the device: which one, how many threads, which precision; each with its reason.

What lives here: ``resolve_*`` of what only the device can tell. What may not: memory (memory.py), loading, running.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.config import Decision, EngineConfig, resolve_kv_format
from headrace.cost.shapes import multiplications
from headrace.errors import ConfigError
from headrace.lora.layout import Layout, create_layout
from headrace.models import families
from headrace.parallel.context import KeyShare
from headrace.sites import is_plain
from headrace.spec import DecoderSpec, KVFormat, KVSpec, kv_groups
from headrace.speculative.settings import SpeculativeSettings, read_settings
from headrace.worker.draft_setup import DraftSetup
from headrace.worker.driver import DriverFacts, ask_driver
from headrace.worker.host import has_fast_bf16, physical_cores

_log = logging.getLogger(__name__)

_ROOMY = 64 * 2**30  # bytes
# Weights of a dense layer, from which on whole rounds of tiles are worth more than fewer steps: so it is with 218
# million (8B), and not with 61 (1B); what lies between was not measured.
_MOST_VERIFIED = 320  # tokens, of 64 sequences with 4 drafts: launched one by one, kernels of so many wait for the host
_LARGE_LAYER = 150_000_000
_BUCKET = 256  # no captured step has more tokens beyond those that it is for

MIN_CAPABILITY = (8, 0)  # Ampere: bfloat16 matrix instructions and asynchronous copies, which every kernel builds on
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker computes, on what and in what. ``config`` is resolved; ``decisions``: of these choices. ``kv``: how
    the cache holds keys and values; None: in ``dtype``. ``stages``: layers of each, of a pipeline. ``share``: of
    ranks that share the keys, this one's. ``pooled``: layers that lie in another stage's memory; ``kept``: of another stage,
    those that lie here."""

    config: EngineConfig
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    threads: int = 1
    decisions: tuple[Decision, ...] = ()
    kv: KVFormat | None = None
    draft: DraftSetup | None = None
    stages: tuple[tuple[int, int], ...] = ()
    share: KeyShare | None = None
    pooled: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def tokens_a_step(self) -> int:
        return _resolved(self.config.scheduler.max_num_batched_tokens)

    @property
    def rows_a_step(self) -> int:
        """The most that this device computes of a step's tokens."""
        return max(self.most_verified, -(-self.tokens_a_step // (1 if self.share is None else self.share.size)))

    @property
    def padded(self) -> bool:
        """Whether chunks of a step are padded to its longest."""
        return not self.config.device.token_concatenation

    @property
    def block_size(self) -> int:
        return _resolved(self.config.cache.block_size)

    @property
    def rows(self) -> int:
        return self.config.scheduler.rows

    @property
    def speculative(self) -> SpeculativeSettings | None:
        """What drafts; None: nothing."""
        return read_settings(self.config.scheduler.speculative_config)

    @property
    def worker_threads(self) -> int | None:
        """Of the thread that computes steps on a CPU; None: whoever submits one computes it."""
        return self.threads if self.config.device.overlap else None

    @property
    def most_rows(self) -> int:
        """Of one step."""
        return min(self.rows, self.tokens_a_step)

    @property
    def most_verified(self) -> int:
        """Tokens of the largest decode step that is captured: those that verify drafts have several of a
        row."""
        drafts = self.speculative.most if self.speculative is not None else 0
        return min(self.tokens_a_step, max(self.most_rows, min(self.most_rows * (1 + drafts), _MOST_VERIFIED)))

    @property
    def captures(self) -> bool:
        """Whether steps are captured, and replayed."""
        return self.device.type == "cuda" and not self.config.device.enforce_eager

    @property
    def beside(self) -> DraftSetup | None:
        """A draft that lies in the target's memory."""
        draft = self.draft
        return None if draft is None or (draft.place is not None and draft.place.elsewhere) else draft

    @property
    def draft_dtype(self) -> torch.dtype:
        return self.dtype if self.draft is None or self.draft.place is None else self.draft.place.dtype

    @property
    def draft_bytes(self) -> int:
        """Of a draft model or head, with the hidden states that are kept for it, but without keys and values."""
        assert self.draft is not None
        return self.draft.weight_bytes(self.draft_dtype.itemsize) + self.draft_state_bytes

    @property
    def draft_state_bytes(self) -> int:
        return 0 if self.draft is None else self.draft.state_bytes(self.most_tapped, self.rows, self.dtype.itemsize)

    @property
    def most_tapped(self) -> int:
        """Tokens of a step, with those that fill a captured one up."""
        return -(-max(self.tokens_a_step, self.most_verified) // _BUCKET) * _BUCKET

    @property
    def target_kv_specs(self) -> tuple[KVSpec, ...]:
        ranks = self.config.device.context_parallel_size
        return kv_groups(self.spec, self.block_size, self.dtype.itemsize, self.kv, ranks)

    @property
    def draft_kv_specs(self) -> tuple[KVSpec, ...]:
        """A draft has whole blocks of the scheduler's on every rank."""
        return () if self.draft is None else self.draft.kv_specs(self._whole_block, self.draft_dtype.itemsize)

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """With what a draft keeps under the same numbers."""
        specs, draft = self.target_kv_specs, self.beside
        return specs if draft is None else draft.beside(specs, self._whole_block, self.draft_dtype.itemsize)

    @property
    def _whole_block(self) -> int:
        return self.block_size * self.config.device.context_parallel_size

    @property
    def adapter_layout(self) -> Layout | None:
        """None: no adapters are served."""
        config, kv = self.config, self.target_kv_specs
        return create_layout(self.spec, config.adapters, config.cache, kv, self.dtype.itemsize, self.stages, self.rows)

    @property
    def block_sizes(self) -> list[int]:
        """Of each KV group."""
        return [each.block_size for each in self.kv_specs]


def _resolved(value: int | None) -> int:
    if value is None:
        raise ConfigError(
            "max_num_batched_tokens, overlap and block_size must be resolved before a worker is made; resolve the config first."
        )
    return value


def resolve_setup(config: EngineConfig, spec: DecoderSpec) -> Setup:
    """Chooses what is automatic, and sets torch's threads."""
    for each in (config.scheduler.max_num_batched_tokens, config.device.overlap, config.cache.block_size):
        _resolved(each)
    if spec.pooling is not None:
        _check_pooling(config, spec)
    device = torch.device(device_kind(config.device.device))
    threads, threads_decision = resolve_threads(config.device.threads, config.device.devices_here)
    torch.set_num_threads(threads)
    dtype, dtype_decision = resolve_dtype(config.model.dtype, spec.checkpoint_dtype, device.type)
    kv = resolve_kv_format(config.cache.kv_cache_dtype, str(dtype).removeprefix("torch."), spec.head_dim)
    decisions = tuple(
        each for each in (dtype_decision, threads_decision, _kv_decision(kv, dtype, spec)) if each is not None
    )
    return Setup(config, spec, device, dtype, threads, decisions, kv)


def check_sharing(setup: Setup) -> None:
    """Raises ConfigError where processes cannot share weights."""
    if setup.device.type != "cpu" and setup.config.device.enable_sleep_mode:
        raise ConfigError(
            "--share-weights holds weights that other processes compute with, so they cannot sleep; leave it out, or "
            "--enable-sleep-mode."
        )
    if not is_plain(setup.spec):
        raise ConfigError(
            "--share-weights shares weights that are computed with as they are stored, but quantized ones are packed for "
            "this device by each process; leave it out, or use --quantization none."
        )


def _check_pooling(config: EngineConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError for what has no meaning where nothing is generated, or nothing cached."""
    if config.scheduler.speculative_config is not None:
        raise ConfigError("--speculative-config proposes tokens, but this model generates none; leave it out.")
    if not spec.causal and not config.device.token_concatenation:
        raise ConfigError("token_concatenation is off, but an encoder is not computed with padding; leave it on.")
    if not spec.causal and config.device.tensor_parallel_size > 1:
        raise ConfigError("--tensor-parallel-size is not supported for encoders; serve one on each device.")


def _kv_decision(kv: KVFormat | None, dtype: torch.dtype, spec: DecoderSpec) -> Decision | None:
    if kv is None:
        return None
    held, plain = kv.token_bytes(spec.head_dim), spec.head_dim * dtype.itemsize
    reason = (
        f"{held} bytes a token and head in place of {plain}: the same memory holds {plain / held:.2f} times the tokens"
    )
    return Decision("kv_cache_dtype", kv.name, reason)


def device_kind(requested: str, flag: str = "--device") -> str:
    """cpu or cuda, for the config's auto, cpu or cuda. Raises ConfigError when a GPU is asked for and there is none
    that can be used."""
    return _device(requested, flag)[0]


def resolve_device(requested: str) -> tuple[str, Decision | None]:
    """As ``device_kind``, with the reason of an automatic choice; a GPU that is there and cannot be used is a warning
    too."""
    kind, gpu = _device(requested)
    if gpu is None or requested != "auto":
        return kind, None
    if gpu.problem is None:
        return kind, Decision(
            "device", kind, f"found {gpu.name}, compute capability {'.'.join(map(str, gpu.capability or ()))}"
        )
    if gpu.name is None:
        return kind, Decision("device", kind, "there is no NVIDIA GPU here, so the CPU computes")
    reason = f"{gpu.problem}; --device cpu runs instead"
    _log.warning("%s", reason)
    return kind, Decision("device", kind, reason)


def _device(requested: str, flag: str = "--device") -> tuple[str, GPU | None]:
    if requested == "cpu":
        return "cpu", None
    gpu = find_gpu()
    if requested == "cuda" and gpu.problem is not None:
        raise ConfigError(f"{flag} is cuda: {gpu.problem}. {flag} cpu runs here.")
    return "cuda" if gpu.problem is None else "cpu", gpu


def takes_long_steps(kind: str, model: Mapping[str, Any], memory: int | None = None) -> bool:
    """Whether very long steps are quicker a token than steps of whole rounds of tiles (a sparse model's read experts
    less often, those of a model with small layers launch less), and their activations a small part of the device's
    memory. ``model``: its config.json; ``memory``: bytes of another device than this one. Who reads along is another
    matter."""
    if kind != "cuda" or (memory or torch.cuda.get_device_properties(0).total_memory) < _ROOMY:
        return False
    spec = families.spec_from_config(model)
    return any(layer.moe for layer in spec.layers) or multiplications(spec) < _LARGE_LAYER


def resolve_threads(requested: int | None, ranks: int = 1) -> tuple[int, Decision | None]:
    """CPU threads that compute, of each rank. More threads than physical cores slow GEMMs down."""
    if requested is not None:
        return requested, None
    cores, reason = physical_cores()
    if ranks > 1:
        cores, reason = max(1, cores // ranks), f"{reason}; {ranks} ranks share them"
    return cores, Decision("threads", cores, reason)


def resolve_dtype(requested: str, checkpoint_dtype: str, device: str) -> tuple[torch.dtype, Decision]:
    """The precision of weights, activations and KV."""
    name = checkpoint_dtype if requested == "auto" else requested
    origin = "as the checkpoint is stored" if requested == "auto" else "as asked for"
    if name not in DTYPES:
        return torch.float32, Decision(
            "dtype", "float32", f"the checkpoint is stored as {name}, which nothing computes in"
        )
    if device != "cpu" or name != "float16":
        return DTYPES[name], Decision("dtype", name, origin)
    # float16 has no fast arithmetic on CPUs; bfloat16 has, on some
    chosen = "bfloat16" if has_fast_bf16() else "float32"
    why = "this CPU multiplies bfloat16 in hardware" if chosen == "bfloat16" else "this CPU has no bfloat16 arithmetic"
    return DTYPES[chosen], Decision("dtype", chosen, f"{name} {origin}, but computed in {chosen}: {why}")


# --- the GPU here: a context is not made, so that looking costs the card nothing


@dataclass(frozen=True, slots=True)
class GPU:
    """``name`` None: there is none. ``problem``, if any, is one clause: found …; needed is …"""

    name: str | None
    problem: str | None = None
    capability: tuple[int, int] | None = None


def find_gpu() -> GPU:
    """The GPU that torch would use."""
    with warnings.catch_warnings(record=True) as said:  # an old driver is no more than a warning of torch's
        warnings.simplefilter("always")
        present = bool(torch.cuda.is_available())
    if not present:
        return _absent(ask_driver(), " ".join(str(warning.message) for warning in said))
    try:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except RuntimeError as error:
        return GPU(
            "an NVIDIA GPU",
            f"found an NVIDIA GPU that does not start ({_first_line(str(error))}); needed is one that does",
        )
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
        return GPU(
            name, f"found {name} of compute capability {found}; needed is {needed} (Ampere) or newer", capability
        )
    return GPU(name, None, capability)


def _absent(driver: DriverFacts | None, said: str) -> GPU:
    """Why torch sees no GPU."""
    if driver is None or not driver.cards:
        return GPU(None, "found no NVIDIA GPU with a driver; needed is one of compute capability 8.0 or newer")
    name, built_for = driver.cards[0].name, torch.version.cuda
    if built_for is None:
        return GPU(
            name, f"found {name}, but torch {torch.__version__} is built without CUDA; needed is a CUDA build of torch"
        )
    if driver.cuda[0] < int(built_for.split(".")[0]):
        newest = ".".join(map(str, driver.cuda))
        found = f"found {name} with driver {driver.version}, which runs CUDA up to {newest}"
        return GPU(
            name, f"{found}; needed is a driver for CUDA {built_for}, which torch {torch.__version__} is built for"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return GPU(
            name, f"found {name}, but CUDA_VISIBLE_DEVICES is {hidden!r} and hides it; needed is its number there"
        )
    return GPU(
        name,
        f"found {name} with driver {driver.version}, but torch cannot use it ({_first_line(said) or 'it does not say why'})",
    )


def _first_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "")
