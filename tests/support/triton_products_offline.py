"""Compiles products for few rows, those with codes of few bits, and what rounds inputs for an H200 without one, and
reads what came out. Run as a program, in a process of its own.

``python triton_products_offline.py codes`` (or ``wide``, or ``others``) prints a JSON object: for each case registers, spills, shared memory,
instruction counts.
"""

from __future__ import annotations

import json
import sys

import torch
from triton.runtime import driver

from headrace.kernels.candidate import EightBits, ExpertFacts, Shape
from headrace.kernels.linear import coded, eight_bits, flat_linear
from headrace.kernels.linear.coded import CodedProduct
from headrace.kernels.linear.coded_forms import forms_for
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.flat_forms import flat, vector
from headrace.kernels.linear.forms import VECTOR, Form
from headrace.kernels.linear.packing import Coding, Scales, empty
from headrace.kernels.linear.triton_ends import make_scratch
from headrace.kernels.moe import triton_coded, triton_coded_few
from headrace.kernels.norm import triton_rounded
from headrace.kernels.norm.triton_rounded import Rounding
from headrace.spec import Activation
from tests.support.triton_offline import CompileOnly, record

GATE = Epilogue(torch.zeros(64, 1), 1e-5, Activation.SILU)
SUM = Epilogue(residual=torch.zeros(1, 1024, dtype=torch.bfloat16), scale=torch.zeros(1024))
CODINGS = {
    "W4": Coding(4), "W4, zeros": Coding(4, zeros=True), "W4, groups of 32": Coding(4, 4), "W8": Coding(8), "FP8": Coding(8, floats=True),
    "W2": Coding(2), "W3": Coding(3), "W6": Coding(6), "MXFP4": Coding(4, 4, floats=True, scales=Scales.POWER),
    "NVFP4": Coding(4, 8, floats=True, scales=Scales.FP8), "NF4": Coding(4, 2, table=True),
    "Q4_K": Coding(4, 4, shifts=True, scales=Scales.BYTE), "Q6_K": Coding(6, 8, scales=Scales.BYTE),
}  # fmt: skip
FLAT = {
    "vector, gate": (vector(2, 1024, 0, 4), GATE),
    "flat, 64 rows, gate": (flat(64, 64, 128, 4), GATE),
    "flat, 64 rows, sum": (flat(64, 64, 128, 5, 4), SUM),
}
PLACES = {"alone": Epilogue(), "gate": GATE, "sum": SUM}


def figures_of(coding: Coding, most: int, epilogue: Epilogue, *, ordered: bool = False) -> dict[str, int]:
    gated = epilogue.gate is not None
    shape, outs = Shape(1024, 2048, gated), 2048 if gated else 1024
    forms = forms_for(shape, outs, coding, 132, {})
    packed = empty(coding, outs, 2048, torch.device("cpu"), gated=gated, ordered=ordered)
    product = CodedProduct(packed, None, forms, make_scratch(Shape(outs, 2048), forms, "cpu"), pdl=True)
    x, form = torch.zeros(1, 2048, dtype=torch.bfloat16), product.form(most)
    assert form is not None
    return record(coded, ("_codes_kernel",), lambda: product.launch(form, x, epilogue))["_codes_kernel"]


def whole(coding: Coding, most: int, epilogue: Epilogue) -> dict[str, int]:
    """Codes that int8 inputs multiply."""
    gated = epilogue.gate is not None
    outs = 2048 if gated else 1024
    forms = (*forms_for(Shape(1024, 2048, gated), outs, coding, 132, {}), (2**31, coded.TALL))
    packed = empty(coding, outs, 2048, torch.device("cpu"), gated=gated, ordered=False)
    scratch = make_scratch(Shape(outs, 2048), forms, "cpu")
    rounding = Rounding(EightBits("int8"), dealt=True)
    product = CodedProduct(packed, None, forms, scratch, pdl=True, rounding=rounding)
    codes, own, form = torch.zeros(1, 2048, dtype=torch.int8), torch.zeros(1, 1), product.form(most)
    assert form is not None
    launch = product._launch
    return record(coded, ("_codes_kernel",), lambda: launch(form, codes, own, epilogue, torch.bfloat16))[
        "_codes_kernel"
    ]


def few_rows(form: Form, epilogue: Epilogue) -> dict[str, int]:
    gated = epilogue.gate is not None
    shape, forms = Shape(1024, 2048, gated), ((64, form),)
    weight = torch.zeros(2048 if gated else 1024, 2048, dtype=torch.bfloat16)
    product = flat_linear.Product(weight, None, shape, forms, make_scratch(shape, forms, "cpu"), True)
    name = "_vector_kernel" if form.kind == VECTOR else "_flat_kernel"
    return record(flat_linear, (name,), lambda: product.launch(form, weight[:1], epilogue))[name]


def rounded(eight: EightBits) -> dict[str, dict[str, int]]:
    """Inputs as an 8B model has them: a sum and its norm, a gate, and rows that nobody else rounds."""
    x, both = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(1, 28672, dtype=torch.bfloat16)
    rounding = Rounding(eight, torch.ones(()) if eight.static else None)
    calls = {
        "_norm_kernel": lambda: rounding.normed(x, x[0], 1e-5, x),
        "_gate_kernel": lambda: rounding.activated(both, Activation.SILU),
        "_rounded_kernel": lambda: rounding.rows(both[:, :14336]),
    }
    return {f"{eight}: {name}": record(triton_rounded, (name,), call)[name] for name, call in calls.items()}


