"""From a trace of a run to prices that a simulation takes: a device of known prices is found again; hostile and foreign
files are refused."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import cli
from headrace.bench.serve import parse_steps, step_figures
from headrace.clock import VirtualClock
from headrace.commands.simulate_calibrate import report
from headrace.config import DeviceConfig, EngineConfig, SchedulerConfig
from headrace.cost import sharing
from headrace.cost.calibrated import (
    SHIPPED,
    VERSION,
    CalibratedSteps,
    best_calibrated,
    calibrated_path,
    find_calibrated,
    load_calibrated,
    price_of,
    save_calibrated,
)
from headrace.cost.cost_model import CALIBRATED_EVERY, CostModel, FadingError, StepLoad, Work
from headrace.cost.prices import Classes, FrontPrices, FrontWork, HostPrices, Slowness, StepPrices
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.cost.prompt_shapes import PromptShapes, ShapeBounds
from headrace.cost.run_facts import MEASURED_SWITCHES, facts_of
from headrace.cost.shapes import multiplications
from headrace.cost.sharing import SharedBlocks
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.engine.resolve import resolve_config
from headrace.errors import ConfigError
from headrace.observe.metrics import StepRecorder, StepTimes
from headrace.observe.trace import StepTrace, TraceFile
from headrace.planner.against import VOID_STATUS, Compared, compare_figures, status_of
from headrace.planner.calibrate import behind_of, calibrate, fit_front, front_of
from headrace.planner.devices import CPU_EFFICIENCY, GPU_EFFICIENCY, Device, classes_of, find_device, known_devices
from headrace.planner.drive import Drive
from headrace.planner.executor import ModelledExecutor
from headrace.planner.pricing import choose_prices
from headrace.planner.runs import RecordedRun, RecordedStep, read_run
from headrace.planner.simulator import Load, simulate
from headrace.planner.step_time import StepTime
from headrace.planner.workload.load import LoadRequest, drawn, prompt_ids
from headrace.planner.workload.statistics import Sample, summarise
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.request import NewRow, SamplingParams, StepPlan, StepResult
from headrace.spec import DecoderSpec, LayerSpec, RopeSpec, kv_groups
from lab.truth_front import HANDED_ON, front_work
from tests.support.board import steps_page
from tests.support.hash_engine import create_core

SPEC = DecoderSpec(
    "llama", 600, 128, 4, 2, 32, 256, (LayerSpec(),) * 3, 4096, RopeSpec(1e4, 32), checkpoint_dtype="bfloat16"
)
BANDWIDTH, RATE = 1e9, 2e11
ONE = Slowness(1.0, 1.0)
PAIRS = ("products", "head", "experts", "decode", "prompts")


def device(kind: str = "cuda", name: str = "test card", **more: Any) -> Device:
    identity = DeviceIdentity(kind=kind, name=name, threads=0)
    profile = DeviceProfile(
        identity=identity, read_bandwidth=BANDWIDTH, copy_bandwidth=BANDWIDTH, gemm_rates={"bfloat16": RATE}, **more
    )
    return Device(name, profile, 2**33, GPU_EFFICIENCY if kind == "cuda" else CPU_EFFICIENCY, 0.0)


def cost_model(on: Device, spec: DecoderSpec = SPEC) -> CostModel:
    return CostModel(spec, kv_groups(spec, 16, 2), on.profile, weight_bytes=2, dtype="bfloat16")


def true_prices(kind: str = "cuda") -> StepPrices:
    classes = classes_of(kind)
    count = len(classes.names)
    return StepPrices(
        (Slowness(1.4, 1.3),) * count, ONE, (Slowness(2.2, 1.0),) * count, Slowness(0.0, 1.8), 1.0, 1.0, classes, (0.0,) * count, 1e-5,
        # A modelled host works within the handing over.
        host=HostPrices(launch=4e-3, record=2e-3) if kind == "cuda" else HostPrices(4e-4, 1e-5, 2e-5, 1e-6),
    )  # fmt: skip


def traced(path: Path, *run: Any, **more: Any) -> Path:
    ran(path, *run, **more)
    return path


def ran(
    path: Path,
    on: Device,
    asked: list[LoadRequest],
    prices: StepPrices,
    *,
    depth: int = 1,
    spec: DecoderSpec = SPEC,
    model: str = "m",
    room: int = 12,
    graphed: bool = False,
) -> list[Sample]:
    """A run of the real core over a device of these prices, as an engine there would have written it down. ``graphed``:
    steps with prompts, too."""
    costs, clock = cost_model(on, spec), VirtualClock()
    info = keyed_hash_info(
        vocab_size=spec.vocab_size, num_blocks=4000, block_size=16, max_num_seqs=64, max_model_len=4096
    )
    shapes = PromptShapes(ShapeBounds(64, 512, multiplications(spec), 1.0))  # none was recorded ahead
    shapes.add(shapes.first)
    step_time = StepTime(costs, prices, shapes=shapes if graphed else None)
    executor = ModelledExecutor(info, step_time.of_plan, clock)
    config = SchedulerConfig(max_num_batched_tokens=512)
    core = create_core(executor, config, clock, depth=depth)
    facts = facts_of(costs, DeviceConfig(overlap=depth), model=model, engine="test")
    trace = StepTrace(TraceFile(str(path)), StepRecorder(costs), core.stats, name="test", facts=facts)
    core.observe(trace)
    ids = partial(_ids, asked, spec.vocab_size)
    samples = Drive([core], asked, ids, room=room, max_queue=10_000).run().samples
    trace.close()
    return samples


def _ids(asked: list[LoadRequest], vocab_size: int, index: int) -> array[int]:
    return prompt_ids(asked[index], index, vocab_size=vocab_size, seed=0)


def some(count: int = 60, prompt: int = 150, output: int = 12, seed: int = 0) -> list[LoadRequest]:
    from headrace.planner.workload.load import Lengths

    return drawn(count, Lengths(prompt, output, 0.9), seed=seed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("runs") / "a.json", device(), some(90), true_prices(), graphed=True)


@pytest.fixture(scope="module")
def found(run: Path) -> CalibratedSteps:
    return calibrate([read_run(run)], device(), cost_model(device()))


# --- found again


def test_a_device_of_known_prices_is_found_again_and_another_load_is_simulated_as_it_is(found: CalibratedSteps) -> None:
    """Fitted to one workload, held against another: the device's own figures within 3 %."""
    host = found.prices.host
    assert host.step < 1e-6 and (host.launch, host.record) == pytest.approx((4e-3, 2e-3), rel=0.02)
    load = Load(some(40, 90, 30, seed=5), max_concurrency=10)
    truth = replace(device(), calibrated=(replace(found, prices=true_prices()),))
    known, guessed = (
        simulate(SPEC, EngineConfig(), each, load).figures for each in (truth, replace(device(), calibrated=(found,)))
    )
    for each in compare_figures(guessed, [known]):
        assert abs(each.error) < 0.03, (each.figure, each.error)
    assumed = simulate(SPEC, EngineConfig(), device(), load).figures
    assert abs(assumed["duration"] / known["duration"] - 1) > 0.1  # what was assumed is not it


