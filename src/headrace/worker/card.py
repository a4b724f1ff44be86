"""Measures a CUDA card: bandwidth, GEMMs, and what a kernel costs beside its work.

What lives here: timing on the device (graphs replayed between events) and the limits found with it, in full or at a
glance. What may not: storing and finding profiles (cost/profile.py), which device is measured (profile.py), cases of
benchmarks (bench/).

A graph leaves out what a launch costs the host; a call that reads the device cannot be captured and is timed as it is
launched. Whatever memory a measurement takes is given back to the device. GEMMs run in bursts of about ten
milliseconds with pauses: held for longer, a card that has reached its power limit lowers its clock, and how far depends
on what ran before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headrace.cost.profile import DeviceIdentity, Limits, said_rate
from headrace.errors import ConfigError

ROUNDS = 9
LAUNCHES = 2000  # of the host alone
READ_BYTES = 4 * 2**30  # of the read and of the copy; the L2 of the largest cards is under 130 MB
GLANCE_BYTES = 2**30
READ_ROW = 2**14
LEAST_READS_OF_L2 = 4
NOTED_BYTES = 2 * 2**30  # of the card, in others' hands
GEMM_SIZE = 8192
GLANCE_FLOAT32_SIZE = 4096  # float32 is an order of magnitude slower
BURST_SECONDS = 0.01
PAUSE_SECONDS = 0.1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHAIN = 500  # kernels of a graph that measures what lies between them
SPIN_CYCLES = 20_000  # about 10 µs


@dataclass(frozen=True, slots=True)
class LaunchCosts:
    """Seconds."""

    plain: float  # of the host, to launch one small operator
    in_graph: float  # of the device, for one small kernel in a chain
    gap: float  # of that, what passes between the end of one kernel and the begin of the next


@dataclass(frozen=True, slots=True)
class Measurement:
    """Of a device, in full. ``more``: of its DeviceProfile; ``notes``: what is said of it."""

    limits: Limits
    reads: Sequence[float]  # bytes/s of each round
    working_set: int  # bytes
    more: Mapping[str, Any]
    notes: Sequence[str]


def card_identity() -> DeviceIdentity:
    """The current card: name, compute capability and size tell it from a part of it and from its siblings."""
    facts = torch.cuda.get_device_properties()
    features = (
        f"sm_{facts.major}{facts.minor}",
        f"{facts.multi_processor_count} SMs",
        f"{facts.total_memory / 2**30:.0f} GiB",
    )
    return DeviceIdentity(kind="cuda", name=facts.name, threads=0, features=features)


def measure_card() -> Measurement:
    """Everything, in about ten seconds."""
    with _emptied():
        size, others = _working_set(READ_BYTES), _taken_by_others()
        reads, copies = _bandwidths(size, ROUNDS, 0.1)
        rates = {name: median(_gemm_rates(dtype, ROUNDS)) for name, dtype in DTYPES.items()}
        launch, sustained = measure_launches(), _sustained_gemm_rate(torch.bfloat16)
    in_graph = f"{launch.in_graph * 1e6:.2f} µs in a graph, of it {launch.gap * 1e6:.2f} µs between two"
    notes = [
        f"bfloat16 products held for a second: {said_rate(sustained)}",
        f"a small kernel: {launch.plain * 1e6:.1f} µs to launch, {in_graph}",
    ]
    if others > NOTED_BYTES:
        shared = f"{others / 2**30:.1f} GiB of the card are not this process's"
        notes.append(f"note: {shared}; if others compute there, measure again without them")
    more = {
        "sustained_gemm_rates": {"bfloat16": sustained},
        "launch_overhead": launch.plain,
        "graph_kernel": launch.in_graph,
        "graph_gap": launch.gap,
    }
    return Measurement(Limits(median(reads), median(copies), rates), reads, size, more, notes)


def card_limits() -> Limits:
    """The limits of this moment, in about three seconds: a benchmark prints them beside its figures."""
    with _emptied():
        reads, copies = _bandwidths(_working_set(READ_BYTES), 5, 0.02)
        return Limits(
            median(reads), median(copies), {name: median(_gemm_rates(dtype, 5)) for name, dtype in DTYPES.items()}
        )


def glance_at_card() -> Limits:
    """Roughly, in a few hundredths of a second and one GiB: the engine that starts has taken the rest."""
    _glance_rate(torch.bfloat16, 16)  # the library's own scratch memory stays, so it is none of what goes back
    with _pool_of_its_own():
        read, copy = _glance_bandwidths(_working_set(GLANCE_BYTES))
        sizes = {"bfloat16": GEMM_SIZE, "float16": GEMM_SIZE, "float32": GLANCE_FLOAT32_SIZE}
        return Limits(read, copy, {name: _glance_rate(DTYPES[name], size) for name, size in sizes.items()})


def measure_launches() -> LaunchCosts:
    """What a kernel costs beside its work. Chains of kernels of one length and of twice that length differ by the work
    alone."""
    x = torch.zeros(16, device="cuda")
    spin = torch.cuda._sleep  # a kernel that counts clock cycles

    def spinning(cycles: int) -> float:
        return median(cuda_time([lambda: spin(cycles)] * CHAIN, 0.1))  # type: ignore[no-untyped-call]

    short, long = spinning(SPIN_CYCLES), spinning(2 * SPIN_CYCLES)
    return LaunchCosts(
        _plain_launch(x), median(cuda_time([lambda: x.add_(0.0)] * CHAIN, 0.1)), max(0.0, 2 * short - long)
    )


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


def _elapsed(replay: Callable[[], Any], repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _soon(call: Callable[[], Any]) -> float:
    """Seconds a call: the best of three rounds of four, launched without a graph."""
    call()
    return min(_elapsed(call, 4) / 4 for _ in range(3))


@contextmanager
def _pool_of_its_own() -> Iterator[None]:
    """What is allocated inside goes back to the device; what the process holds in its allocator stays there, warm."""
    pool = torch.cuda.MemPool()
    with _refused_without_room(), torch.cuda.use_mem_pool(pool):
        yield
    del pool


@contextmanager
def _emptied() -> Iterator[None]:
    """What was allocated inside goes back to the device, and everything else that is free in this process's
    allocator."""
    with _refused_without_room():
        # the library's own scratch memory stays: a piece of the working set would keep all of it
        _glance_rate(torch.bfloat16, 16)
        yield
    torch.cuda.empty_cache()


@contextmanager
def _refused_without_room() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"The card has {free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB left, too little to be measured. Stop what else runs on it."
        ) from error
    finally:
        torch.cuda.synchronize()


def _working_set(wanted: int) -> int:
    """Bytes, at most a third of what is free (read and copy take two of these), and several times the L2."""
    free, total = torch.cuda.mem_get_info()
    size = min(wanted, free // 3) // 2**20 * 2**20
    least = LEAST_READS_OF_L2 * torch.cuda.get_device_properties().L2_cache_size
    if size < least:
        raise ConfigError(
            f"The card has {free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB left; its bandwidth is measured over at least "
            f"{3 * least / 2**30:.1f} GiB. Stop what else runs on it."
        )
    return size


def _taken_by_others() -> int:
    """Bytes; this process's own context (about half a GiB) counts as another's."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


