"""The list of mutants does not rot: each can be planted, each row that is kept has two, and the page shows them.
Killing them takes a command."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.reliability import mutants
from tests.reliability.mutant_list import MUTANTS, Mutant, Unplantable
from tests.reliability.register import ROWS, Status
from tests.support.serving import ROOT


def test_every_mutant_can_be_planted() -> None:
    """Its text stands once in the product, wherever: who changes that text changes the mutant."""
    wrong = mutants.unplantable()
    assert not wrong, "\n".join(wrong)


def test_a_mutant_follows_its_text_into_another_file_and_depth_and_is_missed_where_it_is_gone() -> None:
    mutant = Mutant(1, "x", "a.py", "    if x:\n        y()\n", "    pass\n", (), "-")
    assert mutant.plant({"a.py": "def f():\n    if x:\n        y()\n    z()\n"}) == (
        "a.py",
        "def f():\n    pass\n    z()\n",
    )
    assert mutant.plant({"a.py": "x = 1\n", "b.py": "if x:\n    y()\n"}) == ("b.py", "pass\n")
    for sources in (
        {"a.py": "if x:\n    z()\n"},
        {"a.py": "if x:\n    y()\n" * 2},
        {"b.py": "if x:\n    y()\n", "c.py": "if x:\n    y()\n"},
    ):
        with pytest.raises(Unplantable, match="row 1"):
            mutant.plant(sources)


def test_every_row_has_two_and_each_names_tests_of_its_row() -> None:
    planted = Counter(each.row for each in MUTANTS)
    kept = {row.number: row for row in ROWS if row.status is not Status.WAITING}
    assert not [number for number in kept if planted[number] < 2]
    assert not [each for each in MUTANTS if not each.tests or not set(each.tests) <= set(kept[each.row].tests)]


def test_the_page_shows_the_mutants() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert mutants.table() in page, "put what `python -m tests.reliability.mutants --list` prints into the page"