def test_steps_that_wait_for_launches_do_not_make_work_seem_slow(found: CalibratedSteps) -> None:
    """Prompts that the device does in a tenth of the launches' time."""
    costs, step = cost_model(device()), StepLoad(60, 1, (1830.0,), (60.0,), (0.0,), graph_tokens=64)
    fitted, true = (
        each.seconds(costs.work(step), BANDWIDTH, RATE, step, decode=False) for each in (found.prices, true_prices())
    )
    assert fitted == pytest.approx(true, rel=0.1) and true < 3e-3  # launching takes 4
    on = replace(device(), calibrated=(found,))
    graphed, launched = (
        simulate(SPEC, EngineConfig(), on, Load([LoadRequest(size, 1, at=0.0)])).figures["mean_ttft_ms"]
        for size in (3, 2049)
    )
    assert graphed < 2.0 and launched > 4.0


def test_steps_are_fitted_to_what_they_are_known_to_amount_to(run: Path, found: CalibratedSteps) -> None:
    """Half as much work at the same times: such a step, and no other, takes as long as before."""
    costs = cost_model(device())

    def halved(step: RecordedStep) -> Work:
        work = costs.work(step.load)
        parts = {name: (part[0] / 2, part[1] / 2) for name in PAIRS for part in [getattr(work, name)]}
        return replace(work, **parts, others=work.others / 2, activations=work.activations / 2)

    again, steps = calibrate([read_run(run)], device(), costs, [halved]), read_run(run).steps
    for step in steps[5::9]:
        known, halves = (
            each.prices.seconds(work, BANDWIDTH, RATE, step.load, decode=step.decode)
            for each, work in ((found, costs.work(step.load)), (again, halved(step)))
        )
        assert halves == pytest.approx(known, rel=0.02)


@pytest.mark.parametrize("depth", [0, 1])
def test_on_a_cpu_nothing_is_launched_and_the_host_shows(tmp_path: Path, depth: int) -> None:
    on = device("cpu", "a cpu")
    path = traced(tmp_path / "c.json", on, some(40), true_prices("cpu"), depth=depth)
    found = calibrate([read_run(path)], on, cost_model(on))
    assert found.prices.host.launch == 0.0 and found.prices.classes == Classes((40,))
    if depth == 1:  # a modelled device is no CPU's own thread at depth 0
        assert found.prices.host.step == pytest.approx(4e-4, rel=0.2)


def test_the_report_counts_what_was_fitted_and_says_what_was_not(found: CalibratedSteps) -> None:
    text = "\n".join(report(found))
    assert f"{len(found.fitted)} parameters were fitted" in text and "no step was decided by it" in text
    assert "it covers steps of up to 512 tokens and 12 sequences" in text and found.runs[0].sha256[:12] in text


def test_the_running_engine_is_told_the_same_price(found: CalibratedSteps) -> None:
    model, costs = price_of(found, cost_model(device())), cost_model(device())
    load = costs.load_of(_plan([0, 1], [40, 90], [1, 1]))
    on, config = replace(device(), calibrated=(found,)), resolve_config(EngineConfig(), "cuda")[0]
    step_time = choose_prices(on, config, costs, tuple(kv_groups(SPEC, 16, 2))).step_time
    assert model(load, True) == pytest.approx(step_time.of_load(load, rows=2).seconds)


def test_kernels_have_the_class_of_their_own_sizes_however_they_are_launched() -> None:
    """By graph or by launch, GEMMs fitted to graphs of 512 tokens priced one of 2,048 10 % too high, and attention of a
    hundred sequences beside a prompt was a quarter too cheap."""
    classes = classes_of("cuda", products=2e8)
    assert classes.middle == (256, 700) and len(classes.gemm_names) == len(classes.names)
    seen = ((1830.0,), (60.0,), (0.0,))
    for tokens, graph, place in ((60, 64, 3), (200, 0, 4), (200, 320, 5), (600, 0, 5), (600, 704, 6), (8000, 0, 6)):
        load = StepLoad(tokens, 40, *seen, graph_tokens=graph)
        assert (classes.gemm_place(load, decode=False), classes.keys_place(load, decode=False)) == (place, 3)
        assert classes.gemm_place(load, decode=True) == classes.place(tokens, decode=True)
    plain = classes_of("cuda")
    assert plain.gemm_place(load, decode=False) == plain.keys_place(load, decode=False) == 6


