"""What the steps of a server were during a benchmark, from its /metrics before and after: how many, how long, how wrong their prediction.

Other servers have no such metrics; then there is nothing to say.

What lives here: reading those pages. What may not: sending load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.bench.http_client import BrokenAnswer, HttpClient

_SUMS = {
    "steps": "headrace_steps_total",
    "tokens": "headrace_step_tokens_total",
    "measured": "headrace_step_measured_seconds_total",
    "predicted": "headrace_step_predicted_seconds_total",
}
_ENERGY = {"joules": "headrace_energy_joules_total", "joules_seconds": "headrace_energy_seconds_total"}  # where the server's device counts them
_LINE = re.compile(r"^(headrace_\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)
_CALIBRATED = ("headrace_step_prediction_error", '{prediction="calibrated"}')


async def read_steps(client: HttpClient) -> dict[str, float] | None:
    """Sums since the server's start; None where the server does not tell."""
    try:
        answer = await client.get("/metrics")
    except (OSError, TimeoutError, BrokenAnswer):
        return None
    return parse_steps(answer.body.decode("utf-8", errors="replace")) if answer.status == 200 else None


def parse_steps(page: str) -> dict[str, float] | None:
    """The sums of a page in Prometheus's text format."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in _LINE.findall(page):
        try:
            found[name, labels] = float(value)
        except ValueError:
            continue
    sums = {key: found[name, ""] for key, name in _SUMS.items() if (name, "") in found}
    if len(sums) < len(_SUMS):
        return None
    more = {"calibrated": _CALIBRATED, **{key: (name, "") for key, name in _ENERGY.items()}}
    return sums | {key: found[line] for key, line in more.items() if line in found}


def step_figures(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, float]:
    """Of the steps between: errors are predicted / measured − 1 (of a calibration: of the last steps)."""
    if before is None or after is None or after["steps"] <= before["steps"]:
        return {}
    steps, measured = after["steps"] - before["steps"], after["measured"] - before["measured"]
    figures = {"steps": steps, "mean_step_ms": measured / steps * 1e3, "computed_tokens": after["tokens"] - before["tokens"]}
    predicted = after["predicted"] - before["predicted"]
    if predicted > 0 and measured > 0:
        figures["step_prediction_error"] = predicted / measured - 1.0
    if "calibrated" in after:
        figures["step_calibration_error"] = after["calibrated"]
    joules, seconds = (after.get(key, 0.0) - before.get(key, 0.0) for key in _ENERGY)
    if "joules" in before and seconds > 0:
        figures |= {"device_joules": joules, "mean_device_watts": joules / seconds}
    return figures
