"""The child of ``python -m lab profile`` that runs the engine as it is: token times, launches and allocations a step,
memory.

``python -m lab.profile_run JOB.json``.

What lives here: those measurements. What may not: hardware counters (profile_ncu.py, profile_step.py), rendering
(profile_page.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from headrace.bench.offline import limits_here
from headrace.config import EngineConfig
from headrace.engine.llm import LLM
from headrace.observe.report import machine_facts, say, write_json
from headrace.worker.host import process_memory
from lab.jobs import account_of, child_main, device_name
from lab.profile_step import Case, Stepper, scaled_cases
from lab.table_measure import TableBench
from lab.table_rows import scaled, select_rows
from lab.table_run import limits_of

TIMED = ("decode-1", "decode-256", "prefill-1x2048")
WINDOW = 32  # decode steps over which is counted


def work(config: EngineConfig, job: Mapping[str, Any]) -> None:
    """``job``: scale, repeats, result (a file)."""
    limits = limits_here(config.device.device)
    bare = process_memory()
    with LLM.from_config(config) as llm:
        say(f"{llm.info.model} loaded")
        llm.engine.await_kernels()
        bench = TableBench(llm, llm.info.vocab_size, llm.engine.recorder, job["repeats"])
        timed = [asdict(bench.measure(scaled(row, job["scale"]))) for row in select_rows(TIMED)]
        stepper = Stepper(llm.engine)
        steps = [_counts(stepper, case) for case in scaled_cases(job["scale"]) if case.kind == "decode"]
        result = {
            "facts": machine_facts(str(limits), device=device_name(config)),
            "limits": limits_of(limits),
            "timed": timed,
            "steps": steps,
            "host_memory": {"before the engine": bare, "with the engine": process_memory()},
            "device_memory": _device_memory(),
            **account_of(llm.engine),
        }
    write_json(Path(job["result"]), result)


def _counts(stepper: Stepper, case: Case) -> dict[str, Any]:
    """Per step, over steps in which all rows decode."""
    found = {"step": case.says, **_allocations(stepper, case), **_launches(stepper, case)}
    say(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def _allocations(stepper: Stepper, case: Case) -> dict[str, Any]:
    """Calls of torch's allocator for the device, memory it took from the driver, and what the process grew by on the
    host."""
    stepper.add(case, 4 * WINDOW)
    stepper.decode_until_settled(case, WINDOW)
    before, resident = _allocator(), process_memory()
    for _ in range(WINDOW):
        stepper.engine.core.step()
    after, grown = _allocator(), process_memory() - resident
    stepper.finish()
    return {name: (after[name] - value) / WINDOW for name, value in before.items()} | {
        "host bytes": max(0, grown) / WINDOW
    }


def _allocator() -> dict[str, int]:
    """Running counts; none where there is no device with an allocator of its own."""
    if not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "device allocations": stats["allocation.all.allocated"],
        "taken from the driver": stats["segment.all.allocated"],
    }


def _launches(stepper: Stepper, case: Case) -> dict[str, Any]:
    """Kernels and copies on the device a step, graphs as the engine runs them."""
    if not torch.cuda.is_initialized():
        return {}
    stepper.add(case, 4 * WINDOW)
    stepper.decode_until_settled(case)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(WINDOW):
            stepper.engine.core.step()
        torch.cuda.synchronize()
    stepper.finish()
    spans = [
        Span(each.name, each.time_range.start, each.time_range.end)
        for each in profile.events()
        if each.device_type.name == "CUDA"
    ]
    for line in layer_lines(sorted(spans, key=lambda each: each.begin), WINDOW):
        say(line)
    on_device = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    copies = sum(event.count for event in on_device if event.key.startswith(("Memcpy", "Memset")))
    return {"kernels": (sum(event.count for event in on_device) - copies) / WINDOW, "copies": copies / WINDOW}


class Span(NamedTuple):
    """What the device did, from when to when, µs."""

    name: str
    begin: float
    end: float


def layer_lines(spans: Sequence[Span], steps: int) -> list[str]:
    """A layer in the middle of a step, kernel by kernel: the gap before each and its duration, means over ``steps`` and
    their alike layers. Kernels that overlap have gaps below 0. Nothing where steps are not alike, or no layers repeat."""
    names, each = [span.name for span in spans], len(spans) // steps
    middle = range(each // 4, each - each // 4)
    alike = [size for size in range(2, each // 4) if all(names[at] == names[at + size] for at in middle)]
    if len(spans) % steps or names != names[:each] * steps or not alike:
        return [f"{len(spans)} launches in {steps} steps, in which no layers repeat"]
    size, begin = alike[0], each // 4
    layers = [step * each + at for step in range(steps) for at in range(begin, each - each // 4 - size, size)]
    lines = [
        f"a layer has {size} launches, {mean(spans[at + size].begin - spans[at].begin for at in layers):.2f} µs; gap, duration:"
    ]
    for place in range(size):
        here = [at + place for at in layers]
        gap = mean(spans[at].begin - spans[at - 1].end for at in here)
        lines.append(f"{gap:8.2f} {mean(spans[at].end - spans[at].begin for at in here):8.2f}  {names[here[0]][:80]}")
    return lines


def _device_memory() -> dict[str, int]:
    """Bytes, as the driver and torch's allocator count them."""
    if not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    held, most = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    return {"of the whole": total, "in use": total - free, "held by torch": held, "most allocated": most}


if __name__ == "__main__":
    sys.exit(child_main(work))
