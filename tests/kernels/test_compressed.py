"""Weights of 12 bits: nothing of them is lost, and products over them are those over the weights as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.kernels import Kernels
from headrace.kernels.build.c_compiler import Native, native_library
from headrace.kernels.candidate import CallSite, Declined, KernelContext
from headrace.kernels.linear import compressed, reference
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.layers.packed import Piece
from headrace.quant import lossless
from headrace.quant.lossless import Lossless
from headrace.sites import Role, Weight
from tests.support.kernel_cases import assert_close, called, using

CPU, BF16 = torch.device("cpu"), torch.bfloat16
FACTS: dict[str, Any] = {"dtype": BF16, "formats": (Lossless().label,)}


@pytest.fixture(scope="module")
def native() -> Native:
    found = native_library()
    if isinstance(found, Declined) or not found.library["headrace_has_compressed"]():
        pytest.skip("no C compiler, or no AVX-512 with BF16")
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def as_it_was(native: Native, weight: Tensor) -> bool:
    found = compressed.compress(native.library, weight)
    back = compressed.decompress(native.library, found, 0, len(weight))
    return torch.equal(back.view(torch.int16), weight.view(torch.int16))


def make(
    native: Native, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False
) -> Callable[[Tensor], Tensor]:
    context = KernelContext(techniques=using(batch_invariant=invariant))
    pack = compressed.create_linear(
        native, CallSite("packed_linear", CPU, called("packed_linear", **FACTS)[1], context)
    )
    assert not isinstance(pack, Declined)
    linear: Callable[[Tensor], Tensor] = pack([held(weight)], bias)
    return linear


def held(weight: Tensor) -> Piece:
    outs, ins = weight.shape
    piece = Piece("layer", Lossless(), outs, ins, dtype=BF16, device=CPU)
    piece.get_parameter("weight").data.copy_(weight)
    piece.finish_loading()
    return piece


def drawn(rows: int, depth: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_every_value_of_bfloat16_survives(native: Native, order: str) -> None:
    """All signs, exponents and fractions, NaN with every payload among them: ascending ones mostly need 4 bits,
    shuffled ones all 8."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if order == "shuffled":
        values = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    assert as_it_was(native, values.to(torch.int16).view(BF16).view(1024, 64))


