"""Products over weights in few bits by C: the twin's numbers where nothing is rounded, those of rounded inputs
elsewhere."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_int
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels import Kernels
from headrace.kernels.build.c_compiler import (
    FLAGS,
    HEADERS,
    Compiler,
    Native,
    cpu_identity,
    find_compiler,
    native_library,
)
from headrace.kernels.build.native import function_of
from headrace.kernels.candidate import Declined
from headrace.kernels.linear import packed, panels
from headrace.layers.packed import Piece
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.floats import MXFP4, NVFP4, NormalFloat
from headrace.quant.gguf import BLOCKS, GGUFBlocks
from headrace.quant.integers import AWQ, GPTQ, PackedIntegers
from headrace.quant.rotated import Rotated
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.kernel_cases import assert_close, called, using

CPU = torch.device("cpu")
FP8 = "float8_e4m3fn"
W8A8 = ScaledWeight("int8", (1, WHOLE), activations=Activations("int8"))
INT8_INPUTS = Activations("int8")
W4A8, W6A8 = (PackedIntegers(bits, 128, False, activations=INT8_INPUTS) for bits in (4, 6))
FORMS: tuple[Format, ...] = (
    *(GGUFBlocks(kind) for kind in BLOCKS),
    GPTQ(2, 32), GPTQ(3, 64), GPTQ(4, 128, act_order=True), GPTQ(8, 0), AWQ(4, 128),
    PackedIntegers(4, 32), PackedIntegers(5, 0, False), PackedIntegers(6, 64), PackedIntegers(7, 32, False), PackedIntegers(8, 32),
    W4A8, W6A8, PackedIntegers(4, 32, activations=INT8_INPUTS), PackedIntegers(3, 0, False, activations=INT8_INPUTS),
    PackedIntegers(4, 64, act_order=True, activations=INT8_INPUTS), PackedIntegers(8, 0, activations=INT8_INPUTS),
    PackedIntegers(4, 128, False, activations=Activations("int8", static=True)),
    ScaledWeight("int8", (1, WHOLE)), ScaledWeight("int8", (1, 64)), W8A8,
    ScaledWeight("int8", (1, WHOLE), activations=Activations("int8", static=True)),
    ScaledWeight(FP8, (32, 128)), ScaledWeight(FP8, (1, WHOLE), activations=Activations("fp8")),
    ScaledWeight(FP8, (WHOLE, WHOLE), activations=Activations("fp8", static=True)),
    Rotated(MXFP4(), 32), Rotated(NVFP4(inverse=True), 16), Rotated(MXFP4(), 128), Rotated(PackedIntegers(4, 64, act_order=True), 32),
    MXFP4(), NVFP4(inverse=True), NVFP4(inverse=False), NormalFloat("nf4", nested=False), NormalFloat("nf4", nested=True),
)  # fmt: skip
ROWS = (1, 2, 3, 7, 70)


@pytest.fixture(autouse=True)
def native() -> Native:
    found = native_library()
    if isinstance(found, Declined):
        pytest.skip("no C compiler")
    return found


def piece_of(form: Format, outs: int = 96, ins: int = 512, *stacked: int, dtype: torch.dtype = torch.float32) -> Piece:
    """Random codes under random scales; an activation order that is none."""
    piece = Piece("weight", form, outs, ins, dtype=dtype, device=CPU, stacked=stacked)
    list(piece.make_up(outs))
    random = torch.Generator().manual_seed(outs)
    for name, held in piece.named_parameters():
        if (
            name in ("scale", "scales", "weight_scale", "absmax")
            and held.is_floating_point()
            and held.element_size() > 1
        ):
            held.data.mul_(torch.rand(held.shape, generator=random).to(held.dtype) + 0.5)
        if name in ("g_idx", "weight_g_idx"):
            held.data = held.data[..., torch.randperm(ins, generator=random)]
    piece.finish_loading()
    return piece


def made(
    pieces: list[Piece], bias: Tensor | None, dtype: torch.dtype, chosen: str, **options: Any
) -> Callable[[Tensor], Tensor]:
    kernels = Kernels(CPU, **options)
    outs, formats = sum(piece.outs for piece in pieces), tuple(piece.form.label for piece in pieces)
    facts: dict[str, Any] = {"dtype": dtype, "in_features": pieces[0].ins, "out_features": outs, "formats": formats}
    facts |= {
        "codings": tuple(piece.form.coding for piece in pieces),
        "eights": tuple(piece.form.eight for piece in pieces),
    }
    linear: Callable[[Tensor], Tensor] = kernels.choose(*called("packed_linear", **facts))(pieces, bias)
    assert kernels.choices[-1].chosen == chosen
    return linear


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def rounded(x: Tensor) -> Tensor:
    """To 8 bits, in blocks of 32."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).round() * scale).nan_to_num().flatten(-2)


