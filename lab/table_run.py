"""One model's rows in a process of its own: ``python -m lab.table_run JOB.json``.

The result is written anew after every row, so that what was measured is kept whatever happens later.

What lives here: the child of ``python -m lab table``. What may not: definitions of rows (table_rows.py), peers,
rendering.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.bench.offline import limits_here
from headrace.config import EngineConfig
from headrace.cost.profile import Limits
from headrace.errors import HeadraceError
from headrace.observe.report import machine_facts, say, write_json
from lab.jobs import account_of, child_main, device_name
from lab.table_measure import Measured, TableBench
from lab.table_rows import Row, scaled, select_rows


def work(config: EngineConfig, job: Mapping[str, Any]) -> None:
    """``job``: rows (names), scale, repeats, result (a file)."""
    from headrace.worker.energy import create_energy_meter, power_limit
    from headrace.worker.settings import device_kind

    rows = [scaled(row, job["scale"]) for row in select_rows(job["rows"]) if row.group != "start"]
    kind, limits = (
        device_kind(config.device.device),
        limits_here(config.device.device),
    )  # before the engine takes the memory
    facts = machine_facts(str(limits), device=device_name(config), flags=_said(config), **_power_of(power_limit(kind)))
    result: dict[str, Any] = {"facts": facts, "limits": limits_of(limits), "rows": []}
    write_json(Path(job["result"]), result)
    from headrace.engine.llm import LLM  # the engine, and torch with it

    begin = time.perf_counter()
    with LLM.from_config(config) as llm:
        say(f"{llm.info.model} loaded in {time.perf_counter() - begin:.1f} s")
        llm.engine.await_kernels()
        bench = TableBench(
            llm, llm.info.vocab_size, llm.engine.recorder, job["repeats"], joules=create_energy_meter(kind).joules
        )
        for row in rows:
            result["rows"].append(asdict(measured_row(bench, row)))
            write_json(Path(job["result"]), result | account_of(llm.engine))


def _power_of(watts: float | None) -> dict[str, str]:
    return {} if watts is None else {"power limit": f"{watts:.0f} W"}


def _said(config: EngineConfig) -> str:
    longest = f", {config.model.max_model_len} positions" if config.model.max_model_len else ""
    weights = "random weights" if config.model.load_format == "dummy" else "weights of the checkpoint"
    return f"{weights}, greedy, EOS ignored, prompts of random ids{longest}, strict kernels"


def limits_of(limits: Limits) -> dict[str, float]:
    """Those that a peer's are held against: bytes/s, and FLOP/s in bfloat16."""
    return {
        "read_bandwidth": limits.read_bandwidth,
        "copy_bandwidth": limits.copy_bandwidth,
        "gemm_rate": limits.gemm_rates["bfloat16"],
    }


def measured_row(bench: TableBench, row: Row) -> Measured:
    """A row that cannot be measured is a row with a problem; the others go on."""
    try:
        measured = bench.measure(row)
    except HeadraceError as error:
        measured = Measured(row.name, row.unit, problem=error.message)
    middle = f"{measured.median:.4g} {row.unit}" if measured.median is not None else f"missing: {measured.problem}"
    say(f"{row.name}: {middle}")
    return measured


if __name__ == "__main__":
    sys.exit(child_main(work))
