"""CUDA graphs recorded one after another, on a stream of their own, over memory that all of them share.

What lives here: recording. What may not: what is recorded (graphs.py, prompt_graphs.py), when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


class Recorder:
    """Graphs that never run at once may share their memory: what one of them leaves behind for later, others must not be told is free."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        """What is recorded next comes behind what has been queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """What is launched within becomes the graph. (torch.cuda.graph would also synchronise and empty the allocator, every time.)"""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                yield graph
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that is of no use any more: what broke it is what counts.

        Where ending it fails, too, torch's allocator goes on giving out the pool's memory and lets nobody else record there: it is told that
        this is over, and later graphs have a pool of their own.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()