def test_a_graph_reads_shared_keys_for_each_of_its_sequences(run: Path, tmp_path: Path) -> None:
    lines = run.read_text().replace('"saved":[]', '"saved":[32.0]')
    (tmp_path / "shared.json").write_text(lines)
    steps = read_run(tmp_path / "shared.json").steps
    assert {bool(step.load.saved) for step in steps if step.load.graphed} == {False}
    assert any(step.load.saved for step in steps if not step.load.graphed)


def test_of_the_hosts_seconds_those_behind_the_devices_beginning_are_told_apart() -> None:
    """An idle device begins 0.5 ms after a step was scheduled, though the host is at each for 1 ms."""
    host = HostPrices(step=1e-3, graphed=2e-3)
    step = RecordedStep(
        step_id=1, load=StepLoad(1, 1, (1.0,), (1.0,)), rows=1, added=0, added_tokens=0, decode=True, longest=1, continuous=True, seconds=3e-3,
        ended=3.5e-3, scheduled=0.0, submitted=1e-4, queued=4e-4, waited=0.0, collected=4e-3,
    )  # fmt: skip
    graph = replace(step, load=replace(step.load, graph_tokens=16), decode=False, continuous=False, ended=5e-3)
    assert behind_of(host, [step] * 9, [graph] * 9) == pytest.approx((6e-4, 4e-4))
    assert behind_of(host, [step] * 9, [graph]) == (pytest.approx(6e-4), 0.0) and behind_of(host, [], []) == (0.0, 0.0)


def test_an_engine_without_graphs_launches_steps_with_prompts(found: CalibratedSteps) -> None:
    costs = cost_model(device())
    on = replace(
        device(),
        calibrated=(
            found,
            replace(found, switches={"enforce_eager": True}),
            replace(found, switches={"prompt_graphs": False}),
        ),
    )
    launched = []
    for switches in ({}, {"enforce_eager": True}, {"prompt_graphs": False}):
        config = resolve_config(replace(EngineConfig(), device=DeviceConfig(**switches)), "cuda")[0]
        step_time = choose_prices(on, config, costs, tuple(kv_groups(SPEC, 16, 2))).step_time
        launched.append(step_time.of_load(StepLoad(60, 1, (1830.0,), (60.0,), (0.0,)), decode=False).launch_seconds > 0)
    assert launched == [False, True, True]


def test_what_a_step_costs_beside_its_work_is_its_layers(found: CalibratedSteps) -> None:
    """Of twice as many: launching, recording, shared keys."""
    deep = replace(SPEC, layers=SPEC.layers * 2)
    on = replace(device(), calibrated=(replace(found, prices=replace(found.prices, shared=1e-3)),))
    config, groups = resolve_config(EngineConfig(), "cuda")[0], tuple(kv_groups(deep, 16, 2))
    shared, plain = (
        choose_prices(on, config, cost_model(device(), deep), groups).step_time.of_load(
            StepLoad(4, 4, (80.0,), (80.0,), (80.0,), saved), rows=4
        )
        for saved in ((1e-9,), ())
    )
    assert shared.seconds - plain.seconds == pytest.approx(2e-3, rel=1e-3)


# --- files


def test_a_calibration_is_kept_and_found_for_its_device_model_and_switches(
    found: CalibratedSteps, tmp_path: Path
) -> None:
    save_calibrated(found, calibrated_path(found, tmp_path))
    other = replace(found, model="wide", shape=replace(found.shape, hidden=4096))
    save_calibrated(other, calibrated_path(other, tmp_path))
    eager = replace(found, switches={"enforce_eager": True})
    save_calibrated(eager, calibrated_path(eager, tmp_path))
    kept = find_calibrated(device().profile.identity, [tmp_path])
    assert sorted(each.model for each in kept) == ["m", "m", "wide"] and found in kept
    assert best_calibrated(kept, SPEC, "bfloat16", {}) == (found, ())
    assert best_calibrated(kept, SPEC, "bfloat16", {"enforce_eager": True})[0] == eager
    assert best_calibrated(kept, SPEC, "bfloat16", {"flat_gemm": False}) == (None, ())
    assert find_calibrated(device(name="another").profile.identity, [tmp_path]) == []


def test_another_model_or_precision_is_marked_as_extrapolation(found: CalibratedSteps) -> None:
    wide = replace(SPEC, hidden_size=256)
    best, other = best_calibrated([found], wide, "float16", {})
    assert (
        best == found and len(other) == 2 and "another model" in other[0] and "another precision (bfloat16)" in other[1]
    )
    packed = replace(SPEC, formats=(("head", (ScaledWeight("float8_e4m3fn", (1, WHOLE)),)),))
    assert best_calibrated([found], packed, "bfloat16", {}) == (found, ("weights that are not quantized",))


