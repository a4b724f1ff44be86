"""Configuration: frozen dataclasses, composed. Command-line flags, the config file and LLM(...) keywords all come from these fields.

What lives here: the fields, their help and bounds, and ``resolve_*`` functions that fill automatic values and say why.
What may not: torch, reading checkpoints, and any use of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ConfigError


def option(default: Any, help: str, **extra: Any) -> Any:
    """A config field that is also a flag. ``extra``: ``choices``, ``size`` (32k, 2M, 20GiB are read), ``flags`` (further spellings), ``metavar``."""
    return field(default=default, metadata={"help": help, **extra})


def switch(default: bool, help: str) -> Any:
    """A technique's on/off switch: reached by ``--technique NAME=on|off``, without a flag of its own."""
    return field(default=default, metadata={"help": help, "technique": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which precision."""

    model: str | None = option(None, "folder, .gguf file or hub id (org/name[@revision]); without it the bundled demo model")
    tokenizer: str | None = option(None, "folder or file of another tokenizer than the model's own")
    served_model_name: tuple[str, ...] = option((), "names the API answers to", metavar="NAME")
    dtype: str = option("auto", "precision of weights and activations", choices=("auto", "bfloat16", "float16", "float32"))
    load_format: str = option("auto", "where weights come from", choices=("auto", "safetensors", "gguf", "dummy"))
    max_model_len: int | None = option(None, "longest sequence in tokens; without it, what the model allows and memory holds", size=True)
    quantization: str | None = option(None, "weight format; none is supported yet", choices=())
    chat_template: str | None = option(None, "Jinja template: a file or the text itself")
    generation_config: str = option("auto", "sampling defaults: auto (from the model), headrace (none), or a folder")
    seed: int = option(0, "seed of dummy weights and of requests without their own")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Where keys and values live."""

    block_size: int = option(16, "tokens a KV block", choices=(8, 16, 32, 64))
    gpu_memory_utilization: float = option(0.9, "share of the device's memory that weights, activations and KV may take (on a CPU see --kv-cache-memory)")
    kv_cache_memory: int | None = option(None, "bytes for KV blocks, instead of a share of memory", size=True)
    num_blocks: int | None = option(None, "KV blocks, instead of bytes (tests and experiments)")
    kv_cache_dtype: str = option("auto", "precision of the KV cache; auto = the model's", choices=("auto", "bfloat16", "float16", "float32"))
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prefixes")
    paged_allocation: bool = switch(True, "off: reserve a sequence's longest length at admission")
    kv_caching: bool = switch(True, "off: recompute every token of a sequence at every step")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who goes, with how many tokens."""

    max_num_seqs: int = option(256, "sequences running at once")
    max_num_batched_tokens: int | None = option(None, "tokens a step; automatic by device", size=True)
    max_logits_rows: int = option(2048, "positions a step whose logits may be materialised (prompt_logprobs spend it)")
    scheduling_policy: str = option("fcfs", "order of the waiting queue", choices=("fcfs", "priority"))
    chunked_prefill: bool = switch(True, "off: a prompt is computed whole, before any decoding")
    continuous_batching: bool = switch(True, "off: a batch runs until its last sequence ends before the next is formed")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What it runs on, and how."""

    device: str = option("auto", "where to compute", choices=("auto", "cuda", "cpu"))
    executor: str = option("model", "keyed-hash computes no model: each next token is a hash of the context (to measure and test everything else)", choices=("model", "keyed-hash"))
    device_time: float = option(0.0, "seconds a step of the keyed-hash executor takes")
    threads: int | None = option(None, "CPU threads for computing; automatic by core count")
    tensor_parallel_size: int = option(1, "devices a layer is split over (1 only, so far)", flags=("-tp",))
    pipeline_parallel_size: int = option(1, "devices the layers are dealt to (1 only, so far)", flags=("-pp",))
    overlap: int | None = option(None, "steps in flight beyond the one being collected (0, 1 or 2); automatic by device", choices=(0, 1, 2))
    enforce_eager: bool = option(False, "no graphs")
    batch_invariant: bool = option(False, "the same bits whatever else is in the batch")
    strict_kernels: bool = option(False, "a kernel that would fall back to its torch twin is an error")
    token_concatenation: bool = switch(True, "off: every sequence of a step is padded to the longest")
    disabled_kernels: tuple[str, ...] = option((), "kernel candidates never to choose, by name", metavar="NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Who may ask, and how much."""

    host: str = option("127.0.0.1", "address to listen on; other than loopback needs a key")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = option((), "key clients must send (also HEADRACE_API_KEY)", metavar="KEY")
    max_queue: int = option(1024, "requests waiting or running before new ones get 429")
    max_body_bytes: int = option(32 * 2**20, "largest request body", size=True)
    shutdown_timeout: float = option(30.0, "seconds that running requests get after SIGTERM")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything below the server. ``resolve()`` in engine/llm.py fills what only the checkpoint and the device can tell."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        if not 0.0 < self.cache.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization is {self.cache.gpu_memory_utilization}; give a share above 0 and up to 1.")
        if self.scheduler.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs is {self.scheduler.max_num_seqs}; give at least 1.")
        for flag, value in (("-tp", self.device.tensor_parallel_size), ("-pp", self.device.pipeline_parallel_size)):
            if value != 1:
                raise ConfigError(f"{flag} is {value}, but only one device is supported so far; leave it at 1.")


@dataclass(frozen=True, slots=True)
class Decision:
    """One automatic choice and its reason; printed at start and by ``headrace doctor``."""

    name: str
    value: Any
    reason: str
