"""What is planted into the product to see whether the checks can fail.

What lives here: reading the list, mutants.diff, which says how it is written, and where in the product a mutant's text
stands. What may not: planting (mutants.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

from tests.reliability.register import tests

LIST = Path(__file__).with_name("mutants.diff")
NEVER = "-"  # has no verdict yet


class Unplantable(Exception):
    """Its text stands nowhere, or in several places."""


@dataclass(frozen=True, slots=True)
class Mutant:
    row: int
    what: str
    file: str  # below the package, where it was written
    old: str  # whole lines; their common indentation does not count
    new: str
    tests: tuple[str, ...]
    verdict: str  # of the last run, and its day

    def plant(self, sources: Mapping[str, str]) -> tuple[str, str]:
        """The file in which its text stands now, and the file's text with the mutant. Code moves: where that file is
        gone, or has the text no longer, any other is good that has it alone. Raises Unplantable."""
        lines = tuple(dedent(self.old + self.new).splitlines())
        pattern, new = _pattern(lines[: self.old.count("\n")]), lines[self.old.count("\n") :]
        found = [(self.file, match) for match in pattern.finditer(sources.get(self.file, ""))]
        found = found or [(file, match) for file, text in sources.items() for match in pattern.finditer(text)]
        if len(found) != 1:
            places = ", ".join(file for file, _ in found) or "nowhere"
            raise Unplantable(f"row {self.row}, {self.what}: its text stands in {places}; rewrite it in {LIST.name}")
        file, match = found[0]
        planted = "".join(f"{match[1]}{line}\n" for line in new)
        return file, sources[file][: match.start()] + planted + sources[file][match.end() :]


@cache
def _pattern(lines: tuple[str, ...]) -> re.Pattern[str]:
    """These lines, indented by as much as the first of them."""
    return re.compile("^( *)" + r"\1".join(re.escape(line) + "\n" for line in lines), re.MULTILINE)


def read() -> Iterator[Mutant]:
    for entry in LIST.read_text(encoding="utf-8").split("\n@ ")[1:]:
        head, *lines = entry.splitlines()
        row, what, file, words, verdict = head.split(" | ")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line.startswith(mark)) for mark in "-+")
        yield Mutant(int(row), what, file, old, new, tests(words), verdict)


def record(mutant: Mutant, verdict: str) -> None:
    """Writes a verdict into the list."""
    start = f"\n@ {mutant.row} | {mutant.what} | {mutant.file} | "
    before, _, after = LIST.read_text(encoding="utf-8").partition(start)
    head, end, after = after.partition("\n")
    LIST.write_text(f"{before}{start}{head.rpartition(' | ')[0]} | {verdict}{end}{after}", encoding="utf-8")


MUTANTS = tuple(read())
