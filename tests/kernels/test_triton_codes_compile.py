"""Products with codes of few bits compile for an H200 without one: no spills, the wide matrix instruction, words that
come ahead."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from tests.support import offline

if (
    importlib.util.find_spec("triton") is None
):  # not imported here: whether its kernels are interpreted is fixed with that
    pytest.skip("triton is not installed", allow_module_level=True)


@cache
def kernels() -> dict[str, dict[str, int]]:
    (found,) = offline.found(("triton_codes_offline",))
    return found


@pytest.mark.timeout(300)
def test_nothing_spills_and_everything_fits() -> None:
    assert len(kernels()) == 13 + 6 + 12 + 1 + 5
    for name, figures in kernels().items():
        assert figures["LDL"] + figures["STL"] == 0 and figures["local"] == 0, name
        assert figures["shared"] <= 232448, name


@pytest.mark.timeout(300)
def test_codes_come_asynchronously_and_are_read_by_the_wide_matrix_instruction() -> None:
    for name, figures in kernels().items():
        if "widened" not in name:
            instruction = "IGMMA" if "int8 inputs" in name else "QGMMA" if "inputs" in name else "HGMMA"
            assert figures[instruction] >= 4 and figures["HMMA"] == 0 and figures["LDGSTS"] > 0, (name, figures)
