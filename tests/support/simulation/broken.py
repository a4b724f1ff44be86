"""What the runner raises when something that must hold does not.

What lives here: the error. What may not: conditions.
"""

from __future__ import annotations


class Broken(AssertionError):
    """``kind`` is one word for what is broken, the same however it comes about: a schedule is shrunk for as long as it
    stays."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


def hold(condition: object, kind: str, detail: str) -> None:
    """For conditions that are cheap to put into words; the hot ones raise by themselves."""
    if not condition:
        raise Broken(kind, detail)
