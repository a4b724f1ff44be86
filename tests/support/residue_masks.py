"""Masks without a grammar: ids of one remainder, so that ``allowed_token_ids`` is the oracle and nothing needs
llguidance.

What lives here: the stand-ins for whoever follows grammars. What may not: tests.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from headrace import LLM, SamplingParams, StructuredOutputs
from headrace.engine.grammar_masks import NO_DRAFTS, GrammarStats
from headrace.request import Request, TokenMasks
from headrace.scheduler.events import AddRequest, RefuseRequest
from headrace.scheduler.roster import Sequence as LiveSequence
from headrace.scheduler.step_planner import NO_MASKS

PLAIN = (
    8000  # ids below are text in the demo model's vocabulary; an end of answer would end it whatever --ignore-eos says
)


def masked(params: SamplingParams, remainder: int, divisor: int) -> SamplingParams:
    """The same request, but its tokens are those of one remainder, by masks."""
    return replace(params, structured_outputs=StructuredOutputs(choice=(f"{remainder} {divisor}",)))


def listed(params: SamplingParams, remainder: int, divisor: int) -> SamplingParams:
    """The same tokens by a list of ids."""
    return replace(params, allowed_token_ids=tuple(range(remainder, PLAIN, divisor)))


class ResidueMasks:
    """Follows what ``masked`` asks for; see engine/grammar_masks.py. ``given`` counts masks."""

    stats = GrammarStats()
    seconds: Mapping[int, float] = NO_MASKS

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._begun: list[Request] = []
        self.given = 0

    @property
    def compiling(self) -> bool:
        return bool(self._begun)

    def begin(self, request: Request) -> None:
        self._begun.append(request)

    def take_compiled(self, wait: float) -> list[AddRequest | RefuseRequest]:
        taken, self._begun = self._begun, []
        return [AddRequest(request) for request in taken]

    def drop(self, request_id: int) -> None:
        self._begun = [request for request in self._begun if request.request_id != request_id]

    def keep(self, request_ids: Container[int]) -> None:
        pass

    def close(self) -> None:
        pass

    def dead_end(self, request_id: int, index: int) -> str | None:
        return None

    def forced(self, wanted: Sequence[tuple[int, LiveSequence]]) -> dict[int, tuple[int, ...]]:
        return {}

    def masks(
        self, wanted: Sequence[tuple[int, LiveSequence]], drafts: Mapping[int, Sequence[int]] = NO_DRAFTS
    ) -> TokenMasks:
        self.given += len(wanted)
        samples, bits = list[int](), list[np.ndarray[tuple[int], np.dtype[np.bool_]]]()
        for j, sequence in wanted:
            fine = self._bits(sequence.request.params)
            path = [fine, *(fine for _ in takewhile(fine.__getitem__, drafts.get(j, ())))]
            samples, bits = [*samples, *([j] * len(path))], [*bits, *path]
        return TokenMasks(tuple(samples), self._words, np.packbits(np.stack(bits), axis=1, bitorder="little").tobytes())

    def _bits(self, params: SamplingParams) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        assert params.structured_outputs is not None and params.structured_outputs.choice is not None
        remainder, divisor = map(int, params.structured_outputs.choice[0].split())
        ids = np.arange(32 * self._words)
        bits: np.ndarray[tuple[int], np.dtype[np.bool_]] = (ids % divisor == remainder) & (ids < PLAIN)
        return bits


class NoCheck:
    """Takes every constraint."""

    def require(self, wanted: StructuredOutputs) -> None:
        pass

    def close(self) -> None:
        pass


def follow_residues(llm: LLM) -> ResidueMasks:
    """From now on structured outputs of this engine are what ``masked`` says."""
    masks = ResidueMasks(llm.info.vocab_size)
    llm.engine.masks = llm.engine.core._masks = masks  # type: ignore[assignment]
    llm._inputs.grammars = NoCheck()  # type: ignore[assignment]
    return masks
