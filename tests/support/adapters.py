"""LoRA adapters as PEFT writes them, from a seed; and what they make of a model of transformers.

What lives here: writing a folder, merging one into a model, factors as kernels get them. What may not: tests.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace.kernels.inputs import SlotFactors
from headrace.spec import ADDRESS_UNIT

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _modules(model: Any, targets: Sequence[str]) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in targets}


def _sizes(module: Any) -> tuple[int, int]:
    """(inputs, outputs); transformers' Conv1D holds its weight turned."""
    outs, ins = module.weight.shape
    return (outs, ins) if type(module).__name__ == "Conv1D" else (ins, outs)


def write(
    folder: Path,
    model: Any,
    *,
    targets: Sequence[str] = LLAMA,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    strength: float = 0.3,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """``model``: of transformers. ``ranks``: rank_pattern. ``config``: further fields, such as use_rslora."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * strength / math.sqrt(shape[-1])

    tensors: dict[str, Tensor] = {}
    for name, module in _modules(model, targets).items():
        ins, outs = _sizes(module)
        own = next((value for key, value in (ranks or {}).items() if name.endswith(key)), rank)
        at = f"base_model.model.{name}"
        if isinstance(module, nn.Embedding):
            tensors[f"{at}.lora_embedding_A"], tensors[f"{at}.lora_embedding_B"] = (
                draw(own, outs) * math.sqrt(outs),
                draw(ins, own),
            )
            continue
        tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"] = draw(own, ins), draw(outs, own)
        if config.get("use_dora"):
            tensors[f"{at}.lora_magnitude_vector"] = torch.rand(outs, generator=generator) + 0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "rank_pattern": dict(ranks or {}),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


def scattered(
    a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], gains: Tensor | None = None, chunk: int = 2**20
) -> SlotFactors:
    """Factors of slots as a device holds them: each row anywhere in a pool of NaN, in chunks. ``a`` [slots, parts, most,
    ins], ``b`` [slots, most, Σ parts], ``ranks`` [slots, parts], ``gains`` [slots, 2, Σ parts], float32."""
    slots, count, most, ins = a.shape
    lines: list[tuple[int, Tensor]] = []  # of the table's column, and what lies there
    floats, firsts = 4 // a.element_size(), [sum(parts[:part]) for part in range(count + 1)]
    chunks = [-(-size // chunk) for size in (ins, max(parts), max(parts) * floats)]
    starts = [count]
    for rows, each in zip((most, most, 2), chunks, strict=True):
        starts.append(starts[-1] + count * rows * each)
    table = torch.full((slots, starts[-1] + 3), -1, dtype=torch.int32)  # those of all sites lie side by side
    table[:, :count] = ranks
    for slot in range(slots):
        for part in range(count):
            span = slice(firsts[part], firsts[part + 1])
            held = [a[slot, part], b[slot, :, span]]
            held += [] if gains is None else [gains[slot, :, span].contiguous().view(a.dtype)]
            for which, matrix in enumerate(held):
                for row in range(int(ranks[slot, part]) if which < 2 else 2 * (int(ranks[slot, part]) > 0)):
                    for piece, values in enumerate(matrix[row].split(chunk)):
                        column = starts[which] + (part * (most, most, 2)[which] + row) * chunks[which] + piece
                        lines.append((slot * table.shape[1] + column, values))
    random.Random(0).shuffle(lines)
    width = ADDRESS_UNIT * (-(-max((len(values) for _, values in lines), default=1) // ADDRESS_UNIT) + 1)
    pool = torch.full((width * (len(lines) + 1),), float("nan"), dtype=a.dtype)
    for place, (column, values) in enumerate(lines, start=1):
        pool[place * width : place * width + len(values)] = values
        table.view(-1)[column] = place * width // ADDRESS_UNIT
    table = table.to(a.device)
    shapes = ((count, most, chunks[0]), (count, most, chunks[1]), (count, 2, chunks[2]))
    addresses = (
        table[:, first:last].unflatten(1, shape) for (first, last), shape in zip(pairwise(starts), shapes, strict=True)
    )
    return SlotFactors(pool.to(a.device), table[:, :count], *addresses, chunk, gains is not None)


def merge(model: Any, folder: Path) -> Any:
    """The same model with the adapter in its weights, by the formulas of the papers."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in model.named_modules():
        at = f"base_model.model.{name}"
        table = f"{at}.lora_embedding_A" in tensors
        if not table and f"{at}.lora_A.weight" not in tensors:
            continue
        a = tensors[f"{at}.lora_embedding_A"] if table else tensors[f"{at}.lora_A.weight"]
        b = tensors[f"{at}.lora_embedding_B"] if table else tensors[f"{at}.lora_B.weight"]
        scale = config["lora_alpha"] / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
        delta = scale * (b @ a)
        turned = table or type(module).__name__ == "Conv1D"
        weight = module.weight.data.clone()
        merged = weight + (delta.T if turned else delta)
        if config.get("use_dora"):
            merged = merged * (tensors[f"{at}.lora_magnitude_vector"] / merged.norm(dim=1))[:, None]
        module.weight = nn.Parameter(merged, requires_grad=False)  # one that is tied stays as it is elsewhere
    return model
