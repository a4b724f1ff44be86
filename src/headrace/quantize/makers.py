"""Selects the maker of matrices for the requested format.

What lives here: that choice. What may not: how any of them does it.
"""

from __future__ import annotations

import torch

from headrace.errors import ConfigError
from headrace.quantize.gguf_recipe import gguf_recipe
from headrace.quantize.layer import Maker
from headrace.quantize.lossless import LosslessRecipe
from headrace.quantize.names import Choice, is_gguf
from headrace.quantize.outliers import OutlierRecipe
from headrace.quantize.recipe import recipe_for
from headrace.quantize.ternary import TernaryRecipe
from headrace.spec import DecoderSpec


def maker_for(
    choice: Choice,
    *,
    group_size: int | None,
    asymmetric: bool,
    scales: torch.dtype,
    spec: DecoderSpec | None = None,
) -> Maker:
    """``spec``: of the model, for GGUF; ``scales``: the type in which the model is stored. Raises ConfigError."""
    if choice.form in ("dfloat11", "qmoe") or is_gguf(choice.form):
        if group_size is not None or asymmetric:
            raise ConfigError(
                f"--group-size and --asymmetric are for low-bit integers, and {choice.form} has its own format; leave them out."
            )
        if is_gguf(choice.form):
            assert spec is not None, "which matrix gets which type depends on it"
            return gguf_recipe(choice, spec)
        if choice.form == "qmoe":
            return TernaryRecipe(choice.method)
        if scales is not torch.bfloat16:
            raise ConfigError(
                f"--format dfloat11 holds bfloat16, and this model is stored in {str(scales).removeprefix('torch.')}; give another."
            )
        return LosslessRecipe()
    recipe = recipe_for(choice, group_size=group_size, asymmetric=asymmetric, scales=scales)
    layout = {"int8-outliers": "outlier-columns", "spqr": "sparse-outliers"}.get(choice.form)
    return recipe if layout is None else OutlierRecipe(recipe, choice.form, layout)
