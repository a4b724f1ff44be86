"""Compiles forms of the kernels for few rows for an H200 on a machine without one. Run as a program, in a process of
its own.

What lives here: the launches that become compilations. What may not: judgement (the test).

``python triton_flat_offline.py`` prints a JSON object: for each case the figures of triton_offline.py.
"""

from __future__ import annotations

import json

import torch
from triton.runtime import driver

from headrace.kernels.candidate import Shape
from headrace.kernels.linear import flat_linear
from headrace.kernels.linear.around import Around
from headrace.kernels.linear.flat_forms import VECTOR, Form, flat, vector
from headrace.spec import Activation
from tests.support.triton_offline import CompileOnly, record

GATE = Around(torch.zeros(64, 1), 1e-5, Activation.SILU)
SUM = Around(residual=torch.zeros(1, 1024, dtype=torch.bfloat16), scale=torch.zeros(1024))
CASES = {
    "vector, gate": (vector(2, 1024, 0, 4), GATE),
    "flat, 64 rows, gate": (flat(64, 64, 128, 4), GATE),
    "flat, 64 rows, sum": (flat(64, 64, 128, 5, 4), SUM),
}


def figures_of(form: Form, around: Around) -> dict[str, int]:
    gated = around.gate is not None
    shape, forms = Shape(1024, 2048, gated), ((64, form),)
    weight = torch.zeros(2048 if gated else 1024, 2048, dtype=torch.bfloat16)
    product = flat_linear.Product(weight, None, shape, forms, flat_linear.make_scratch(shape, forms, "cpu"), True)
    name = "_vector_kernel" if form.kind == VECTOR else "_flat_kernel"
    return record(flat_linear, (name,), lambda: product.launch(form, weight[:1], around))[name]


if __name__ == "__main__":
    driver.set_active(CompileOnly())
    print(json.dumps({name: figures_of(*case) for name, case in CASES.items()}))