def test_what_lies_beyond_the_fitted_steps_is_marked(found: CalibratedSteps) -> None:
    on = replace(device(), calibrated=(found,))
    inside = simulate(SPEC, EngineConfig(), on, Load(some(8, 60, 5), max_concurrency=4))
    assert inside.facts["extrapolated"] == [] and inside.facts["fitted_parameters"] == len(found.fitted)
    beyond = simulate(SPEC, EngineConfig(), on, Load([LoadRequest(3000, 20, at=0.0)] * 30))
    told = " ".join(beyond.facts["extrapolated"])
    assert (
        "steps of 30 sequences (fitted up to 12)" in told
        and "sequences of 3,020 tokens" in told
        and "tokens (fitted up to 512)" in told
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_file_with_a_number_that_is_none_is_refused_by_its_name(
    found: CalibratedSteps, tmp_path_factory: Any, data: st.DataObject
) -> None:
    stored = json.loads(json.dumps({"version_of_file": VERSION, **asdict(found)}))
    path = tmp_path_factory.mktemp("c") / "x.calibrated.json"
    places = [
        ("prices", "others"),
        ("prices", "sampled"),
        ("covered", "tokens"),
        ("median_error",),
        ("bandwidth",),
        ("prices", "host", "step"),
    ]
    *way, last = data.draw(st.sampled_from(places))
    at = stored
    for name in way:
        at = at[name]
    at[last] = data.draw(st.sampled_from([-1.0, float("nan"), float("inf"), -1e-300]))
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=f"{last} = .*not a number of at least 0"):
        load_calibrated(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version_of_file": 1}', '{"version_of_file": 9}', "nonsense"])
def test_files_that_are_no_calibration_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.calibrated.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.calibrated\.json.*calibrate again"):
        load_calibrated(path)


def test_a_file_that_is_not_there_need_not_be_deleted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json is not there; give the path of a file that is\.$"):
        load_calibrated(tmp_path / "absent.json")


def test_what_is_shipped_can_be_read_and_is_of_a_device_that_is_known() -> None:
    for path in SHIPPED.glob("*.json"):
        each = load_calibrated(path)
        (name,) = (key for key, known in known_devices().items() if known.profile.identity.name == each.device.name)
        assert each in find_device(name, threads=1, memory=None, free_memory=0).calibrated


# --- runs that say too little, or something else


def edited(run: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The trace with every event of a device's step changed."""
    lines = run.read_text().split("\n")
    for index, line in enumerate(lines):
        text = line.rstrip(",")
        if '"tid":2' in text and '"cat":"step"' in text:
            event = json.loads(text)
            change(event)
            lines[index] = json.dumps(event) + ("," if line.endswith(",") else "")
    path = tmp_path / "edited.json"
    path.write_text("\n".join(lines))
    return path


WRONG_STEPS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda event: event["args"].update({"measured ms": -1.0}), "Expected `float` >= 0.0 - at `$.measured ms`"),
    (lambda event: event["args"].update({"measured ms": math.nan}), "malformed"),
    (lambda event: event["args"].update({"tokens": "many"}), "Expected `int`, got `str` - at `$.tokens`"),
    (lambda event: event["args"]["load"].update({"keys": [math.inf]}), "malformed"),
    (lambda event: event.update({"ts": -5.0}), "Expected `float` >= 0.0 - at `$.ts`"),
    (lambda event: event.update({"dur": "long"}), "Expected `float`, got `str` - at `$.dur`"),
    (lambda event: event["args"].pop("load"), "missing required field `load`"),
    (lambda event: event["args"].pop("step"), "missing required field `step`"),
]


