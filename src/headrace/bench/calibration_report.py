"""What is said of a calibration: every fitted parameter with its confidence, what was kept and why, how far it reaches.

What lives here: words and tables. What may not: fitting, files.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.bench.report import table
from headrace.cost.calibrated import CalibratedSteps
from headrace.cost.step_fit import Parameter

COLUMNS = ("parameter", "fitted", "±", "of the limit", "steps")


def report(found: CalibratedSteps) -> Iterator[str]:
    """Lines."""
    fitted = found.fitted
    yield f"{found}, engine {found.version}"
    yield f"runs: {', '.join(f'{run.name} ({run.steps} steps, sha256 {run.sha256[:12]}…)' for run in found.runs)}"
    yield f"switches: {', '.join(f'{name}={value}' for name, value in found.switches.items()) or 'as an engine has them'}"
    yield f"units: {found.bandwidth / 1e12:.4g} TB/s, {found.rate / 1e12:.4g} TFLOP/s {found.dtype}; a slowness is measured over ideal seconds"
    yield ""
    yield f"{len(fitted)} parameters were fitted:"
    yield table(COLUMNS, [_row(each) for each in fitted])
    yield ""
    kept: dict[str, list[str]] = {}
    for each in found.parameters:
        if each.note:
            kept.setdefault(each.note, []).append(each.name)
    yield f"{len(found.parameters) - len(fitted)} were not:"
    for note, names in kept.items():
        yield f"  {note}: {'; '.join(names)}"
    yield ""
    reach = found.covered
    yield f"it covers steps of up to {reach.tokens:,} tokens and {reach.sequences:,} sequences, and sequences of up to {reach.context:,} tokens"
    yield f"half of the fitted steps lie within {found.median_error:.1%} of their price, nine of ten within {found.p90_error:.1%}"
    if found.steadiness is not None:
        yield f"they took {found.steadiness}; a simulation draws from that"
    if found.front is not None:
        yield f"a front end: {found.front.request * 1e3:.2f} ms a request and {found.front.token * 1e6:.2f} µs a prompt token (2 fitted parameters)"


def _row(each: Parameter) -> list[str | float]:
    seconds = each.name.endswith("seconds")
    value, error = (f"{number * 1e6:.4g} µs" if seconds else f"{number:.4g}" for number in (each.value, each.error))
    share = f"{1.0 / each.value:.0%}" if each.value and not seconds else ""
    return [each.name.removesuffix(", seconds"), value, error if each.error else "at its least", share, each.steps]
