"""``python -m lab truth`` on machines of known prices that drift and are disturbed: they are judged right, and a wrong
price is found."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.clock import VirtualClock
from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.cost.calibrated import SHARES, VERSION, CalibratedSteps, Steadiness, load_calibrated, save_calibrated
from headrace.cost.cost_model import CostModel
from headrace.cost.popularity import touched_experts
from headrace.cost.prices import Slowness, StepPrices
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.cost.run_facts import facts_of
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.errors import ConfigError
from headrace.observe.metrics import StepRecorder
from headrace.observe.trace import StepTrace, TraceFile
from headrace.planner.devices import Device, classes_of
from headrace.planner.executor import ModelledExecutor
from headrace.planner.simulator import Load, simulate
from headrace.planner.steadiness import Disturbances, fit_steadiness
from headrace.planner.step_time import StepTime
from headrace.spec import DecoderSpec, LayerSpec, MoESpec, RopeSpec, kv_groups
from lab import truth_run
from lab.truth import _Bench, _calibrated, _measure, _show, _Taken
from lab.truth_judge import Judged, as_sent, judge
from lab.truth_kept import Kept, Measured, keep, read_kept
from lab.truth_loads import Loads, Part, loads_for, repeated, sized, suited
from lab.truth_routing import as_touched, routed_work
from lab.truth_run import Runner
from tests.support.hash_engine import create_core

SPEC = DecoderSpec(
    "llama", 600, 128, 4, 2, 32, 256, (LayerSpec(),) * 3, 4096, RopeSpec(1e4, 32), checkpoint_dtype="bfloat16"
)
PROFILE = DeviceProfile(
    identity=DeviceIdentity(kind="cpu", name="a machine", threads=0),
    read_bandwidth=1e9,
    copy_bandwidth=1e9,
    gemm_rates={"bfloat16": 2e11},
)
ONE, TWO = Slowness(1.4, 1.3), Slowness(2.2, 1.0)
PRICES = StepPrices(
    (ONE, ONE),
    ONE,
    (TWO, TWO),
    Slowness(0.0, 1.8),
    1.0,
    1.0,
    classes_of("cpu"),
    (1e-3, 1e-3),
    1e-5,
    woken=5e-4,
    rested=2e-3,
)
CONFIG = replace(  # bfloat16 whatever this CPU computes in
    EngineConfig(),
    model=ModelConfig(dtype="bfloat16"),
    cache=CacheConfig(block_size=16),
    scheduler=SchedulerConfig(max_num_batched_tokens=512),
)
RATIOS = tuple(math.exp(0.1 * (share - 0.5) + 3.0 * max(0.0, share - 0.8)) for share in SHARES)
HICCUPS = Steadiness(RATIOS, tuple(math.sqrt(each) for each in RATIOS), 0.6, 0.1)


def fitted(seed: int) -> tuple[Part, ...]:
    shapes = (
        Part("single", 8, 90, 6, 0.9, clients=1),
        Part("decode", 12, 12, 12, clients=12),
        Part("resting", 8, 90, 5, 0.9, rate=2.0, even=True),
        Part("mixed", 24, 150, 12, 0.9, clients=5),
    )
    return tuple(replace(part, seed=seed) for part in shapes)


LOADS = Loads(
    tuple(fitted(10 * number) for number in range(1, 4)),
    (Part("closed", 90, 60, 16, 0.5, clients=4, seed=5), Part("open", 90, 60, 6, 0.5, rate=1.0, seed=6)),
    fronts=(), timed=False, scale=0.01,
)  # fmt: skip


def machine(folder: Path, ratio: Callable[[int, float, bool], float]) -> Runner:
    """An engine of PRICES on virtual time whose steps take ``ratio`` times as long."""
    costs, clock = CostModel(SPEC, kv_groups(SPEC, 16, 2), PROFILE, weight_bytes=2, dtype="bfloat16"), VirtualClock()
    info = keyed_hash_info(
        vocab_size=SPEC.vocab_size, num_blocks=4000, block_size=16, max_num_seqs=64, max_model_len=4096
    )
    executor = ModelledExecutor(info, StepTime(costs, PRICES).of_plan, clock, ratio=ratio)
    core = create_core(executor, CONFIG.scheduler, clock, depth=0)
    facts, path, salts = (
        facts_of(costs, DeviceConfig(overlap=0), model="m", engine="test"),
        folder / "trace.json",
        itertools.count(7, 7919),
    )
    trace = StepTrace(TraceFile(str(path)), StepRecorder(costs), core.stats, name="test", facts=facts)
    return Runner(
        folder, path, lambda part, path: truth_run._drive(core, trace, part, next(salts), SPEC.vocab_size, path)
    )


def drifting(step: int, now: float, alone: bool) -> float:
    """Slower and slower, and two parts in a hundred up and down."""
    return 1.0 + 0.02 * now + 0.02 * math.sin(step)


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine that was measured, and the prices fitted to its A."""

    bench: _Bench
    runner: Runner
    measured: Measured
    found: CalibratedSteps
    device: Device