@pytest.mark.parametrize(("change", "says"), WRONG_STEPS, ids=[says for _, says in WRONG_STEPS])
def test_steps_that_cannot_be_meant_are_refused(
    run: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_run(edited(run, tmp_path, change))
    assert says in refused.value.message


@pytest.mark.parametrize("text", ["", "{}", '{"completed": 3}', "[\nnonsense\n{}\n]", "PK\x03\x04"])
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json .*--trace FILE"):
        read_run(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / "absent.json")


def test_a_trace_of_a_killed_process_is_read_up_to_its_end(run: Path, tmp_path: Path) -> None:
    whole = read_run(run)
    path = tmp_path / "torn.json"
    path.write_text(run.read_text()[: int(run.stat().st_size * 0.7)])
    torn = read_run(path)
    assert 0.5 * len(whole.steps) < len(torn.steps) < len(whole.steps) and torn.sha256 != whole.sha256


def test_runs_of_another_device_model_or_setting_and_too_few_steps_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is of test card with 0 threads, but --device is other"):
        calibrate([read_run(run)], device(name="other"), cost_model(device()))
    wide = replace(SPEC, hidden_size=256)
    with pytest.raises(
        ConfigError, match=r"of another model: llama: 3 layers of 128.*--model is llama: 3 layers of 256"
    ):
        calibrate([read_run(run)], device(), cost_model(device(), wide))
    few = traced(tmp_path / "few.json", device(), some(2, 20, 6), true_prices())
    with pytest.raises(ConfigError, match=r"few.json has \d+ whole steps, and at least 20"):
        calibrate([read_run(few)], device(), cost_model(device()))
    deep = traced(tmp_path / "deep.json", device(), some(30), true_prices(), depth=2)
    with pytest.raises(ConfigError, match="overlap 2 and no switches, the first one with overlap 1"):
        calibrate([read_run(run), read_run(deep)], device(), cost_model(device()))


def test_a_run_whose_steps_are_alike_says_what_it_cannot_tell(tmp_path: Path) -> None:
    asked = [LoadRequest(1, 60, at=0.0)]
    found = calibrate(
        [read_run(traced(tmp_path / "same.json", device(), asked, true_prices()))], device(), cost_model(device())
    )
    assert any("cannot be told apart" in each.note for each in found.parameters)


# --- the front end


def seen(folder: Path, front: FrontPrices, asked: list[LoadRequest], room: int = 1) -> tuple[Path, RecordedRun]:
    """A run, one request after another, and what its clients saw behind such a front end."""
    samples = ran(folder / "run.json", device(), asked, true_prices(), room=room)
    requests = [
        asdict(each) | {"arrivals": [at + front.seconds(each.prompt_tokens) for at in each.arrivals]}
        for each in samples
    ]
    path = folder / "seen.json"
    path.write_text(json.dumps({"requests": requests}))
    return path, read_run(folder / "run.json")


def test_a_front_end_is_found_again_and_shifts_first_tokens(found: CalibratedSteps, tmp_path: Path) -> None:
    path, run = seen(tmp_path, FrontPrices(2e-3, 5e-6), some(30))
    fitted = fit_front([path], found, run)
    assert (
        fitted.front is not None
        and fitted.front.request == pytest.approx(2e-3, rel=0.02)
        and fitted.front.token == pytest.approx(5e-6, rel=0.02)
    )
    assert [each.name for each in fitted.runs] == ["a.json", "seen.json"]
    asked = [replace(each, at=0.2 * index) for index, each in enumerate(some(30))]
    plain, behind = (
        simulate(SPEC, EngineConfig(), replace(device(), calibrated=(each,)), Load(asked)).figures
        for each in (found, fitted)
    )
    assert behind["median_ttft_ms"] - plain["median_ttft_ms"] == pytest.approx(2.0 + 0.005 * 150, rel=0.3)
    assert behind["median_tpot_ms"] == pytest.approx(plain["median_tpot_ms"], rel=0.05)


def test_a_client_whose_request_is_under_way_misses_the_next_step(found: CalibratedSteps) -> None:
    """In a closed loop: without a front end the next request joins the step after the last token, with one it waits for
    that."""
    load = Load([LoadRequest(20, 30) for _ in range(40)], max_concurrency=8)
    both = [
        simulate(SPEC, EngineConfig(), replace(device(), calibrated=(replace(found, front=front),)), load).figures
        for front in (None, FrontPrices(1e-4))
    ]
    assert both[1]["median_ttft_ms"] >= both[0]["median_ttft_ms"]


def burst(found: CalibratedSteps, front: FrontPrices) -> dict[str, Any]:
    load = Load([LoadRequest(20, 2, at=0.0)] * 41)
    return simulate(SPEC, EngineConfig(), replace(device(), calibrated=(replace(found, front=front),)), load).figures


def test_tokens_of_a_burst_leave_once_all_of_it_has_passed_the_front_end(found: CalibratedSteps) -> None:
    assert burst(found, FrontPrices(0.01, 1e-4))["median_ttft_ms"] == pytest.approx(41 * (10 + 2), rel=0.1)
    working = FrontPrices(0.01, 1e-4, FrontWork(0.005, 1e-4))
    assert burst(found, working)["median_ttft_ms"] == pytest.approx(41 * (5 + 2), rel=0.1)


def test_tokens_leave_no_faster_than_the_front_end_streams(found: CalibratedSteps) -> None:
    plain, slow = (
        burst(found, FrontPrices(0.0, 0.0, FrontWork(output_token=each)))["median_tpot_ms"] for each in (0.0, 0.01)
    )
    assert slow > plain and slow >= 41 * 10


def test_a_front_ends_work_is_found_again(tmp_path: Path) -> None:
    paths = []
    names = ("completed", "total_input_tokens", "total_output_tokens", "messages", "steps")
    loads = [
        (10, 90, 60, 60, 60),
        (200, 9000, 4000, 500, 20),
        (32, 64000, 900, 900, 30),
        (7, 7, 700, 30, 100),
        (1, 8000, 64, 64, 64),
        (90, 400, 9000, 100, 200),
    ]
    for number, load in enumerate(loads):
        seconds = sum(times * price for times, price in zip(load, (1e-3, 2e-6, 1e-6, 1e-5, 3e-5), strict=True))
        figures: dict[str, Any] = dict(zip(names, load, strict=True))
        messages = [float(number) for number in range(figures.pop("messages"))]
        figures["requests"] = [{"arrivals": messages + messages[:1]}]
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(figures | {"front_cpu_seconds": seconds}))
    work = front_work(paths)
    assert work is not None
    assert (work.request, work.prompt_token) == pytest.approx((1e-3, 2e-6), rel=0.05)
    assert (work.output_token, work.message, work.step) == pytest.approx((1e-6, 1e-5, 3e-5), rel=0.05)
    assert front_work(paths[:3]) is None
    for path in paths:
        row = json.loads(path.read_text())
        path.write_text(json.dumps(row | {"front_cpu_seconds": row["front_cpu_seconds"] + 5e-4 * row["completed"]}))
        handed_on = row["completed"] * 1e-3 + row["total_input_tokens"] * 2e-6
        path.write_text(
            json.dumps(json.loads(path.read_text()) | ({HANDED_ON: handed_on} if path in paths[1:3] else {}))
        )
    work = front_work(paths)
    assert work is not None
    assert (work.request, work.prompt_token, work.ended) == pytest.approx((1e-3, 2e-6, 5e-4), rel=0.05)
    assert (work.output_token, work.message, work.step) == pytest.approx((1e-6, 1e-5, 3e-5), rel=0.05)


def test_prompts_of_one_length_give_one_number() -> None:
    assert front_of([9] * 9, [3e-3] * 9) == FrontPrices(pytest.approx(3e-3), 0.0)  # type: ignore[arg-type]
    assert front_of([5, 9, 11], [-1e-3] * 3) == FrontPrices(0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[:3], "has 3 requests with an answer, and at least 5"),
        (
            lambda rows: [{**each, "prompt_tokens": each["prompt_tokens"] + 1} for each in rows],
            "are not found in run.json in their order",
        ),
        (lambda rows: [{**each, "arrivals": [-1.0]} for each in rows], "tokens at -1 …, which cannot have happened"),
        (
            lambda rows: [{**each, "arrivals": [2.0, 1.0]} for each in rows],
            "tokens at 2, 1 …, which cannot have happened",
        ),
        (
            lambda rows: [{**each, "cached_tokens": each["prompt_tokens"]} for each in rows],
            "100% of its prompt tokens came from the cache",
        ),
        (lambda rows: [{}], "missing required field `sent`"),
    ],
)
def test_clients_files_that_say_nothing_are_refused(
    found: CalibratedSteps, tmp_path: Path, change: Callable[[list[dict[str, Any]]], Any], says: str
) -> None:
    path, run = seen(tmp_path, FrontPrices(), some(10))
    path.write_text(json.dumps({"requests": change(json.loads(path.read_text())["requests"])}))
    with pytest.raises(ConfigError) as refused:
        fit_front([path], found, run)
    assert says in refused.value.message


