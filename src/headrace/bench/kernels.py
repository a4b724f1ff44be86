"""``headrace bench kernels``: checks every candidate of each operation against its twin, then times it against the
physical limits.

What lives here: forcing a candidate, checking, timing, the table. What may not: the shapes and inputs
(kernel_cases.py), kernels.

The floor of a call is max(bytes / read bandwidth, FLOPs / GEMM rate), with limits measured in the same run; the
fraction is floor / median. A candidate that declines is printed as missing with its reason; one with a wrong result is
printed as wrong and fails the run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headrace.bench.kernel_cases import DEFAULT_SPEC, CaseMaker, KernelCase
from headrace.bench.sweep import Sweep
from headrace.cost.profile import Limits, last_level_cache_bytes
from headrace.errors import ConfigError
from headrace.kernels import DECLARED, TWIN, Kernels
from headrace.kernels.operations import OPERATIONS
from headrace.models.families import spec_from_config
from headrace.observe.report import machine_facts, print_facts, shown_fraction, table, void_note, write_json
from headrace.spec import DecoderSpec
from headrace.worker.card import cuda_time
from headrace.worker.profile import limits_now

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4, torch.float16: 4e-3}  # of the largest value
COLUMNS = ("op", "case", "kernel", "median µs", "spread %", "GB/s", "GFLOP/s", "floor µs", "fraction", "note")


@dataclass(frozen=True, slots=True)
class KernelBench:
    """What to time: ``spec`` gives the shapes, ``rows`` are token counts, ``seconds`` are spent on each row of the
    table."""

    spec: DecoderSpec = DEFAULT_SPEC
    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (1, 16, 512)
    context: int = 1024  # tokens a sequence has behind it
    ops: tuple[str, ...] = ()  # all that have cases
    seconds: float = 0.3
    device: str = "cpu"
    maker: type[CaseMaker] = CaseMaker
    batch_invariant: bool = False  # only candidates whose bits do not depend on the batch, as they are then


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One candidate at one call site; times in seconds, None if it did not run. ``note`` says why, or how precisely it
    was checked."""

    op: str
    case: str
    kernel: str
    seconds: float | None = None  # median of a call
    spread: float | None = None  # (slowest - fastest) / median of the rounds
    bytes: int = 0
    flops: int = 0
    floor: float | None = None
    note: str = ""
    wrong: bool = False

    @property
    def fraction(self) -> float | None:
        return None if self.seconds is None or self.floor is None else self.floor / self.seconds


def measure(bench: KernelBench, limits: Limits, sweep: Sweep | None = None) -> list[KernelRow]:
    """Times every candidate of ``bench.ops``, the twin last, until ``sweep`` is stopped. Raises ConfigError for an
    unknown operation, type or row count."""
    _check(bench)
    dtype = DTYPES[bench.dtype]
    device = torch.device(bench.device)
    maker = bench.maker(bench.spec, dtype, bench.context, 4 * cache_bytes(device), device)
    place = nullcontext() if device.type == "cpu" else device  # where it is not needed, it costs each operation some µs
    with torch.inference_mode(), place:
        cases = (case for rows, op in product(bench.rows, bench.ops or maker.ops()) for case in maker.cases(op, rows))
        return (sweep or Sweep()).take(row for case in cases for row in _case_rows(case, bench, limits, dtype))


def cache_bytes(device: torch.device) -> int:
    return (
        int(torch.cuda.get_device_properties(device).L2_cache_size)
        if device.type == "cuda"
        else last_level_cache_bytes()
    )


def _check(bench: KernelBench) -> None:
    if bench.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device; use --device cpu.")
    if unknown := set(bench.ops) - set(bench.maker.ops()):
        raise ConfigError(f"Unknown operations {sorted(unknown)}; choose among {', '.join(bench.maker.ops())}.")
    if bench.dtype not in DTYPES:
        raise ConfigError(f"--dtype is {bench.dtype}; choose among {', '.join(DTYPES)}.")
    if not bench.rows or min(bench.rows) < 1:
        raise ConfigError(f"--rows is {bench.rows}; give token counts of at least 1.")


def _case_rows(case: KernelCase, bench: KernelBench, limits: Limits, dtype: torch.dtype) -> Iterator[KernelRow]:
    twin = OPERATIONS[case.op].twin
    want = _tensors(case.calls(twin)[0]())
    rate = limits.gemm_rates.get(bench.dtype, limits.gemm_rates["float32"])
    floor = max(case.bytes / limits.read_bandwidth, case.flops / rate)
    for name in (*(candidate.name for candidate in OPERATIONS[case.op].candidates), TWIN):
        kernel, reason = _forced(
            case, name, torch.device(bench.device), invariant=bench.batch_invariant and name != TWIN
        )
        if kernel is None:
            yield KernelRow(case.op, case.label, name, note=reason)
            continue
        calls = case.calls(kernel)
        error = max(_error(got, expected) for got, expected in zip(_tensors(calls[0]()), want, strict=True))
        if not error <= TOLERANCE[dtype]:
            yield KernelRow(case.op, case.label, name, note=f"wrong: differs from its twin by {error:.2g}", wrong=True)
            continue
        rounds = time_calls(calls, bench.seconds, torch.device(bench.device))
        middle = median(rounds)
        note = "" if name == TWIN else f"error {error:.0e}"
        yield KernelRow(
            case.op, case.label, name, middle, (max(rounds) - min(rounds)) / middle, case.bytes, case.flops, floor, note
        )


