"""Configuration: frozen dataclasses, composed. Command-line flags, the config file and LLM(...) keywords all come from
these fields.

What lives here: the fields, and the one check that every value passes, whichever way it came. What may not: bounds of
one field and what is told of it (data/options.toml), what does not go together (data/conflicts.toml), torch, reading
checkpoints, command-line parsing (flags.py), and any use of the values.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError
from headrace.spec import KV_FORMATS, AdapterSpace, KVFormat

Config = TypeVar("Config")
_DATA = Path(__file__).parent / "data"
OPTIONS = tomllib.loads((_DATA / "options.toml").read_text(encoding="utf-8"))  # by class and field
_PARSERS = tomllib.loads((_DATA / "parsers.toml").read_text(encoding="utf-8"))
for _name, _known in _PARSERS.items():
    OPTIONS["ServerConfig"][_name]["choices"] = tuple(_known)
QUANTIZATION = OPTIONS["ModelConfig"]["quantization"]
CONFLICTS = tomllib.loads((_DATA / "conflicts.toml").read_text(encoding="utf-8"))  # by class
_COMPARED = {"!=": operator.ne, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "%": operator.mod}


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(part: type[Config]) -> type[Config]:
    """A frozen dataclass of flags, with what options.toml has of each as its metadata. A field that is not there is the
    on/off switch of a technique (None: automatic): it is reached by ``--technique NAME=on|off``, without a flag of its own,
    and the register (techniques/) says what each means."""
    for name in part.__annotations__:
        said = OPTIONS[part.__name__].get(name, {"flag": False, "technique": True})
        without = {"off": None} if "on" in said else {}
        setattr(part, name, field(default=vars(part)[name], metadata={"flag": True, **without, **said}))
    return dataclass(frozen=True, slots=True, kw_only=True)(part)


def technique_name(of: Field[Any]) -> str:
    """What the technique that a switch belongs to is called."""
    named = of.metadata["technique"]
    return named if isinstance(named, str) else of.name.removeprefix("enable_")


def technique_spellings(of: Field[Any]) -> set[str]:
    """What ``--technique`` and ``LLM(technique=…)`` know a switch by: the technique's name, and the field's own where
    that says the same."""
    return {technique_name(of)} if isinstance(of.metadata["technique"], str) else {technique_name(of), of.name}


@settings
class ModelConfig:
    """Which model, in which precision."""

    model: str | None = None
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    dtype: str = "auto"
    load_format: str = "auto"
    share_weights: bool = False
    max_model_len: int | None = None
    quantization: str | None = None
    task: str = "auto"
    chat_template: str | None = None
    special_tokens_in_messages: bool = False
    generation_config: str = "auto"
    seed: int = 0

    @property
    def chat_options(self) -> dict[str, Any]:
        """What a tokenizer has to know of conversations."""
        return {"chat_template": self.chat_template, "special_tokens_in_messages": self.special_tokens_in_messages}

    def __post_init__(self) -> None:
        check_fields(self)


@settings
class CacheConfig:
    """The size, format and reuse of the KV cache."""

    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    paged_allocation: bool = True
    unified_paging: bool = True
    kv_caching: bool = True

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


@settings
class SchedulerConfig:
    """Which requests run, and with how many tokens per step."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_logits_rows: int | None = None
    max_step_ms: float | None = None
    scheduling_policy: str = "fcfs"
    tenant_weight: tuple[str, ...] = ()
    fair_input_price: float = 1.0
    fair_output_price: float = 2.0
    expected_ttft: float = 1.0
    reading_speed: float = 4.8
    qoe_preemptions: float = 0.1
    ageing: float = 4.0
    length_prediction: str = "history"
    ttft_target_ms: float = 2000.0
    tpot_target_ms: float = 100.0
    chunked_prefill: bool = True
    continuous_batching: bool = True
    fast_forward: bool = True
    speculative_config: str | None = None
    longest_first: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", json.dumps(self.speculative_config))
        check_fields(self)
        if len(self.tenant_weights) < len(self.tenant_weight):
            raise ConfigError(
                f"tenant_weight names a tenant twice ({', '.join(self.tenant_weight)[:200]}); give each one weight."
            )

    @property
    def max_step_seconds(self) -> float | None:
        return None if self.max_step_ms is None else self.max_step_ms / 1e3

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