def assert_same(got: Tensor, want: Tensor) -> None:
    assert (got.float() - want.float()).abs().max() <= 3e-6 * want.float().abs().max()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.label)
def test_nothing_is_rounded_in_float32(form: Format) -> None:
    """Product and weights are the twin's, laid out once, in the memory of the format."""
    piece, twin = piece_of(form), piece_of(form)
    held, linear = piece.num_bytes, made([piece], None, torch.float32, "native")
    assert piece.relaid and piece.num_bytes <= 1.2 * held
    for rows in (slice(0, 96), slice(32, 64), torch.tensor([5, 0, 95, 5])):
        some = rows if isinstance(rows, slice) else slice(0, 96)
        want = twin.dense(some, torch.float32)
        assert_same(piece.dense(rows, torch.float32), want if isinstance(rows, slice) else want[rows])
    for count in ROWS:
        x = drawn(count, 600)[:, :512]
        assert_same(linear(x), packed.packed_linear([twin], None)(x))


@pytest.mark.parametrize("form", [form for form in FORMS if "inputs" not in form.label], ids=lambda form: form.label)
def test_inputs_are_rounded_where_codes_are_whole_numbers(form: Format) -> None:
    """The result is that of rounded inputs to float32's precision, and of plain ones to that of 8 bits."""
    piece = piece_of(form, dtype=torch.bfloat16)
    weight = piece_of(form, dtype=torch.bfloat16).dense(slice(0, 96), torch.float32)
    linear = made([piece], None, torch.bfloat16, "integer")
    given = panels.PanelProduct(panels_of(piece).native, linear_function(), True, False, False)
    for count in ROWS:
        x = drawn(count, 512)
        inputs = rounded(x) if panels_of(piece).whole else x
        order = piece.tensors[0].get("order")
        if order is not None:  # blocks are those of the order in which inputs lie
            inputs = torch.empty_like(x).index_copy_(1, order.long(), rounded(x[:, order]))
        y = given(x, piece, 0)
        assert_same(y, inputs @ weight.t())
        assert (y - x @ weight.t()).abs().max() <= 0.02 * y.abs().max()
        assert_close(
            linear(x.bfloat16()).float(), packed.packed_linear([piece], None)(x.bfloat16().float()), torch.bfloat16
        )


@pytest.mark.parametrize("size", [2, 8, 32, 128])
def test_inputs_are_rotated_to_the_bit(size: int) -> None:
    """In the type that the model computes in, before they are rounded."""
    form = Rotated(MXFP4(), size)
    piece, plain = (piece_of(each, dtype=torch.bfloat16) for each in (form, form.inner))
    for rows in (1, 9):
        x = drawn(rows, 512, dtype=torch.bfloat16)
        want = made([plain], None, torch.bfloat16, "integer")(form.activated(x, {}))
        assert torch.equal(made([piece], None, torch.bfloat16, "integer")(x), want)


def panels_of(piece: Piece) -> Any:
    return piece.relaid[0]


def linear_function() -> Any:
    found = native_library()
    assert not isinstance(found, Declined)
    return function_of(found, "headrace_panel_product", "qPPPqii", c_int)


