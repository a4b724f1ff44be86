"""Configuration: frozen dataclasses, composed. Command-line flags, the config file and LLM(...) keywords all come from
these fields.

What lives here: the fields, their bounds, and the one check that every value passes, whichever way it came. What may
not: what is told of them (data/options.toml), torch, reading checkpoints, command-line parsing (flags.py), and any use of the values.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
import types
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError
from headrace.spec import KV_FORMATS, AdapterSpace, KVFormat

Config = TypeVar("Config")


def option(default: Any, **extra: Any) -> Any:
    """A config field that is also a flag, of which data/options.toml has the help.

    ``extra``: ``choices``; ``aliases`` (other words for them); ``minimum``, ``maximum``; ``size`` (32k, 2M, 20GiB are read);
    ``flags`` (further spellings); ``json`` (the whole list may be one word of JSON); ``technique`` (it is reached by
    ``--technique`` too; a text is the technique's name where the field has another), with ``on`` and ``off`` where those
    words mean other values.
    """
    return field(default=default, metadata={"flag": True, **extra})


def switch(default: bool | None) -> Any:
    """A technique's on/off switch (None: automatic): reached by ``--technique NAME=on|off``, without a flag of its own. The register
    (techniques/) says what each means."""
    return field(default=default, metadata={"technique": True, "flag": False})


def technique_name(of: Field[Any]) -> str:
    """What the technique that a switch belongs to is called."""
    named = of.metadata["technique"]
    return named if isinstance(named, str) else of.name.removeprefix("enable_")


def technique_spellings(of: Field[Any]) -> set[str]:
    """What ``--technique`` and ``LLM(technique=…)`` know a switch by: the technique's name, and the field's own where
    that says the same."""
    return {technique_name(of)} if isinstance(of.metadata["technique"], str) else {technique_name(of), of.name}


MAX_REPLICAS = 64
MAX_STAGES = 16
MAX_FRONT_ENDS = 64
MOST_LORA_RANK = 256
LEAST, FINITE = 1e-6, 1_000_000_000  # of what is above 0, and of what is finite

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
}
KV_ALIASES = {"fp8": "fp8_e4m3", "int8_per_token_head": "int8", "int4_per_token_head": "int4"}  # as vLLM has them


QUANTIZATIONS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "gptq", "awq", "bitsandbytes", "mxfp4", "gguf")
QUANTIZATION_ALIASES = {"gptq_marlin": "gptq", "awq_marlin": "awq", "modelopt_fp4": "modelopt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which precision."""

    model: str | None = option(None)
    tokenizer: str | None = option(None)
    served_model_name: tuple[str, ...] = option(())
    dtype: str = option("auto", choices=("auto", *DTYPES), aliases=DTYPE_ALIASES)
    load_format: str = option("auto", choices=("auto", "safetensors", "gguf", "dummy"))
    share_weights: bool = option(False)
    max_model_len: int | None = option(None, size=True, minimum=2)
    quantization: str | None = option(None, choices=("none", *QUANTIZATIONS), aliases=QUANTIZATION_ALIASES)
    task: str = option(
        "auto",
        choices=("auto", "generate", "embed", "score", "pooling"),
        flags=("--runner",),
        aliases={"embedding": "embed", "classify": "score"},
    )
    chat_template: str | None = option(None)
    special_tokens_in_messages: bool = option(False)
    generation_config: str = option("auto")
    seed: int = option(0)

    @property
    def chat_options(self) -> dict[str, Any]:
        """What a tokenizer has to know of conversations."""
        return {"chat_template": self.chat_template, "special_tokens_in_messages": self.special_tokens_in_messages}

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The size, format and reuse of the KV cache."""

    block_size: int | None = option(None, choices=(8, 16, 32, 64, 128))
    gpu_memory_utilization: float = option(0.9)
    kv_cache_memory: int | None = option(None, size=True, minimum=1)
    num_blocks: int | None = option(None, minimum=1)
    kv_cache_dtype: str = option(
        "auto",
        choices=("auto", *DTYPES, *KV_FORMATS),
        aliases=DTYPE_ALIASES | KV_ALIASES,
        technique="quantized_kv",
        on="int8",
        off="auto",
    )
    enable_prefix_caching: bool = option(True, technique=True)
    paged_allocation: bool = switch(True)
    unified_paging: bool = switch(True)
    kv_caching: bool = switch(True)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; give a share above 0 and up to 1."
            )


def resolve_kv_format(requested: str, dtype: str, head_dim: int) -> KVFormat | None:
    """What ``kv_cache_dtype`` is for a model that computes in ``dtype``; None: that. Raises ConfigError."""
    if requested in ("auto", dtype):
        return None
    if (found := KV_FORMATS.get(requested)) is None:
        narrow = ", ".join(KV_FORMATS)
        raise ConfigError(
            f"--kv-cache-dtype is {requested}, but the model computes in {dtype}; leave it at auto, or choose one of {narrow}."
        )
    if (problem := found.problem(head_dim)) is not None:
        raise ConfigError(f"--kv-cache-dtype {requested} does not fit this model: {problem}; int8 does.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Which requests run, and with how many tokens per step."""

    max_num_seqs: int | None = option(None, minimum=1)
    max_num_batched_tokens: int | None = option(None, size=True, minimum=1)
    max_logits_rows: int | None = option(None, minimum=1)
    max_step_ms: float | None = option(None, minimum=0.01, maximum=FINITE, technique="step_budget", on=50.0, off=None)
    scheduling_policy: str = option(
        "fcfs", choices=("fcfs", "priority", "fair", "deadline", "qoe", "shortest-remaining")
    )
    tenant_weight: tuple[str, ...] = option(())
    fair_input_price: float = option(1.0, minimum=0.0, maximum=FINITE)
    fair_output_price: float = option(2.0, minimum=0.0, maximum=FINITE)
    expected_ttft: float = option(1.0, minimum=LEAST, maximum=86_400)
    reading_speed: float = option(4.8, minimum=LEAST, maximum=1_000_000)
    qoe_preemptions: float = option(0.1, minimum=0.0, maximum=FINITE)
    ageing: float = option(4.0, minimum=0.001, maximum=FINITE)
    length_prediction: str = option("history", choices=("history", "max-tokens"))
    ttft_target_ms: float = option(2000.0, minimum=0.01, maximum=FINITE)
    tpot_target_ms: float = option(100.0, minimum=0.01, maximum=FINITE)
    chunked_prefill: bool = switch(True)
    continuous_batching: bool = switch(True)
    fast_forward: bool = switch(True)
    speculative_config: str | None = option(None, technique="speculation", on='{"method": "ngram"}', off=None)
    longest_first: bool = switch(True)

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", json.dumps(self.speculative_config))
        check_fields(self)
        self._check_fair()
        if self.max_step_ms is not None and not self.chunked_prefill:
            raise ConfigError(
                f"max_step_ms is {self.max_step_ms:g}, but prompts are computed whole (chunked_prefill is off); leave one of them out."
            )

    @property
    def max_step_seconds(self) -> float | None:
        return None if self.max_step_ms is None else self.max_step_ms / 1e3

    def _check_fair(self) -> None:
        prices = (self.fair_input_price, self.fair_output_price)
        if not any(prices):
            raise ConfigError("fair_input_price and fair_output_price are 0; give a price above 0.")
        if len(self.tenant_weights) < len(self.tenant_weight):
            raise ConfigError(
                f"tenant_weight names a tenant twice ({', '.join(self.tenant_weight)[:200]}); give each one weight."
            )

    @property
    def tenant_weights(self) -> dict[str, float]:
        """``tenant_weight`` read. Raises ConfigError."""
        return dict(map(_read_weight, self.tenant_weight))

    @property
    def rows(self) -> int:
        """``max_num_seqs``, once it is resolved. Raises ConfigError before."""
        if self.max_num_seqs is None:
            raise ConfigError("max_num_seqs must be resolved before an engine is made; resolve the config first.")
        return self.max_num_seqs

    @property
    def logits_rows(self) -> int:
        """``max_logits_rows``, or what it is by default: more would be set aside for prompts' scores alone, and gain
        them nothing."""
        return self.max_logits_rows or max(_LOGITS_ROWS, self.max_num_seqs or 0)


_LOGITS_ROWS = 512


def _read_weight(entry: str) -> tuple[str, float]:
    name, _, text = entry.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not name or not 1e-6 <= weight <= 1e6:
        raise ConfigError(
            f"tenant_weight has {entry[:80]!r}; give NAME=WEIGHT with a weight from 0.000001 to 1000000, like team-a=2."
        )
    return name, weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device, and how to compute on it."""

    device: str = option("auto", choices=("auto", "cuda", "cpu"))
    executor: str = option("model", choices=("model", "keyed-hash"))
    device_time: float = option(0.0, minimum=0.0)
    threads: int | None = option(None, minimum=1)
    tensor_parallel_size: int = option(1, flags=("-tp",), minimum=1)
    enable_expert_parallel: bool = option(False, technique=True)
    expert_placement: str | None = option(None)
    expert_failover: bool = option(False)
    pipeline_parallel_size: int = option(1, flags=("-pp",), minimum=1, maximum=MAX_STAGES)
    pipeline_layers: tuple[int, ...] = option(())
    context_parallel_size: int = option(1, flags=("-cp",), minimum=1, technique="context_parallel", on=2, off=1)
    ranks_per_device: int = option(1, minimum=1)
    data_parallel_size: int = option(1, flags=("-dp",), minimum=1, maximum=MAX_REPLICAS)
    data_parallel_routing: str = option("prefix", choices=("prefix", "load", "turns"))
    prefill_replicas: int = option(0, minimum=0, technique="prompts_apart", on=1, off=0)
    swap_roles: bool = switch(False)
    distributed_executor_backend: str = option("mp", choices=("mp", "ray"))
    nnodes: int = option(1, minimum=1)
    node_rank: int = option(0, minimum=0)
    master_addr: str = option("127.0.0.1")
    master_port: int = option(29501, minimum=1, maximum=65535)
    node_secret_file: str | None = option(None)
    overlap: int | None = option(None, choices=(0, 1, 2), technique=True, on=1, off=0)
    enforce_eager: bool = option(False, technique="cuda_graphs", on=False, off=True)
    batch_invariant: bool = option(False, technique=True)
    trace: str | None = option(None)
    enable_sleep_mode: bool = option(False)
    strict_kernels: bool = option(False)
    token_concatenation: bool = switch(True)
    last_layer_pruning: bool = switch(True)
    compressed_weights: bool = switch(False)
    joint_deltas: bool = switch(True)
    integer_products: bool = switch(True)
    flat_gemm: bool = switch(True)
    tuned_products: bool = switch(True)
    quantized_gemm: bool = switch(True)
    wide_copy: bool | None = switch(None)
    gated_products: bool = switch(True)
    cuda_prefill: bool = switch(True)
    deep_fusion: bool = switch(True)
    early_weights: bool = switch(True)
    persistent_decode: bool = switch(True)
    persistent_fp8: bool = switch(False)
    one_launch_experts: bool = switch(True)
    joined_experts: bool = switch(True)
    fused_rope_attention: bool = switch(True)
    cascade_attention: bool = switch(True)
    one_shot_sums: bool = switch(True)
    fused_sums: bool = switch(True)
    sequence_parallel: bool | None = switch(None)
    expert_dispatch: bool | None = switch(None)
    unified_maximum: bool = switch(False)
    programmatic_launch: bool = switch(True)
    prompt_graphs: bool = switch(True)
    drafts_ahead: bool = switch(True)
    activation_arena: bool = switch(True)
    disabled_kernels: tuple[str, ...] = option(())

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_prefill()
        self._check_failover()
        if self.expert_placement is not None and not self.enable_expert_parallel:
            raise ConfigError(
                f"expert_placement is {self.expert_placement!r}, but enable_expert_parallel is off; turn it on, or leave the placement out."
            )
        if self.batch_invariant and self.tensor_parallel_size > 2:
            raise ConfigError(
                f"--tensor-parallel-size is {self.tensor_parallel_size}, but --batch-invariant holds for sums of up to 2 ranks; "
                "leave one of them out."
            )
        self._check_nodes()
        self._check_shared_device()
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            if getattr(self, name) != 1 and self.executor == "keyed-hash":
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but keyed-hash computes no model; leave one of them out."
                )

    def _check_failover(self) -> None:
        if not self.expert_failover:
            return
        if not self.enable_expert_parallel or self.tensor_parallel_size == 1:
            raise ConfigError(
                "expert_failover is on, but experts are not on several devices; give --enable-expert-parallel and "
                "--tensor-parallel-size, too, or turn it off."
            )
        if self.num_devices > self.tensor_parallel_size or self.nnodes > 1 or self.enable_sleep_mode:
            raise ConfigError(
                "expert_failover is on, but it is for --tensor-parallel-size alone, on one host and without sleep mode; leave the others out."
            )
        if self.distributed_executor_backend == "ray" or self.batch_invariant:
            raise ConfigError(
                "expert_failover is on, but neither Ray nor --batch-invariant goes with it; leave one of them out."
            )

    def _check_shared_device(self) -> None:
        if self.ranks_per_device not in (1, self.tensor_parallel_size) or (
            self.ranks_per_device > 1
            and (
                self.num_devices > self.tensor_parallel_size
                or self.nnodes > 1
                or self.expert_failover
                or self.distributed_executor_backend == "ray"
            )
        ):
            raise ConfigError(
                f"ranks_per_device is {self.ranks_per_device}, but it is for all ranks of --tensor-parallel-size "
                f"({self.tensor_parallel_size}) alone, on one host; give that number, or leave it out."
            )

    def _check_nodes(self) -> None:
        nodes = f"nnodes is {self.nnodes}"
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank is {self.node_rank}, but {nodes}; nodes count from 0.")
        ray = self.distributed_executor_backend == "ray"
        if self.data_parallel_size > 1 and (ray or self.nnodes > 1):
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size}, but replicas share one host; start a server on each host instead."
            )
        if self.nnodes == 1:
            return
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"{nodes}, but one replica has {self.num_ranks} devices; give each node equally many devices."
            )
        if ray:
            raise ConfigError(
                f"{nodes}, but Ray knows its nodes itself; leave it out, or distributed_executor_backend."
            )
        if self.enable_sleep_mode:
            raise ConfigError(f"{nodes}, but enable_sleep_mode is for one host; leave one of them out.")

    @property
    def ranks_here(self) -> int:
        """Of one replica, on each host; with Ray, this process's own."""
        return 1 if self.distributed_executor_backend == "ray" else self.num_ranks // self.nnodes

    @property
    def devices_here(self) -> int:
        """Of all replicas; with Ray it is not known where they are."""
        return self.num_devices // self.nnodes

    @property
    def staging_regions(self) -> int:
        """Replicas that may hand over prompts."""
        return self.data_parallel_size if self.swap_roles else self.prefill_replicas

    def _check_prefill(self) -> None:
        prefill, replicas = self.prefill_replicas, self.data_parallel_size
        if self.swap_roles and not prefill:
            raise ConfigError(
                "swap_roles is on, but no replica computes prompts for others; give --prefill-replicas, too, or turn it off."
            )
        if prefill and prefill >= replicas:
            raise ConfigError(
                f"prefill_replicas is {prefill} and data_parallel_size {replicas}: none would answer; give at most {replicas - 1}, "
                f"or {prefill + 1} replicas."
            )
        if prefill and self.num_ranks > 1:
            raise ConfigError(
                f"prefill_replicas is {prefill}, but a replica of {self.num_ranks} ranks hands over no keys and values; "
                "give 1 rank each, or leave prefill_replicas out."
            )
        if prefill and self.enable_sleep_mode:
            raise ConfigError(
                "enable_sleep_mode is on, but replicas that hand over keys and values do not sleep; leave it or prefill_replicas out."
            )

    @property
    def num_ranks(self) -> int:
        """Of one replica, each with a device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def ranks_a_stage(self) -> int:
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.data_parallel_size


_PARSERS = tomllib.loads((Path(__file__).parent / "data" / "parsers.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's address, keys, limits and other settings."""

    host: str = option("127.0.0.1")
    port: int = option(8000, minimum=0, maximum=65535)
    uds: str | None = option(None)
    api_server_count: int = option(1, minimum=1, maximum=MAX_FRONT_ENDS)
    api_key: tuple[str, ...] = option(())
    operator_key: tuple[str, ...] = option(())
    allowed_origins: tuple[str, ...] = option((), json=True)
    allowed_methods: tuple[str, ...] = option((), json=True)
    allowed_headers: tuple[str, ...] = option((), json=True)
    allow_credentials: bool = option(False)
    ssl_certfile: str | None = option(None)
    ssl_keyfile: str | None = option(None)
    ssl_ca_certs: str | None = option(None)
    ssl_cert_reqs: int = option(0, choices=(0, 1, 2))
    unknown_fields: str = option("refuse", choices=("refuse", "ignore"))
    max_queue: int = option(1024, minimum=1)
    max_body_bytes: int = option(32 * 2**20, size=True, minimum=1)
    max_answer_bytes: int = option(64 * 2**20, size=True, minimum=2**16)
    max_answers_bytes: int = option(256 * 2**20, size=True, minimum=2**16)
    tool_call_parser: str = option("auto", choices=tuple(_PARSERS["tool_call_parser"]))
    reasoning_parser: str = option("auto", choices=tuple(_PARSERS["reasoning_parser"]))
    repetition_detection: bool = option(False)
    moderation: str | None = option(None)
    moderation_words: str | None = option(None)
    moderation_prompt: bool = option(False)
    moderation_timeout: float = option(5.0, minimum=0.01)
    when_asleep: str = option("wait", choices=("wait", "refuse", "wake"))
    shutdown_timeout: float = option(30.0, minimum=0.0)
    supervise: bool = option(False)
    log_format: str = option("text", choices=("text", "json"))
    tenant_by: str = option("auto", choices=("auto", "key", "user", "adapter"))
    prefix_sharing: str = option("key", choices=("key", "all"))

    allow_runtime_lora_updating: bool = option(False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.uds == "":
            raise ConfigError("uds is empty; give the path of a Unix socket, or leave it out to listen on an address.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters that are served with the model."""

    enable_lora: bool = option(False, technique="lora")
    lora_modules: tuple[str, ...] = option(())
    lora_dir: str | None = option(None)
    max_loras: int | None = option(None, minimum=1)
    max_lora_rank: int = option(16, minimum=1, maximum=MOST_LORA_RANK)
    max_cpu_loras: int | None = option(None, minimum=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_loras and self.max_cpu_loras and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, below max_loras, {self.max_loras}; give at least as many."
            )
        if len(self.modules) < len(self.lora_modules):
            raise ConfigError(
                f"lora_modules names an adapter twice ({', '.join(self.lora_modules)[:200]}); give each name once."
            )
        if (self.lora_modules or self.lora_dir is not None) and not self.enable_lora:
            object.__setattr__(self, "enable_lora", True)

    def space(self, most: int, slots: int = 1024) -> AdapterSpace:
        """Of a device: for so many adapters in a step and on the device, where no flag says otherwise."""
        slots = self.max_cpu_loras or 4 * (self.max_loras or 0) or slots
        return AdapterSpace(slots, self.max_loras or min(most, slots))

    @property
    def modules(self) -> dict[str, str]:
        """``lora_modules`` read: folders by name. Raises ConfigError."""
        return dict(map(_read_module, self.lora_modules))


def _read_module(entry: str) -> tuple[str, str]:
    name, _, path = entry.partition("=")
    if not path:
        raise ConfigError(f"lora_modules has {entry[:80]!r}; give NAME=PATH, like sql=/adapters/sql.")
    return check_adapter_name(name), path


def check_adapter_name(name: str) -> str:
    """Raises ConfigError."""
    if not 0 < len(name) <= 128 or name.startswith(".") or not all(each.isalnum() or each in "-_.:@" for each in name):
        raise ConfigError(
            f"an adapter is called {name[:80]!r}; give 1 to 128 letters, digits and -_.:@, not beginning with a dot."
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything below the server. What only the checkpoint and the device can tell is filled at start, each choice
    with its reason (a Decision)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        cache = self.cache
        if self.device.prefill_replicas and not (
            cache.enable_prefix_caching and cache.kv_caching and cache.paged_allocation
        ):
            raise ConfigError(
                "prefill_replicas needs enable_prefix_caching, kv_caching and paged_allocation: what is handed over lies in the prefix "
                "cache. Turn them on, or leave prefill_replicas out."
            )
        if self.device.ranks_per_device > 1 and self.device.device != "cpu" and cache.kv_cache_memory is None:
            raise ConfigError(
                "ranks_per_device is above 1, and ranks on one GPU cannot measure what each of them has left; "
                "give --kv-cache-memory, the bytes of each."
            )


ENGINE_PARTS: Mapping[str, type] = {
    "model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "device": DeviceConfig,
    "adapters": AdapterConfig,
}  # fmt: skip


def engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """From values by field name; what is no field of the engine's is left out."""
    return EngineConfig(**{name: built(part, given) for name, part in ENGINE_PARTS.items()})


def built(config_class: type[Config], given: Mapping[str, Any]) -> Config:
    """An instance from those given values that are its fields; absent ones keep their defaults."""
    kinds = field_types(config_class)  # type: ignore[arg-type]  # a class has a hash, whatever its instances have
    return config_class(**{name: _as_field(given[name], kind) for name, kind in kinds.items() if name in given})


def _as_field(value: Any, kind: FieldType) -> Any:
    """As people write it: one word for a list of one, a path for a text."""
    if kind.many:
        return (value,) if isinstance(value, str) else tuple(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def switches() -> dict[str, tuple[type, Field[Any]]]:
    """Every switch by each of its spellings, with the part that has it."""
    every = ((part, each) for part in ENGINE_PARTS.values() for each in fields(part) if each.metadata.get("technique"))
    return {spelling: (part, each) for part, each in every for spelling in technique_spellings(each)}


@dataclass(frozen=True, slots=True)
class Decision:
    """One automatic choice and its reason; printed at start and by ``headrace doctor``."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class FieldType:
    """A field's annotation, taken apart: ``int | None`` is int and optional, ``tuple[str, ...]`` is str and many."""

    base: type
    optional: bool = False
    many: bool = False


@cache
def field_types(config_class: type) -> Mapping[str, FieldType]:
    """The type of every field of a config class, by field name."""
    return {name: _field_type(hint) for name, hint in get_type_hints(config_class).items()}


def _field_type(hint: Any) -> FieldType:
    if get_origin(hint) in (Union, types.UnionType):
        (base,) = (part for part in get_args(hint) if part is not types.NoneType)
        return FieldType(base, optional=True)
    if get_origin(hint) is tuple:
        return FieldType(get_args(hint)[0], many=True)
    return FieldType(hint)


def check_fields(config: Any) -> None:
    """Type, choices and bounds of every field. Raises ConfigError that names the field, its value and what is
    allowed."""
    kinds = field_types(config.__class__)
    for each in fields(config):
        value = getattr(config, each.name)
        if "aliases" in each.metadata and isinstance(value, str) and value in each.metadata["aliases"]:
            value = each.metadata["aliases"][value]
            object.__setattr__(config, each.name, value)
        check_value(each, kinds[each.name], value)


def check_value(of: Field[Any], kind: FieldType, value: Any) -> None:
    """One field's value against its type, choices and bounds."""
    if value is None and kind.optional:
        return
    if not _has_type(kind, value):
        raise ConfigError(f"{of.name} is {value!r}; give {_wanted(kind)}.")
    if isinstance(value, int) and value.bit_length() > 63:  # frames between processes hold no more
        raise ConfigError(f"{of.name} is {value}; give a number of at most 63 bits.")
    choices, minimum, maximum = (of.metadata.get(bound) for bound in ("choices", "minimum", "maximum"))
    if choices and value not in choices:
        raise ConfigError(f"{of.name} is {value!r}; give one of {', '.join(map(str, choices))}.")
    if (minimum is not None and not value >= minimum) or (maximum is not None and not value <= maximum):
        wanted = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise ConfigError(f"{of.name} is {value}; give {wanted}.")


def _has_type(kind: FieldType, value: Any) -> bool:
    if kind.many:
        return isinstance(value, tuple) and all(isinstance(item, kind.base) for item in value)
    if isinstance(value, bool):
        return kind.base is bool
    return isinstance(value, (int, float) if kind.base is float else kind.base)


def _wanted(kind: FieldType) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return "a tuple of strings" if kind.many else words[kind.base] + (" or None" if kind.optional else "")