def measured(folder: Path, ratio: Callable[[int, float, bool], float], loads: Loads = LOADS) -> Seen:
    bench = _Bench(CONFIG, [], SPEC, "a simulated one", folder, True)
    runner = machine(folder, ratio)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truth_run, "SETTLES", 0.0)
        seen = _measure(bench, loads, runner)
    return Seen(bench, runner, seen, *_calibrated([_Taken(bench, runner, seen)]))


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return measured(tmp_path_factory.mktemp("drifted"), drifting)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return measured(
        tmp_path_factory.mktemp("disturbed"), Disturbances(HICCUPS, 3).ratio, replace(LOADS, held=LOADS.held[:1])
    )


def verdict(seen: Seen, found: CalibratedSteps, *names: str, lucks: int = 2) -> list[Judged]:
    """The more ``lucks`` the less chance: of what must hold, and not of what is far off anyway."""
    on, held = replace(seen.device, calibrated=(found,)), seen.measured
    return [
        judge(SPEC, CONFIG, on, part, held.runs[part.name], lucks=lucks) for part in held.held if part.name in names
    ]


def missed(judged: list[Judged]) -> list[str]:
    return [
        f"{each.part.name} {one.figure} {one.error:+.1%}"
        for each in judged
        for one in each.asked
        if one.verdict == "MISSED"
    ]


def error(judged: list[Judged], figure: str) -> float:
    return max(abs(one.error) for each in judged for one in each.compared if one.figure == figure)


def test_a_machine_that_drifts_is_judged_right(drifted: Seen) -> None:
    right = verdict(drifted, drifted.found, "closed", "open", lucks=4)
    assert not missed(right) and error(right, "mean_step_ms") < 0.08
    assert drifted.found.prices.rested > 2.0 * drifted.found.prices.woken
    early = replace(drifted.measured, parts=drifted.measured.parts[: len(LOADS.servings[0])])
    first, _ = _calibrated([_Taken(drifted.bench, drifted.runner, early)])
    assert error(verdict(drifted, first, "closed"), "mean_step_ms") > 0.12, (
        "what was fitted before the machine slowed down"
    )


def test_tails_of_a_machine_that_is_disturbed_are_simulated_and_a_wrong_price_is_found(disturbed: Seen) -> None:
    found = disturbed.found
    assert found.steadiness is not None and found.steadiness.alone[-1] == pytest.approx(RATIOS[-1], rel=0.15)
    assert found.steadiness.prompts[-1] < 0.9 * RATIOS[-1]
    assert found.steadiness.lasting == pytest.approx(HICCUPS.lasting, abs=0.25)
    with_tails = verdict(disturbed, found, "closed", lucks=4)
    assert not [each for each in missed(with_tails) if "p99_ttft" not in each]  # the longest of 90 prompts is luck
    steady = verdict(disturbed, replace(found, steadiness=None), "closed")
    assert error(with_tails, "p99_itl_ms") < 0.7 * error(steady, "p99_itl_ms")
    dear = replace(
        found.prices, products=tuple(Slowness(1.5 * each.bytes, each.flops) for each in found.prices.products)
    )
    assert any("mean_step_ms" in each for each in missed(verdict(disturbed, replace(found, prices=dear), "closed")))


