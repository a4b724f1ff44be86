"""The formats and methods that ``headrace quantize`` knows, by name.

What lives here: names, their descriptions, which go together. What may not: torch, how anything is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import ConfigError

GGUF_TYPES = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k",
)  # fmt: skip
FORMATS = {
    "fp8": "weights and inputs in FP8 (e4m3), one scale per output and per token",
    "fp8-static": "as fp8, but with one input scale, found by --calibration",
    "fp8-block": "as fp8, but with one scale per 128 x 128 weights and per 128 inputs of a token",
    "w8a8": "weights and inputs in 8-bit integers, one scale per output and per token",
    "wNa16": "only weights, in integers of N bits, 2 to 8; one scale per 128 inputs (with 8 bits: for all)",
    "w1a16": "only weights, on one of two levels; both per 64 inputs",
    "wNa8": "as wNa16, with inputs in 8-bit integers",
    "mxfp4": "only weights, in 4-bit floats with a power of two per 32",
    "nvfp4": "only weights, in 4-bit floats with an FP8 scale per 16",
    "int8-outliers": "as w8a8, but one in a hundred inputs and its weights are unchanged (LLM.int8())",
    "spqr": "only weights, in 3-bit integers; one in a hundred is stored unchanged (SpQR)",
    "qmoe": "experts in three values, less than one bit each (QMoE); the rest is unchanged",
    "slicegpt": "unquantized, with fewer dimensions (--keep; SliceGPT)",
    "gguf-TYPE": f"a .gguf file for llama.cpp and Headrace; TYPE is one of {', '.join(GGUF_TYPES)}",
    "dfloat11": "bfloat16 in 11 bits, lossless (DFloat11)",
}
METHODS = {
    "rtn": "round to the nearest code; needs no text",
    "gptq": "codes that compensate for each other's errors (GPTQ)",
    "awq": "input channels scaled by their importance (AWQ)",
    "smooth": "outliers shifted from inputs to weights (SmoothQuant)",
    "imatrix": "errors weighted by how much each input carries (llama.cpp's importance matrix)",
    "mr-gptq": "inputs and weights rotated in small blocks, then GPTQ (MR-GPTQ)",
}
_WIDTHS = re.compile(r"w(\d+)a(8|16)")
_INTEGERS = ("rtn", "gptq", "awq")
_METHODS = {
    "fp8": ("rtn", "smooth"), "fp8-static": ("rtn", "smooth"), "fp8-block": ("rtn", "smooth"), "w8a8": ("rtn", "smooth", "gptq", "awq"),
    "mxfp4": ("rtn", "gptq", "mr-gptq"), "nvfp4": ("rtn", "gptq", "mr-gptq"),
    "w1a16": ("rtn", "gptq"), "int8-outliers": ("rtn",), "spqr": ("gptq",), "dfloat11": ("rtn",), "qmoe": ("rtn", "gptq"), "slicegpt": ("rtn",),
    **{f"gguf-{kind}": ("rtn", "imatrix") for kind in GGUF_TYPES},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """``bits``: of integers; ``method``: one of METHODS."""

    form: str
    method: str
    bits: int = 8
    rounds_inputs: bool = False


def chosen(form: str, method: str | None, *, text: bool) -> Choice:
    """``text``: whether there is a text to calibrate with. Raises ConfigError."""
    widths = _WIDTHS.fullmatch(form)
    if form not in _METHODS and (widths is None or not 2 <= int(widths[1]) <= 8):
        raise ConfigError(f"--format {form} is not known; give one of {', '.join(FORMATS)} (N from 2 to 8).")
    integers = (*_INTEGERS, "smooth") if widths is not None and widths[2] == "8" else _INTEGERS
    allowed = _METHODS.get(form, integers)
    if method is not None and method not in allowed:
        raise ConfigError(f"--method {method} is not for {form}: {METHODS[method]}. Give one of {', '.join(allowed)}.")
    usual = "smooth" if form == "w8a8" else next((each for each in ("gptq", "imatrix") if each in allowed), "rtn")
    method = method or (usual if text else allowed[0])
    choice = Choice(form, method, int(widths[1]) if widths else 8, bool(widths and widths[2] == "8"))
    if not text and needs_text(choice):
        raise ConfigError(f"--format {form} by {method} needs a text to calibrate with; give one: --calibration FILE.")
    return choice


def is_gguf(form: str) -> bool:
    return form.startswith("gguf-")


def needs_text(choice: Choice) -> bool:
    return choice.method != "rtn" or choice.form in ("fp8-static", "int8-outliers", "slicegpt")
