"""What the first stage of a pipeline knows and proposes, on its way to the other stages, ahead of the hidden states of the
step that verifies it.

    a step's message [chunks, 2 + most], int32:   tokens its row has | drafts | d1 d2 … (0 beyond them)

``most`` is what the plan allows, so that whoever receives knows the size. What lives here: that message. What may not:
proposing, acceptance (speculator.py), when it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.parallel.pipeline import Pipe
from headrace.worker.rows import Ints

_LENGTH, _COUNT, _FIRST = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Heard:
    """By chunk of a plan."""

    lengths: Ints
    counts: Ints
    tokens: list[list[int]]


class DraftRelay:
    def __init__(self, pipe: Pipe, device: torch.device) -> None:
        self._pipe = pipe
        self._device = device

    def tell(self, lengths: Ints, most: int, drafts: Mapping[int, Sequence[int]]) -> None:
        """By the first stage. ``drafts``: by chunk that has some."""
        table = np.zeros((len(lengths), _FIRST + most), dtype=np.int32)
        table[:, _LENGTH] = lengths
        for chunk, tokens in drafts.items():
            table[chunk, _COUNT] = len(tokens)
            table[chunk, _FIRST : _FIRST + len(tokens)] = tokens
        self._pipe.send(torch.from_numpy(table).to(self._device))

    def hear(self, chunks: int, most: int) -> Heard | None:
        """By the others; the first has nobody to hear."""
        if self._pipe.stage == 0:
            return None
        given = torch.empty(chunks, _FIRST + most, dtype=torch.int32, device=self._device)
        self._pipe.receive(given)
        if self._pipe.stage < self._pipe.stages - 1:
            self._pipe.send(given)
        table: Ints = given.cpu().numpy()
        counts = table[:, _COUNT]
        tokens = [row[_FIRST : _FIRST + count].tolist() for row, count in zip(table, counts, strict=True)]
        return Heard(table[:, _LENGTH], counts, tokens)