def test_the_switch_leaves_inputs_as_they_are() -> None:
    piece = piece_of(GGUFBlocks("Q4_0"), dtype=torch.bfloat16)
    linear = made([piece], None, torch.bfloat16, "native", techniques=using(integer_products=False))
    x, weight = drawn(5, 512, dtype=torch.bfloat16), piece.dense(slice(0, 96), torch.float32)
    assert torch.equal(linear(x), (x.float() @ weight.t()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pieces_of_several_formats_are_one_weight(dtype: torch.dtype) -> None:
    """With a bias, outputs that fill no panel, inputs that fill no block, strided rows, and shapes of any rank."""
    forms = GGUFBlocks("Q8_0"), PackedIntegers(4, 32, activations=INT8_INPUTS), ScaledWeight(FP8, (1, WHOLE)), W8A8
    pieces = [piece_of(form, outs, 288, dtype=dtype) for form, outs in zip(forms, (33, 64, 7, 20), strict=True)]
    bias, twin = drawn(124, dtype=dtype), packed.packed_linear([*pieces], None)
    want = {rows: (twin(drawn(rows, 300, dtype=dtype)[:, :288].float()) + bias.float()) for rows in (1, 6, 40)}
    linear = made(pieces, bias, dtype, "native" if dtype is torch.float32 else "integer")
    for rows, expected in want.items():
        x = drawn(rows, 300, dtype=dtype)[:, :288]
        assert (linear(x).float() - expected).abs().max() <= (
            3e-6 if dtype is torch.float32 else 0.02
        ) * expected.abs().max()
    assert linear(drawn(6, 288, dtype=dtype).view(2, 3, 288)).shape == (2, 3, 124)
    assert linear(drawn(0, 288, dtype=dtype)).shape == (0, 124)


def test_inputs_that_fill_no_block() -> None:
    """Channels have any number of inputs."""
    for form in (W8A8, ScaledWeight(FP8, (1, WHOLE)), ScaledWeight("int8", (WHOLE, WHOLE))):
        piece, twin, x = piece_of(form, 33, 100), piece_of(form, 33, 100), drawn(9, 100)
        assert_same(made([piece], None, torch.float32, "native")(x), packed.packed_linear([twin], None)(x))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (GGUFBlocks("Q4_K"), torch.float32),
        (GGUFBlocks("Q4_K"), torch.bfloat16),
        (W8A8, torch.bfloat16),
        (W4A8, torch.bfloat16),
    ],
)
def test_rows_have_the_same_bits_in_any_company(form: Format, dtype: torch.dtype) -> None:
    chosen = "native" if dtype is torch.float32 else "integer"
    linear, x = (
        made([piece_of(form, dtype=dtype)], None, dtype, chosen, techniques=using(batch_invariant=True)),
        drawn(300, 512, dtype=dtype),
    )
    together = linear(x)
    for first, end in ((0, 1), (3, 5), (0, 40), (250, 260), (299, 300)):
        assert torch.equal(linear(x[first:end]), together[first:end])


def test_one_row_that_is_no_number_does_not_touch_others() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        linear = made(
            [piece_of(GGUFBlocks("Q6_K"), dtype=dtype)], None, dtype, "native" if dtype is torch.float32 else "integer"
        )
        x = drawn(6, 512, dtype=dtype)
        want = linear(x)
        x[2, 40], x[4, 500], x[5] = float("nan"), float("inf"), 0.0
        got = linear(x)
        assert got[2].isnan().all() and not got[4].isfinite().any() and not got[5].any()
        assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


def test_scales_may_be_as_large_and_small_as_they_can() -> None:
    """Zeros, subnormal numbers and the largest ones of float16, codes at both ends."""
    for value in (0.0, 6e-8, -65504.0):
        piece, twin = (Piece("weight", GGUFBlocks("Q8_0"), 16, 64, dtype=torch.bfloat16, device=CPU) for _ in range(2))
        for each in (piece, twin):
            blocks = each.get_parameter("weight").data.view(-1, 34)
            blocks[:, :2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
            blocks[:, 2:], blocks[:, 3::2] = 0x80, 0x7F
            each.finish_loading()
        x = torch.ones(3, 64, dtype=torch.bfloat16)
        want = x.float() @ twin.dense(slice(0, 16), torch.float32).t()
        assert torch.equal(made([piece], None, torch.bfloat16, "integer")(x), want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_are_the_twin_s(dtype: torch.dtype) -> None:
    gate_up, down = (
        piece_of(GGUFBlocks(kind), outs, 256, 4, dtype=dtype) for kind, outs in (("Q4_K", 512), ("Q6_K", 256))
    )
    said: dict[str, Any] = {
        "formats": (gate_up.form.label, down.form.label),
        "codings": (gate_up.form.coding, down.form.coding),
    }
    kernels = Kernels(CPU)
    sparse: Any = kernels.choose(*called("packed_moe", dtype=dtype, num_experts=4, top_k=2, **said))
    given = [
        (drawn(rows, 256, dtype=dtype), drawn(rows, 4, dtype=dtype), [gate_up], [down], 2, True, Activation.SILU)
        for rows in (1, 5, 80)
    ]
    want = [packed.packed_moe(*each) for each in given]
    for each, expected in zip(given, want, strict=True):
        assert (sparse(*each).float() - expected.float()).abs().max() <= (
            3e-6 if dtype is torch.float32 else 0.03
        ) * expected.float().abs().max()
    assert gate_up.relaid and kernels.choices[-1].chosen == ("native" if dtype is torch.float32 else "integer")


def test_groups_that_panels_do_not_have_are_widened() -> None:
    """Activation order with groups of several sizes, which only tensors tell."""
    form = GPTQ(4, 32, act_order=True)

    def uneven() -> Piece:
        piece = Piece("weight", form, 96, 512, dtype=torch.float32, device=CPU)
        list(piece.make_up(0))
        piece.get_parameter("g_idx").data[:3] = 5
        piece.finish_loading()
        return piece

    piece, x = uneven(), drawn(5, 512)
    linear = made([piece], None, torch.float32, "native")
    assert not piece.relaid and torch.equal(linear(x), packed.packed_linear([piece], None)(x))
    with pytest.raises(
        ConfigError,
        match=r"GPTQ, 4 bits, .* is multiplied by parts, .* depend on the batch; leave --batch-invariant out",
    ):
        made([uneven()], None, torch.float32, "native", techniques=using(batch_invariant=True))


def test_the_widest_instruction_of_this_processor_is_chosen(native: Native) -> None:
    flags = cpu_identity().split()
    want = 512 if {"avx512_vnni", "avx512bw"} <= set(flags) else 256 if "avx_vnni" in flags else 0
    assert native.library["headrace_panel_vnni"]() == want


def test_other_formats_are_left_to_others() -> None:
    kernels = Kernels(CPU)
    kernels.choose(
        *called(
            "packed_linear",
            dtype=torch.float32,
            formats=("GGUF Q8_0", "unquantised"),
            codings=(GGUFBlocks("Q8_0").coding, None),
        )
    )
    assert dict(kernels.choices[-1].declined)["native"] == "computes with codes of few bits, not with unquantised"


# flags that make the compiler write for one, what this one must have to run it, bits of the vectors that VNNI
# multiplies
PROCESSORS = {
    "none of these": (("-march=x86-64",), "sse2", 0),
    "AVX2": (("-march=x86-64-v3",), "avx2", 0),
    "AVX-VNNI": (("-march=x86-64-v3", "-mavxvnni"), "avx_vnni", 256),
    "AVX-512": (("-march=x86-64-v4",), "avx512bw", 0),
    "AVX-512 VNNI": (("-march=x86-64-v4", "-mavx512vnni"), "avx512_vnni", 512),
    "AVX-512 VNNI, in C": (("-march=native", "-DHEADRACE_PLAIN_DOTS"), "", 0),
}


@pytest.fixture(scope="module", autouse=True)
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Native | Declined]]]:
    """Compiled while the tests before run; that of the widest instructions is the product's own."""
    flags = {*cpu_identity().split(), ""}
    *compiled, plain = (name for name, (_, needed, _) in PROCESSORS.items() if needed in flags)
    with ThreadPoolExecutor(2) as pool:
        own = {compiled.pop(): pool.submit(native_library)} if compiled else {}
        yield own | {
            name: pool.submit(built, tmp_path_factory.mktemp("panels"), PROCESSORS[name][0])
            for name in (*compiled, plain)
        }


