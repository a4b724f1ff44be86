"""Kernels that begin while the one before still runs: until they have waited for it they read weights alone, and they
always wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.support.triton_interpreter  # before any kernel: it fixes the mode
from headrace.kernels.attention import triton_rotary as rotary
from headrace.kernels.candidate import EightBits, ExpertFacts, Shape, plainly_empty
from headrace.kernels.inputs import AdapterRows
from headrace.kernels.linear import triton_codes as codes
from headrace.kernels.linear import triton_eight as eight_bits
from headrace.kernels.linear import triton_flat as flat
from headrace.kernels.linear.coded import CodedFused, CodedProduct, lay
from headrace.kernels.linear.eight_bits import Maker
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.flat_forms import flat as flat_form
from headrace.kernels.linear.flat_forms import vector
from headrace.kernels.linear.flat_linear import FusedLinear, Product
from headrace.kernels.linear.forms import FLAT, Form
from headrace.kernels.linear.triton_ends import make_scratch
from headrace.kernels.lora import triton_joint as joint
from headrace.kernels.lora import triton_lora as lora
from headrace.kernels.moe import triton_coded_few as moe
from headrace.kernels.moe import triton_few as few
from headrace.kernels.moe import triton_moe as grouped
from headrace.kernels.moe import triton_routing as routing
from headrace.kernels.moe.triton_coded import CodedMoe
from headrace.kernels.moe.triton_moe import Moe
from headrace.kernels.norm import triton_norm as norm
from headrace.kernels.norm import triton_rounded as rounding
from headrace.kernels.rows import triton_embedding as embedding
from headrace.kernels.rows import triton_rows as rows
from headrace.kernels.sampling import triton_pick as sampling
from headrace.quant.codes import Activations
from headrace.quant.integers import PackedIntegers
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.adapters import scattered
from tests.support.codings import random_piece

Builder = tests.support.triton_interpreter.Builder


@dataclass
class Programs:
    """What programs did before they waited. ``early``: addresses by kind of access; ``waited``: of each program so
    far."""

    waited: list[bool] = field(default_factory=list)
    early: dict[str, set[int]] = field(default_factory=lambda: {"load": set(), "store": set(), "atomic": set()})

    def begin(self, z: int) -> int:
        self.waited.append(False)
        return z

    def access(self, kind: str, pointers: Any, mask: Any) -> None:
        if not self.waited[-1]:
            lanes = np.broadcast_to(np.asarray(getattr(mask, "data", mask)).astype(bool), pointers.data.shape)
            self.early[kind] |= set(pointers.data[lanes].astype(np.int64).reshape(-1).tolist())

    def wait(self) -> None:
        self.waited[-1] = True


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    told = Programs()
    begin, load, store, atomic = (
        getattr(Builder, name)
        for name in ("set_grid_idx", "create_masked_load", "create_masked_store", "create_atomic_rmw")
    )

    def noted(kind: str, stock: Callable[..., Any], at: int, mask_at: int) -> Callable[..., Any]:
        def access(self: Any, *given: Any, **named: Any) -> Any:
            told.access(kind, given[at], given[mask_at])
            return stock(self, *given, **named)

        return access

    monkeypatch.setattr(Builder, "set_grid_idx", lambda self, x, y, z: begin(self, x, y, told.begin(z)))
    monkeypatch.setattr(Builder, "create_masked_load", noted("load", load, 0, 1))
    monkeypatch.setattr(Builder, "create_masked_store", noted("store", store, 0, 2))
    monkeypatch.setattr(Builder, "create_atomic_rmw", noted("atomic", atomic, 1, 3))
    for module in (
        codes,
        eight_bits,
        embedding,
        few,
        flat,
        grouped,
        routing,
        joint,
        lora,
        moe,
        norm,
        rotary,
        rounding,
        rows,
        sampling,
    ):
        monkeypatch.setattr(sys.modules[module.__name__], "gdc_wait", told.wait)
    return told


def assert_in_order(programs: Programs, weights: Iterable[torch.Tensor]) -> None:
    assert programs.waited and all(programs.waited), (
        "a kernel that does not wait lets the one behind it overtake the one before"
    )
    assert not programs.early["store"] and not programs.early["atomic"]
    extents = [(weight.data_ptr(), weight.data_ptr() + weight.numel() * weight.element_size()) for weight in weights]
    assert all(any(low <= address < high for low, high in extents) for address in programs.early["load"]), (
        "read before it was written"
    )


FORMS = [vector(4, 32, ahead, 1, late=late) for ahead in (0, 1, 2) for late in (False, True)] + [
    flat_form(16, 32, 32, 2, ways) for ways in (1, 2)
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_products_read_weights_alone_before_they_wait(form: Form, gated: bool, programs: Programs) -> None:
    outs, ins, tokens = 40, 128, form.rows
    shape, forms = Shape(outs, ins, gated), ((64, form),)
    if not form.fits(shape):
        return
    weight = torch.randn(outs * (2 if gated else 1), ins).bfloat16()
    layer = Product(weight, torch.randn(len(weight)).bfloat16(), shape, forms, make_scratch(shape, forms, "cpu"), True)
    residual, scale = None if gated else torch.randn(tokens, outs).bfloat16(), None if gated else torch.rand(outs)
    FusedLinear(layer)(
        torch.randn(tokens, ins).bfloat16(),
        Epilogue(torch.rand(3, tokens), 1e-5, Activation.SILU if gated else None, residual, scale),
    )
    assert_in_order(programs, [weight])
    assert form.kind == "flat" or programs.early["load"], "its first weights are under way meanwhile"


@pytest.mark.parametrize("ways", [1, 2])
def test_products_with_quantised_weights_read_those_alone_before_they_wait(ways: int, programs: Programs) -> None:
    shape, epilogue = Shape(64, 256), Epilogue(residual=torch.randn(3, 64).bfloat16(), scale=torch.rand(64))
    forms = ((64, Form(FLAT, 16, 64, 128, ways, late=True)),)
    (packed,) = lay([random_piece(PackedIntegers(4, 128, zero=False), 64, 256)], gated=False) or ()
    coded = CodedProduct(packed, torch.randn(64).bfloat16(), forms, make_scratch(shape, forms, "cpu"), pdl=True)
    CodedFused(coded)(torch.randn(3, 256).bfloat16(), epilogue)
    piece = random_piece(ScaledWeight("int8", (1, WHOLE), activations=Activations("int8")), 64, 256)
    site: Any = SimpleNamespace(pdl=True, empty=plainly_empty)
    forms = ((64, Form(FLAT, 16, 32, 128, ways, 4, 1)),)
    eight = Maker(site, EightBits("int8"), forms, make_scratch(shape, forms, "cpu")).made(
        [piece], torch.randn(64).bfloat16()
    )
    assert eight is not None
    eight.fused(torch.randn(3, 256).bfloat16(), epilogue)
    rounder = rounding.Rounding(EightBits("int8"))
    rounder.rows(torch.randn(4, 96).bfloat16(), torch.rand(70, 4), 1e-5, pdl=True)
    held = (packed.blocks, packed.factor, coded.bias, eight.weight, eight.scale, eight.bias)
    assert_in_order(programs, [each for each in held if each is not None])


def test_the_others_wait_before_they_touch_what_another_kernel_wrote(programs: Programs) -> None:
    x, weight, table = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16(), torch.randn(9, 64).bfloat16()
    norm.rms_norm(x, weight, 1e-5, None, pdl=True)
    norm.layer_norm(x, weight, weight.clone(), 1e-5, None, pdl=True)
    embedding.embedding(torch.arange(5), table, None, pdl=True)
    q, k, v = torch.randn(5, 4, 16).split_with_sizes((2, 1, 1), dim=1)
    caches = torch.zeros(2, 2, 1, 8, 16)
    rotary.rotary_write(q, k, v, torch.arange(5), torch.randn(9, 16), caches[0], caches[1], torch.arange(5), pdl=True)
    assert_in_order(programs, [weight])


def gather() -> None:
    ids, table, every = torch.zeros(4, 32).int(), torch.zeros(4, 8).int(), torch.arange(3).int()
    rows.gather_inputs(ids, table, every, every, every, every + 1, 4, 8, pdl=True)


def store() -> None:
    every = torch.arange(3).int()
    rows.store_tokens(torch.zeros(4, 32).int(), every, every + 1, every.long(), torch.zeros(3), pdl=True)


def pick() -> None:
    sampling.greedy_tokens(torch.randn(3, 3000), pdl=True)


@pytest.mark.parametrize("launched", [gather, store, pick])
def test_what_stands_around_a_forward_pass_waits_before_it_touches_anything(
    launched: Callable[[], None], programs: Programs
) -> None:
    launched()
    assert_in_order(programs, [])


def test_adapters_read_slots_ranks_and_factors_alone_before_they_wait(programs: Programs) -> None:
    """These are written by what is never launched early: copies, and the lookup of rows' slots at a step's begin."""
    a, b, ranks = torch.randn(3, 2, 16, 64), torch.randn(3, 16, 40), torch.full((3, 2), 16).int()
    slots, squares = torch.tensor([2, -1, 0, 2]).int(), torch.rand(3, 4) * 64
    two = lora._adder(pdl=True, invariant=False)
    factors = scattered(a, b, ranks, (24, 16), torch.rand(3, 2, 40))
    for add in (two, joint._joint(torch.zeros(64, dtype=torch.int32), two, pdl=True)):
        add(torch.randn(4, 40), torch.randn(4, 64), factors, (24, 16), AdapterRows(slots), squares)
        assert programs.early["load"]
        table = factors.ranks._base
        assert table is not None
        assert_in_order(programs, [factors.pool, table, slots])


def test_experts_of_few_tokens_guess_ids_before_they_wait_and_read_them_again(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guess says what to bring nearer, no more."""
    made: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: (made.append(empty(*size, **how)), made[-1])[1])
    monkeypatch.setattr(moe, "bring_nearer", lambda at, BYTES: None)
    form = PackedIntegers(4, 128, zero=False)
    up, down = ([random_piece(form, 128, 128, seed=seed, copies=3) for seed in seeds] for seeds in ((1, 2), (3,)))
    facts = ExpertFacts(torch.bfloat16, 3, 2, eights=(None, None), rounded=(form.coding, form.coding))
    experts, x = CodedMoe(facts, pdl=True), torch.randn(2, 128).bfloat16()
    logits = torch.randn(2, 3).bfloat16()
    epilogue = Epilogue(torch.rand(3, 2), 1e-5, None, torch.randn(2, 128).bfloat16(), torch.rand(128).bfloat16())
    experts.fused(x, logits, up, down, 2, True, Activation.SILU, epilogue)
    plain = torch.randn(3, 256, 128).bfloat16(), torch.randn(3, 128, 128).bfloat16()
    Moe(False, pdl=True).fused(x, logits, *plain, 2, True, Activation.SILU, epilogue)
    assert programs.early["load"]
    more, squares = torch.randn(2, 9, 128).bfloat16(), torch.rand(3, 9)
    epilogue = Epilogue(squares, 1e-5, None, more[0], torch.rand(128).bfloat16())
    Moe(False, pdl=True).fused(more[1], torch.randn(9, 3).bfloat16(), *plain, 2, True, Activation.SILU, epilogue)
    assert_in_order(programs, [each for each in made if each.dtype == torch.int32])


def test_a_step_begins_when_the_one_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that fetches it does not wait, so it is the one that may not be launched early: all others of the step
    follow it."""
    named: list[dict[str, Any]] = []

    class Launched:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **given: named.append(given)

    monkeypatch.setattr(rows, "_fetch_kernel", Launched())
    rows.fetch_step(
        torch.zeros(4, 7, 8).int(),
        torch.zeros(1).int(),
        torch.zeros(3, 8).int(),
        torch.zeros(4, 8).int(),
        pdl=True,
    )
    assert named[0]["PDL"] and "launch_pdl" not in named[0]


def test_no_other_kernel_begins_early() -> None:
    files = Path(norm.__file__).parents[1].glob("*/*.py")
    early = {
        "coded",
        "eight_bits",
        "flat_linear",
        "triton_coded_few",
        "triton_embedding",
        "triton_few",
        "triton_joint",
        "triton_lora",
        "triton_moe",
        "triton_norm",
        "triton_pick",
        "triton_rotary",
        "triton_rounded",
        "triton_rows",
    }
    assert {path.stem for path in files if "**dependent(" in path.read_text()} == early
