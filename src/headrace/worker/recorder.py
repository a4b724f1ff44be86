"""CUDA graphs recorded one after another, on a stream of their own, over memory that all of them share.

What lives here: recording, and what all graphs are recorded of. What may not: which steps they compute, and
when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs
from headrace.models.decoder import Decoder
from headrace.models.draft_head import DraftHead
from headrace.worker.device_memory import scratch_of_graphs
from headrace.worker.launches import Launches
from headrace.worker.rows import Gather, Rows


class Recorder:
    """Of one decoder over one KV cache and one set of rows. Graphs that never run at once may share their memory: what
    one of them leaves behind for later, others must not be told is free."""

    def __init__(
        self,
        decoder: Decoder | DraftHead,
        kernels: Kernels,
        rows: Rows,
        kv_caches: Sequence[Tensor],
        groups: Sequence[int] | None = None,
        tables: Sequence[Tensor] | None = None,
        entry: Tensor | None = None,  # [most tokens, hidden]
        ahead: int = 0,
        launches: Launches | None = None,
    ) -> None:
        """``groups``: which of the rows' block tables each cache is read by; None: its own. ``tables``: instead of
        these. ``entry``: of a stage or a head, where the hidden states will be that it goes on from. ``ahead``: as
        Gather has it. ``launches``: of all graphs that may be held together."""
        self.decoder = decoder
        self.kernels = kernels
        self.rows = rows
        self.gather = Gather(rows, kernels, tables, ahead)
        self.entry, self.ahead = entry, ahead
        self.launches = launches or Launches()
        self._kv_caches = tuple(kv_caches)
        self._groups = tuple(range(len(kv_caches))) if groups is None else tuple(groups)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(rows.device)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        begun = () if self.entry is None else (self.entry[: len(inputs.token_ids)],)
        return self.decoder.forward(
            replace(inputs, attention=tuple(inputs.attention[group] for group in self._groups)), self._kv_caches, *begun
        )

    @contextmanager
    def captures(self) -> Iterator[None]:
        """What is recorded within takes the scratch of GEMMs from the graphs' memory."""
        with torch.inference_mode(), scratch_of_graphs(self.rows.device):
            yield

    @contextmanager
    def while_graphable(self, forget: Callable[[], None]) -> Iterator[None]:
        """Each step has run eagerly before: a capture compiles nothing. Where a kernel gives way all the same, and to a
        twin that looks at the device, there are no graphs in the end."""
        try:
            yield
        except RuntimeError:
            if self.kernels.graphable:
                raise
            forget()

    def renew(self) -> None:
        """No graph is left: later ones have memory of their own, and what these had is the driver's again."""
        self.launches.forget()
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def follow(self) -> None:
        """What is recorded next comes after what has been queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self.rows.device))

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """What is launched within becomes the graph. (torch.cuda.graph would also synchronise and empty the allocator,
        every time.)"""
        keeps = self.launches.joins
        graph = torch.cuda.CUDAGraph(keep_graph=keeps)
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                yield graph
                graph.capture_end()
                if keeps:
                    graph.instantiate()
            except BaseException:
                self._abandon(graph)
                raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that is of no use any more: what broke it is what counts.

        Where ending it fails, too, torch's allocator goes on giving out the pool's memory and lets nothing else record
        there: it is told that this is over, and later graphs have a pool of their own.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()
