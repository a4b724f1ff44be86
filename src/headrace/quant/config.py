"""``quantization_config`` of a checkpoint: which format each of its matrices is in. One reader a method.

What lives here: reading those configs, strictly, and their lists of exceptions. What may not: torch, tensors, a
decoder's own names (models/weight_rules.py asks for each matrix by its name on disk).
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.dfloat11 import DFloat11
from headrace.quant.floats import MX_GROUP, MXFP4, NV_GROUP, NVFP4, NormalFloat
from headrace.quant.gguf import BLOCKS, GGUFBlocks
from headrace.quant.integers import AWQ, GPTQ, PackedIntegers, TwoLevels
from headrace.quant.outliers import OutlierColumns, SparseOutliers
from headrace.quant.rotated import Rotated
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.quant.ternary import Ternary

FP8, INT8 = "float8_e4m3fn", "int8"
BY_TENSOR, BY_CHANNEL = (WHOLE, WHOLE), (1, WHOLE)

Choose = Callable[[str], Format | None]  # a matrix's name on disk → its format; None: as the rest of the model
_Config = Mapping[str, Any]


def read_quantization(config: Any) -> Choose:
    """Raises ModelError that names the method, and what would work instead."""
    if not isinstance(config, Mapping):
        raise ModelError(
            f"config.json: quantization_config is {str(config)[:80]!r}, not a mapping; "
            "the config is damaged, fetch it again."
        )
    method = config.get("quant_method")
    if method is None and isinstance(config.get("quant_algo"), str):
        method = "modelopt"
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"The weights are quantised by {str(method)[:40]!r}, which is not supported. Use a checkpoint in one of "
            f"{', '.join(_METHODS)} (docs/formats.md), or one that is not quantised."
        )
    return _METHODS[method](config)


_ANOTHER = "use a checkpoint in another format (docs/formats.md), or one that is not quantised"


def _refuse(config: _Config, what: str, remedy: str = _ANOTHER) -> ModelError:
    return ModelError(
        f"quantization_config ({config.get('quant_method') or 'modelopt'}): {what}, which is not supported; {remedy}."
    )


def _of(config: _Config, name: str, allowed: Sequence[Any], default: Any) -> Any:
    """A value that must be one of those that are understood."""
    value = default if config.get(name) is None else config[name]
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
        raise _refuse(config, f"{name} is {str(value)[:60]!r}", f"supported are {', '.join(map(str, allowed))}")
    return value


def _size(config: _Config, name: str, default: int) -> int:
    """A group's size; -1 stands for a whole row, which is 0 here."""
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 0 < value < 2**24):
        raise _refuse(config, f"{name} is {str(value)[:40]!r}", "a positive number of inputs, or -1, is needed")
    return max(value, 0)


def _pair(config: _Config, name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(e) is not int or not 0 < e < 2**24 for e in value):
        raise _refuse(config, f"{name} is {str(value)[:60]}", "two positive numbers are needed")
    return value[0], value[1]


def _texts(config: _Config, *names: str) -> list[str]:
    found: list[str] = []
    for name in names:
        value = config.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _refuse(config, f"{name} is {str(value)[:60]!r}", "a list of layers' names is needed")
        found += value
    return found


def _is_part(name: str, listed: str) -> bool:
    """Whether ``listed`` is this layer, what it is in, or its own last words; ``*`` stands for any."""
    words = listed.strip(".")
    return fnmatch.fnmatchcase(f".{name}.", f"*.{words}.*") if "*" in words else f".{words}." in f".{name}."


def _without(config: _Config, exceptions: Sequence[str], form: Format) -> Choose:
    """``form`` for all but the exceptions and the head, which these methods leave as it is."""
    listed = (*exceptions, "lm_head")
    return lambda name: None if any(_is_part(name, each) for each in listed) else form


# --- FP8
# ----------------------------------------------------------------------------------------------------------------


