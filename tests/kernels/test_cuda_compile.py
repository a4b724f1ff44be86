"""The persistent decode step compiles for an H200 without one: next to nothing spills, the instructions that were
meant, memory that fits."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.kernels.build import nvrtc as compiler
from headrace.kernels.step.shape import SOURCES, StepShape, why_not
from tests.support.assembler import nvcc
from tests.support.specs import LLAMA_8B

SHAPE = StepShape(LLAMA_8B, block_size=128, programs=132)
SHARED = 232448  # bytes a program may have


def machine_code(text: str, folder: Path, options: Sequence[str]) -> bytes:
    """By NVRTC, as the engine does it, or by the compiler of an installed toolkit."""
    try:
        return compiler.build(text, options, folder)
    except compiler.CompileError as error:
        if "not found" not in str(error):
            raise
    if (found := nvcc()) is None:
        pytest.skip("neither NVRTC nor nvcc is installed")
    source, target = folder / "step.cu", folder / "step.cubin"
    source.write_text(text)
    subprocess.run(
        [found, "-cubin", *options, "-o", str(target), str(source)],
        check=True,
        capture_output=True,
        timeout=110,
    )
    return target.read_bytes()


def tool(name: str) -> str:
    """Triton brings the disassembler."""
    found = find_spec("triton")
    beside = Path(str(found.origin)).parent / "backends" / "nvidia" / "bin" / name if found is not None else Path(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (it comes with triton)")
    return path


@pytest.fixture(scope="module", params=[(False, 0), (True, 0), (True, 1)], ids=["bfloat16", "FP8", "FP8, keys in int8"])
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    target = tmp_path_factory.mktemp("cuda") / "kernel.cubin"
    shape = replace(SHAPE, fp8=request.param[0], kv=request.param[1])
    target.write_bytes(machine_code(compiler.source(*SOURCES), target.parent, shape.options()))
    yield target


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_of_ranks_keep_all_in_registers(tmp_path: Path, size: int) -> None:
    """And let four programs onto a processor."""
    options = ("-arch=sm_90a", f"-DSIZE={size}", "-DTYPE=0", "-DTHREADS=256", f"-DMOST={2**18}")
    target = tmp_path / "sums.cubin"
    target.write_bytes(machine_code(compiler.source("sums/one_shot.cu"), tmp_path, options))
    said = dump(target, "-res-usage")
    registers, stacks = (re.findall(rf"{name}:(\d+)", said) for name in ("REG", "STACK"))
    assert len(stacks) == 5 and set(stacks) == {"0"} and max(map(int, registers)) <= 64, said


def dump(code: Path, *options: str) -> str:
    return subprocess.run(
        [tool("cuobjdump"), *options, str(code)], check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.timeout(120)
def test_next_to_nothing_spills(code: Path) -> None:
    said = dump(code, "-res-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert registers <= 255 and stack <= 16, said


@pytest.mark.timeout(120)
def test_weights_come_by_bulk_copies_into_matrix_instructions(code: Path) -> None:
    text = dump(code, "-sass")
    counts = {name: len(re.findall(rf"\b{name}", text)) for name in ("UBLKCP", "HMMA", "MOVM", "LDL", "STL")}
    assert counts["UBLKCP"] and counts["HMMA"] >= 32 and counts["MOVM"], counts
    assert counts["LDL"] + counts["STL"] <= 10, counts  # and none of them in a loop over weights


@pytest.mark.timeout(120)
def test_one_copy_of_every_operator_stays_in_the_instruction_cache(code: Path, request: pytest.FixtureRequest) -> None:
    """Code for each operator in turn was 141 KiB, and every layer read it again from the second-level cache."""
    last = max(int(each, 16) for each in re.findall(r"/\*([0-9a-f]{4,5})\*/", dump(code, "-sass")))
    keys_in_codes = request.node.callspec.params["code"][1]
    assert last < (120 if keys_in_codes else 100) * 1024


HANDED = (
    "embedding",
    "token_ids",
    "positions",
    "slots",
    "context",
    "block_table",
    "cos_sin",
    "kv",
    "out",
)  # by kernels before, or to those after


def read_early(text: str) -> set[str]:
    """Of HANDED, what the kernel names before it waits for the kernel before: itself, or in what it calls until
    then."""
    body = text[text.index("decode_step(const __grid_constant__") :]
    assert body.count("wait_for_before();") == 1
    parts = [body[: body.index("wait_for_before();")]]
    for part in parts:
        for name in re.findall(r"(\w+)(?:<\w+>)?\(", part):
            for defined in re.finditer(rf"void {name}\(.*?^}}", text, re.DOTALL | re.MULTILINE):
                parts += [] if defined[0] in parts else [defined[0]]
    return {name for name in HANDED for part in parts if re.search(rf"\bp\.{name}\b", part)}


def test_a_step_that_begins_early_reads_nothing_that_another_kernel_may_still_write() -> None:
    """A token's id read a moment too early is the last step's, and only now and then."""
    text = compiler.source(*SOURCES)
    assert not read_early(text)
    rows_first = text.replace("  wait_for_before();\n", "").replace(
        "  read_rows(p, s);\n", "  read_rows(p, s);\n  wait_for_before();\n"
    )
    assert {"context", "slots", "positions"} <= read_early(rows_first)
    embedded_first = text.replace("  wait_for_before();\n", "").replace(
        "#pragma unroll 1\n  for (int layer", "  wait_for_before();\n  for (int layer"
    )
    assert {"token_ids", "embedding"} <= read_early(embedded_first)


def test_a_shape_that_cannot_be_dealt_is_refused_by_both(tmp_path: Path) -> None:
    """What the source asserts and what Python declines are one rule."""
    assert why_not(LLAMA_8B, 132) is None
    text = compiler.source(*SOURCES)
    wrong = tuple("-DINNER=8200" if each.startswith("-DINNER=") else each for each in SHAPE.options())
    try:
        compiler.build(text, wrong, tmp_path)
    except compiler.CompileError as error:
        assert "not found" in str(error) or "K cannot be dealt" in str(error)
    else:
        pytest.fail("8200 is no multiple of what the warps take")
