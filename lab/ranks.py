"""``python -m lab ranks``: models laid out over several devices, each engine in a process of its own, beside what a
simulation says of the same requests.

    tp2   ep2   pp4   tp2xpp2   cp2   dp2   tensor (ep: whole experts), pipeline, context and data parallel sizes
    NAME:tp4-eager=decode,mixed          of another model, other rows; -eager: without CUDA graphs

Layouts take cards in their order, as many at once as there are cards for; on a CPU one comes after another.

What lives here: which layouts, their cards and their time, and both ends of the child that measures one. What may not:
rows (table_rows.py), timing (table_measure.py), ranks meeting alone (ranks_link.py), predicting (ranks_predicted.py).
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.arguments import count, output
from headrace.config import EngineConfig
from headrace.observe.report import say, write_json
from lab.jobs import account_of, child_main, config_for, run_child
from lab.ranks_link import said
from lab.ranks_predicted import predicted
from lab.table_measure import TableBench
from lab.table_rows import scaled, select_rows
from lab.table_run import measured_row

ROWS = ("decode", "prefill")
_KINDS = {
    "tp": "tensor_parallel_size",
    "ep": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
}
_PART = f"(?:{'|'.join(_KINDS)})[1-9][0-9]?"
_LAYOUT = re.compile(rf"(?:(?P<model>.+):)?(?P<parts>{_PART}(?:x{_PART})*)(?P<eager>-eager)?(?:=(?P<rows>.+))?")
_LEAST_SECONDS = 15.0  # no engine is started for less


@dataclass(frozen=True, slots=True)
class Layout:
    """``name``: as it was asked for; ``sizes``: fields of DeviceConfig. No ``rows``: those of all layouts."""

    name: str
    model: str
    sizes: Mapping[str, Any]
    rows: tuple[str, ...]

    def config(self, config: EngineConfig) -> EngineConfig:
        model = replace(config.model, model=self.model or config.model.model or "Llama-3.1-8B")
        return config_for(model.model or "", replace(config, model=model, device=replace(config.device, **self.sizes)))


def layout(text: str) -> Layout:
    """Raises ArgumentTypeError."""
    found = _LAYOUT.fullmatch(text)
    parts = re.findall(f"({'|'.join(_KINDS)})([0-9]+)", found["parts"]) if found else []
    sizes: dict[str, Any] = {_KINDS[kind]: int(size) for kind, size in parts}
    if found is None or len(sizes) < len(parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no layout such as tp2, tp2xpp2 or NAME:pp4=decode,mixed, each of {', '.join(_KINDS)} at most once"
        )
    if "ep" in dict(parts):
        sizes["enable_expert_parallel"] = True
    if found["eager"]:
        sizes["enforce_eager"] = True
    return Layout(text, found["model"] or "", sizes, tuple((found["rows"] or "").split(",")) if found["rows"] else ())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layouts",
        nargs="+",
        type=layout,
        default=[layout("tp1"), layout("tp2")],
        metavar="LAYOUT",
        help="how a model lies over devices: tp2, pp4, tp2xpp2, dp2, NAME:tp4=decode,mixed (default: tp1 tp2)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=ROWS,
        metavar="ROW",
        help="rows of the table, in this order (default: decode prefill)",
    )
    parser.add_argument("--repeats", type=count, default=2, help="timed repeats of a row (default: 2)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiplies requests and lengths: to try it out, comparable with nothing",
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each layout (default: 300)")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all of it (default: 3600)")
    parser.add_argument(
        "--output-json", type=output, metavar="FILE", help="write all figures as JSON, after each layout"
    )


class Cards:
    """Given out to whoever comes, in the order of their numbers."""

    def __init__(self, count: int) -> None:
        self._free, self._next, self._changed = list(range(count)), 0, threading.Condition()
        self.count = count

    @contextmanager
    def taken(self, number: int, count: int) -> Iterator[list[int]]:
        with self._changed:
            self._changed.wait_for(lambda: self._next == number and len(self._free) >= count)
            mine, self._free, self._next = self._free[:count], self._free[count:], number + 1
            self._changed.notify_all()
        try:
            yield mine
        finally:
            with self._changed:
                self._free = sorted(self._free + mine)
                self._changed.notify_all()


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Exit status 1 where a figure is missing."""
    end = time.monotonic() + args.budget
    configs = [each.config(config) for each in args.layouts]
    for each in args.layouts:
        select_rows(each.rows or args.rows)
    sizes = sorted({each.device.num_ranks for each in configs} - {1})
    job = {"repeats": args.repeats, "scale": args.scale, "device": config.device.device, "sizes": sizes}
    links, status = run_child("lab.ranks_link", configs[0], job, timeout=min(args.limit, args.budget))
    print("\n".join([links.get("limits", "limits: not measured"), *map(said, links.get("sums", ()))]), flush=True)
    found: dict[str, Any] = {"links": links}
    cards = Cards(links.get("cards", 0) or 1)  # a CPU is one

    def one(number: int) -> tuple[str, dict[str, Any]]:
        layout, rows = args.layouts[number], args.layouts[number].rows or args.rows
        needed = min(configs[number].device.num_devices, cards.count)
        with cards.taken(number, needed) as mine:
            figures = _measured(
                configs[number], {**job, "rows": rows}, links, mine, min(args.limit, end - time.monotonic())
            )
        figures["predicted"] = predicted(configs[number], rows, args.scale, links.get("device", ""))
        return layout.name, figures

    with ThreadPoolExecutor(max(2, cards.count)) as pool:
        for done in as_completed([pool.submit(one, number) for number in range(len(configs))]):
            name, figures = done.result()
            found[name] = figures
            status = status or figures["ended"] or any(row["problem"] for row in figures.get("rows", ()))
            print(_table(name, figures), flush=True)
            if args.output_json:
                write_json(Path(args.output_json), found)
    return 1 if status else 0


