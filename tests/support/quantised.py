"""Tiny checkpoints in every format that is read, rounded to nearest from a tiny model; and the plain checkpoints they
stand for.

What lives here: writers, bit by bit in numpy, that share no line with the readers. What may not: reading, tests.

``write("gptq-4", folder)`` returns two folders: the quantised model, and one whose float32 weights are exactly what it
means.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import tiny

Array = np.ndarray[Any, Any]
Made = tuple[dict[str, Tensor], Array]  # tensors by suffix, and the matrix they mean
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def stream_of_bits(codes: Array, bits: int) -> Array:
    """[n, k] codes as int32 words [n, ⌈k · bits / 32⌉], lowest bit first, one code behind another."""
    n, k = codes.shape
    flat = (
        (codes.astype(np.uint32)[:, :, None] >> np.arange(bits, dtype=np.uint32) & 1)
        .astype(np.uint8)
        .reshape(n, k * bits)
    )
    flat = np.pad(flat, ((0, 0), (0, -(k * bits) % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


def _groups(weight: Array, size: int) -> Array:
    return weight.reshape(weight.shape[0], -1, size or weight.shape[1])


def rounded(weight: Array, bits: int, size: int, *, zeros: bool) -> tuple[Array, Array, Array]:
    """(codes, scales, zeros) of groups of inputs: codes [outs, ins] unsigned, the others [outs, groups]."""
    split, most = _groups(weight, size), 2**bits - 1
    if zeros:
        low, high = np.minimum(split.min(2), 0), np.maximum(split.max(2), 0)
        scale = ((high - low) / most).astype(np.float16)
        zero = np.clip(np.round(-low / scale.astype(np.float32)), 1, most)
    else:
        scale = (np.abs(split).max(2) / (most // 2)).astype(np.float16)
        zero = np.full(scale.shape, 2 ** (bits - 1), dtype=np.float32)
    codes = np.clip(np.round(split / scale.astype(np.float32)[..., None]) + zero[..., None], 0, most)
    return codes.reshape(weight.shape), scale, zero


def meant(codes: Array, scale: Array, zero: Array, size: int) -> Array:
    split = _groups(codes.astype(np.float32), size)
    dense: Array = ((split - zero[..., None].astype(np.float32)) * scale[..., None].astype(np.float32)).reshape(
        codes.shape
    )
    return dense


def _t(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def gptq(weight: Array, bits: int = 4, size: int = 32, *, offset: int = 1, order: bool = False) -> Made:
    ins = weight.shape[1]
    inputs = np.random.default_rng(ins).permutation(ins) if order else np.arange(ins)
    codes, scale, zero = rounded(weight[:, inputs], bits, size, zeros=True)
    groups = np.empty(ins, dtype=np.int32)
    groups[inputs] = np.arange(ins) // (size or ins)
    back = np.argsort(inputs)
    tensors = {
        "qweight": _t(stream_of_bits(codes[:, back], bits).T),
        "qzeros": _t(stream_of_bits((zero - offset).T, bits)),
        "scales": _t(scale.T),
        "g_idx": _t(groups),
    }
    return tensors, meant(codes, scale, zero, size)[:, back]


def awq(weight: Array, size: int = 32) -> Made:
    codes, scale, zero = rounded(weight, 4, size, zeros=True)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight outputs, which one is in each place of their word

    def packed(values: Array) -> Tensor:  # [outs, n] → [n, outs / 8]
        return _t(stream_of_bits(values.T.reshape(values.shape[1], -1, 8)[:, :, order].reshape(values.shape[1], -1), 4))

    return {"qweight": packed(codes), "qzeros": packed(zero), "scales": _t(scale.T)}, meant(codes, scale, zero, size)


def packed_integers(weight: Array, bits: int = 4, size: int = 32, *, zeros: bool = False) -> Made:
    codes, scale, zero = rounded(weight, bits, size, zeros=zeros)
    tensors = {
        "weight_packed": _t(stream_of_bits(codes, bits)),
        "weight_scale": _t(scale).bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = _t(stream_of_bits(zero.T, bits).T)
    return tensors, meant(codes, tensors["weight_scale"].float().numpy(), zero, size)


def fp8(weight: Array, block: tuple[int, int], *, name: str = "weight_scale", static: float | None = None) -> Made:
    """``block``: outputs and inputs of a scale, 0: all."""
    outs, ins = weight.shape
    rows, columns = block[0] or outs, block[1] or ins
    scale = np.empty((-(-outs // rows), -(-ins // columns)), dtype=np.float32)
    codes, dense = torch.empty(outs, ins, dtype=torch.float8_e4m3fn), np.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = np.abs(weight[part]).max() / 448
            codes[part] = _t(weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[part] = codes[part].float().numpy() * scale[i, j]
    tensors = {"weight": codes, name: _t(scale).squeeze() if block == (0, 0) else _t(scale)}
    return tensors | ({} if static is None else {"input_scale": torch.tensor([static])}), dense


def int8(weight: Array) -> Made:
    scale = np.abs(weight).max(1, keepdims=True) / 127
    codes = np.round(weight / scale).astype(np.int8)
    return {"weight": _t(codes), "weight_scale": _t(scale)}, codes * scale


def llm_int8(weight: Array) -> Made:
    """bitsandbytes' int8 keeps the largest of each row."""
    tensors, dense = int8(weight)
    return {
        "weight": tensors["weight"],
        "SCB": tensors["weight_scale"][:, 0] * 127,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, dense


def nf4(weight: Array, *, nested: bool) -> Made:
    outs, ins = weight.shape
    table = np.sort(np.random.default_rng(4).uniform(-1, 1, 16)).astype(np.float32)
    table[[0, 15]] = -1, 1
    blocks = weight.reshape(-1, 64)
    largest = np.abs(blocks).max(1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [outs, ins]}
    more = {}
    if nested:
        offset = float(largest.mean())
        inner = np.sort(np.random.default_rng(5).uniform(-1, 1, 256)).astype(np.float32)
        apart = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
        most = np.abs(apart).max(1).astype(np.float32)
        codes8 = np.abs(apart[:, :, None] / most[:, None, None] - inner).argmin(2).astype(np.uint8)
        largest = (inner[codes8] * most[:, None]).reshape(-1)[: len(largest)] + np.float32(offset)
        more = {"weight.nested_absmax": _t(most), "weight.nested_quant_map": _t(inner)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = np.abs(blocks[:, :, None] / largest[:, None, None] - table).argmin(2).astype(np.uint8)
    pairs = codes.reshape(-1, 2)
    tensors = {
        "weight": _t(pairs[:, :1] << 4 | pairs[:, 1:]),
        "weight.absmax": _t(codes8.reshape(-1)[: len(blocks)]) if nested else _t(largest),
        "weight.quant_map": _t(table),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        **more,
    }
    return tensors, (table[codes] * largest[:, None]).reshape(outs, ins).astype(np.float32)


def _e2m1(values: Array) -> tuple[Array, Array]:
    codes = np.abs(values[..., None] - E2M1).argmin(-1).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, E2M1[codes]


def nvfp4(weight: Array, *, suffixes: tuple[str, str, str], inverse: bool) -> Made:
    split = _groups(weight, 16)
    whole = np.float32(np.abs(weight).max() / (448 * 6))
    scale = _t((np.abs(split).max(2) / 6 / whole).astype(np.float32)).to(torch.float8_e4m3fn)
    wide = scale.float().numpy()[..., None] * whole
    packed, values = _e2m1(split / wide)
    stored = torch.tensor([1 / whole if inverse else whole])
    if inverse:
        wide = scale.float().numpy()[..., None] / stored.numpy()
    tensors = dict(zip(suffixes, (_t(packed.reshape(len(weight), -1)), scale, stored), strict=True))
    return tensors, (values * wide).reshape(weight.shape).astype(np.float32)


def mxfp4(weight: Array) -> Made:
    split = _groups(weight, 32)
    exponent = np.ceil(np.log2(np.abs(split).max(2) / 6)).astype(np.int32)
    packed, values = _e2m1(split / np.exp2(exponent)[..., None])
    tensors = {
        "weight_packed": _t(packed.reshape(len(weight), -1)),
        "weight_scale": _t((exponent + 127).astype(np.uint8)),
    }
    return tensors, (values * np.exp2(exponent)[..., None]).reshape(weight.shape).astype(np.float32)


@dataclass(frozen=True)
class Recipe:
    """``config``: its quantization_config. ``inputs``: how the inputs of its matrices are rounded, for the oracle."""

    make: Callable[[Array], Made]
    config: Mapping[str, Any]
    plain: tuple[str, ...] = ()  # further matrices that are left as they are
    inputs: Callable[[Tensor], Tensor] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the model
    head: bool = False


def rounded_to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _fp8_rows(x: Tensor) -> Tensor:
    return rounded_to_fp8(x, x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)


def _fp8_groups(x: Tensor, size: int = 32) -> Tensor:
    return _fp8_rows(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)


def _int8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return (x / scale).round() * scale


def compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.gate$"],
        **more,
    }


def _ints(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **more}


_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": False}
_CT_NVFP4, _MODELOPT = (
    ("weight_packed", "weight_scale", "weight_global_scale"),
    ("weight", "weight_scale", "weight_scale_2"),
)

RECIPES: Mapping[str, Recipe] = {
    "fp8-blocks": Recipe(
        lambda w: fp8(w, (32, 32), name="weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        inputs=_fp8_groups,
        fields={"intermediate_size": 96 + 32},
    ),
    "fp8-tensor-static": Recipe(
        lambda w: fp8(w, (0, 0), static=0.05),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "model.layers.1.mlp.down_proj"]},
        plain=("layers.1.mlp.down_proj",),
        inputs=lambda x: rounded_to_fp8(x, torch.tensor(0.05)),
    ),
    "fp8-channel": Recipe(lambda w: fp8(w, (1, 0)), {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, inputs=_fp8_rows),
    "compressed-w8a8": Recipe(int8, compressed("int-quantized", _CHANNEL, _TOKEN), inputs=_int8_rows),
    "compressed-fp8": Recipe(
        lambda w: fp8(w, (1, 0)),
        compressed("float-quantized", {**_CHANNEL, "type": "float"}, {**_TOKEN, "type": "float"}),
        inputs=_fp8_rows,
    ),
    "compressed-w4a16": Recipe(packed_integers, compressed("pack-quantized", _ints(4))),
    "compressed-w4a8": Recipe(packed_integers, compressed("pack-quantized", _ints(4), _TOKEN), inputs=_int8_rows),
    "compressed-w6a8": Recipe(
        lambda w: packed_integers(w, 6, 0), compressed("pack-quantized", _ints(6, strategy="channel", group_size=None), _TOKEN), inputs=_int8_rows
    ),
    "compressed-w8a16": Recipe(lambda w: packed_integers(w, 8, 0), compressed("pack-quantized", _ints(8, strategy="channel", group_size=None))),
    "compressed-zeros": Recipe(lambda w: packed_integers(w, zeros=True), compressed("pack-quantized", _ints(4, symmetric=False))),
    "compressed-ignore": Recipe(
        packed_integers,
        compressed("pack-quantized", _ints(4), ignore=["re:.*v_proj$", "model.layers.2.mlp.up_proj", "lm_head"]),
        plain=("v_proj", "layers.2.mlp.up_proj"),
    ),
    "compressed-nvfp4": Recipe(
        lambda w: nvfp4(w, suffixes=_CT_NVFP4, inverse=True),
        compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}),
    ),
    "compressed-mxfp4": Recipe(
        mxfp4, compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32})
    ),
    "gptq-4": Recipe(gptq, _GPTQ),
    "gptq-act-order": Recipe(lambda w: gptq(w, order=True), {**_GPTQ, "desc_act": True}),
    "gptq-v2": Recipe(lambda w: gptq(w, offset=0), {**_GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-2": Recipe(lambda w: gptq(w, 2), {**_GPTQ, "bits": 2}),
    "gptq-3": Recipe(lambda w: gptq(w, 3), {**_GPTQ, "bits": 3}),
    "gptq-8-row": Recipe(lambda w: gptq(w, 8, 0), {**_GPTQ, "bits": 8, "group_size": -1}),
    "gptq-head": Recipe(gptq, {**_GPTQ, "lm_head": True}, head=True),
    "gptq-dynamic": Recipe(gptq, {**_GPTQ, "dynamic": {r"-:.*layers\.1\..*": {}}}, plain=("layers.1.",)),
    "awq": Recipe(awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}),
    "nf4": Recipe(lambda w: nf4(w, nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
                  fields={"intermediate_size": 128}),
    "nf4-nested": Recipe(
        lambda w: nf4(w, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        fields={"intermediate_size": 128},
    ),
    "bnb-int8": Recipe(llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "modelopt-nvfp4": Recipe(
        lambda w: nvfp4(w, suffixes=_MODELOPT, inverse=False), {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    ),
    "modelopt-fp8": Recipe(
        lambda w: fp8(w, (0, 0), static=0.05),
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        inputs=lambda x: rounded_to_fp8(x, torch.tensor(0.05)),
    ),
}  # fmt: skip


def is_quantised(recipe: Recipe, key: str) -> bool:
    """Whether a plain checkpoint's tensor is stored in the recipe's format."""
    matrix = key.endswith("_proj.weight") or (".experts." in key) or (recipe.head and key == "lm_head.weight")
    return matrix and not any(part in key for part in recipe.plain)


def write(name: str, folder: Path, *, model: str = "llama", seed: int = 0) -> tuple[Path, Path]:
    """(the quantised checkpoint, the float32 one that it stands for)."""
    recipe = RECIPES[name]
    plain = tiny.save(model, folder / "plain", seed=seed, **recipe.fields)
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        stored[key] = dense[key] = tensor
        if is_quantised(recipe, key):
            del stored[key]
            made, matrix = recipe.make(tensor.numpy())
            stored |= {f"{key.removesuffix('.weight')}.{suffix}": each for suffix, each in made.items()}
            dense[key] = _t(matrix)
    quantised = tiny.save_tokenizer(folder / "quantised")
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": recipe.config}))
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, quantised / "model.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in dense.items()}, plain / "model.safetensors")
    return quantised, plain


def write_stacked(folder: Path) -> tuple[Path, Path]:
    """Experts in one tensor, as gpt-oss stores them: rows of gate and up take turns; what its blocks mean is what
    transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # slow

    plain = tiny.save("qwen3-moe", folder / "plain")
    stored, dense = (load_file(plain / "model.safetensors") for _ in range(2))
    random = torch.Generator().manual_seed(0)
    for layer, (word, parts) in itertools.product(
        range(3), (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
    ):
        at = f"model.layers.{layer}.mlp.experts."
        outs, ins = dense[f"{at}0.{parts[0]}.weight"].shape
        blocks = torch.randint(0, 256, (8, len(parts) * outs, ins // 32, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8, generator=random)
        meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        stored |= {f"{at}{word}_blocks": blocks, f"{at}{word}_scales": scales}
        for expert, (index, part) in itertools.product(range(8), enumerate(parts)):
            del stored[f"{at}{expert}.{part}.weight"]
            dense[f"{at}{expert}.{part}.weight"] = meant[expert, index :: len(parts)].contiguous()
    (folder / "packed").mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "packed" / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "packed" / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    return folder / "packed", plain
