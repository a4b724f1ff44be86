"""The list of mutants does not rot: each can be planted, each row that is kept has two, and the page shows them. Killing them takes a command."""

from __future__ import annotations

from collections import Counter

from tests.reliability import mutants
from tests.reliability.mutant_list import MUTANTS
from tests.reliability.register import ROWS, Status
from tests.support.serving import ROOT


def test_every_mutant_can_be_planted() -> None:
    """Its text stands once in the product: who changes that text changes the mutant."""
    sources = {file: (ROOT / mutants.PRODUCT / file).read_text(encoding="utf-8") for file in {each.file for each in MUTANTS}}
    assert not [each for each in MUTANTS if each.occurrences(sources[each.file]) != 1 or each.old == each.new]


def test_every_row_has_two_and_each_names_tests_of_its_row() -> None:
    planted = Counter(each.row for each in MUTANTS)
    kept = {row.number: row for row in ROWS if row.status is not Status.WAITING}
    assert not [number for number in kept if planted[number] < 2]
    assert not [each for each in MUTANTS if not each.tests or not set(each.tests) <= set(kept[each.row].tests)]


def test_the_page_shows_the_mutants() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert mutants.table() in page, "put what `python -m tests.reliability.mutants --list` prints into the page"
