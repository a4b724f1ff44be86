"""``python -m lab skip``: does the device wait for launches, or do launches wait for the device?

The measures of SKIP (Vellaisamy et al. 2025, Characterizing and Optimizing LLM Inference Workloads on CPU-GPU Coupled
Architectures): a kernel's launch and queuing time is what passes between the call that launches it and its first
instruction; their sum over a run is TKLQT. While the device is idle that time is the launch itself and does not depend
on the batch (CPU-bound); once kernels queue behind each other it grows (GPU-bound). The kernels of a CUDA graph share
one call, so for the verdict only the first kernel of a call counts.

What lives here: the profile of some decode steps by torch.profiler (CUPTI), and these figures from its events.
What may not: the engine's own record of its steps (observe/metrics.py, steps.py), other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from headrace.bench.arguments import count, output
from headrace.bench.offline import facts_here
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import print_facts, table, write_json
from headrace.planner.workload.conversations import random_conversations
from headrace.planner.workload.load import Lengths
from headrace.request import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

STEPS = 20  # profiled; steps before them let the engine come to rest
STEPS_BEFORE = 10
IDLE_LAUNCHES = 30
QUEUED_FACTOR = 2.0  # of a launch to an idle device: beyond it more time goes into queuing than into launching
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchFloor:
    """Microseconds from a launch to the kernel's begin on an idle device, launched alone and as a graph."""

    alone: float
    graph: float


@dataclass(frozen=True, slots=True)
class SkipFigures:
    """Of decode steps. TKLQT counts every kernel; ``wait`` and ``floor`` count the first kernel of each call."""

    mode: str  # "graphs" or "eager"
    steps: int
    kernels_per_step: float
    launches_per_step: float
    tklqt_ms_per_step: float
    launch_and_queue_us: float  # TKLQT / kernels
    wait_us: float  # mean launch and queuing time of a call
    floor_us: float  # ... if the device were idle at each of them
    kernel_us: float  # mean duration
    step_ms: float  # wall
    busy_share: float  # of the wall time in which a kernel or a copy ran

    @property
    def verdict(self) -> str:
        return "GPU-bound" if self.wait_us > QUEUED_FACTOR * self.floor_us else "CPU-bound"


COLUMNS = (
    "mode", "kernels a step", "launches a step", "TKLQT ms a step", "launch+queue µs a kernel", "µs a launch", "idle device µs",
    "kernel µs", "step ms", "no kernel runs", "verdict",
)  # fmt: skip


def skip_figures(events: Iterable[Event], steps: int, floor: LaunchFloor, mode: str) -> SkipFigures:
    """From Chrome trace events as torch.profiler writes them. Work whose launch lies outside of the profile is left
    out."""
    events = list(events)
    calls = _calls_of(events)
    launched = [event for event in events if event.get("cat") in _ON_DEVICE and _correlation(event) in calls]
    kernels = [event for event in launched if event["cat"] == "kernel"]
    if not kernels:
        raise ConfigError(
            "The profiler saw no kernels; CUPTI may be taken by another profiler. Stop that one and run this again."
        )
    queued = [event["ts"] - calls[_correlation(event)]["ts"] for event in kernels]
    first = _first_of_each_call(kernels)
    waits = [event["ts"] - calls[call]["ts"] for call, event in first.items()]
    floors = [floor.graph if _is_graph(calls[call]) else floor.alone for call in first]
    wall = max(event["ts"] + event["dur"] for event in launched) - min(event["ts"] for event in launched)
    return SkipFigures(
        mode=mode,
        steps=steps,
        kernels_per_step=len(kernels) / steps,
        launches_per_step=len(first) / steps,
        tklqt_ms_per_step=sum(queued) / steps / 1e3,
        launch_and_queue_us=mean(queued),
        wait_us=mean(waits),
        floor_us=mean(floors),
        kernel_us=mean(event["dur"] for event in kernels),
        step_ms=wall / steps / 1e3,
        busy_share=_covered((event["ts"], event["ts"] + event["dur"]) for event in launched) / wall,
    )


def _calls_of(events: Sequence[Event]) -> dict[int, Event]:
    return {_correlation(event): event for event in events if event.get("cat") in _CALLS and event.get("ph") == "X"}


def _correlation(event: Event) -> int:
    return int(event.get("args", {}).get("correlation", 0))


def _is_graph(call: Event) -> bool:
    return "GraphLaunch" in str(call["name"])