def _fp8(config: _Config) -> Choose:
    """transformers' fine-grained FP8 (DeepSeek's and Qwen's blocks), and what AutoFP8 and vLLM write."""
    _of(config, "fmt", ("e4m3",), "e4m3")
    static = _of(config, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    powers = _of(config, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    exceptions = _texts(config, "modules_to_not_convert", "ignored_layers")
    sizes = config.get("weight_block_size")
    if sizes is None:
        return _without(config, exceptions, ScaledWeight(FP8, BY_TENSOR, activations=Activations("fp8", static)))
    block = _pair(config, "weight_block_size", sizes)
    if static:
        raise _refuse(config, "blocks with static activations")
    activations = Activations("fp8", group=block[1], powers=powers)
    form = ScaledWeight(FP8, block, ("weight_scale_inv", "weight_scale"), activations=activations)
    return _without(config, exceptions, form)


def _fbgemm(config: _Config) -> Choose:
    return _without(
        config, _texts(config, "modules_to_not_convert"), ScaledWeight(FP8, BY_CHANNEL, activations=Activations("fp8"))
    )


def _modelopt(config: _Config) -> Choose:
    algorithm = _of(
        config, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"), None
    )
    form: Format
    if algorithm == "FP8":
        form = ScaledWeight(FP8, BY_TENSOR, activations=Activations("fp8", static=True))
    elif algorithm.startswith("FP8"):
        form = ScaledWeight(FP8, BY_CHANNEL, activations=Activations("fp8"))
    else:
        if algorithm == "NVFP4_AWQ":
            raise _refuse(config, "quant_algo NVFP4_AWQ (scales before the weights)")
        _of(config, "group_size", (NV_GROUP,), NV_GROUP)
        form = NVFP4(inverse=False, suffixes=("weight", "weight_scale", "weight_scale_2"))
    patterns = [re.compile(fnmatch.translate(each)) for each in _texts(config, "ignore", "exclude_modules")]
    return lambda name: None if any(each.match(name) for each in patterns) else form


# --- compressed-tensors
# ---------------------------------------------------------------------------------------------------


def _compressed_tensors(config: _Config) -> Choose:
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refuse(config, f"sparsity_config {str(sparsity)[:60]}")
    rotations = _rotations(config, config.get("transform_config") or {})
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refuse(config, f"config_groups is {str(groups)[:60]!r}", "the config is damaged, fetch it again")
    schemes = [
        (_texts(group, "targets"), _scheme(config, group)) for group in groups.values() if isinstance(group, Mapping)
    ]
    ignored = _texts(config, "ignore")

    def choose(name: str) -> Format | None:
        if any(_is_target(name, each) for each in ignored):
            return None
        exact = [
            form for targets, form in schemes if any(each != "Linear" and _is_target(name, each) for each in targets)
        ]
        return (exact or [form for targets, form in schemes if "Linear" in targets] or [None])[0]

    def rotated(name: str) -> Format | None:
        form = choose(name)
        for targets, exceptions, size in rotations:
            if not any(_is_target(name, each) for each in exceptions) and (
                "Linear" in targets or any(_is_target(name, each) for each in targets)
            ):
                form = Rotated(form or Format(), size)
        return form

    return rotated if rotations else choose


def _rotations(config: _Config, transforms: Any) -> list[tuple[list[str], list[str], int]]:
    """(targets, exceptions, size) of what rotates inputs; weights have been rotated before they were stored."""
    schemes = transforms.get("config_groups") or {} if isinstance(transforms, Mapping) else None
    if not isinstance(schemes, Mapping) or not all(isinstance(each, Mapping) for each in schemes.values()):
        raise _refuse(config, f"transform_config is {str(transforms)[:60]!r}", "the config is damaged, fetch it again")
    found = []
    for scheme in schemes.values():
        for part in scheme.get("apply") or []:
            if part.get("location") in ("weight_input", "weight_output"):
                continue
            size = scheme.get("head_dim")
            if (
                part.get("location") != "input"
                or scheme.get("type") != "hadamard"
                or scheme.get("randomize")
                or not isinstance(size, int)
                or size < 2
                or size & (size - 1)
            ):
                said = f"{scheme.get('type')} at {part.get('location')} in blocks of {size}"
                raise _refuse(
                    config,
                    f"transform_config {said}",
                    "supported are Hadamard rotations of inputs in blocks of a power of two",
                )
            found.append((_texts(part, "targets"), _texts(part, "ignore"), size))
    return found


def _is_target(name: str, target: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], name) is not None
        except re.error as error:
            raise ModelError(
                f"quantization_config: {target[:80]!r} is no regular expression ({error}); fetch config.json again."
            ) from error
    return name == target or name.removeprefix("model.") == target


def _scheme(config: _Config, group: _Config) -> Format | None:
    weights, said = group.get("weights"), group.get("format") or config.get("format")
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise _refuse(config, f"weights is {str(weights)[:60]!r}", "the config is damaged, fetch it again")
    if group.get("output_activations"):
        raise _refuse(config, "output_activations")
    weights = {"quant_method": config.get("quant_method"), **weights}  # what is refused names it
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    size = _size(weights, "group_size", -1) if weights.get("group_size") is not None else 0
    zero, ordered = weights.get("symmetric") is False, weights.get("actorder") in ("group", "GROUP", True)
    match said, kind, bits:
        case "pack-quantized", "int", int() if 2 <= bits <= 8 and strategy in ("group", "channel"):
            inputs = _inputs(config, group.get("input_activations"))
            if inputs is not None and inputs.kind == "fp8":
                raise _refuse(config, f"input_activations in FP8 beside {said} weights")
            return PackedIntegers(bits, size if strategy == "group" else 0, zero, act_order=ordered, activations=inputs)
        case "nvfp4-pack-quantized", "float", 4:
            _of(weights, "group_size", (NV_GROUP,), NV_GROUP)
            return NVFP4(inverse=True)
        case "mxfp4-pack-quantized", "float", 4:
            _of(weights, "group_size", (MX_GROUP,), MX_GROUP)
            return MXFP4()
        case "int-quantized" | "float-quantized" | "naive-quantized", "int" | "float", 8 if (
            not (kind == "float" and zero) and not ordered
        ):
            activations = _inputs(config, group.get("input_activations"))
            return ScaledWeight(
                FP8 if kind == "float" else INT8, _block(config, weights, size), zero=zero, activations=activations
            )
    raise _refuse(
        config, f"format {said!r} of {bits} bits ({kind}, {strategy}{', activation order' if ordered else ''})"
    )


def _block(config: _Config, weights: _Config, size: int) -> tuple[int, int]:
    strategy = _of(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
    if strategy == "group":
        return 1, size
    if strategy != "block":
        return BY_TENSOR if strategy == "tensor" else BY_CHANNEL
    return _pair(config, "block_structure", weights.get("block_structure"))


def _inputs(config: _Config, inputs: Any) -> Activations | None:
    if inputs is None:
        return None
    if (
        not isinstance(inputs, Mapping)
        or inputs.get("num_bits") != 8
        or inputs.get("type", "int") not in ("int", "float")
    ):
        raise _refuse(config, f"input_activations {str(inputs)[:80]}")
    if inputs.get("symmetric") is False:
        raise _refuse(config, "asymmetric input_activations")
    kind = "fp8" if inputs.get("type") == "float" else "int8"
    if not inputs.get("dynamic"):
        if inputs.get("strategy", "tensor") != "tensor":
            raise _refuse(config, f"static input_activations by {inputs.get('strategy')}")
        return Activations(kind, static=True)
    grouped = inputs.get("strategy") in ("group", "block") and inputs.get("group_size")
    return Activations(kind, group=_size(inputs, "group_size", -1) if grouped else 0)


# --- GPTQ, AWQ, bitsandbytes, MXFP4, GGUF
# --------------------------------------------------------------------------------


def _gptq(config: _Config) -> Choose:
    if config.get("is_marlin_format"):
        raise _refuse(config, "weights laid out for one kernel (is_marlin_format)")
    version = _of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if config.get("rotation"):
        raise _refuse(config, f"rotation {str(config['rotation'])[:40]!r}")
    offset = int(version != "gptq_v2")
    plain = _gptq_format(config, {}, offset)
    overrides = config.get("dynamic") or {}
    if not isinstance(overrides, Mapping):
        raise _refuse(config, f"dynamic is {str(overrides)[:60]!r}", "a mapping is needed")
    formats = {
        pattern: _gptq_format(config, own, offset) for pattern, own in overrides.items() if not pattern.startswith("-:")
    }
    blocks = [
        name
        for group in config.get("modules_in_block_to_quantize") or []
        for name in (group if isinstance(group, list) else [group])
    ]

    def choose(name: str) -> Format | None:
        for pattern in overrides:
            if _is_target(name, "re:" + pattern.removeprefix("-:").removeprefix("+:")):
                return formats.get(pattern)
        if name == "lm_head":
            return plain if config.get("lm_head") is True else None
        mine = _is_expert_or_dense(name) and (not blocks or any(_is_part(name, str(each)) for each in blocks))
        return plain if mine else None

    return choose


def _is_expert_or_dense(name: str) -> bool:
    """GPTQ's and AWQ's writers leave routers as they are, without a word."""
    return not name.endswith((".mlp.gate", ".block_sparse_moe.gate"))


def _gptq_format(config: _Config, own: Any, offset: int) -> GPTQ:
    both = {**config, **(own if isinstance(own, Mapping) else {})}
    _of(both, "pack_dtype", ("int32",), "int32")
    bits, ordered = _of(both, "bits", (2, 3, 4, 8), None), _of(both, "desc_act", (True, False), False)
    return GPTQ(bits, _size(both, "group_size", -1), act_order=ordered, zero_offset=offset)


def _awq(config: _Config) -> Choose:
    _of({**config, "version": str(config.get("version", "gemm")).lower()}, "version", ("gemm",), "gemm")
    form = AWQ(_of(config, "bits", (4,), 4), _size(config, "group_size", 128))
    if config.get("zero_point") is False:
        raise _refuse(config, "zero_point false")
    choose = _without(config, _texts(config, "modules_to_not_convert"), form)
    return lambda name: choose(name) if _is_expert_or_dense(name) else None


def _bitsandbytes(config: _Config) -> Choose:
    exceptions = _texts(config, "llm_int8_skip_modules")
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return _without(config, exceptions, ScaledWeight(INT8, BY_CHANNEL, ("SCB",), factor=1 / 127))
    _of(config, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    kind = _of(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return _without(
        config, exceptions, NormalFloat(kind, _of(config, "bnb_4bit_use_double_quant", (True, False), False))
    )


def _mxfp4(config: _Config) -> Choose:
    """As gpt-oss has it: the experts, and nothing else."""
    exceptions, form = _texts(config, "modules_to_not_convert"), MXFP4(blocks=True)
    return lambda name: form if ".experts" in name and not any(_is_part(name, each) for each in exceptions) else None


def _own(config: _Config) -> Choose:
    """What ``headrace quantize`` writes where there is no form that others read."""
    kind = _of(config, "format", ("outlier-columns", "sparse-outliers", "dfloat11", "ternary", "two-levels"), None)
    form: Format = DFloat11() if kind == "dfloat11" else Ternary()
    if kind == "two-levels":
        form = TwoLevels(_of(config, "group_size", (32, 64, 128), None))
    if kind in ("outlier-columns", "sparse-outliers"):
        share = config.get("share")
        if not isinstance(share, float) or not 0 < share < 0.5:
            raise _refuse(config, f"share is {str(share)[:40]!r}", "a part of all weights is needed, less than half")
        form = OutlierColumns(ScaledWeight(INT8, BY_CHANNEL, activations=Activations("int8")), share)
        if kind == "sparse-outliers":
            bits = _of(config, "bits", (2, 3, 4, 5, 6, 7, 8), None)
            form = SparseOutliers(PackedIntegers(bits, _size(config, "group_size", -1), zero=False), share)
    ignored = _texts(config, "ignore")
    experts = kind == "ternary"  # and nothing else
    return lambda name: (
        None if any(_is_target(name, each) for each in ignored) or (experts and ".experts." not in name) else form
    )


def _gguf(config: _Config) -> Choose:
    """Put together from a file's table of tensors: ``types`` names each matrix's."""
    types: Mapping[str, str] = config["types"]
    if unknown := next(((name, kind) for name, kind in types.items() if kind not in BLOCKS), None):
        raise ModelError(
            f"{unknown[0]} has GGUF type {unknown[1]}, which is not supported as it is packed; "
            f"supported are {', '.join(BLOCKS)}. Use a file of those types, or --quantization none, "
            "which widens the weights while they are read."
        )
    formats = {name: GGUFBlocks(kind) for name, kind in types.items()}
    return formats.get


_METHODS: Mapping[str, Callable[[_Config], Choose]] = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt, "compressed-tensors": _compressed_tensors,
    "gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes, "mxfp4": _mxfp4, "gguf": _gguf, "headrace": _own,
}  # fmt: skip

_CONFIGS = tomllib.loads(Path(__file__).with_name("usual_configs.toml").read_text(encoding="utf-8"))
# How a method's checkpoints usually are, for random weights (--load-format dummy --quantization …), and what plain ones
# are made into while they are read.
USUAL: Mapping[str, Mapping[str, Any]] = _CONFIGS["usual"]
MADE: Mapping[str, Mapping[str, Any]] = _CONFIGS["made"]
