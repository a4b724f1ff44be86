"""Grammars for engines without a model: what may come next is a hash of all that is known, and a grammar is there after
some turns.

What lives here: the double of engine/grammar_masks.py. What may not: llguidance, what is allowed (oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from headrace.engine.grammar_masks import NO_DRAFTS, GrammarStats
from headrace.engine.keyed_hash import _mix
from headrace.request import Request, TokenMasks
from headrace.scheduler.events import AddRequest, RefuseRequest
from headrace.scheduler.roster import Sequence as LiveSequence
from headrace.scheduler.step_planner import MASK_SECONDS
from tests.support.simulation.broken import hold
from tests.support.simulation.oracle import WORDS, allowed, chain, forced, mask_words, root

REFUSAL = "the grammar cannot be followed"


class HashMasks:
    """``arrived``: called with each request when it is handed over. ``turns_of(request_id)``: how long its grammar
    takes; refused or not. ``adapted``: adapters change what a context's hash is."""

    def __init__(
        self, turns_of: Callable[[int], tuple[int, bool]], arrived: Callable[[Request], None], *, adapted: bool
    ) -> None:
        self._turns_of = turns_of
        self._arrived = arrived
        self._adapted = adapted
        self._compiling: dict[int, tuple[Request, int]] = {}
        self._followed: set[int] = set()
        self._turn = 0

    @property
    def compiling(self) -> bool:
        return bool(self._compiling)

    @property
    def stats(self) -> GrammarStats:
        return GrammarStats()

    @property
    def followed(self) -> set[int]:
        return self._followed

    def begin(self, request: Request) -> None:
        self._compiling[request.request_id] = request, self._turn + self._turns_of(request.request_id)[0]

    def take_compiled(self, wait: float) -> list[AddRequest | RefuseRequest]:
        self._turn += 1
        ready = [request for request, due in self._compiling.values() if due <= self._turn]
        for request in ready:
            del self._compiling[request.request_id]
            self._arrived(request)
        refused = {request.request_id for request in ready if self._turns_of(request.request_id)[1]}
        self._followed.update(request.request_id for request in ready if request.request_id not in refused)
        return [
            RefuseRequest(request, REFUSAL) if request.request_id in refused else AddRequest(request)
            for request in ready
        ]

    def drop(self, request_id: int) -> None:
        self._compiling.pop(request_id, None)

    def keep(self, request_ids: Container[int]) -> None:
        if self._followed:
            self._followed = {each for each in self._followed if each in request_ids}

    def dead_end(self, request_id: int, index: int) -> str | None:
        return None

    @property
    def seconds(self) -> Mapping[int, float]:
        """From nothing to more than a step has time for."""
        return {each: (each % 4) * 0.6 * MASK_SECONDS for each in self._followed}

    def masks(
        self, wanted: Sequence[tuple[int, LiveSequence]], drafts: Mapping[int, Sequence[int]] = NO_DRAFTS
    ) -> TokenMasks:
        for _, sequence in wanted:
            hold(
                sequence.request_id in self._followed,
                "masks",
                f"request {sequence.request_id} has been forgotten and asks for a mask",
            )
        paths = [
            (j, head) for j, sequence in wanted for head in _heads(sequence, self._head(sequence), drafts.get(j, ()))
        ]
        return TokenMasks(tuple(j for j, _ in paths), WORDS, b"".join(mask_words(head) for _, head in paths))

    def forced(self, wanted: Sequence[tuple[int, LiveSequence]]) -> dict[int, tuple[int, ...]]:
        runs = {j: forced(self._head(s)) for j, s in wanted if s.request.params.logprobs is None}
        return {j: run for j, run in runs.items() if len(run) > 1}

    def _head(self, sequence: LiveSequence) -> int:
        return chain(sequence.token_ids, root(sequence.request.adapter if self._adapted else None))[-1]


def _heads(sequence: LiveSequence, head: int, drafts: Sequence[int]) -> Iterator[int]:
    """What is known as a hash, and behind each draft that may stand there, as long as something may follow."""
    yield head
    for token in drafts:
        fine, head = token in allowed(head) and token not in sequence.stop_ids, _mix(head, token)
        if not fine or not allowed(head):
            return
        yield head