def test_figures_of_a_machine_that_disagrees_with_itself_are_counted_apart(
    drifted: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    (judged,) = verdict(drifted, drifted.found, "closed")

    def shown(simulated: float, **spreads: float) -> tuple[int, str]:
        compared = tuple(
            replace(each, simulated=simulated * each.measured, spread=spreads.get(each.figure, 0.01))
            for each in judged.compared
        )
        status = _show(
            argparse.Namespace(model=None, keep=None, output_json=None),
            drifted.found,
            [replace(judged, compared=compared)],
            (),
        )
        return status, capsys.readouterr().out

    assert shown(1.0)[0] == 0
    status, out = shown(1.0, median_ttft_ms=0.5)
    assert (
        status == 3
        and f"{len(judged.asked) - 1} of {len(judged.asked)} figures hold, 1 void" in out
        and "more than 15% apart" in out
    )
    status, out = shown(1.5, median_ttft_ms=0.5)
    assert status == 1 and f"0 of {len(judged.asked)} figures hold, {len(judged.asked) - 1} MISSED, 1 void" in out


def test_steps_of_b_are_none_that_prices_are_fitted_to(drifted: Seen) -> None:
    runner, seen = drifted.runner, drifted.measured
    mine = {step.step_id for step in runner.recorded(seen.parts).steps}
    others = {step for name, span in runner.spans.items() if name not in seen.parts for step in span}
    assert {name[0] for name in seen.parts} == {"a"} and len(runner.spans["b0.closed"]) == seen.runs["closed"][0][0][
        "steps"
    ]
    assert (
        len(runner.spans) == 1 + 3 * 4 + 2 * 2
        and not mine & others
        and sorted(mine | others) == list(range(runner.until))
    )
    assert not any(
        request["cached_tokens"] for runs in seen.runs.values() for (each,) in runs for request in each["requests"]
    )


def test_what_was_measured_is_judged_again_from_its_folder(drifted: Seen) -> None:
    folder, seen, spans = drifted.bench.folder, drifted.measured, drifted.runner.spans
    keep(folder, Kept("cuda", True, False, seen.held, seen.parts, seen.fronts, spans))
    kept, runner, again = read_kept(folder)
    assert kept.spans == spans and again.held == seen.held and again.runs == seen.runs
    found, _ = _calibrated([_Taken(drifted.bench, runner, again)])
    assert found == drifted.found
    save_calibrated(drifted.found, given := folder / "given.json")
    assert _calibrated([_Taken(replace(drifted.bench, prices=str(given)), runner, again)])[0] == found
    with pytest.raises(ConfigError, match="no prices are shipped"):
        _calibrated([_Taken(replace(drifted.bench, prices="shipped"), runner, again)])
    with pytest.raises(ConfigError, match="give what --keep left"):
        read_kept(folder / "nowhere")


# --- loads


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_part_that_is_held_against_is_one_that_was_fitted(kind: str) -> None:
    loads = loads_for(kind, 1.0)
    sizes = [
        {(part.count, part.prompt, part.output, part.seed) for part in parts} for parts in (*loads.servings, loads.held)
    ]
    assert sum(map(len, sizes)) == len(set().union(*sizes))
    with pytest.raises(ConfigError, match="--scale is 0"):
        loads_for(kind, 0.0)


def test_b_repeated_is_the_same_load_of_other_ids() -> None:
    for part in loads_for("cpu", 1.0).held:
        one, other = (
            replace(part, vocabulary=again.vocabulary).conversations(0, 32000)
            for again in (*repeated([part], 0), *repeated([part], 1))
        )
        shapes = [
            [(len(each.turns[0].new_ids), each.turns[0].max_tokens, each.arrival) for each in run]
            for run in (one, other)
        ]
        assert shapes[0] == shapes[1] and all(
            a.turns[0].new_ids[:16] != b.turns[0].new_ids[:16] for a, b in zip(one, other, strict=True)
        )


def test_b_lasts_as_long_on_a_quick_machine_as_on_a_slow_one() -> None:
    def b_at(reached: float) -> list[Part]:
        return sized(loads_for("cpu", 1.0), {"closed": reached, "shared": 2.0 * reached})

    counts = {reached: [part.count for part in b_at(reached)] for reached in (0.1, 1.0, 100.0)}
    assert counts == {0.1: [24, 24, 24], 1.0: [60, 30, 120], 100.0: [800, 800, 800]}
    assert [part.rate for part in b_at(3.0)] == [None, 1.5, None]
    serving = {part.name: part for part in loads_for("cpu", 1.0).servings[0]}
    assert all(suited(part, 2.0) == part for part in serving.values() if not part.even)
    quick = {name: suited(part, 0.05) for name, part in serving.items()}
    assert (quick["resting"].rate, quick["resting"].count, quick["decode-4"].output, quick["mixed"].count) == (
        8.0,
        20,
        128,
        80,
    )


def test_b_lasts_on_a_quick_card_by_more_requests_and_bursts() -> None:
    loads = loads_for("cuda", 1.0)
    counts = [
        [(part.count, part.times) for part in sized(loads, dict.fromkeys(("closed", "burst", "shared"), reached))]
        for reached in (10.0, 130.0, 10_000.0)
    ]
    assert counts[0] == [(128, 1), (84, 1), (200, 1), (160, 1)]
    assert counts[1] == [(390, 1), (195, 1), (200, 2), (160, 2)] and counts[2][2:] == [(200, 8), (160, 8)]
    part = replace(loads.held[3], times=3)
    assert part.names(1) == ["b1.shared", "b1.shared.1", "b1.shared.2"] and str(part).endswith("3 times")
    begun = {each.conversations(0, 32000)[0].turns[0].new_ids[:16] for each in part.each_time()}
    assert (
        len(begun) == 3
        and len({len(each.conversations(0, 32000)[5].turns[0].new_ids) for each in part.each_time()}) == 1
    )


def test_of_a_sparse_model_it_is_counted_how_unevenly_tokens_choose() -> None:
    parts = [part for serving in loads_for("cuda", 1.0).servings for part in serving]
    alike = [part.name for part in parts if part.routes_alike]
    assert len(parts) == 51 and len(alike) == 19 and {"decode-1", "long-1", "prompt-70", "single", "shared"} < {*alike}
    moe, rng = MoESpec(64, 4, 32, True), np.random.default_rng(0)
    even = [[np.stack([rng.permutation(64)[:4] for _ in range(rows)]) for rows in (40, 40, 30)] for _ in range(20)]
    alike = [[np.tile(rng.permutation(64)[:4], (rows, 1)) for rows in (40, 40, 30)] for _ in range(3)]
    for layers in (even, alike, [*even, *alike * 3]):
        touched = np.mean([len(np.unique(step)) for layer in layers for step in layer])
        popularity = as_touched(moe, layers)
        each = [touched_experts(64, 4, rows, popularity) for rows in (40, 40, 30)]
        assert np.mean(each) == pytest.approx(touched, abs=0.8)


def test_what_a_step_amounts_to_is_by_the_model_of_the_part_that_it_was_of() -> None:
    step = SimpleNamespace(step_id=7, load="seven")
    models: dict[str, Any] = {name: SimpleNamespace(work=lambda load, name=name: (name, load)) for name in "abc"}
    spans = {"a": range(3), "b": range(3, 9)}
    seen = [routed_work(spans, {name: models[name] for name in routed}, models["c"])(step) for routed in ("ab", "a")]  # type: ignore[arg-type]
    assert seen == [("b", "seven"), ("c", "seven")]


# --- disturbances


def test_what_disturbs_steps_is_found_again_and_drawn_as_it_was() -> None:
    draws, now = Disturbances(HICCUPS, 1), 0.0
    times, ratios = [], []
    for step in range(4000):
        times.append(now)
        ratios.append(draws.ratio(step, now))
        now += 0.02 * ratios[-1]
    found = fit_steadiness([np.array(times)], [np.array(ratios)], [np.full(4000, True)])
    assert found is not None and found.alone == pytest.approx(RATIOS, rel=0.2)
    assert found.lasting == pytest.approx(HICCUPS.lasting, abs=0.1) and found.seconds in (0.05, 0.1, 0.2)
    again = Disturbances(HICCUPS, 1)
    assert (
        [again.ratio(step, times[step]) for step in range(50)]
        == ratios[:50]
        != [Disturbances(HICCUPS, 2).ratio(step, 0.0) for step in range(50)]
    )
    for count, each in ((90, np.full(90, 1.0)), (9, np.arange(1.0, 10.0))):
        assert fit_steadiness([np.arange(float(count))], [each], [np.full(count, True)]) is None


def test_luck_disturbs_steps_and_a_seed_of_it_is_the_same_again(disturbed: Seen) -> None:
    load = Load(Part("x", 12, 40, 60, clients=12).asked(), max_concurrency=12, luck=4)
    on = replace(disturbed.device, calibrated=(disturbed.found,))
    one, again, other = (simulate(SPEC, CONFIG, on, each).figures for each in (load, load, replace(load, luck=5)))
    assert one == again and one["p99_itl_ms"] != other["p99_itl_ms"]


def test_a_calibration_keeps_its_steadiness_and_refuses_one_that_is_none(disturbed: Seen, tmp_path: Path) -> None:
    found, path = disturbed.found, tmp_path / "x.calibrated.json"
    save_calibrated(found, path)
    assert load_calibrated(path) == found and found.steadiness is not None
    for wrong in ({"alone": [1.0]}, {"prompts": [0.0] * len(SHARES)}, {"seconds": 0.0}, {"lasting": 1.5}):
        stored = {"version_of_file": VERSION, **asdict(found), "steadiness": {**asdict(found.steadiness), **wrong}}
        path.write_text(json.dumps(stored))
        with pytest.raises(ConfigError, match="cannot be read"):
            load_calibrated(path)


def test_a_burst_is_simulated_as_its_clients_sent_it_and_a_closed_loop_as_it_was_asked_for() -> None:
    run = {"requests": [{"sent": at} for at in (7.5, 7.0, 7.25)]}
    assert [each.at for each in as_sent(Part("burst", 3, 10, 4), run)] == [0.0, 0.25, 0.5]
    assert [each.at for each in as_sent(Part("closed", 3, 10, 4, clients=2), run)] == [None] * 3
