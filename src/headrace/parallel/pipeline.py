"""How the stages of a pipeline pass on what they have computed, on CPUs: hidden states to the next stage, sampled
tokens from the last to the first, and to all where they verify drafts.

What lives here: the protocol, its implementation over torch's gloo. What may not: which layers a stage holds
(stages.py), a GPU's (nccl.py), when tokens are wanted (worker/model_runner.py).

A stage never waits for another's host (EnergonAI, Du et al. 2022, section 4.2): a send returns at once, and a stage waits
only for what it computes with. Ranks of a stage are neighbours: rank = stage · ranks of a stage + place in it; each
speaks to the rank at its own place.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.parallel.group import GlooGroup

_HIDDEN, _TOKENS = 1, 2


class Pipe(Protocol):
    stage: int
    stages: int
    backend: str  # how they meet, for people
    comm_ops: int  # so far: what has been sent and received
    all: Any  # a Group of all ranks of all stages

    def send(self, hidden: Tensor) -> None:  # [tokens, hidden]
        """To the next stage."""
        ...

    def receive(self, hidden: Tensor) -> Tensor:
        """From the stage before, into ``hidden``."""
        ...

    def send_tokens(self, picked: Tensor, *, to_all: bool = False) -> None:  # [samples, 2], int32
        """From the last stage to the first, or all others."""
        ...

    def receive_tokens(self, picked: Tensor) -> Tensor: ...

    def abort(self) -> None: ...


class GlooPipe:
    """Arguments as GlooGroup has them. ``all``: the group of all ranks."""

    backend = "gloo"

    def __init__(self, store: Any, address: str, rank: int, size: int, stages: int) -> None:
        self.all, self._width = GlooGroup(store, address, rank, size), size // stages
        self.stage, self.stages = rank // self._width, stages
        self._rank, self._first = rank, rank % self._width
        self._group: Any = self.all.exchange
        self.comm_ops = 0
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, hidden: Tensor) -> None:
        self._send(hidden, self._rank + self._width, _HIDDEN)

    def receive(self, hidden: Tensor) -> Tensor:
        return self._receive(hidden, self._rank - self._width, _HIDDEN)

    def send_tokens(self, picked: Tensor, *, to_all: bool = False) -> None:
        for stage in range(self.stages - 1 if to_all else 1):
            self._send(picked, self._first + stage * self._width, _TOKENS)

    def receive_tokens(self, picked: Tensor) -> Tensor:
        return self._receive(picked, self._first + (self.stages - 1) * self._width, _TOKENS)

    def _receive(self, x: Tensor, source: int, tag: int) -> Tensor:
        self._group.recv([x], source, tag).wait()
        self.comm_ops += 1
        return x

    def _send(self, x: Tensor, to: int, tag: int) -> None:
        """What is sent is held until it has arrived: of steps so long ago everything has."""
        self.comm_ops += 1
        held = x.detach().clone(memory_format=torch.contiguous_format)
        self._sent.append((self._group.send([held], to, tag), held))
        while len(self._sent) > self.stages * (self.stages + 4):
            self._sent.popleft()[0].wait()

    def abort(self) -> None:
        self.all.abort()
