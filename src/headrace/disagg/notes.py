"""What two replicas tell each other about one request's keys and values; a front end passes it on.

What lives here: the notes. What may not: frames (engine/connection.py), acting on them (hand_over.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Want:
    """From who answers: it has the nodes of the prompt before ``first``, ``cached`` tokens, and room for the others."""

    request_id: int
    first: int
    cached: int


@dataclass(frozen=True, slots=True)
class Sent:
    """From who computes the prompt, replica ``source``: the nodes from ``first`` on lie in these slots of its region.
    ``last``: they are the prompt's last full ones."""

    request_id: int
    source: int
    first: int
    slots: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """From who answers: these slots are free again."""

    request_id: int
    slots: tuple[int, ...]


Note = Want | Sent | Taken
