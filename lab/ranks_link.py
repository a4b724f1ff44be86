"""Ranks that do nothing but meet: how long a sum of theirs takes, and what one device can do meanwhile.

What lives here: the child of ``python -m lab ranks`` that measures this, and its own children. What may not: engines.

    python -m lab.ranks_link RANK SIZE FOLDER ID        (one that is not the first)
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.observe.report import say, write_json
from headrace.processes.child import environment
from headrace.processes.scratch import Scratch
from lab.jobs import child_main

SIZES = (2**13, 2**15, 2**17, 2**19, 2**21, 2**23, 2**26)  # bytes
_CALLS = 40


def work(config: EngineConfig, job: Mapping[str, Any]) -> None:
    """``job``: size, device, result (a file)."""
    from headrace.bench.offline import limits_here
    from headrace.config import DeviceConfig
    from headrace.parallel.device import check_devices, create_group
    from headrace.parallel.nccl import create_id
    from headrace.parallel.ranks import device_of
    from headrace.worker.settings import device_kind

    kind, size = device_kind(job["device"]), job["size"]
    limits = limits_here(job["device"])
    result: dict[str, Any] = {"limits": str(limits), "sums": []}
    say(f"one device: {limits}")
    write_json(Path(job["result"]), result)
    if size == 1:
        return
    with Scratch() as folder:
        place = (str(folder), "") if kind == "cpu" else ("", create_id().hex())
        if kind == "cuda":
            check_devices(DeviceConfig(tensor_parallel_size=size), size)
        others = [
            subprocess.Popen(
                [sys.executable, "-m", "lab.ranks_link", str(rank), str(size), *place],
                env=environment() | device_of(rank),
            )
            for rank in range(1, size)
        ]
        try:
            group = create_group(place[0], bytes.fromhex(place[1]), 0, size)
            say(f"{size} ranks: {group.account}")
            for way, num_bytes, seconds, graphed in _sums(group, kind):
                said = f"{way}, {num_bytes / 1024:g} KiB: {seconds * 1e6:.1f} us" + (
                    f", in a graph {graphed * 1e6:.1f} us" if graphed else ""
                )
                say(said)
                result["sums"].append((size, said))
                write_json(Path(job["result"]), result)
        finally:
            for each in others:
                each.kill()


def _sums(group: Any, kind: str) -> Iterator[tuple[str, int, float, float]]:
    """(way, bytes, seconds a call, seconds in a graph): as the engine would, and through NCCL alone."""
    yield from _sums_of(group, kind, group.account.partition(",")[0] if kind == "cpu" else "as it comes")
    if kind == "cuda" and group._one_shot is not None:
        group._one_shot = None
        yield from _sums_of(group, kind, "NCCL alone")


def _sums_of(group: Any, kind: str, way: str) -> Iterator[tuple[str, int, float, float]]:
    import torch

    for num_bytes in SIZES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=kind)
        calls = _CALLS if num_bytes < SIZES[-2] else 5

        def some(x: Any = x, calls: int = calls) -> None:
            for _ in range(calls):
                group.all_reduce(x)

        group.least(0)
        seconds = _timed(some, kind) / calls
        graphed = 0.0
        if kind == "cuda":
            cuda: Any = torch.cuda
            graph, stream = cuda.CUDAGraph(), cuda.Stream()  # type: Any, Any
            stream.wait_stream(cuda.current_stream())
            with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                some()
            graphed = _timed(graph.replay, kind) / calls
        yield way, num_bytes, seconds, graphed


def _timed(call: Callable[[], object], kind: str) -> float:
    import torch

    wait: Callable[[], object] = torch.cuda.synchronize if kind == "cuda" else lambda: None
    call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def other(rank: str, size: str, folder: str, id: str) -> int:
    from headrace.parallel.device import create_group

    group = create_group(folder, bytes.fromhex(id), int(rank), int(size))
    return 0 * len(list(_sums(group, "cuda" if id else "cpu")))


if __name__ == "__main__":
    sys.exit(other(*sys.argv[1:]) if len(sys.argv) > 2 else child_main(work))