def _measured(
    config: EngineConfig, job: Mapping[str, Any], links: Mapping[str, Any], cards: Sequence[int], seconds: float
) -> dict[str, Any]:
    if seconds < _LEAST_SECONDS:
        return {"ended": "no time was left for it"}
    seen = ("env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, cards))}") if links.get("cards") else ()
    figures, ended = run_child("lab.ranks", config, job, before=seen, timeout=seconds)
    return {**figures, "ended": ended, "cards": list(cards)}


def _table(name: str, figures: Mapping[str, Any]) -> str:
    """A line a row: what was measured, its spread, what was predicted and by how much that is wrong."""
    lines = [
        f"{name}: ready after {figures.get('start', 0.0):.1f} s"
        + (f" ({figures['ended']})" if figures["ended"] else "")
    ]
    for row in figures.get("rows", ()):
        if row["problem"] or not row["values"]:
            lines.append(f"  {row['row']}: {row['problem']}")
            continue
        value, unit, told = median(row["values"]), row["unit"], figures["predicted"].get(row["row"])
        parts = [f"{value:.3f} {unit} ({min(row['values']):.3f} to {max(row['values']):.3f})"]
        parts += [f"predicted {told:.3f} ({told / value - 1:+.0%})"] if told else []
        parts += [f"floor {row['floor']:.3f}"] if row["floor"] else []
        parts += [f"device idle {row['idle']:.0%}"] if row["idle"] is not None else []
        parts += [f"slowest step: {row['slowest']}"] if row["slowest"] and told and value > 1.2 * told else []
        lines.append(f"  {row['row']}: {', '.join(parts)}")
    return "\n".join(lines)


def work(config: EngineConfig, job: Mapping[str, Any]) -> None:
    """``job``: rows, repeats, scale, result (a file)."""
    from headrace.engine.llm import LLM  # the engine, and torch with it: after its head start

    begin, result = time.perf_counter(), dict[str, Any](rows=[])
    with LLM.from_config(config) as llm:
        result["start"] = time.perf_counter() - begin
        say(f"ready after {result['start']:.1f} s")
        llm.engine.await_kernels()
        stages = config.device.pipeline_parallel_size
        bench = TableBench(llm, llm.info.vocab_size, llm.engine.recorder, job["repeats"], stages=stages)
        for row in (row for name in job["rows"] for row in select_rows([name])):
            result["rows"].append(asdict(measured_row(bench, scaled(row, job["scale"]))))
            write_json(Path(job["result"]), result | account_of(llm.engine))


if __name__ == "__main__":
    sys.exit(child_main(work))
