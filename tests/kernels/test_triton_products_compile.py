"""Products for few rows, and with codes of few bits, compile for an H200 without one, and so does what rounds their
inputs: no spills, the wide matrix instruction, words that come ahead, room for the next launch."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from tests.support import offline

if (
    importlib.util.find_spec("triton") is None
):  # not imported here: whether its kernels are interpreted is fixed with that
    pytest.skip("triton is not installed", allow_module_level=True)


FEW = ("flat", "vector")
COMPILED = tuple(("triton_products_offline", each) for each in ("codes", "wide", "others"))


@cache
def kernels() -> dict[str, dict[str, int]]:
    codes, wide, others = offline.found(*COMPILED)
    return codes | wide | others


@pytest.mark.timeout(300)
def test_nothing_spills_and_everything_fits() -> None:
    assert len(kernels()) == 13 + 6 + 12 + 4 + 1 + 5 + 3 + 4 * 3 + 2 * 2
    for name, figures in kernels().items():
        assert figures["LDL"] + figures["STL"] == 0 and figures["local"] == 0, name
        assert figures["shared"] <= 232448, name


@pytest.mark.timeout(300)
def test_codes_come_asynchronously_and_are_read_by_the_wide_matrix_instruction() -> None:
    for name, figures in kernels().items():
        if "widened" not in name and not name.startswith(FEW) and "_kernel" not in name:
            instruction = "IGMMA" if "int8 inputs" in name else "QGMMA" if "inputs" in name else "HGMMA"
            assert figures[instruction] >= 4 and figures["HMMA"] == 0 and figures["LDGSTS"] > 0, (name, figures)


@pytest.mark.timeout(300)
def test_weights_for_few_rows_come_by_the_copy_engine_into_the_wide_matrix_instruction() -> None:
    for name, figures in kernels().items():
        if name.startswith(FEW):
            flat = name.startswith("flat")
            assert (figures["HGMMA"] > 0, figures["UTMALDG"] > 0, figures["HMMA"]) == (flat, flat, 0), name


@pytest.mark.timeout(300)
def test_what_waits_for_memory_leaves_room_for_many_programs() -> None:
    """Loads in flight hide the memory's latency: of vectors, 4 programs of 4 warps a processor at least, of few tokens' experts too; of rows of
    14,336 by 16 warps, 2."""
    for name, figures in kernels().items():
        assert not (name.startswith("vector") or ", few, " in name) or figures["registers"] <= 128, name
        assert "_kernel" not in name or figures["registers"] <= 64, name
