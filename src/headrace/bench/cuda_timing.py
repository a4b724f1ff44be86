"""Timing on a CUDA device: replays of a graph between events, and the limits of the card in the same run.

What lives here: those measurements. What may not: cases, kernels, tables (kernels.py).

A graph leaves out what a launch costs the host; a call that reads the device cannot be captured and is timed as it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from headrace.worker.profile import Limits

_READ_BYTES = 4 * 2**30
_GEMM_SIZE = 8192


def cuda_limits() -> Limits:
    """Read and copy bandwidth over 4 GiB, and the rate of an 8192³ product of random bfloat16 and float32 numbers; about a second."""
    data = torch.empty(_READ_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(data)
    read = _READ_BYTES / median(cuda_time([data.sum], 0.1))
    copy = 2 * _READ_BYTES / median(cuda_time([lambda: torch.add(data, 0.0, out=target)], 0.1))
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(_GEMM_SIZE, _GEMM_SIZE, device="cuda").to(dtype) for _ in range(2))
        rates[str(dtype).removeprefix("torch.")] = 2 * _GEMM_SIZE**3 / median(cuda_time([lambda a=left, b=right: a @ b], 0.1))  # type: ignore[misc]
    return Limits(read, copy, rates)


def cuda_time(calls: Sequence[Callable[[], Any]], seconds: float, rounds: int = 5) -> list[float]:
    """Seconds a call, one mean for each round; every round goes through all the calls, each over its own memory."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    replay = _captured(calls)
    once = _elapsed(replay, 1)
    repeats = max(1, int(seconds / rounds / max(once, 1e-6)))
    return [_elapsed(replay, repeats) / repeats / len(calls) for _ in range(rounds)]


def _captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """Goes through all the calls: as a graph, or one by one where a call waits for the device."""

    def launch() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except RuntimeError:  # the operation is not permitted while a stream is captured
        torch.cuda.synchronize()
        return launch
    replay: Callable[[], None] = graph.replay
    return replay


def _elapsed(replay: Callable[[], None], repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
