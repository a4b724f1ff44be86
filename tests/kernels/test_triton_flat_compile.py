"""The kernels for few rows compile for an H200 without one: no spills, the instructions that were meant, room for the
next launch."""

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
    (found,) = offline.found(("triton_flat_offline",))
    return found


@pytest.mark.timeout(120)
def test_nothing_spills_and_everything_fits() -> None:
    assert len(kernels()) == 3
    for name, figures in kernels().items():
        assert figures["LDL"] + figures["STL"] == 0 and figures["local"] == 0, name
        assert figures["shared"] <= 232448, name


@pytest.mark.timeout(120)
def test_weights_come_by_the_copy_engine_into_the_wide_matrix_instruction() -> None:
    for name, figures in kernels().items():
        flat = name.startswith("flat")
        assert (figures["HGMMA"] > 0, figures["UTMALDG"] > 0, figures["HMMA"]) == (flat, flat, 0), name


@pytest.mark.timeout(120)
def test_vectors_leave_room_for_many_programs() -> None:
    """Their loads in flight are what hides the memory's latency: 4 programs of 4 warps a processor at least."""
    for name, figures in kernels().items():
        assert not name.startswith("vector") or figures["registers"] <= 128, name
