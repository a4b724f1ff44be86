"""What is planted into the product to see whether the checks can fail.

What lives here: reading the list, mutants.diff, which says how it is written. What may not: planting (mutants.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.register import tests

LIST = Path(__file__).with_name("mutants.diff")


@dataclass(frozen=True, slots=True)
class Mutant:
    row: int
    what: str
    file: str  # below src/headrace
    old: str  # whole lines
    new: str
    tests: tuple[str, ...]

    def occurrences(self, text: str) -> int:
        return f"\n{text}".count(f"\n{self.old}")

    def planted(self, text: str) -> str:
        return f"\n{text}".replace(f"\n{self.old}", f"\n{self.new}")[1:]


def read() -> Iterator[Mutant]:
    for entry in LIST.read_text(encoding="utf-8").split("\n@ ")[1:]:
        head, *lines = entry.splitlines()
        row, what, file, words = head.split(" | ")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line.startswith(mark)) for mark in "-+")
        yield Mutant(int(row), what, file, old, new, tests(words))


MUTANTS = tuple(read())