@settings
class DeviceConfig:
    """The device, and how to compute on it."""

    device: str = "auto"
    executor: str = "model"
    device_time: float = 0.0
    threads: int | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    expert_placement: str | None = None
    expert_failover: bool = False
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] = ()
    pooled_layers: tuple[int, ...] = ()
    context_parallel_size: int = 1
    ranks_per_device: int = 1
    data_parallel_size: int = 1
    data_parallel_routing: str = "prefix"
    prefill_replicas: int = 0
    swap_roles: bool = False
    distributed_executor_backend: str = "mp"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    node_secret_file: str | None = None
    overlap: int | None = None
    enforce_eager: bool = False
    batch_invariant: bool = False
    trace: str | None = None
    enable_sleep_mode: bool = False
    strict_kernels: bool = False
    token_concatenation: bool = True
    last_layer_pruning: bool = True
    compressed_weights: bool = False
    joint_deltas: bool = True
    integer_products: bool = True
    flat_gemm: bool = True
    tuned_products: bool = True
    quantized_gemm: bool = True
    wide_copy: bool | None = None
    gated_products: bool = True
    cuda_prefill: bool = True
    deep_fusion: bool = True
    early_weights: bool = True
    persistent_decode: bool = True
    persistent_fp8: bool = False
    one_launch_experts: bool = True
    joined_experts: bool = True
    fused_rope_attention: bool = True
    cascade_attention: bool = True
    one_shot_sums: bool = True
    fused_sums: bool = True
    sequence_parallel: bool | None = None
    expert_dispatch: bool = False
    unified_maximum: bool = False
    programmatic_launch: bool = True
    prompt_graphs: bool = True
    drafts_ahead: bool = True
    activation_arena: bool = True
    disabled_kernels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

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


@settings
class ServerConfig:
    """The server's address, keys, limits and other settings."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_server_count: int = 1
    api_key: tuple[str, ...] = ()
    operator_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ()
    allowed_headers: tuple[str, ...] = ()
    allow_credentials: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    unknown_fields: str = "refuse"
    max_queue: int = 1024
    max_body_bytes: int = 32 * 2**20
    max_answer_bytes: int = 64 * 2**20
    max_answers_bytes: int = 256 * 2**20
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    repetition_detection: bool = False
    moderation: str | None = None
    moderation_words: str | None = None
    moderation_prompt: bool = False
    moderation_timeout: float = 5.0
    when_asleep: str = "wait"
    shutdown_timeout: float = 30.0
    supervise: bool = False
    log_format: str = "text"
    tenant_by: str = "auto"
    prefix_sharing: str = "key"

    allow_runtime_lora_updating: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@settings
class AdapterConfig:
    """LoRA adapters that are served with the model."""

    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    lora_dir: str | None = None
    max_loras: int | None = None
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
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
        check_together(self)


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
    check_together(config)


def check_together(config: Any) -> None:
    """What conflicts.toml says of its class. Raises ConfigError."""
    if (broken := first_conflict(CONFLICTS.get(config.__class__.__name__, ()), config)) is not None:
        raise ConfigError(broken[1])


def first_conflict(rules: Iterable[Mapping[str, Any]], held: Any) -> tuple[str, str] | None:
    """Of the first rule that settings of ``held`` break, the setting that it names first, and what it says. ``rules``: as
    conflicts.toml has them."""
    broken = ((rule, case) for rule in rules for case in rule["when"] if _holds(case, held))
    return next(((next(iter(case)), rule["say"].format_map(_Shown(held, *case))) for rule, case in broken), None)


class _Shown:
    """Settings by name, as messages show them; of those that a rule names, ``it`` is the first, with its ``value``, and
    ``flag`` and ``other`` are the first two as flags."""

    def __init__(self, held: Any, it: str, other: str = "", *more: str) -> None:
        flags = {"flag": f"--{it.replace('_', '-')}", "other": f"--{other.replace('_', '-')}"}
        self._held, self._words = held, {"it": it, "value": _value(held, it), **flags}

    def __getitem__(self, name: str) -> Any:
        value = self._words[name] if name in self._words else _value(self._held, name)
        return " ".join(map(str, value)) if isinstance(value, tuple) else value


def _value(held: Any, name: str) -> Any:
    return reduce(lambda owner, part: getattr(owner, part, None), name.split("."), held)


def _holds(case: Mapping[str, Any], held: Any) -> bool:
    return all(
        _is(held, _value(held, name), each)
        for name, wanted in case.items()
        for each in (wanted if isinstance(wanted, list) else [wanted])
    )


def _is(held: Any, value: Any, wanted: Any) -> bool:
    if wanted in ("given", "missing"):
        return (value is None or value is False) is (wanted == "missing")
    if isinstance(wanted, bool):
        return (any(value) if isinstance(value, tuple) else bool(value)) is wanted
    compare, _, other = wanted.partition(" ") if isinstance(wanted, str) else ("", "", "")
    if compare not in _COMPARED:
        return bool(value == wanted)
    number = re.fullmatch(r"[\d.]+", other)
    return bool(_COMPARED[compare](value, float(other) if number else getattr(held, other, other)))


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
