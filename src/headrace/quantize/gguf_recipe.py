"""Which matrix of a GGUF file gets which type, and its blocks.

What lives here: the types that files are named by, mixtures among them. What may not: choosing codes (gguf_blocks.py),
writing the file (gguf_file.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.weight_rules import disk_modules
from headrace.quant import Format
from headrace.quant.gguf import BLOCKS, GGUFBlocks
from headrace.quantize.blocks import Inputs
from headrace.quantize.gguf_blocks import encoded
from headrace.quantize.grid import Grid
from headrace.quantize.layer import Maker
from headrace.quantize.names import Choice
from headrace.sites import Role, Weight, weights
from headrace.spec import DecoderSpec

ARCHITECTURES: Mapping[str, str] = {  # families as GGUF calls them
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2", "phi3": "phi3",
}  # fmt: skip
_WINDOWLESS = ("llama", "qwen2", "qwen3", "qwen3_moe")
# file type → (of most matrices, of values and down in every other layer or so, of the head)
MIXTURES: Mapping[str, tuple[str, str, str]] = {
    **{kind: (kind, kind, "Q6_K") for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")},
    "Q8_0": ("Q8_0",) * 3,
    "Q2_K": ("Q2_K", "Q3_K", "Q6_K"),
    "Q3_K_S": ("Q3_K", "Q3_K", "Q6_K"), "Q3_K_M": ("Q3_K", "Q5_K", "Q6_K"),
    "Q4_K_S": ("Q4_K", "Q4_K", "Q6_K"), "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_S": ("Q5_K", "Q5_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
}  # fmt: skip
# what stands in where rows are no whole blocks of 256
_NARROW = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def finer_layer(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third between: as llama.cpp mixes."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


@dataclass(frozen=True, slots=True)
class GGUFRecipe(Maker):
    """``types``: of each matrix, by its name on disk. Blocks are no grid: ``grid`` is not used."""

    types: Mapping[str, str] = field(repr=False, kw_only=True)

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        assert isinstance(form, GGUFBlocks)
        known = seen if self.method == "imatrix" and seen is not None and seen.count else None
        importance = None if known is None else known.gram.diagonal() / known.count
        return {"weight": encoded(form.kind, weight, importance).cpu()}

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        return {"quant_method": "gguf", "types": dict(self.types)}


def gguf_recipe(choice: Choice, spec: DecoderSpec) -> GGUFRecipe:
    """Raises ConfigError for a model that has no place in GGUF, or none of whose matrices can be held in blocks."""
    if spec.family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"GGUF is written of {known}, not of {spec.family}; give another --format.")
    if spec.family in _WINDOWLESS and any(layer.window for layer in spec.layers):
        raise ConfigError(f"GGUF has no word for the attention windows of {spec.family}; give another --format.")
    layout = choice.form.removeprefix("gguf-").upper()
    types: dict[str, str] = {}
    for weight in weights(spec):
        if weight.role in (Role.NORM, Role.ROUTER) or weight.tied or not weight.ins:
            continue
        for merged in disk_modules(spec, weight):
            kinds = ((module, _type(layout, weight, part, len(merged), spec)) for part, module in enumerate(merged))
            types |= {module: kind for module, kind in kinds if kind is not None}
    if not types:
        raise ConfigError(f"--format {choice.form} needs rows of multiples of 32 elements, and this model has none.")
    return GGUFRecipe(choice.form, choice.method, layout, Grid(16), "GGUF", types=types)


def _type(layout: str, weight: Weight, part: int, parts: int, spec: DecoderSpec) -> str | None:
    """None: rows are no whole blocks of any type that would do."""
    most, fine, head = MIXTURES[layout]
    kind = most
    if weight.role is Role.HEAD or (weight.role is Role.EMBEDDING and spec.tied_head):
        kind = head
    elif weight.layer is not None and finer_layer(weight.layer, spec.num_layers):
        value = weight.role is Role.QKV and parts == 3 and part == 2
        kind = fine if value or weight.role is Role.DOWN else most
    if weight.ins % BLOCKS[kind][0]:
        kind = _NARROW.get(kind, kind)
    return None if weight.ins % BLOCKS[kind][0] else kind