@pytest.mark.parametrize(("rows", "depth"), [(1, 4), (5, 8), (16, 64), (37, 100), (130, 1024)])
@pytest.mark.usefixtures("two_threads")
def test_weights_of_any_size_survive(native: Native, rows: int, depth: int) -> None:
    weight = drawn(rows, depth)
    weight[rows // 2] = 0.0
    weight[-1, -1], weight[0, 0] = 1e-40, -1e-30  # a denormal, and one far below the others
    weight[:, 1] *= 1e5  # what lies 14 powers of two below now is far, too
    assert as_it_was(native, weight)
    assert as_it_was(native, torch.cat((weight, weight), 1)[:, :depth])  # rows with a stride


def test_weights_at_every_distance_from_the_largest_survive(native: Native) -> None:
    """4 bits reach 14 powers of two below; each distance in a panel of its own, where nothing else is far."""
    weight = torch.ones(16 * 40, 64, dtype=BF16)
    weight[::16, 5] = 2.0 ** -torch.arange(40.0).to(BF16)
    assert as_it_was(native, weight)


@pytest.mark.parametrize("largest", [None, 100.0, float("inf")])
def test_it_is_a_quarter_smaller(native: Native, largest: float | None) -> None:
    """One weight far above the others of its panel makes one group wide, not all of them."""
    weight = drawn(256, 4096)
    if largest is not None:
        weight[::16, 7] = largest
    assert as_it_was(native, weight) and held(weight).num_bytes / weight.nbytes < 0.758


@pytest.mark.parametrize(("outs", "ins"), [(5, 4), (64, 96), (130, 100), (67, 544)])
@pytest.mark.usefixtures("two_threads")
def test_the_product_equals_the_twin(native: Native, outs: int, ins: int) -> None:
    weight, bias = drawn(outs, ins), drawn(1, outs, 1)[0]
    weight[outs // 2, ins // 2] = 1e-30
    for given in (bias, None):
        linear = make(native, weight, given)
        wide = reference.linear(weight.float(), None if given is None else given.float())
        for rows in (1, 2, 3, 4, 7, 8, 11, 16, 17, 40, 300, compressed.FEW_ROWS + 1):
            x = drawn(rows, 2 * ins, rows)[:, :ins]  # strided rows
            assert_close(linear(x), wide(x.float()).to(BF16), BF16)
    assert make(native, weight)(drawn(6, ins).view(2, 3, ins)).shape == (2, 3, outs)
    assert make(native, weight)(drawn(0, ins)).shape == (0, outs)


@pytest.mark.parametrize("invariant", [False, True])
def test_rows_have_the_same_bits_in_any_company(native: Native, invariant: bool) -> None:
    linear, x = make(native, drawn(70, 200), invariant=invariant), drawn(compressed.FEW_ROWS + 76, 200, 1)
    together = linear(x[: None if invariant else compressed.FEW_ROWS])
    for first, end in ((0, 1), (3, 5), (7, 10), (10, 14), (1, 6), (20, 31), (0, 60), (50, 330)):
        assert torch.equal(linear(x[first:end]), together[first:end])


@pytest.mark.parametrize("x", [torch.ones(2, 16, dtype=BF16), torch.ones(2, 8), torch.ones(2, 4, dtype=BF16)])
def test_an_x_of_another_width_or_type_is_refused(native: Native, x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"x is .*this layer takes torch.bfloat16 \[\.\.\., 8\]"):
        make(native, drawn(16, 8))(x)


def test_a_row_may_lie_anywhere(native: Native) -> None:
    linear, x = make(native, drawn(16, 8)), drawn(3, 11)
    for begin in (0, 1, 2, 3):
        assert torch.equal(linear(x[1:2, begin : begin + 8]), linear(x[1:2, begin : begin + 8].clone()))


def test_parts_of_a_weight_make_the_whole_product(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "PART_BYTES", 2 * 64 * 40)  # 40 rows: 32, a multiple of 16
    weight, bias, x = drawn(100, 64), drawn(1, 100, 1)[0], drawn(compressed.FEW_ROWS + 1, 64, 2)
    assert_close(
        make(native, weight, bias)(x), reference.linear(weight.float(), bias.float())(x.float()).to(BF16), BF16
    )


@pytest.mark.parametrize("facts", [{"formats": ("GGUF Q8_0",)}, {"formats": (Lossless().label, "unquantised")}])
def test_it_leaves_other_formats_to_others(native: Native, facts: dict[str, Any]) -> None:
    found = compressed.create_linear(
        native, CallSite("packed_linear", CPU, called("packed_linear", **FACTS | facts)[1])
    )
    assert isinstance(found, Declined) and "12 bits, lossless alone" in found.reason


def test_what_is_held_is_what_was_loaded(native: Native) -> None:
    weight = drawn(100, 64)
    assert torch.equal(held(weight).dense(slice(32, 96), BF16), weight[32:96])


def test_a_processor_without_the_instructions_declines() -> None:
    library: Any = {"headrace_has_compressed": lambda: 0}
    found = compressed.create_linear(
        Native(library, None, True), CallSite("packed_linear", CPU, called("packed_linear", **FACTS)[1])
    )  # type: ignore[arg-type]
    assert isinstance(found, Declined) and "AVX-512" in found.reason


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (BF16, "cuda")])
def test_other_types_and_devices_are_named(dtype: torch.dtype, device: str) -> None:
    assert (lossless.missing(dtype, torch.device(device)) or "").startswith("holds bfloat16 on a CPU, not ")


def test_a_layer_says_what_it_holds(native: Native) -> None:
    layer = Linear(
        Weight("layer", Role.OUTPUT, 0, (64,), 1024, bias=True, formats=(Lossless(),)),
        LayerContext(BF16, CPU, Kernels(CPU)),
    )
    assert layer.weight is None and layer.bias is not None
    layer.get_parameter("pieces.0.weight").data.copy_(drawn(64, 1024))
    layer.bias.data.zero_()
    layer.finish_loading()
    assert not list(layer.parameters()) and 0.75 < (layer.weight_bytes - 2 * 64) / (2 * 64 * 1024) < 0.77


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_engine_answers_as_without(native: Native, batch_invariant: bool) -> None:
    """Scores within what bfloat16 rounds; tokens until the first near tie."""
    answers, held, floors = [], [], []
    prompts = [{"prompt_token_ids": [1 + (7 * i + j) % 300 for j in range(5 + 9 * i)]} for i in range(5)]
    for on in (False, True):
        switches = {"compressed_weights": on}
        with LLM(
            device="cpu",
            dtype="bfloat16",
            batch_invariant=batch_invariant,
            max_num_batched_tokens=16,
            technique=switches,
        ) as llm:
            answers.append(
                llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True))
            )
            held.append(llm.engine.core.executor.info.memory["weights"])
            floors.append(llm.engine.recorder.summary()["floor_seconds"])
    assert held[1] < 0.9 * held[0] and floors[1] < floors[0]  # less to hold, and less to read
    for off, on_ in zip(*answers, strict=True):
        for index, (mine, other) in enumerate(zip(off.outputs[0].logprobs, on_.outputs[0].logprobs, strict=True)):
            token, got = off.outputs[0].token_ids[index], on_.outputs[0].token_ids[index]
            if token != got:
                break
            assert abs(mine[token].logprob - other[token].logprob) < 0.1
        assert index >= 3