def _forced(
    case: KernelCase, name: str, device: torch.device, *, invariant: bool
) -> tuple[Callable[..., Any] | None, str]:
    """The candidate of that name for this call site, or None and its reason."""
    others = {candidate.name for op in OPERATIONS.values() for candidate in op.candidates} - {name}
    techniques = DECLARED | {"cuda_prefill"} | ({"batch_invariant"} if invariant else set())
    kernels = Kernels(device, techniques=techniques, disabled=frozenset(others))
    try:
        kernel = kernels.choose(OPERATIONS[case.op], case.facts)
    except ConfigError as error:  # neither it nor the twin is batch-invariant
        return None, str(error)
    choice = kernels.choices[-1]  # before it stands who serves what this one leaves
    return (kernel, "") if choice.chosen == name else (None, dict(choice.declined).get(name, "not for this device"))


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference over largest value; NaN if either contains one."""
    got, want = got.float(), want.float()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


def time_calls(calls: Sequence[Callable[[], Any]], seconds: float, device: torch.device) -> list[float]:
    """Seconds per call, one mean for each of five rounds; every round goes through all the calls, each with its own
    memory. Where that takes several times ``seconds``, there are two rounds."""
    return cuda_time(calls, seconds) if device.type == "cuda" else _time(calls, seconds)


def _time(calls: Sequence[Callable[[], Any]], seconds: float, rounds: int = 5) -> list[float]:
    """Seconds per call, one mean for each round; every round goes through all the calls, each with its own memory."""
    for call in calls:
        call()
    means: list[float] = []
    start = time.perf_counter()
    while len(means) < rounds and (len(means) < 2 or time.perf_counter() - start < 4 * seconds):
        begin, count = time.perf_counter(), 0
        while count < len(calls) or time.perf_counter() - begin < seconds / rounds:
            calls[count % len(calls)]()
            count += 1
            if time.perf_counter() - begin > max(1.0, 2 * seconds):
                break
        means.append((time.perf_counter() - begin) / count)
    return means


def run(args: argparse.Namespace, maker: type[CaseMaker] = CaseMaker) -> int:
    """Returns 1 if any candidate was wrong."""
    spec = _read_spec(args.model) if args.model else DEFAULT_SPEC
    if args.tune:
        from headrace.bench.tune import run_tune

        return run_tune(args, spec)
    bench = KernelBench(
        spec=spec,
        dtype=args.dtype,
        rows=tuple(args.rows),
        context=args.context,
        ops=tuple(args.ops),
        seconds=args.seconds,
        device=args.device,
        maker=maker,
        batch_invariant=args.batch_invariant,
    )
    _check(bench)
    sweep = Sweep()
    with _threads(args.threads):
        limits = limits_now(bench.device)
        name = torch.cuda.get_device_name() if bench.device == "cuda" else "cpu"
        facts = machine_facts(str(limits), threads=torch.get_num_threads(), device=name, dtype=args.dtype)
        print_facts(facts)
        rows = measure(bench, limits, sweep)
    print(table(COLUMNS, [_cells(row) for row in rows]))
    if void := void_note({f"{row.kernel} of {row.op}, {row.case}": row.fraction for row in rows}):
        print(void)
    if args.output_json:
        write_json(
            args.output_json, {"facts": facts, "rows": [{**asdict(row), "fraction": row.fraction} for row in rows]}
        )
    return sweep.status(int(any(row.wrong for row in rows)))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_spec(folder: Path) -> DecoderSpec:
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        return spec_from_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a model's config.json ({error}); give the folder that holds it."
        ) from error


def _cells(row: KernelRow) -> tuple[Any, ...]:
    if row.seconds is None or row.floor is None or row.spread is None:
        return (row.op, row.case, row.kernel, *[None] * 6, row.note)
    rates = (row.bytes / row.seconds / 1e9, row.flops / row.seconds / 1e9)
    fraction = shown_fraction(row.fraction)
    return (
        row.op,
        row.case,
        row.kernel,
        row.seconds * 1e6,
        row.spread * 100,
        *rates,
        row.floor * 1e6,
        fraction,
        row.note,
    )