def _bandwidths(size: int, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """Bytes/s read, and bytes/s read and written; in turn, so that a disturbance meets both."""
    data = torch.empty(size // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(data)
    readers: tuple[Callable[[], Tensor], ...] = (data.sum, lambda: data.view(-1, READ_ROW).sum(1))
    # the one that comes closer to the limit
    read = min(readers, key=lambda reader: cuda_time([reader], seconds, rounds=1)[0])
    reads, copies = [], []
    for _ in range(rounds):
        reads += [size / taken for taken in cuda_time([read], seconds, rounds=1)]
        copies += [
            2 * size / taken for taken in cuda_time([lambda: torch.add(data, 0.0, out=target)], seconds, rounds=1)
        ]
    return reads, copies


def _gemm_rates(dtype: torch.dtype, rounds: int) -> list[float]:
    """FLOP/s of [8192, 8192] x [8192, 8192] GEMMs of random numbers (zeros draw less power and run faster), one
    figure a burst."""
    left, right = _random(GEMM_SIZE, dtype), _random(GEMM_SIZE, dtype)
    product = torch.empty_like(left)

    def multiply() -> Tensor:
        return torch.mm(left, right, out=product)

    _elapsed(multiply, 1)  # the first call chooses an algorithm
    repeats = max(1, round(BURST_SECONDS / _elapsed(multiply, 1)))
    return [2.0 * GEMM_SIZE**3 / _burst(multiply, repeats) for _ in range(rounds)]


def _burst(call: Callable[[], Any], repeats: int) -> float:
    """Seconds a call, after a pause and one call that is not counted."""
    time.sleep(PAUSE_SECONDS)
    _elapsed(call, 1)
    return _elapsed(call, repeats) / repeats


def _sustained_gemm_rate(dtype: torch.dtype) -> float:
    left, right = _random(GEMM_SIZE, dtype), _random(GEMM_SIZE, dtype)
    return 2.0 * GEMM_SIZE**3 / cuda_time([lambda: left @ right], 1.0, rounds=1)[0]


def _glance_bandwidths(size: int) -> tuple[float, float]:
    data = torch.empty(size // 4, dtype=torch.float32, device="cuda").normal_()
    first, second = data.chunk(2)
    return size / _soon(data.sum), size / _soon(lambda: torch.add(first, 0.0, out=second))


def _glance_rate(dtype: torch.dtype, size: int) -> float:
    left, right = _random(size, dtype), _random(size, dtype)
    product = torch.empty_like(left)
    return 2.0 * size**3 / _soon(lambda: torch.mm(left, right, out=product))


def _random(size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, size, dtype=dtype, device="cuda").normal_()


def _plain_launch(x: Tensor) -> float:
    """Seconds of the host for one small operator; the device is faster, so nothing queues."""
    for _ in range(100):
        x.add_(0.0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(0.0)
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / LAUNCHES