def test_requests_that_never_came_alone_say_nothing_of_a_front_end(found: CalibratedSteps, tmp_path: Path) -> None:
    path, run = seen(tmp_path, FrontPrices(), some(20), room=10)
    with pytest.raises(ConfigError, match="came to an idle engine"):
        fit_front([path], found, run)


# --- keys that are read once


def _none(count: int) -> list[array[int]]:
    return [array("i")] * count


def _plan(
    rows: list[int],
    starts: list[int],
    counts: list[int],
    added: tuple[NewRow, ...] = (),
    edits: list[tuple[int, int, int, int]] | None = None,
    dropped: list[int] | None = None,
) -> StepPlan:
    row, group, index, block = (array("i", column) for column in zip(*edits, strict=True)) if edits else _none(4)
    none, sampled = array("i"), array("i", range(len(rows)))
    work = array("i", rows), array("i", starts), array("i", counts)
    return StepPlan(
        0,
        array("i", dropped or []),
        added,
        row,
        group,
        index,
        block,
        none,
        none,
        none,
        *work,
        sampled,
        array("i", rows),
    )


def _row(row: int) -> NewRow:
    return NewRow(row, row, array("i", [1]), 1, SamplingParams(), 0, ())


def _begun(tracker: SharedBlocks, rows: int, shared: int, own: int) -> tuple[float, ...]:
    """``rows`` sequences whose first ``shared`` blocks of 128 are the same, and then ``own`` of their own; all
    decode."""
    edits = [(row, 0, index, index) for row in range(rows) for index in range(shared)]
    edits += [(row, 0, shared + index, 1000 + 50 * row + index) for row in range(rows) for index in range(own)]
    context = 128 * (shared + own) - 3
    return tracker.observe(
        _plan(list(range(rows)), [context] * rows, [1] * rows, tuple(_row(row) for row in range(rows)), edits)
    )


def test_shared_blocks_are_read_once_a_chunk() -> None:
    """64 queries × heads in a tile: of 4 heads a KV head, 16 sequences read together."""
    groups = kv_groups(SPEC, 128, 2)
    assert _begun(SharedBlocks(groups, 4), 32, 8, 1) == (8 * 128 * (32 - 2),)
    assert _begun(SharedBlocks(groups, 1), 32, 8, 1) == (8 * 128 * (32 - 1),)
    assert _begun(SharedBlocks(groups, 4), 15, 8, 1) == (0.0,)  # too few to look
    assert _begun(SharedBlocks(groups, 4), 32, 0, 3) == (0.0,)


def test_sharing_ends_when_sequences_do_and_windows_share_nothing() -> None:
    groups = kv_groups(SPEC, 128, 2)
    tracker = SharedBlocks(groups, 1)
    _begun(tracker, 20, 8, 1)
    assert tracker.observe(_plan(list(range(3, 20)), [1200] * 17, [1] * 17, dropped=[0, 1, 2])) == (8 * 128 * 16,)
    assert tracker.observe(_plan([19], [1200], [1], dropped=list(range(3, 19)))) == (0.0,) and tracker.followed == 1
    window = SharedBlocks(kv_groups(replace(SPEC, layers=(LayerSpec(window=256),) * 3), 128, 2), 1)
    assert _begun(window, 32, 8, 1) == (0.0,)


def test_a_simulated_card_is_quicker_where_prompts_begin_alike() -> None:
    from headrace.planner.workload.load import Lengths

    asked = drawn(48, Lengths(20, 40), prefix=1024, num_prefixes=1)
    figures = [
        simulate(
            SPEC, replace(EngineConfig(), device=DeviceConfig(cascade_attention=on)), device(), Load(asked)
        ).figures
        for on in (True, False)
    ]
    assert figures[0]["median_itl_ms"] < 0.8 * figures[1]["median_itl_ms"]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=30), st.integers(0, 2**31))
def test_nothing_is_saved_that_nobody_reads(rows: list[tuple[int, int]], seed: int) -> None:
    """Whatever the tables: between 0 and all keys but one reading."""
    groups, rng = kv_groups(SPEC, 128, 2), np.random.default_rng(seed)
    edits = [
        (row, 0, index, int(rng.integers(0, 4)))
        for row, (shared, own) in enumerate(rows)
        for index in range(shared + own)
    ]
    starts = [128 * (shared + own) + 1 for shared, own in rows]
    names = list(range(len(rows)))
    (saved,) = SharedBlocks(groups, 2).observe(_plan(names, starts, [1] * len(rows), tuple(map(_row, names)), edits))
    assert 0.0 <= saved <= sum(starts)


# --- the command, and what a server tells


