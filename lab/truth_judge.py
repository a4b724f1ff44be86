"""The verdict of ``python -m lab truth``: a part of B as it was simulated, in the mean over lucks, beside the runs of
it that were measured.

What lives here: that comparison, and how it is shown. What may not: measuring (truth_run.py), fitting
(planner/calibrate.py), bounds (planner/against.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import table
from headrace.planner.against import COLUMNS, Compared, compare_figures
from headrace.planner.devices import Device
from headrace.planner.simulator import Load, simulate
from headrace.planner.workload.load import LoadRequest
from headrace.spec import DecoderSpec
from lab.truth_loads import Part

ASKED = (
    "mean_step_ms",
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "p99_ttft_ms",
    "p99_tpot_ms",
)  # figures the verdict is of
LUCKS = 8  # simulations of a part, each disturbed otherwise


@dataclass(frozen=True, slots=True)
class Judged:
    """One part of B."""

    part: Part
    compared: tuple[Compared, ...]

    @property
    def asked(self) -> list[Compared]:
        return [each for each in self.compared if each.figure in ASKED]

    def __str__(self) -> str:
        rows = [[*each.row()[:-1], each.row()[-1] if each.figure in ASKED else ""] for each in self.compared]
        return f"B, {self.part.name} ({self.part}):\n{table(COLUMNS, rows)}"

    def as_dict(self) -> dict[str, Any]:
        figures = []
        for each in self.compared:
            judged = {"error": each.error, "bound": each.bound, "asked": each.figure in ASKED, "verdict": each.verdict}
            figures.append(asdict(each) | judged)
        return {"load": str(self.part), "figures": figures}


def simulated(
    spec: DecoderSpec, config: EngineConfig, device: Device, part: Part, runs: Sequence[Mapping[str, Any]] = (),
    lucks: int = LUCKS, *, front: bool = True, popularity: Sequence[float] = (),
) -> dict[str, float]:  # fmt: skip
    """The mean of each figure; one run a way of sending where nothing disturbs steps. ``runs``: measured ones, as
    whose clients sent the requests of a burst they are simulated. ``front``: requests pass one."""
    found, lucks = [], max(1, lucks // part.times)
    settled = device.kind != "cpu"  # no graphs there
    for asked in [as_sent(part, run) for run in runs] or [part.asked()]:
        load = Load(
            asked, seed=part.seed, max_concurrency=part.room, front=front, popularity=popularity, settled=settled
        )
        for luck in range(lucks):
            report = simulate(spec, config, device, replace(load, luck=luck))
            found.append(report.figures)
            if report.pricing.disturbances(luck) is None:
                break
    return mean_of(found)


def mean_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each figure."""
    names = [name for name, value in runs[0].items() if isinstance(value, (int, float))]
    return {name: sum(run[name] for run in runs) / len(runs) for name in names}


def as_sent(part: Part, run: Mapping[str, Any]) -> list[LoadRequest]:
    """A client takes milliseconds to send hundreds of requests "at once", and a quick engine begins meanwhile: those of
    a burst come when they were sent in this run. Other loads are as they were asked for."""
    asked = part.asked()
    if part.room is None or part.room < part.count:
        return asked
    sent = sorted(float(each["sent"]) for each in run["requests"])
    return [replace(each, at=at - sent[0]) for each, at in zip(asked, sent, strict=True)]


def judge(
    spec: DecoderSpec,
    config: EngineConfig,
    device: Device,
    part: Part,
    repeats: Sequence[Sequence[Mapping[str, Any]]],
    lucks: int = LUCKS,
    *,
    front: bool = True,
    popularity: Sequence[float] = (),
) -> Judged:
    """``repeats``: the runs of each. Raises ConfigError where requests failed."""
    runs = [run for repeat in repeats for run in repeat]
    if failed := sum(each["failed"] for each in runs):
        raise ConfigError(
            f"{failed} requests of the part {part.name} failed, so there is nothing to hold a simulation against."
        )
    measured = [mean_of(repeat) for repeat in repeats]
    return Judged(
        part,
        tuple(
            compare_figures(
                simulated(spec, config, device, part, runs, lucks, front=front, popularity=popularity), measured
            )
        ),
    )
