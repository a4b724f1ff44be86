"""``python -m lab profile``: where a start's time goes and where a step's, on one page.

What lives here: the children that measure, and the page. What may not: measuring (profile_run.py, profile_step.py,
table_start.py).

A part that cannot be measured here is printed as missing, with its reason.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.arguments import output
from headrace.bench.startup import medians
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig
from headrace.errors import BenchFailed, ConfigError
from headrace.observe.report import machine_facts, say, table, write_json, write_text
from lab.jobs import config_for, flags_of, known_shapes, run_child
from lab.profile_ncu import by_kernel, find_ncu, ncu_command, read_kernels, split_steps, sum_up
from lab.table_start import READY, start_seconds

KERNELS_SHOWN = 8
NAME_WIDTH = 60
NCU_TIMEOUT = 300.0  # s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = f"folders with a config.json, or of these shapes: {', '.join(known_shapes())} (default: Llama-3.1-8B)"
    parser.add_argument("--model", nargs="+", metavar="PATH", default=["Llama-3.1-8B"], help=help_text)
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats (default: 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies requests and lengths: to try it out")
    parser.add_argument("--skip-start", action="store_true", help="leave the start out; it is printed as missing")
    parser.add_argument("--markdown", type=output, metavar="FILE", help="write the pages as markdown")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the engine, behind --")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    if args.repeats < 1 or not 0.0 < args.scale <= 1.0:
        raise ConfigError(
            f"--repeats is {args.repeats} and --scale {args.scale:g}; give at least 1 repeat and a scale above 0 and up to 1."
        )
    sweep = Sweep()
    found = sweep.take(profile_model(name, config_for(name, config), args) for name in args.model)
    pages = [list(sections(model)) for model in found]
    print("\n\n".join(_terminal(model, page) for model, page in zip(found, pages, strict=True)))
    if args.output_json:
        write_json(args.output_json, {"facts": machine_facts("measured for each model"), "models": found})
    if args.markdown:
        write_text(args.markdown, "\n".join(_markdown(model, page) for model, page in zip(found, pages, strict=True)))
    return sweep.status()


def profile_model(name: str, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model. Raises BenchFailed where the engine itself cannot be run."""
    say(f"{name}: start")
    start, problem = _start(config, args)
    say(f"{name}: token times, launches, allocations")
    measured, status = run_child("lab.profile_run", config, {"scale": args.scale, "repeats": args.repeats})
    if not measured:
        raise BenchFailed(
            f"{name} could not be profiled: its process ended with status {status}; what it said is above."
        )
    say(f"{name}: hardware counters")
    counted, uncounted = _counters(config, args.scale, on_gpu=measured["facts"]["device"] != "cpu")
    return {
        "name": Path(name).name,
        "start": start,
        "start_problem": problem,
        **measured,
        "counters": counted,
        "counters_problem": uncounted,
    }


def _start(config: EngineConfig, args: argparse.Namespace) -> tuple[dict[str, float], str | None]:
    if args.skip_start:
        return {}, "not asked for"
    try:
        return medians(start_seconds(flags_of(config, args.flags), args.repeats)), None
    except BenchFailed as error:
        return {}, error.message


def _counters(config: EngineConfig, scale: float, *, on_gpu: bool) -> tuple[list[dict[str, Any]], str | None]:
    """Each case's step: its kernels together, and by name. Or why there are none."""
    ncu = find_ncu()
    if not on_gpu or ncu is None:
        return (
            [],
            "ncu (Nsight Compute) is not installed" if on_gpu else "the engine runs on a CPU, which has no such units",
        )
    from lab.profile_step import counted_config, scaled_cases

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "kernels.csv"
        _, status = run_child(
            "lab.profile_step",
            counted_config(config),
            {"scale": scale},
            before=ncu_command(ncu, log),
            timeout=NCU_TIMEOUT,
        )
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    try:
        steps = split_steps(read_kernels(text.splitlines()))
    except BenchFailed as error:
        said = next((line for line in text.splitlines() if "==ERROR==" in line), "")
        return [], f"{error.message} Its status was {status}. {said}".strip()
    cases = scaled_cases(scale)
    return [
        {
            "step": case.says,
            "all": asdict(sum_up("all", kernels)),
            "kernels": [asdict(share) for share in by_kernel(kernels)[:KERNELS_SHOWN]],
        }
        for case, kernels in zip(cases, steps, strict=False)
    ], None


Section = tuple[str, list[str], list[list[str]], str]  # title, columns, rows, remark


def sections(model: Mapping[str, Any]) -> Iterator[Section]:
    yield _start_section(model)
    yield _token_section(model)
    yield _counter_section(model)
    for counted in model["counters"]:
        yield _kernel_section(counted)
    yield _launch_section(model)
    yield _memory_section(model)