def test_the_command_calibrates_simulates_and_refuses_the_run_it_was_fitted_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the H200 of the catalogue, as if it were as slow as that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from headrace.models import families
    from headrace.models.source import find_model

    spec = families.spec_from_config(find_model(EngineConfig().model).config)
    card = known_devices()["h200"]
    path = traced(tmp_path / "a.json", card, some(40, 300, 20), true_prices(), spec=spec, model="demo")
    assert cli.main(["simulate", "--device", "h200", "--dtype", "bfloat16", "--calibrate", str(path)]) == 0
    assert "parameters were fitted" in capsys.readouterr().out and list((tmp_path / "cache").rglob("*.calibrated.json"))
    words = [
        "simulate",
        "--device",
        "h200",
        "--dtype",
        "bfloat16",
        "--num-prompts",
        "8",
        "--output-json",
        str(tmp_path / "s.json"),
    ]
    assert cli.main(words) == 0
    assert "calibrated from" in capsys.readouterr().out
    written = json.loads((tmp_path / "s.json").read_text())
    assert (
        written["prices"]["fitted_parameters"] > 5
        and written["prices"]["fitted_runs"]
        and "extrapolated" in written["prices"]
    )
    alone = ran(tmp_path / "b.json", card, some(10), true_prices(), spec=spec, model="demo", room=1)
    (tmp_path / "c.json").write_text(json.dumps(summarise(alone, 1.0) | {"requests": [asdict(each) for each in alone]}))
    front = [
        "simulate",
        "--device",
        "h200",
        "--dtype",
        "bfloat16",
        "--calibrate",
        str(tmp_path / "b.json"),
        "--front-of",
        str(tmp_path / "c.json"),
    ]
    assert cli.main(front) == 0 and "a front end" in capsys.readouterr().out
    shape = [
        "--num-prompts",
        "10",
        "--input-len",
        "149",
        "--output-len",
        "12",
        "--random-range-ratio",
        "0.9",
        "--max-concurrency",
        "1",
    ]
    assert cli.main([*words[:5], *shape, "--against", str(tmp_path / "c.json")]) == 2
    assert "which the prices were fitted to" in capsys.readouterr().err
    assert cli.main([*words[:-2], "--assumed-prices", "--against", str(tmp_path / "s.json")]) == 0
    assert "assumed, not calibrated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--calibrate nowhere.json", "cannot be read"),
        ("--calibration nowhere.json", "is not there"),
        ("--expert-skew 1.2", "no experts"),
    ],
)
def test_prices_that_cannot_be_had_are_a_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--device", "h200", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_steps_of_a_server_are_read_from_its_page() -> None:
    names = ("steps_total", "step_tokens_total", "step_measured_seconds_total", "step_predicted_seconds_total")

    def page(*values: float) -> str:
        return "".join(f"headrace_{name} {value}\n" for name, value in zip(names, values, strict=True))

    before = parse_steps(page(10, 50, 1.0, 1.0))
    after = parse_steps(page(30, 90, 2.0, 2.2) + 'headrace_step_prediction_error{prediction="calibrated"} -0.04\n')
    figures = step_figures(before, after)
    assert (
        figures["steps"] == 20
        and figures["mean_step_ms"] == pytest.approx(50.0)
        and figures["step_prediction_error"] == pytest.approx(0.2)
    )
    assert figures["step_calibration_error"] == -0.04
    assert "device_joules" not in figures
    pages = (page(10, 50, 1.0, 1.0), 7.5, 2.0), (page(30, 90, 2.0, 2.2), 57.5, 12.0)
    energy = [
        f"headrace_energy_joules_total {joules}\nheadrace_energy_seconds_total {seconds}\n"
        for _, joules, seconds in pages
    ]
    drawn = [parse_steps(steps + more) for (steps, *_), more in zip(pages, energy, strict=True)]
    figures = step_figures(*drawn)
    assert figures["device_joules"] == 50.0 and figures["mean_device_watts"] == 5.0
    for other in (
        step_figures(before, drawn[1]),
        step_figures(drawn[0], after),
    ):  # its counter was found, or lost, meanwhile
        assert "device_joules" not in other and other["steps"] == 20
    assert (
        parse_steps("vllm:num_requests_running 0\n") is None
        and step_figures(None, after) == {}
        and step_figures(after, before) == {}
    )


def test_the_verdict_is_of_two_runs_and_their_spread() -> None:
    simulated = {"mean_step_ms": 10.0, "p99_ttft_ms": 130.0, "output_throughput": 80.0}
    names = ("mean_step_ms", "p99_ttft_ms", "output_throughput")
    runs = [dict(zip(names, values, strict=True)) for values in ((9.0, 100.0, 100.0), (9.8, 110.0, 101.0))]
    held = {each.figure: each for each in compare_figures(simulated, runs)}
    assert held["mean_step_ms"].verdict == "holds" and held["mean_step_ms"].bound == pytest.approx(2 * 0.8 / 9.4)
    assert held["p99_ttft_ms"].verdict == "MISSED" and held["p99_ttft_ms"].bound == 0.2
    assert compare_figures(simulated, runs[:1])[0].row()[-1] == ""
    assert held["output_throughput"].verdict == held["output_throughput"].row()[-1] == "MISSED"


def test_a_machine_that_disagrees_with_itself_gives_no_verdict() -> None:
    def verdicts(*values: float, simulated: float = 10.0) -> tuple[list[str], int]:
        runs = [dict.fromkeys(("mean_step_ms", "p99_itl_ms"), each) for each in (simulated, *values)]
        compared = compare_figures(runs[0], runs[1:])
        return [each.verdict for each in compared], status_of(compared)

    assert verdicts(9.6, 10.4) == (["holds", "holds"], 0)
    assert verdicts(7.0, 13.0) == (["void", "void"], VOID_STATUS), "within twice 60 %, which says nothing"
    assert verdicts(7.0, 13.0, simulated=90.0) == (["void", "void"], VOID_STATUS)
    assert verdicts(9.6, 10.4, simulated=90.0) == (["MISSED", "MISSED"], 1)
    assert verdicts(7.0, simulated=90.0) == (["", ""], 0), "one run"
    assert status_of([Compared("duration", 9.0, 1.0, 0.1), Compared("duration", 9.0, 1.0, 0.9)]) == 1


