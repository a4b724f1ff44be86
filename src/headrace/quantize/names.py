"""The formats and methods that ``headrace quantize`` knows, by name.

What lives here: names, what is said of them, which go together. What may not: torch, how anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError

FORMATS = {
    "fp8": "weights and inputs in FP8 (e4m3), a scale for each output and each token",
    "fp8-static": "likewise, inputs by one scale that --calibration finds",
    "fp8-block": "likewise, a scale for each 128 x 128 weights and each 128 inputs of a token",
    "w8a8": "weights and inputs in 8-bit integers, a scale for each output and each token",
    "wNa16": "weights alone in integers of N bits, 2 to 8; a scale for each 128 inputs (of 8 bits: for all)",
    "wNa8": "likewise, inputs in 8-bit integers",
    "mxfp4": "weights alone in 4-bit floats, a power of two for each 32",
    "nvfp4": "weights alone in 4-bit floats, an FP8 scale for each 16",
    "int8-outliers": "as w8a8, one in a hundred inputs and its weights as they are (LLM.int8())",
    "spqr": "weights alone in 3-bit integers, one in a hundred apart as it is (SpQR)",
    "qmoe": "experts in three values, less than a bit each (QMoE); all else stays",
    "slicegpt": "as it is, in fewer dimensions (--keep; SliceGPT)",
    "dfloat11": "bfloat16 in 11 bits, without loss (DFloat11)",
}
METHODS = {
    "rtn": "to the nearest code; needs no text",
    "gptq": "codes that make up for each other's errors (GPTQ)",
    "awq": "input channels scaled by how much they carry (AWQ)",
    "smooth": "outliers moved from inputs into weights (SmoothQuant)",
    "mr-gptq": "inputs and weights rotated in small blocks, then gptq (MR-GPTQ)",
}
_WIDTHS = re.compile(r"w(\d+)a(8|16)")
_INTEGERS = ("rtn", "gptq", "awq")
_METHODS = {
    "fp8": ("rtn", "smooth"), "fp8-static": ("rtn", "smooth"), "fp8-block": ("rtn", "smooth"), "w8a8": ("rtn", "smooth", "gptq", "awq"),
    "mxfp4": ("rtn", "gptq", "mr-gptq"), "nvfp4": ("rtn", "gptq", "mr-gptq"),
    "int8-outliers": ("rtn",), "spqr": ("gptq",), "dfloat11": ("rtn",), "qmoe": ("rtn", "gptq"), "slicegpt": ("rtn",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """``bits``: of integers; ``method``: one of METHODS."""

    form: str
    method: str
    bits: int = 8
    rounds_inputs: bool = False


def chosen(form: str, method: str | None, *, text: bool) -> Choice:
    """``text``: whether there is some to calibrate with. Raises ConfigError."""
    widths = _WIDTHS.fullmatch(form)
    if form not in _METHODS and (widths is None or not 2 <= int(widths[1]) <= 8):
        raise ConfigError(f"--format {form} is not known; give one of {', '.join(FORMATS)} (N from 2 to 8).")
    integers = (*_INTEGERS, "smooth") if widths is not None and widths[2] == "8" else _INTEGERS
    allowed = _METHODS.get(form, integers)
    if method is not None and method not in allowed:
        raise ConfigError(f"--method {method} is not for {form}: {METHODS[method]}. Give one of {', '.join(allowed)}.")
    usual = "smooth" if form == "w8a8" else "gptq" if "gptq" in allowed else "rtn"
    method = method or (usual if text else allowed[0])
    choice = Choice(form, method, int(widths[1]) if widths else 8, bool(widths and widths[2] == "8"))
    if not text and needs_text(choice):
        raise ConfigError(f"--format {form} by {method} looks at what the model computes; give it text: --calibration FILE.")
    return choice


def needs_text(choice: Choice) -> bool:
    return choice.method != "rtn" or choice.form in ("fp8-static", "int8-outliers", "slicegpt")


def own_entry(layout: str, ignored: Sequence[str], **more: Any) -> dict[str, Any]:
    """``quantization_config`` of a format that has no form but Headrace's."""
    return {"quant_method": "headrace", "format": layout, "ignore": list(ignored), **more}
