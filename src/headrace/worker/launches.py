"""Graphs on their way to the device's queue: each by itself, or several that follow each other as one launch.

A step with drafts replays two graphs for each pass of the draft and two for the target. A launch takes the host as long
as a row of such a step, so from when these are known to be all that the step consists of, they are held, and go together:
as one graph, in which each of them is a node. It is made when the same ones have come in the same order some times.

What lives here: holding, joining. What may not: capture (recorder.py), which graphs a step replays (graphs.py).
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from headrace.kernels.build.driver import DriverError, GraphChain

_log = logging.getLogger(__name__)
_AGAIN = 3  # times that the same graphs have come, from which on they are joined
_MOST = 32  # joined at once; the one made first goes
_Held = list[torch.cuda.CUDAGraph]


class Launches:
    """``joins``: graphs are kept so that they can be joined; else holding does nothing."""

    def __init__(self, *, joins: bool = False) -> None:
        self.joins = joins
        self.holding = False
        self._held: _Held = []
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Stream]] = []
        self._seen = Counter[tuple[int, ...]]()
        self._chains: dict[tuple[int, ...], tuple[GraphChain, _Held]] = {}  # which keep their graphs alive

    def hold(self) -> None:
        """From now on, until ``release``. Whoever queues anything else releases first."""
        self.holding = self.joins

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if self.holding:
            self._held.append(graph)
        else:
            graph.replay()

    def mark(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Records ``event`` behind all that has been replayed so far, or behind what is held with it."""
        if self._held:
            self._marks.append((event, stream))
        else:
            event.record(stream)

    def release(self) -> None:
        """Queues what is held."""
        self.holding = False
        if self._held:
            held, self._held = self._held, []
            self._launch(held)
            marks, self._marks = self._marks, []
            for event, stream in marks:
                event.record(stream)

    def drop(self) -> None:
        """What is held is not queued at all."""
        self.holding = False
        self._held.clear()
        self._marks.clear()

    def forget(self) -> None:
        """Nothing of what was joined is left."""
        self.drop()
        self._seen.clear()
        self._chains.clear()

    def _launch(self, held: _Held) -> None:
        try:
            if (chain := self._joined(held)) is not None:
                chain.launch(torch.cuda.current_stream().cuda_stream)
                return
        except DriverError as error:  # above all, there is no memory for it: nothing of it is queued
            self.joins = False
            self._chains.clear()
            _log.warning("graphs of drafts are launched one by one (%s)", error)
        for graph in held:
            graph.replay()

    def _joined(self, held: _Held) -> GraphChain | None:
        """None where the same ones have not come often yet. Joining takes some milliseconds, once for each sequence of
        graphs."""
        key = tuple(map(id, held))
        if key in self._chains:
            return self._chains[key][0]
        self._seen[key] += 1
        if len(held) < 2 or self._seen[key] < _AGAIN:
            return None
        made = GraphChain([graph.raw_cuda_graph() for graph in held])
        if len(self._chains) == _MOST:
            del self._chains[next(iter(self._chains))]
        self._chains[key] = made, held
        del self._seen[key]
        return made