# --- the error of the running server


def test_the_error_of_a_prediction_fades_and_has_a_sign() -> None:
    error = FadingError()
    for _ in range(200):
        error.observe(1.2, 1.0)
    assert error.signed == pytest.approx(0.2) and error.absolute == pytest.approx(0.2)
    for _ in range(400):
        error.observe(0.9, 1.0)
    assert error.signed == pytest.approx(-0.1, abs=0.01) and error.absolute == pytest.approx(0.1, abs=0.01)
    for predicted, measured in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        error.observe(predicted, measured)
    assert error.count == 600


def test_a_recorder_holds_both_predictions_against_every_step() -> None:
    recorder = StepRecorder(cost_model(device()), calibrated=lambda load, alone: 0.5 if alone else 9.0)
    times = StepTimes(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, True)
    for step in range(40):
        plan = replace(_plan([0, 1], [40 + step, 90 + step], [1, 1]), step_id=step)
        recorder.on_step(plan, StepResult(step, ((1,), (1,)), device_seconds=1.0), times)
    errors = recorder.summary()["prediction_errors"]
    assert errors["calibrated"] == {"count": 40 // CALIBRATED_EVERY, "signed": -0.5, "absolute": 0.5}
    assert errors["learned"]["count"] == 40 and abs(errors["learned"]["signed"]) < 0.5
    page = steps_page(recorder.summary())
    assert 'headrace_step_prediction_error{prediction="calibrated"} -0.5' in page
    assert 'headrace_step_prediction_absolute_error{prediction="learned"}' in page
    assert "step_prediction_error" not in steps_page(StepRecorder().summary())


def test_a_recorder_prices_a_step_with_prompts_as_it_was_computed() -> None:
    told: list[int] = []

    def price(load: StepLoad, alone: bool) -> float:
        told.append(load.graph_tokens)
        return 1.0

    recorder, times = (
        StepRecorder(cost_model(device()), calibrated=price),
        StepTimes(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, True),
    )
    for step, graph_tokens in ((0, 64), (CALIBRATED_EVERY, 0)):
        plan = replace(_plan([0], [0], [50]), step_id=step)
        recorder.on_step(plan, StepResult(step, ((1,),), device_seconds=1.0, graph_tokens=graph_tokens), times)
    assert told == [64, 0]


def test_an_engine_is_told_its_calibration_and_starts_without_one(
    found: CalibratedSteps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.worker.profile import find_price

    costs = cost_model(device())
    assert find_price(costs, {}, [tmp_path]) is None
    save_calibrated(found, calibrated_path(found, tmp_path))
    price = find_price(costs, {}, [tmp_path])
    assert price is not None and price(costs.load_of(_plan([0], [9], [1])), True) > 0
    assert find_price(costs, {"flat_gemm": False}, [tmp_path]) is None
    assert (
        find_price(cost_model(device(), replace(SPEC, hidden_size=256)), {}, [tmp_path]) is None
    )  # another model's says nothing true
    (tmp_path / "x.calibrated.json").write_text("{")
    assert find_price(costs, {}, [tmp_path]) is None and "cannot be read" in caplog.text


def test_steps_after_a_pause_are_told_from_others_and_simulated_so(tmp_path: Path) -> None:
    on, prices = device("cpu", "a cpu"), replace(true_prices("cpu"), woken=5e-3, rested=5e-3)
    asked = [replace(each, at=0.3 * index) for index, each in enumerate(some(40, 60, 6))]
    path = traced(tmp_path / "p.json", on, asked, prices, depth=0)
    found = calibrate([read_run(path)], on, cost_model(on))
    assert found.prices.rested == pytest.approx(5e-3, rel=0.05)
    quick = replace(found, prices=replace(found.prices, woken=0.0, rested=0.0))
    both = [
        simulate(SPEC, EngineConfig(), replace(on, calibrated=(each,)), Load(asked)).figures for each in (quick, found)
    ]
    assert both[1]["median_ttft_ms"] - both[0]["median_ttft_ms"] == pytest.approx(5.0, rel=0.05)
    assert both[1]["median_itl_ms"] == pytest.approx(both[0]["median_itl_ms"], rel=0.01)


def test_every_switch_of_how_steps_are_computed_is_one_that_a_calibration_knows() -> None:
    switches = {
        each.name
        for each in fields(DeviceConfig)
        if each.metadata.get("technique") is True and each.metadata.get("flag") is False
    }
    assert switches - set(MEASURED_SWITCHES) == {
        "cascade_attention",
        "drafts_ahead",
        "expert_dispatch",
        "sequence_parallel",
        "swap_roles",
    }  # whose worth is counted


def test_what_is_assumed_of_kernels_is_what_kernels_say() -> None:
    """Where kernels change with the number of rows, and how shared blocks are read: facts of files that cannot be
    imported here."""
    kernels = Path(sharing.__file__).parents[1] / "kernels"
    text = (kernels / "attention" / "triton_sharing.py").read_text()
    for name, value in (
        ("ROWS", sharing.QUERIES),
        ("UNIT", sharing.UNIT),
        ("FEWEST", sharing.FEWEST),
        ("LEAST_SAVED", sharing.LEAST_SAVED),
    ):
        assert re.search(rf"^{name} = {value}\b", text, re.MULTILINE), name
    forms = json.loads((kernels / "linear" / "measured.json").read_text())["NVIDIA H200"]["flat"]
    assert {row[0] for shape in forms.values() for row in shape} == set(classes_of("cuda").bounds)
    assert re.search(
        rf"^FEW_ROWS = {classes_of('cpu').bounds[0]}\b", (kernels / "linear" / "native.py").read_text(), re.MULTILINE
    )
