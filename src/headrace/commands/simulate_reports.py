"""``headrace simulate --advise`` and ``--four-costs``: reports about a model on a device that need no load.

What lives here: their flags, their tables, and the simulated sweep shown with the advice. What may not: the arithmetic
(planner/).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from headrace.bench.arguments import declare
from headrace.config import EngineConfig
from headrace.flags import parse_size
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.planner.advice import Advice, advise
from headrace.planner.devices import GIB, Device
from headrace.planner.four_costs import CONTEXTS, Costs, Row, four_costs
from headrace.planner.pricing import Priced, priced
from headrace.planner.simulator import Load, simulate
from headrace.planner.workload.load import LoadRequest
from headrace.spec import DecoderSpec

SWEPT_TOKENS = 1_000_000  # of keys, at most, in one point of the sweep: it computes their prompts, too
CONTEXT = 2048
SIZE = {"type": parse_size}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reports = parser.add_argument_group("reports (they need no load)")
    declare(reports, "simulate_reports.arguments", advise=SIZE, four_costs=SIZE, host_link=SIZE)


def asked(args: argparse.Namespace) -> bool:
    return args.advise is not None or args.four_costs is not None


def run_reports(args: argparse.Namespace, config: EngineConfig, device: Device, spec: DecoderSpec) -> int:
    found = priced(spec, config, device)
    facts = machine_facts(str(device), model=f"{config.model.model or 'demo'}, {found.dtype}")
    print_facts(facts)
    written: dict[str, Any] = {"facts": facts}
    if args.four_costs is not None:
        written["four_costs"] = _show_costs(found, args.four_costs, args.host_link)
        written["prices"] = found.pricing.facts(max(row["context"] for row in written["four_costs"]))
    if args.advise is not None:
        written["advice"] = _show_advice(found, args.advise)
    if args.output_json:
        write_json(args.output_json, written)
    return 0


# --- four costs


def _show_costs(found: Priced, contexts: list[int], host_link: float | None) -> list[dict[str, Any]]:
    rows, notes = four_costs(found, contexts or CONTEXTS, host_link=host_link)
    columns = ("context", "KV GiB", "prompt s", "users", "token ms", "token ms, all", "switch s")
    for title, which in (
        ("at the peak, all memory but the weights for keys and values", "peak"),
        ("by this engine", "engine"),
    ):
        print(f"\n{title}:\n{table(columns, [_cells(row, getattr(row, which)) for row in rows])}")
    for note in (*(f"note: {note}" for note in notes), *of_prices(found, max(row.context for row in rows))):
        print(note)
    return [asdict(row) for row in rows]


def _cells(row: Row, costs: Costs | None) -> list[Any]:
    start: list[Any] = [row.context, row.kv_bytes / GIB]
    if costs is None:
        return [*start, *[None] * 5]
    full = costs.full * 1e3 if costs.full is not None else None
    return [*start, costs.prompt, costs.users, costs.own * 1e3, full, costs.switch]


# --- advice


def _show_advice(found: Priced, context: int) -> dict[str, Any]:
    advice = advise(found, context)
    batches = sorted(
        {
            1,
            max(1, advice.knee // 4),
            max(1, advice.knee // 2),
            advice.knee,
            min(2 * advice.knee, advice.most),
            advice.most,
        }
    )
    points = [_point(found, batch, context) for batch in batches]
    columns = ("sequences", "step ms", "tokens/s", "simulated ms", "error")
    print(
        f"\nsteps that only decode, {context:,} tokens a sequence:\n{table(columns, [[point[column] for column in columns] for point in points])}"
    )
    for line in (*_of_apart(points), *sentences(advice), *of_prices(found, context)):
        print(line)
    return {**asdict(advice), **found.pricing.facts(context), "points": points}


def _of_apart(points: list[dict[str, Any]]) -> list[str]:
    """Why some points have no simulation next to them."""
    return [
        f"note: {point['sequences']:,} sequences were simulated, too, but are not all in memory until the last of them writes: "
        f"{point['apart']} are preempted or end before that, so there is nothing to compare with."
        for point in points if point["apart"]
    ]  # fmt: skip


def sentences(advice: Advice) -> list[str]:
    """The advice in words."""
    share = advice.tokens_a_second / advice.most_tokens_a_second
    if advice.knee == advice.most:
        knee = f"Memory ends before the knee: all {advice.most:,} sequences that fit are worth it ({advice.tokens_a_second:,.0f} tokens/s)."
        spare = "No KV memory is spare."
    else:
        knee = (
            f"The knee is at {advice.knee:,} sequences: {advice.tokens_a_second:,.0f} tokens/s, {share:.0%} of what the {advice.most:,} "
            f"that fit would give, at {advice.step * 1e3:.1f} ms a token (--max-num-seqs {advice.knee})."
        )
        spare = f"Beyond it lie {advice.spare_blocks:,} blocks, {advice.spare_bytes / GIB:.1f} GiB of KV: they buy the last {1 - share:.0%}."
    return [knee, spare, _of_replica(advice)]


def of_prices(found: Priced, context: int) -> list[str]:
    """Where the prices of the steps so far came from, and which of them were never measured."""
    return [
        f"prices: {found.pricing.origin}",
        *(f"extrapolated: {each}" for each in found.pricing.extrapolated(context)),
    ]


def _of_replica(advice: Advice) -> str:
    size = f"{advice.replica_bytes / GIB:.1f} GiB each"
    if not advice.replica_fits:
        return f"A second engine does not fit: two with {advice.knee:,} sequences take {size}."
    gain = f"two with {advice.knee:,} sequences ({size}) would give at most {advice.replica_ratio:.2f} times one with all memory"
    return f"A second engine {'would use the slack' if advice.replica_pays else 'would not pay'}: {gain}."


def _point(found: Priced, batch: int, context: int) -> dict[str, Any]:
    predicted = found.decode_seconds(batch, context)
    simulated, apart = _simulated(found, batch, context) if batch * context <= SWEPT_TOKENS else (None, 0)
    error = f"{predicted / simulated - 1:+.1%}" if simulated else None
    point = {"sequences": batch, "step ms": predicted * 1e3, "tokens/s": batch / predicted}
    return {**point, "simulated ms": simulated * 1e3 if simulated else None, "error": error, "apart": apart}


def _simulated(found: Priced, batch: int, context: int) -> tuple[float | None, int]:
    """The time between tokens while all sequences decode, through the engine's own scheduler, and how many did not
    decode beside the last; None if there are such, or if the context is too short to tell."""
    most = found.config.scheduler.max_num_batched_tokens or 1
    steps = -(-batch * context // max(1, most - batch)) + 2  # until the last prompt is computed
    prompt = context - steps // 2 - 8
    if prompt < 1:
        return None, 0
    scheduler = replace(found.config.scheduler, max_num_seqs=batch, max_num_batched_tokens=max(most, 2 * batch))
    load = Load([LoadRequest(prompt, steps + 24, at=0.0)] * batch, max_queue=batch, front=False)
    report = simulate(found.spec, replace(found.config, scheduler=scheduler), found.device, load)
    last = report.samples[-1]
    apart = int(report.figures["preemptions"]) or sum(each.ended < last.arrivals[20] for each in report.samples)
    return None if apart else median(last.gaps[4:20]), apart
