"""``python -m lab ranks``: one model over several numbers of ranks, each engine in a process of its own, after another.

What lives here: which rows for how many ranks, and both ends of the child that measures them. What may not: rows
(table_rows.py), timing (table_measure.py), ranks meeting alone (ranks_link.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.arguments import count, output
from headrace.config import EngineConfig
from headrace.observe.report import say, write_json
from lab.jobs import account_of, child_main, config_for, run_child
from lab.table_measure import TableBench
from lab.table_rows import scaled, select_rows
from lab.table_run import measured_row

ROWS = ("decode", "prefill-1x2048", "prefill-1x8192")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=count,
        default=[1, 2],
        metavar="N",
        help="numbers of ranks, one after the other (default: 1 2)",
    )
    parser.add_argument(
        "--rows", nargs="+", default=ROWS, metavar="ROW", help="rows of the table (default: decode and two prompts)"
    )
    parser.add_argument("--repeats", type=count, default=2, help="timed repeats of a row (default: 2)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiplies requests and lengths: to try it out, comparable with nothing",
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each number of ranks (default: 300)")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Exit status 1 where a figure is missing."""
    config = config_for(config.model.model or "Llama-3.1-8B", config)
    job = {"rows": list(args.rows), "repeats": args.repeats, "scale": args.scale, "device": config.device.device}
    found: dict[str, Any] = {}
    found["links"], status = run_child("lab.ranks_link", config, {**job, "size": max(args.sizes)}, timeout=args.limit)
    for size in args.sizes:
        own = replace(config, device=replace(config.device, tensor_parallel_size=size))
        found[str(size)], ended = run_child("lab.ranks", own, job, timeout=args.limit)
        status = status or ended or any(row["problem"] for row in found[str(size)].get("rows", ()))
        if ended:
            say(f"{size} ranks: {ended}")
    print(_table(found, args.sizes))
    if args.output_json:
        write_json(Path(args.output_json), found)
    return 1 if status else 0


def _table(found: Mapping[str, Any], sizes: list[int]) -> str:
    lines = [str(found["links"].get("limits", "limits: not measured"))]
    lines += [f"all-reduce of {size} ranks, {each}" for size, each in found["links"].get("sums", ())]
    for size in sizes:
        rows = [
            (row["row"], median(row["values"]), row["unit"], row["floor"])
            for row in found[str(size)].get("rows", ())
            if row["values"]
        ]
        said = [
            f"{name} {value:.3f} {unit}" + (f" (floor {floor:.3f})" if floor else "")
            for name, value, unit, floor in rows
        ]
        lines.append(f"{size} ranks, ready after {found[str(size)].get('start', 0.0):.1f} s: {'; '.join(said)}")
    return "\n".join(lines)


def work(config: EngineConfig, job: Mapping[str, Any]) -> None:
    """``job``: rows, repeats, scale, result (a file)."""
    from headrace.engine.llm import LLM  # the engine, and torch with it: after its head start

    begin, result = time.perf_counter(), dict[str, Any](rows=[])
    with LLM.from_config(config) as llm:
        result["start"] = time.perf_counter() - begin
        say(
            f"{config.device.tensor_parallel_size} ranks are ready after {result['start']:.1f} s: {llm.engine.core.executor.info.start_seconds}"
        )
        llm.engine.await_kernels()
        bench = TableBench(llm, llm.info.vocab_size, llm.engine.recorder, job["repeats"])
        for row in select_rows(job["rows"]):
            result["rows"].append(asdict(measured_row(bench, scaled(row, job["scale"]))))
            write_json(Path(job["result"]), result | account_of(llm.engine))


if __name__ == "__main__":
    sys.exit(child_main(work))
