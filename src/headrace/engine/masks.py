"""What the core needs of whoever follows grammars (grammar_masks.py).

What lives here: the protocol and its figures. What may not: llguidance, tokenizers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.request import Request, TokenMasks
from headrace.scheduler.events import AddRequest, RefuseRequest
from headrace.sequence import Sequence as LiveSequence


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Counters since the start (seconds are wall time: of compiling, beside the steps; of masks, in the loop), and the cache."""

    compiled: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    cached: int = 0
    cached_bytes: int = 0
    compiling: int = 0  # requests whose grammar is under way


class Masks(Protocol):
    """``begin`` a request, take it once compiled, ask for masks of its sequences, ``drop`` or stop to ``keep`` it."""

    @property
    def compiling(self) -> bool:
        """Requests have begun and are not taken yet."""

    @property
    def stats(self) -> GrammarStats: ...

    def begin(self, request: Request) -> None: ...

    def take_compiled(self, wait: float) -> list[AddRequest | RefuseRequest]:
        """Requests that can run, or why not; waits up to so many seconds for the first."""

    def drop(self, request_id: int) -> None:
        """A request that has begun is not wanted any more."""

    def keep(self, request_ids: Container[int]) -> None:
        """Forgets the requests that have been taken and are none of these."""

    @property
    def seconds(self) -> Mapping[int, float]:
        """What one mask is likely to take, for each request that has been taken."""

    def masks(self, wanted: Sequence[tuple[int, LiveSequence]]) -> TokenMasks:
        """What each sample may be, after all that is known of its sequence."""

    def dead_end(self, request_id: int, index: int) -> str | None:
        """Why nothing at all may follow in this answer of a request that is kept; None: something may."""