def _start_section(model: Mapping[str, Any]) -> Section:
    rows = [[name, f"{seconds:.3f}"] for name, seconds in model["start"].items()]
    return (
        "The start, in stages",
        ["stage", "s"],
        rows,
        f"missing: {model['start_problem']}" if model["start_problem"] else "",
    )


def _token_section(model: Mapping[str, Any]) -> Section:
    """How many tokens could have been made in the time a start takes: what it must be paid back with."""
    starts = [model["start"].get(name) for name in READY.values()]
    rows = []
    for row in model["timed"]:
        middle, batch = median(row["values"]), row["requests"]
        decode = row["row"].startswith("decode")
        paid = [f"{start / (middle / 1e3) * batch:,.0f}" if decode and start else "" for start in starts]
        rows.append([row["row"], f"{middle:.3f}", f"{min(row['values']):.3f}–{max(row['values']):.3f}", *paid])
    columns = [
        "",
        "ms a step (prefill: to the first token)",
        "spread",
        "tokens in the time of a start, caches empty",
        "caches filled",
    ]
    return "Start against token time", columns, rows, ""


def _counter_section(model: Mapping[str, Any]) -> Section:
    columns = ["step", "kernels", "ms in kernels", "SMs active", "tensor cores active", "memory", "of the read limit"]
    limit = model["limits"]["read_bandwidth"]
    rows = [[each["step"], *_share(each["all"], limit)] for each in model["counters"]]
    remark = "Counted by ncu on an eager engine, kernel by kernel, weighted with their times; one after the other, they run longer than in a graph."
    return (
        "What the device did in a step",
        columns,
        rows,
        f"missing: {model['counters_problem']}" if model["counters_problem"] else remark,
    )


def _kernel_section(counted: Mapping[str, Any]) -> Section:
    columns = ["kernel", "launches", "ms", "SMs active", "tensor cores active", "memory"]
    rows = [[short_name(each["name"]), *_share(each)] for each in counted["kernels"]]
    return f"The longest kernels of {counted['step']}", columns, rows, ""


def _share(each: Mapping[str, Any], limit: float | None = None) -> list[str]:
    bandwidth = each["bandwidth"]
    shares = [f"{each[name]:.1%}" if each[name] is not None else "missing" for name in ("sm_active", "tensor_active")]
    memory = f"{bandwidth / 1e12:.2f} TB/s" if bandwidth is not None else "missing"
    cells = [str(each["count"]), f"{1e3 * each['seconds']:.3f}", *shares, memory]
    return cells if limit is None else [*cells, f"{bandwidth / limit:.1%}" if bandwidth is not None else "missing"]


def short_name(name: str) -> str:
    """Without the arguments of templates and calls that make a line unreadable."""
    bare = name.split("(", 1)[0] if not name.startswith("(") else name
    return bare if len(bare) <= NAME_WIDTH else bare[: NAME_WIDTH - 1] + "…"


def _launch_section(model: Mapping[str, Any]) -> Section:
    names = [name for name in model["steps"][0] if name != "step"] if model["steps"] else []
    rows = [[each["step"], *(f"{each[name]:,.1f}" for name in names)] for each in model["steps"]]
    remark = "" if "kernels" in names else "missing: launches and device allocations; the engine runs on a CPU"
    return "Launches and allocations a decode step, graphs as the engine runs them", ["step", *names], rows, remark


def _memory_section(model: Mapping[str, Any]) -> Section:
    rows = [[f"the engine's account: {name}", _gib(size)] for name, size in model["memory"].items()]
    rows += [[f"device: {name}", _gib(size)] for name, size in model["device_memory"].items()]
    rows += [[f"host, resident: {name}", _gib(size)] for name, size in model["host_memory"].items()]
    return "Footprint", ["", "GiB"], rows, ""


def _gib(size: float) -> str:
    return f"{size / 2**30:.3f}"


def _facts(model: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        f"{name}: {model['facts'][name]}"
        for name in ("date", "device", "machine", "versions", "limits")
        if name in model["facts"]
    )


def _terminal(model: Mapping[str, Any], page: Sequence[Section]) -> str:
    parts = [f"{model['name']}, {model['dtype']}", *_facts(model)]
    for title, columns, rows, remark in page:
        parts += ["", title, *([table(columns, rows)] if rows else []), *([remark] if remark else [])]
    return "\n".join(parts)


def _markdown(model: Mapping[str, Any], page: Sequence[Section]) -> str:
    lines = [f"## {model['name']}, {model['dtype']}", "", *(f"- {fact}" for fact in _facts(model)), ""]
    for title, columns, rows, remark in page:
        lines += [f"### {title}", ""]
        if rows:
            grid = [columns, ["---"] * len(columns), *([cell.replace("|", "/") for cell in row] for row in rows)]
            lines += [*(f"| {' | '.join(row)} |" for row in grid), ""]
        lines += [remark, ""] if remark else []
    return "\n".join(lines)
