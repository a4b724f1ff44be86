"""The register says the truth: every row is there, every test it names exists, and the page shows it as it is."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.reliability import register
from tests.reliability.register import ROWS, Row, Status
from tests.reliability.run import HEAVY
from tests.support.serving import ROOT

PAGE = ROOT / "docs" / "reliability.md"


@cache
def names_in(file: str) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def untrue(row: Row) -> str | None:
    """What is wrong with a row; None when it holds."""
    for test in row.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).exists() or name not in names_in(file):
            return f"row {row.number}: there is no {test}"
    if (row.status is Status.HELD) == bool(row.missing):
        return f"row {row.number}: it is {row.status.value}, and what is missing is {row.missing!r}"
    return None if row.tests or row.status is Status.WAITING else f"row {row.number} names no test"


def test_every_row_is_there_and_true() -> None:
    assert [row.number for row in ROWS] == list(range(1, 61))
    assert not [wrong for row in ROWS if (wrong := untrue(row))]


@pytest.mark.parametrize(
    "row",
    [
        Row(1, "x", Status.HELD, ("tests/reliability/test_register.py::test_that_is_not_there",)),
        Row(1, "x", Status.HELD, ("tests/nowhere.py::test_x",)),
        Row(1, "x", Status.HELD),
        Row(1, "x", Status.HELD, ("tests/reliability/test_register.py::test_every_row_is_there_and_true",), "a part"),
        Row(1, "x", Status.WAITING),
    ],
)
def test_untrue_rows_are_noticed(row: Row) -> None:
    assert untrue(row)


def test_the_page_shows_the_register() -> None:
    assert register.table() in PAGE.read_text(encoding="utf-8"), (
        "put what `python -m tests.reliability.register` prints into the page"
    )


def test_heavy_forms_are_of_rows_that_are_kept() -> None:
    kept = {row.number for row in ROWS if row.status is not Status.WAITING}
    assert {heavy.row for heavy in HEAVY} <= kept and [heavy.row for heavy in HEAVY] == sorted(
        heavy.row for heavy in HEAVY
    )