def _first_of_each_call(kernels: Iterable[Event]) -> dict[int, Event]:
    first: dict[int, Event] = {}
    for event in kernels:
        call = _correlation(event)
        if call not in first or event["ts"] < first[call]["ts"]:
            first[call] = event
    return first


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=count, default=1, help="requests at once (default: 1)")
    parser.add_argument("--input-len", type=count, default=32, help="prompt tokens (default: 32)")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    check_skip_profile(config)
    facts = facts_here(config.device.device, shape=f"batch {args.batch_size}, {args.input_len} in, {STEPS} steps")
    figures = run_skip_profile(config, args.batch_size, args.input_len)
    print_facts(facts)
    print("\n" + show_skip(figures))
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "launches": skip_as_dicts(figures)})
    return 0


def check_skip_profile(config: EngineConfig) -> None:
    """Raises ConfigError where there are no kernel launches to look at."""
    from headrace.worker.settings import device_kind

    if config.device.executor != "model" or device_kind(config.device.device) != "cuda":
        raise ConfigError(
            "Kernel launches (CUPTI) need a model on a CUDA device; run this where torch finds one, without --device cpu."
        )


def run_skip_profile(config: EngineConfig, batch_size: int, input_len: int, steps: int = STEPS) -> list[SkipFigures]:
    """The steady decode steps of one batch, with graphs (unless they are off) and without. Starts an engine for
    each."""
    config = replace(config, device=replace(config.device, trace=None))  # the timed run's, and not to be overwritten
    eager = replace(config, device=replace(config.device, enforce_eager=True))
    floor = launch_floor()
    return [
        _profiled(each, batch_size, input_len, steps, floor)
        for each in ([eager] if config.device.enforce_eager else [config, eager])
    ]


def show_skip(figures: Sequence[SkipFigures]) -> str:
    rows = [
        [
            each.mode, each.kernels_per_step, each.launches_per_step, each.tklqt_ms_per_step, each.launch_and_queue_us, each.wait_us, each.floor_us,
            each.kernel_us, each.step_ms, f"{1 - each.busy_share:.1%}", each.verdict,
        ]
        for each in figures
    ]  # fmt: skip
    return "kernel launches in steady decode (SKIP, under the profiler)\n" + table(COLUMNS, rows)


def skip_as_dicts(figures: Sequence[SkipFigures]) -> list[dict[str, Any]]:
    return [{**asdict(each), "verdict": each.verdict} for each in figures]


def launch_floor() -> LaunchFloor:
    """Medians over launches that each find the device idle."""
    import torch

    x = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x.add_(1.0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1.0)

    def one_by_one(launch: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(IDLE_LAUNCHES):
                launch()
                torch.cuda.synchronize()

        return run

    return LaunchFloor(*(_median_wait(profiled(one_by_one(launch))) for launch in (lambda: x.add_(1.0), graph.replay)))


def _median_wait(events: Sequence[Event]) -> float:
    calls = _calls_of(events)
    kernels = [event for event in events if event.get("cat") == "kernel" and _correlation(event) in calls]
    return float(median(event["ts"] - calls[_correlation(event)]["ts"] for event in kernels))


def profiled(work: Callable[[], None]) -> list[Event]:
    """The trace events of ``work`` and of everything it launched. Only CUDA's side is recorded: that of the operators
    costs time itself."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _profiled(config: EngineConfig, batch_size: int, input_len: int, steps: int, floor: LaunchFloor) -> SkipFigures:
    from headrace.engine.llm import LLM

    with LLM.from_config(config) as llm:
        most = steps + 2 * STEPS_BEFORE + 8  # tokens: the batch outlives the profile
        for seed in range(2):  # the first batch compiles and captures
            collectors = _submit(llm, batch_size, input_len, most, seed)
            _until_steady(llm, batch_size)
            events = profiled(lambda: _turn(llm, steps)) if seed else []
            while not all(each.finished for each in collectors):
                llm.turn()
    return skip_figures(events, steps, floor, "eager" if config.device.enforce_eager else "graphs")


def _turn(llm: LLM, times: int) -> None:
    for _ in range(times):
        llm.turn()


def _submit(llm: LLM, batch_size: int, input_len: int, output_len: int, seed: int) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    conversations = random_conversations(
        batch_size, Lengths(input_len, output_len), vocab_size=llm.info.vocab_size, seed=seed
    )
    return [
        llm.submit({"prompt_token_ids": list(conversation.turns[0].new_ids)}, params) for conversation in conversations
    ]


def _until_steady(llm: LLM, batch_size: int) -> None:
    """Turns until the whole batch has decoded for a few steps."""
    decoded = 0
    while decoded < STEPS_BEFORE:
        llm.turn()
        records = llm.engine.recorder.records
        decoded = decoded + 1 if records and records[-1].kind == "decode" and records[-1].rows == batch_size else 0