def widened(coding: Coding) -> dict[str, int]:
    product = CodedProduct(
        empty(coding, 256, 2048, torch.device("cpu"), gated=True, ordered=False), None, (), None, False
    )  # type: ignore[arg-type]
    return record(coded, ("_widen_kernel",), lambda: product.widen(0, 64, torch.bfloat16))["_widen_kernel"]


def eight(kind: str, group: int, most: int, epilogue: Epilogue) -> dict[str, int]:
    """8-bit inputs, too."""
    weight = torch.zeros(2048, 2048, dtype=torch.uint8).view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    scale, own = (torch.zeros(16, 16), torch.zeros(1, 16)) if group else (torch.zeros(2048), torch.zeros(1, 1))
    forms = (*eight_bits.forms_for(2048, 2048, 132, blocked=bool(group)), (2**31, eight_bits.TALL))
    scratch = make_scratch(Shape(2048, 2048), forms, "cpu")
    layer = eight_bits.EightBitLinear(weight, scale, None, None, EightBits(kind, group), forms, scratch, pdl=True)
    form = next(form for rows, form in forms if most <= rows)
    return record(
        eight_bits, ("_eight_kernel",), lambda: layer.launch(form, weight[:1], own, epilogue, torch.bfloat16)
    )["_eight_kernel"]


def experts(name: str, coding: Coding, eight: EightBits | None) -> dict[str, dict[str, int]]:
    """Of one token; Qwen3-30B-A3B's shape, but for how many experts there are."""
    facts = ExpertFacts(torch.bfloat16, 8, 8, eights=(eight,), rounded=(coding,))
    up, down = (
        empty(coding, *shape, torch.device("cpu"), gated=shape[0] == 1536, ordered=False, copies=8)
        for shape in ((1536, 2048), (2048, 768))
    )
    x, moe = torch.zeros(1, 2048, dtype=torch.bfloat16), triton_coded.CodedMoe(facts, pdl=True)
    epilogue = Epilogue(torch.zeros(512, 1), 1e-6, None, x, x[0])
    found = record(
        triton_coded_few, ("_expand_coded_few_kernel", "_contract_coded_few_kernel"),
        lambda: moe.computed_around(x, x[:, :8], up, down, 8, True, Activation.SILU, None, epilogue),
    )  # fmt: skip
    return {f"{name}, few, {kernel.split('_')[1]}": figures for kernel, figures in found.items()}


def of_codes() -> dict[str, dict[str, int]]:
    found = {f"{name}, 16 rows": figures_of(coding, 16, PLACES["alone"]) for name, coding in CODINGS.items()}
    for name, rows, epilogue in (
        ("W4", 16, GATE), ("W4", 999, Epilogue()), ("W4, zeros", 16, Epilogue()), ("W6", 999, Epilogue()),
    ):  # fmt: skip
        found[f"{name}, int8 inputs, {rows} rows"] = whole(CODINGS[name], rows, epilogue)
    found["W4, in order, 16 rows"] = figures_of(Coding(4, zeros=True, ordered=True), 16, PLACES["alone"], ordered=True)
    return found


def of_wide_codes() -> dict[str, dict[str, int]]:
    """By rows, and by what stands around."""
    found = {}
    for rows in (16, 32, 64):
        found |= {
            f"W4, {rows} rows, {place}": figures_of(Coding(4), rows, epilogue)
            for place, epilogue in PLACES.items()
            if place != "alone"
        }
    for name in ("W4", "FP8", "Q4_K"):
        found |= {f"{name}, {rows} rows": figures_of(CODINGS[name], rows, PLACES["alone"]) for rows in (32, 64, 128)}
        found[f"{name}, widened"] = widened(CODINGS[name])
    return found


def of_others() -> dict[str, dict[str, int]]:
    found = {name: few_rows(*case) for name, case in FLAT.items()}
    both = Epilogue(residual=torch.zeros(1, 2048, dtype=torch.bfloat16), scale=torch.zeros(2048))
    alone = PLACES["alone"]
    cases = (
        ("fp8", 0, 16, GATE),
        ("fp8", 0, 64, both),
        ("int8", 0, 16, alone),
        ("fp8", 128, 16, alone),
        ("fp8", 128, 999, GATE),
    )
    found |= experts("W4", Coding(4), None) | experts("FP8, rounded", Coding(8, floats=True), EightBits("fp8"))
    for kind, group, most, epilogue in cases:
        found[f"{kind} inputs, groups of {group}, {most} rows"] = eight(kind, group, most, epilogue)
    for each in (EightBits("fp8"), EightBits("fp8", static=True), EightBits("fp8", 128), EightBits("int8")):
        found |= rounded(each)
    return found


if __name__ == "__main__":
    driver.set_active(CompileOnly())
    print(json.dumps({"codes": of_codes, "wide": of_wide_codes, "others": of_others}[sys.argv[1]]()))