@pytest.mark.parametrize("name", PROCESSORS)
def test_other_processors_compute_the_same(name: str, builds: Mapping[str, Future[Native | Declined]]) -> None:
    """Each way of multiplying that this processor has, and what stands around the instructions of others."""
    _, needed, vnni = PROCESSORS[name]
    if name not in builds:
        pytest.skip(f"this processor has no {needed}")
    other = builds[name].result()
    assert isinstance(other, Native)
    assert other.library["headrace_panel_vnni"]() == vnni
    function = function_of(other, "headrace_panel_product", "qPPPqii", c_int)
    for form in (
        GGUFBlocks("Q8_0"),
        GGUFBlocks("Q4_K"),
        GGUFBlocks("IQ4_XS"),
        GGUFBlocks("Q6_K"),
        NVFP4(inverse=True),
        PackedIntegers(3, 64),
        W8A8,
        W4A8,
        W6A8,
    ):
        piece, twin = piece_of(form, ins=256), piece_of(form, ins=256)
        assert panels.relaid(other, piece)
        weight = twin.dense(slice(0, 96), torch.float32)
        for rows in (1, 5):
            x = drawn(rows, 256)
            inputs = twin.activated(x) if form in (W8A8, W4A8, W6A8) else rounded(x)
            assert_same(panels.PanelProduct(other, function, True, False, False)(x, piece, 0), inputs @ weight.t())
            if form not in (W8A8, W4A8, W6A8):
                assert_same(panels.PanelProduct(other, function, False, False, False)(x, piece, 0), x @ weight.t())


def built(folder: Path, flags: tuple[str, ...]) -> Native:
    compiler = find_compiler()
    assert isinstance(compiler, Compiler)
    for name in (*HEADERS, "linear/panels.c"):
        (folder / Path(name).name).write_bytes(resources.files("headrace.kernels").joinpath(name).read_bytes())
    target = folder / "panels.so"
    done = subprocess.run(
        [compiler.path, *FLAGS, *flags, "-shared", str(folder / "panels.c"), "-o", str(target), "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and any(flag in done.stderr for flag in flags):
        pytest.skip(f"not for this processor: {done.stderr.splitlines()[0]}")
    assert not done.returncode, done.stderr
    return Native(ctypes.CDLL(str(target)), target, False)
