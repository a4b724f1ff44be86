"""Ranks that do nothing but meet: how long a sum of theirs takes, and what one device can do meanwhile.

What lives here: the child of ``python -m lab ranks`` that measures this, and its own children. What may not: engines.

    python -m lab.ranks_link RANK SIZE FOLDER ID        (one of them; the first says what it measured, a line each)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from headrace.config import EngineConfig
from headrace.observe.report import say, write_json
from headrace.processes.child import environment
from headrace.processes.scratch import Scratch
from lab.jobs import child_main

SIZES = (2**13, 2**15, 2**16, 2**17, 2**18, 2**19, 2**21, 2**23, 2**26)  # bytes
_CALLS, _REPEATS = 40, 12


def work(config: EngineConfig, job: Mapping[str, Any]) -> None:
    """``job``: sizes, device, result (a file)."""
    from headrace.bench.offline import limits_here
    from headrace.config import DeviceConfig
    from headrace.parallel.device import check_devices, device_here
    from headrace.worker.settings import device_kind

    kind, sizes = device_kind(job["device"]), job["sizes"]
    limits = limits_here(job["device"])
    result: dict[str, Any] = {"limits": str(limits), "cards": 0, "device": device_here(kind), "sums": []}
    if kind == "cuda":
        import torch

        result["cards"] = torch.cuda.device_count()
        check_devices(DeviceConfig(tensor_parallel_size=max(sizes, default=1)), max(sizes, default=1))
    say(f"one device: {limits}")
    write_json(Path(job["result"]), result)
    for size in sizes:
        for each in _of_ranks(kind, size):
            say(said(each))
            result["sums"].append(each)
            write_json(Path(job["result"]), result)


def said(each: Mapping[str, Any]) -> str:
    """Microseconds: the median, the least and the most."""
    found = {"a call": each["us"], "in a graph": each["graphed_us"]}
    spreads = [f"{how} {median(us):.1f} us ({min(us):.1f} to {max(us):.1f})" for how, us in found.items() if us]
    return f"{each['ranks']} ranks, {each['way']}, {each['bytes'] / 1024:g} KiB: {', '.join(spreads)}"


def _of_ranks(kind: str, size: int) -> Iterator[dict[str, Any]]:
    """As its first rank says them, line by line."""
    from headrace.parallel.nccl import create_id
    from headrace.parallel.ranks import device_of

    with Scratch() as folder:
        place = (str(folder), "") if kind == "cpu" else ("", create_id().hex())
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "lab.ranks_link", str(rank), str(size), *place],
                env=environment() | device_of(rank),
                stdin=subprocess.PIPE,  # whose end is theirs
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            for line in ranks[0].stdout or ():
                yield json.loads(line)
        finally:
            for each in ranks:
                each.kill()
                each.wait()


def _sums(group: Any, kind: str) -> Iterator[dict[str, Any]]:
    """As the engine would, and through NCCL alone."""
    yield from _sums_of(group, kind, group.backend.partition(",")[0] if kind == "cpu" else "as it comes")
    if kind == "cuda" and group._one_shot is not None:
        group._one_shot = None
        yield from _sums_of(group, kind, "NCCL alone")


def _sums_of(group: Any, kind: str, way: str) -> Iterator[dict[str, Any]]:
    import torch

    for num_bytes in SIZES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=kind)
        calls = _CALLS if num_bytes < SIZES[-2] else 5

        def some(x: Any = x, calls: int = calls) -> None:
            for _ in range(calls):
                group.all_reduce(x)

        group.all_reduce_min(0)
        us, graphed = _timed(some, kind, calls), list[float]()
        if kind == "cuda":
            cuda: Any = torch.cuda
            graph, stream = cuda.CUDAGraph(), cuda.Stream()  # type: Any, Any
            stream.wait_stream(cuda.current_stream())
            with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                some()
            group.all_reduce_min(0)
            graphed = _timed(graph.replay, kind, calls)
        yield {"way": way, "ranks": group.size, "bytes": num_bytes, "us": us, "graphed_us": graphed}


def _timed(call: Callable[[], object], kind: str, calls: int) -> list[float]:
    """Microseconds of one of the ``calls`` in ``call``, repeated. On a GPU all are queued before one is waited for, by
    its own clock: a rank whose host is late delays the first of them alone."""
    import torch

    call()
    repeats = _REPEATS if kind == "cuda" else 3
    if kind == "cpu":
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return [1e6 * each / calls for each in seconds]
    cuda: Any = torch.cuda
    events = [cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    cuda.synchronize()
    return [1e3 * before.elapsed_time(after) / calls for before, after in pairwise(events)]


def rank(number: str, size: str, folder: str, id: str) -> int:
    import torch.distributed

    from headrace.parallel.group import GlooGroup, Group
    from headrace.parallel.nccl import NCCLGroup

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    group: Group
    if id:
        group = made = NCCLGroup(bytes.fromhex(id), int(number), int(size), one_shot=True)
        made.connect()
    else:
        distributed: Any = torch.distributed
        store = distributed.FileStore(f"{folder}/meeting", int(size))
        group = GlooGroup(store, "127.0.0.1", int(number), int(size))
    if number == "0":
        say(f"{size} ranks: {group.backend}")
    for each in _sums(group, "cuda" if id else "cpu"):
        print(json.dumps(each), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(rank(*sys.argv[1:]) if len(sys.argv) > 2 else child_main(work))
