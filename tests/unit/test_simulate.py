"""``headrace simulate``: the real core over a device that only takes time; hand-computed cases, equal schedules, loads,
bad input."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.arguments import declared
from headrace.clock import VirtualClock
from headrace.commands import simulate as command
from headrace.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from headrace.cost.prices import FrontPrices
from headrace.cost.profile import DeviceIdentity, DeviceProfile, cpu_identity, save_profile
from headrace.engine.core import EngineCore
from headrace.engine.executor import Executor
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.errors import ConfigError
from headrace.flags import CommandParser
from headrace.models.families import spec_from_config
from headrace.planner import drive
from headrace.planner.devices import Device, Efficiency, Share, find_device, known_devices, with_calibrations
from headrace.planner.drive import Drive, Outcome
from headrace.planner.executor import ModelledExecutor
from headrace.planner.simulator import DraftOn, Load, Report, simulate, who_drafts
from headrace.planner.step_time import StepPrice, StepTime
from headrace.planner.workload.conversations import conversations_of
from headrace.planner.workload.load import Lengths, LoadRequest, arriving, drawn, prompt_ids
from headrace.planner.workload.statistics import summarise
from headrace.request import Request, SamplingParams, StepPlan
from headrace.sites import count_bytes
from tests.support.command import status_of
from tests.support.hash_engine import create_core
from tests.support.outside import shared
from tests.support.specs import SMALL

SHAPES = Path(__file__).parents[2] / "lab" / "shapes"
HIDDEN, WIDE, VOCAB, LAYERS = SMALL.hidden_size, SMALL.intermediate_size, SMALL.vocab_size, SMALL.num_layers
SPEC = replace(SMALL, tied_head=True)
WHOLE = Share(1.0, 1.0)
BANDWIDTH, RATE = 1e6, 1e8  # so slow that a step takes a part of a second


def tiny_device(host_seconds: float = 0.0, layer: float = 0.0, memory: int = 4 * 2**30) -> Device:
    profile = DeviceProfile(
        identity=DeviceIdentity(kind="cuda", name="tiny", threads=0),
        read_bandwidth=BANDWIDTH,
        copy_bandwidth=BANDWIDTH,
        gemm_rates={"bfloat16": RATE},
    )
    return Device("tiny", profile, memory, Efficiency(WHOLE, WHOLE, WHOLE, WHOLE, layer, "exact"), host_seconds)


def by_tokens(plan: StepPlan) -> StepPrice:
    """0.1 s and a hundredth a token."""
    return StepPrice(0.1 + 0.01 * plan.num_tokens, 0.05, 1.0, 1.0)


def driven(
    asked: Sequence[LoadRequest],
    *,
    depth: int = 0,
    host: float = 0.0,
    room: int | None = None,
    executor: Callable[[Any, VirtualClock], Executor] | None = None,
    plans: list[StepPlan] | None = None,
    front: FrontPrices | None = None,
    **info: int,
) -> tuple[Outcome, EngineCore]:
    clock = VirtualClock()
    facts = keyed_hash_info(**info)
    runner = executor(facts, clock) if executor else ModelledExecutor(facts, by_tokens, clock, host_seconds=host)
    if plans is not None:
        submit = runner.submit
        runner.submit = lambda plan: (plans.append(plan), submit(plan))[1]  # type: ignore[method-assign]
    core = create_core(runner, SchedulerConfig(max_num_batched_tokens=64), clock, depth=depth)
    ids = partial(_ids, asked, facts.vocab_size)
    return Drive([core], asked, ids, room=room, max_queue=10_000, front=front).run(), core


def _ids(asked: Sequence[LoadRequest], vocab_size: int, index: int) -> array[int]:
    return prompt_ids(asked[index], index, vocab_size=vocab_size, seed=0)


# --- hand-computed


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_request_alone_takes_its_prefill_and_then_its_decode_steps(depth: int) -> None:
    outcome, _ = driven([LoadRequest(30, 5, at=1.0)], depth=depth)
    (sample,) = outcome.samples
    assert sample.ttft == pytest.approx(0.1 + 0.30)
    assert sample.gaps == pytest.approx([0.11] * 4)
    assert sample.tpot == pytest.approx(0.11)
    assert outcome.seconds == pytest.approx(1.0 + 0.4 + 4 * 0.11)


def test_the_host_shows_at_depth_0_and_hides_behind_the_device_from_depth_1_on() -> None:
    gaps = [driven([LoadRequest(30, 9, at=0.0)], depth=depth, host=0.02)[0].samples[0].gaps for depth in (0, 1, 2)]
    assert gaps[0] == pytest.approx([0.11 + 0.02] * 8)
    assert gaps[1] == pytest.approx([0.11] * 8) and gaps[2] == pytest.approx([0.11] * 8)


def test_what_the_host_does_behind_a_step_delays_the_next_and_not_the_tokens_of_this_one() -> None:
    """All of it counted before the device begins, an H200's first tokens were 0.3 to 0.8 ms late."""

    def priced(plan: StepPlan) -> StepPrice:
        return replace(by_tokens(plan), host_seconds=0.05, host_behind=0.03)

    made: list[ModelledExecutor] = []

    def create(facts: Any, clock: VirtualClock) -> Executor:
        made.append(ModelledExecutor(facts, priced, clock))
        return made[0]

    outcome, core = driven([LoadRequest(30, 5, at=1.0)], executor=create)
    assert outcome.samples[0].gaps == pytest.approx([0.11 + 0.05] * 4)
    assert made[0].collected_at == pytest.approx(core.clock.now() - 0.03)
    assert outcome.samples[0].ttft == pytest.approx(0.02 + 0.4 + 0.03)  # as seen without the executor's word


def test_an_engine_that_has_served_the_same_before_has_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape with prompts is captured when it comes again: on a card, half of an 8B's first tokens were of graphs where
    a simulation that began anew had a third."""
    graphed, plain = list[bool](), StepTime.of_plan

    def of_plan(self: StepTime, plan: StepPlan) -> StepPrice:
        price = plain(self, plan)
        graphed.extend([] if price.decode else [price.graph_tokens > 0])
        return price

    monkeypatch.setattr(StepTime, "of_plan", of_plan)
    spec = spec_from_config(json.loads((SHAPES / "Llama-3.1-8B/config.json").read_text()))
    load = Load(arriving(drawn(40, Lengths(500, 8, 0.9), seed=1), 12.0, seed=1), settled=True)
    simulate(spec, EngineConfig(), with_calibrations(known_devices()["h200"]), load)
    middle = len(graphed) // 2
    assert sum(graphed[middle:]) > sum(graphed[:middle])


def test_no_more_of_a_burst_joins_a_step_than_a_socket_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "PIPE", 3 * (drive.REQUEST_BYTES + 8 * drive.ID_BYTES))
    plans: list[StepPlan] = []
    driven([LoadRequest(8, 1, at=0.0)] * 8, plans=plans)
    plain = [len(plan.rows) for plan in plans]
    plans.clear()
    driven([LoadRequest(8, 1, at=0.0)] * 8, plans=plans, front=FrontPrices())
    assert plain == [8] and [len(plan.rows) for plan in plans] == [3, 3, 2]


def test_a_socket_that_was_full_is_written_to_again_once_the_front_end_has_parsed_what_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200, 22 of 160 long prompts decoded alone for 77 ms, in which all others were parsed."""
    monkeypatch.setattr(drive, "PIPE", drive.REQUEST_BYTES)
    outcome, _ = driven([LoadRequest(8, 1, at=0.0)] * 8, front=FrontPrices(request=0.2))
    first, *others = (sample.arrivals[0] for sample in outcome.samples)
    parsed = 8 * 0.2
    assert first == pytest.approx(parsed) and min(others) > parsed + 0.1  # which a step takes at least


def test_a_request_that_comes_within_a_step_waits_for_its_end_and_counts_from_when_it_was_sent() -> None:
    outcome, _ = driven([LoadRequest(30, 5, at=0.0), LoadRequest(9, 1, at=0.1)])
    assert outcome.samples[1].sent == 0.1
    assert outcome.samples[1].ttft == pytest.approx(
        0.3 + 0.1 + 0.01 * (1 + 9)
    )  # the rest of the first step, then one step with both


def test_a_client_that_is_held_back_sends_late() -> None:
    outcome, _ = driven([LoadRequest(30, 3, at=0.0), LoadRequest(30, 1, at=0.1)], room=1)
    assert [sample.sent for sample in outcome.samples] == pytest.approx([0.0, 0.62])
    assert outcome.samples[1].lag == pytest.approx(0.52) and outcome.samples[1].ttft == pytest.approx(0.4)
    assert outcome.most_running == 1


def test_tokens_depend_on_neither_chunks_nor_preemption_nor_depth() -> None:
    asked = [LoadRequest(prompt, 30) for prompt in (20, 90, 40, 70)]
    plain = _answers(asked, depth=0, budget=512, num_blocks=64)
    assert len({tuple(each) for each in plain.values()}) == 4 and all(len(each) == 30 for each in plain.values())
    assert (
        plain == _answers(asked, depth=2, budget=7, num_blocks=64) == _answers(asked, depth=1, budget=64, num_blocks=14)
    )


def _answers(asked: Sequence[LoadRequest], *, depth: int, budget: int, num_blocks: int) -> dict[int, list[int]]:
    clock, found = VirtualClock(), {index: list[int]() for index in range(len(asked))}
    executor = ModelledExecutor(keyed_hash_info(num_blocks=num_blocks, max_model_len=200), by_tokens, clock)
    config = SchedulerConfig(max_num_batched_tokens=budget)
    core = create_core(executor, config, clock, depth=depth)
    for index, each in enumerate(asked):
        params = SamplingParams(temperature=0.0, max_tokens=each.output, ignore_eos=True, detokenize=False)
        core.add(Request(request_id=index, prompt_token_ids=_ids(asked, 512, index), params=params))
    while core.has_work:
        for output in core.step():
            found[output.request_id] += output.token_ids
    assert (core.stats().counters.preemptions > 0) == (num_blocks == 14)
    return found


def test_the_overlap_that_a_flag_asks_for_is_the_simulation_s() -> None:
    load = Load([LoadRequest(10, 20, at=0.0)])
    seconds = [
        simulate(SPEC, replace(EngineConfig(), device=DeviceConfig(overlap=depth)), tiny_device(0.01), load).figures[
            "duration"
        ]
        for depth in (0, 1, None)
    ]
    assert seconds[0] == pytest.approx(seconds[1] + 0.01 * 19) and seconds[2] == seconds[1]


def test_a_whole_simulation_by_hand() -> None:
    """One layer's weights are (64·(64+64) + 64·64 + 64·256 + 128·64) of two bytes; every figure follows from bytes and
    FLOPs."""
    per_layer = HIDDEN * 128 + HIDDEN * HIDDEN + HIDDEN * 2 * WIDE + WIDE * HIDDEN
    head, norms, kv_token = VOCAB * HIDDEN, 5 * HIDDEN, 2 * 2 * 16 * 2 * LAYERS
    decode_bytes = 2 * (LAYERS * per_layer + head + norms + HIDDEN) + kv_token * (11 + 1)
    report = simulate(SPEC, EngineConfig(), tiny_device(), Load([LoadRequest(10, 2, at=0.0)]))
    assert report.figures["mean_itl_ms"] == pytest.approx(decode_bytes / BANDWIDTH * 1e3)
    assert report.figures["limit_share"] == pytest.approx(1.0) and report.figures["device_busy_share"] == pytest.approx(
        1.0
    )
    slower = simulate(SPEC, EngineConfig(), tiny_device(layer=0.25), Load([LoadRequest(10, 2, at=0.0)])).figures
    assert slower["mean_itl_ms"] == pytest.approx(report.figures["mean_itl_ms"] + LAYERS * 250)
    # A prompt of 1,000: its products are bound by FLOPs, the rest by bytes.
    prompt = 1000
    pairs = prompt * (prompt + 1) / 2
    products = 2 * LAYERS * per_layer * prompt / RATE
    attention = 4 * 64 * LAYERS * pairs / RATE
    rest = (2 * head + 2 * norms + kv_token * prompt + 2 * HIDDEN * prompt) / BANDWIDTH
    report = simulate(SPEC, EngineConfig(), tiny_device(), Load([LoadRequest(prompt, 1, at=0.0)]))
    assert report.figures["mean_ttft_ms"] == pytest.approx((products + attention + rest) * 1e3)


def test_drafts_are_tokens_and_their_model_is_priced_where_it_is() -> None:
    """A verification that takes what a step takes, and drafts of a device whose layers are five times as fast."""

    def told(
        drafts: dict[str, Any] | None, draft: DraftOn | None = None, output: int = 101, **device: Any
    ) -> dict[str, Any]:
        config = replace(
            EngineConfig(),
            scheduler=SchedulerConfig(speculative_config=None if drafts is None else json.dumps(drafts)),
            device=DeviceConfig(overlap=0, **device),
        )
        return simulate(
            SPEC, config, tiny_device(layer=1.0), Load([LoadRequest(10, output, at=0.0)], draft=draft)
        ).figures

    chain = {"model": "-", "num_speculative_tokens": 4, "acceptance": 1.0}
    own = {**chain, "device": "cpu"}
    other = DraftOn(SPEC, tiny_device(layer=0.2))
    each = other.priced(EngineConfig(), tiny_device(layer=1.0)).decode_seconds(1, 60) * 1e3
    plain, beside = told(None), told({**chain, "draft_cost": 0.2})
    waits, ahead = told(own, other, drafts_ahead=False), told(own, other)
    for found in (plain, beside, waits, ahead):
        assert found["total_output_tokens"] == 101
    assert beside["tokens_per_verification"] == pytest.approx(5.0, abs=0.2)
    step = plain["mean_tpot_ms"]
    assert beside["mean_tpot_ms"] == pytest.approx(step * 1.8 / 5, rel=0.05)
    assert waits["mean_tpot_ms"] == pytest.approx((step + 4 * each) / 5, rel=0.1)
    # one pass foretells the sample, and four the next drafts: in a verification, or as long as they take
    assert ahead["mean_tpot_ms"] == pytest.approx(max(step, 5 * each) / 5, rel=0.1)
    assert ahead["drafts_ahead_used"] > 50 and ahead["drafts_ahead_refuted"] == 0
    # two stages: a verification takes as long as a step, and beside it another is under way
    stages = {
        "pipeline_parallel_size": 2,
        "pipeline_layers": (SPEC.num_layers // 2, SPEC.num_layers - SPEC.num_layers // 2),
    }
    alone, flight = (told(chain, output=2001, drafts_ahead=on, **stages) for on in (False, True))
    assert flight["total_output_tokens"] == alone["total_output_tokens"] == 2001
    assert flight["mean_tpot_ms"] == pytest.approx(alone["mean_tpot_ms"] / 2, rel=0.25)
    assert flight["drafts_ahead_used"] > 40 and flight["drafts_ahead_spared"] == 0
    often = told({**chain, "acceptance": 0.7}, output=201, **stages)
    assert often["total_output_tokens"] == 201 and often["drafts_ahead_spared"] > 0


def test_a_draft_beside_its_target_is_priced_and_takes_memory() -> None:
    """Its passes as its shape says, where no cost is given; its weights and keys in room that the target has without."""
    drafts = {"model": "named", "num_speculative_tokens": 2, "acceptance": 1.0}

    def told(draft: DraftOn | None, **more: Any) -> Report:
        given = json.dumps({**drafts, **more})
        config = replace(
            EngineConfig(), scheduler=SchedulerConfig(speculative_config=given), device=DeviceConfig(overlap=0)
        )
        return simulate(SPEC, config, tiny_device(layer=1.0), Load([LoadRequest(10, 61, at=0.0)], draft=draft))

    free, beside, stated = told(None), told(DraftOn(SPEC)), told(DraftOn(SPEC), draft_cost=0.5)
    step = free.figures["mean_tpot_ms"]
    assert beside.figures["mean_tpot_ms"] == pytest.approx(3 * step, rel=0.1)  # two passes as long as a verification
    assert stated.figures["mean_tpot_ms"] == pytest.approx(2 * step, rel=0.1)
    plain, shared = (each.info.kv_groups[0].spec for each in (free, beside))
    assert shared.bytes_per_block == 2 * plain.bytes_per_block and not plain.beside
    assert beside.info.memory["draft model"] == count_bytes(SPEC, 2)


def test_a_draft_device_without_a_draft_is_refused() -> None:
    for drafts in (None, '{"method": "ngram"}', '{"model": "-"}'):
        with pytest.raises(ConfigError, match="--draft-device is where a draft model computes apart"):
            who_drafts(replace(EngineConfig(), scheduler=SchedulerConfig(speculative_config=drafts)), apart=True)


# --- the same schedule


@pytest.mark.parametrize(("depth", "num_blocks"), [(0, 14), (1, 14), (2, 14), (1, 400)])
def test_the_schedule_is_that_of_the_core_over_another_executor(depth: int, num_blocks: int) -> None:
    """Every plan of a modelled run is the plan of a run over the keyed-hash executor that takes as long."""
    asked = arriving(drawn(25, Lengths(20, 60, 0.5), prefix=32, num_prefixes=3), 4.0, burstiness=0.5, seed=3)
    steady = StepPrice(0.13, 0.1, 1.0, 1.0)
    mine: list[StepPlan] = []
    theirs: list[StepPlan] = []
    sizes = {"num_blocks": num_blocks, "max_num_seqs": 12, "max_model_len": 200}
    a, core = driven(
        asked,
        depth=depth,
        plans=mine,
        executor=lambda info, clock: ModelledExecutor(info, lambda plan: steady, clock),
        **sizes,
    )
    b, _ = driven(
        asked,
        depth=depth,
        plans=theirs,
        executor=lambda info, clock: KeyedHashExecutor(info, device_time=0.13, clock=clock),
        **sizes,
    )
    assert [_without_ids(plan) for plan in mine] == [_without_ids(plan) for plan in theirs] and len(mine) > 50
    assert a.samples == b.samples and len(a.samples) == len(asked)
    assert (core.stats().counters.preemptions > 0) == (num_blocks == 14)


def _without_ids(plan: StepPlan) -> StepPlan:
    return replace(
        plan, rows_added=tuple(replace(new, token_ids=array("i", [len(new.token_ids)])) for new in plan.rows_added)
    )


# --- determinism, and what must hold for any load


def test_the_seed_decides_everything() -> None:
    def run(seed: int) -> Any:
        asked = arriving(drawn(30, Lengths(60, 20, 0.5), seed=seed), 2.0, burstiness=0.3, seed=seed)
        report = simulate(SPEC, EngineConfig(), tiny_device(1e-3), Load(asked, seed=seed, max_concurrency=7))
        return report.figures, report.samples

    assert run(4) == run(4) != run(5)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 30), st.floats(0, 3), st.integers(0, 2)), min_size=1, max_size=25
    ),
    st.integers(0, 2),
    st.integers(9, 40),
    st.integers(1, 9),
)
def test_no_request_is_lost_whatever_comes(
    rows: list[tuple[int, int, float, int]], depth: int, num_blocks: int, seqs: int
) -> None:
    """Each ends once with all of its tokens, in order of time, and the engine is as it was before."""
    rows.sort(key=lambda row: row[2])
    asked = [LoadRequest(prompt, output, at, (name,), 32) for prompt, output, at, name in rows]
    outcome, core = driven(asked, depth=depth, host=0.01, num_blocks=num_blocks, max_num_seqs=seqs, max_model_len=128)
    assert [(sample.output_tokens, sample.error) for sample in outcome.samples] == [
        (each.output, None) for each in asked
    ]
    for sample in outcome.samples:
        assert sample.sent < sample.arrivals[0] and sample.arrivals == sorted(sample.arrivals)
    assert not core.has_work and core.stats().num_used_blocks == 0


def test_more_load_is_never_quicker() -> None:
    """The same gaps, compressed: time to first token and between tokens grow, throughput up to the device's own."""
    found = []
    for rate in (0.05, 0.5, 50.0):
        asked = arriving(drawn(60, Lengths(40, 20)), rate, burstiness=1.0, seed=1)
        outcome, _ = driven(asked, max_num_seqs=16)
        found.append(summarise(outcome.samples, outcome.seconds, {"ttft": 1.0}))
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"):
        values = [figures[name] for figures in found]
        assert all(a <= b * 1.02 for a, b in pairwise(values)), (name, values)
    assert found[0]["mean_ttft_ms"] < found[-1]["mean_ttft_ms"] / 10
    assert found[-1]["request_goodput"] < found[-1]["request_throughput"]


def test_shared_prefixes_are_hits_and_quicker() -> None:
    asked = drawn(20, Lengths(10, 4), prefix=480, num_prefixes=2)
    alone = [replace(each, pieces=(index,)) for index, each in enumerate(asked)]
    both = [
        simulate(SPEC, EngineConfig(), tiny_device(), Load(each, max_concurrency=1)).figures for each in (asked, alone)
    ]
    assert both[0]["prefix_hit_share"] > 0.6 and both[1]["prefix_hit_share"] == 0
    assert both[0]["mean_ttft_ms"] < both[1]["mean_ttft_ms"] / 2
    assert both[0]["cached_input_tokens"] == 18 * 384  # of 480 tokens three whole blocks of 128


def test_prompts_share_what_their_names_say() -> None:
    asked = [LoadRequest(1200, 1, pieces=pieces, piece=512) for pieces in ((7, 8), (7, 9))]
    a, b = (prompt_ids(each, index, vocab_size=1000, seed=1) for index, each in enumerate(asked))
    assert len(a) == len(b) == 1200 and a[:512] == b[:512]
    assert all(sum(x == y for x, y in zip(a[start:], b[start:], strict=True)) < 20 for start in (512, 1024))
    assert min(a) >= 0 and max(a) < 1000


@pytest.mark.parametrize(("prefix", "num_prefixes"), [(0, 1), (33, 3)])
def test_an_engine_is_asked_what_a_simulation_is(prefix: int, num_prefixes: int) -> None:
    lengths = Lengths(50, 20, 0.7)
    asked = arriving(drawn(40, lengths, prefix=prefix, num_prefixes=num_prefixes, seed=5), 3.0, burstiness=0.7, seed=5)
    conversations = conversations_of(asked, vocab_size=1000, seed=5)
    assert [(each.prompt, each.output, each.at) for each in asked] == [
        (len(each.turns[0].new_ids), each.turns[0].max_tokens, each.arrival) for each in conversations
    ]


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    asked = [LoadRequest(1, 1)] * 3000
    for shape in (0.25, 1.0, 4.0):
        times = [each.at or 0.0 for each in arriving(asked, 5.0, burstiness=shape, seed=2)]
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(0.2, rel=0.1)
        assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2 == pytest.approx(1 / shape, rel=0.2)
    even = [each.at for each in arriving(asked[:3], 4.0, burstiness=float("inf"), seed=0)]
    assert even == [0.25, 0.5, 0.75]
    assert [each.at for each in arriving(asked[:2], float("inf"), burstiness=1.0, seed=0)] == [0.0, 0.0]


# --- devices, and what does not fit


def test_published_limits_are_marked_and_lowered_and_measured_ones_are_as_measured() -> None:
    known = known_devices()
    assert {name: device.profile.source for name, device in known.items()} == {
        "h200": "measured", "h100": "measured", "b200": "published", "a100": "published", "l40s": "published", "rtx4090": "published"
    }  # fmt: skip
    assert known["h200"].profile.read_bandwidth == 4.47e12 and known["h200"].profile.gemm_rate("bfloat16") == 798e12
    assert 3.0e12 < known["h100"].profile.read_bandwidth < 3.35e12
    assert all("not calibrated" in str(device) for device in known.values())


def test_this_cpu_is_what_was_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"never measured with 3 threads.*doctor --profile"):
        find_device("cpu", threads=3, memory=None, free_memory=2**33, folder=tmp_path)
    profile = DeviceProfile(
        identity=cpu_identity(3),
        read_bandwidth=7e10,
        copy_bandwidth=6e10,
        gemm_rates={"bfloat16": 1e12},
        source="measured",
    )
    path = save_profile(profile, tmp_path)
    found = find_device("cpu", threads=3, memory=None, free_memory=2**33, folder=tmp_path)
    assert found.profile == profile and found.memory == 2**33 and found.kind == "cpu"
    assert find_device(str(path), threads=1, memory=2**32, free_memory=0).memory == 2**32
    report = simulate(SPEC, EngineConfig(), found, Load([LoadRequest(9, 3, at=0.0)]))
    assert report.figures["completed"] == 1 and report.info.kv_groups[0].spec.block_size == 16


def test_a_card_profile_wants_its_memory_stated(tmp_path: Path) -> None:
    path = save_profile(tiny_device().profile, tmp_path)
    with pytest.raises(ConfigError, match="--device-memory"):
        find_device(str(path), threads=1, memory=None, free_memory=0)


# --- the command


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = status_of("simulate", *words)
    told = capsys.readouterr()
    return status, told.out, told.err


def test_the_command_writes_what_bench_serve_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    words = (
        "--device",
        "h200",
        "--num-prompts",
        "9",
        "--request-rate",
        "20",
        "--goodput",
        "ttft:500",
        "--output-json",
        str(path),
    )
    status, out, _ = call(capsys, *words)
    assert status == 0 and "measured" in out and "calibrated from" in out and "extrapolated: another model" in out
    written = json.loads(path.read_text())
    assert written["completed"] == 9 and len(written["requests"]) == 9
    for name in (
        "duration",
        "request_goodput",
        "p99_ttft_ms",
        "median_tpot_ms",
        "mean_itl_ms",
        "p99_e2el_ms",
        "preemptions",
        "prefix_hit_share",
    ):
        assert isinstance(written[name], (int, float))
    assert written["facts"]["server"].startswith("simulated")


def test_a_measured_run_gives_the_error_of_each_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, again = tmp_path / "run.json", tmp_path / "again.json"
    words = ("--device", "h200", "--num-prompts", "9", "--request-rate", "20")
    assert call(capsys, *words, "--output-json", str(path))[0] == 0
    measured = json.loads(path.read_text())
    path.write_text(json.dumps(measured | {"mean_ttft_ms": measured["mean_ttft_ms"] * 2}))
    status, out, _ = call(capsys, *words, "--against", str(path), "--output-json", str(again))
    assert status == 0 and "-50.0%" in out and out.count("+0.0%") == 14
    assert json.loads(again.read_text())["error_of_mean_ttft_ms"] == pytest.approx(-0.5)
    status, _, err = call(capsys, *words, "--input-len", "200", "--against", str(path))
    assert status == 2 and "total_input_tokens is 1152, this run's 1800" in err
    for text in ("[]", "{", '{"completed": 9}'):
        path.write_text(text)
        status, _, err = call(capsys, *words, "--against", str(path))
        assert status == 2 and "bench serve --output-json wrote" in err


TRACES = {
    "columns.csv": ("A,B\n1,2\n", ".*has the columns 'A', 'B'; its columns must be one of: TIMESTAMP"),
    "columns.jsonl": ('{"timestamp": 1}\n', ".*has the columns 'timestamp'; its columns must be one of"),
    "back.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0319600,3,8\n2023-11-16 18:17:03.0319600,3,8\n",
        "Row 2 of the trace .* at -1.000 s after the first row",
    ),
    "negative.jsonl": (
        '{"timestamp": -5, "input_length": 3, "output_length": 1, "hash_ids": []}\n',
        "Row 1 of the trace .* at -0.005 s; give",
    ),
    "length.jsonl": (
        '{"timestamp": 5, "input_length": -3, "output_length": 1, "hash_ids": []}\n',
        "Row 1 .* has -3 prompt",
    ),
    "long.jsonl": (
        '{"timestamp": 5, "input_length": 30, "output_length": 1, "hash_ids": [1]}\n'
        '{"timestamp": 6, "input_length": 90000, "output_length": 7, "hash_ids": [1]}\n',
        r"1 of 2 requests .*request 2 has 90000 \+ 7",
    ),
    "deep.jsonl": ("[" * 100_000 + "\n", "Row 1 .*cannot be read"),
    "endless.jsonl": (
        '{"timestamp": Infinity, "input_length": 3, "output_length": 1, "hash_ids": []}\n',
        "Row 1 .* at inf s",
    ),
    "empty.jsonl": ("", ".*no requests"),
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_that_cannot_be_run_as_it_stands_is_a_sentence(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, said = TRACES[name]
    (tmp_path / name).write_text(text)
    status, out, err = call(capsys, "--device", "h200", "--workload", "trace", "--trace", str(tmp_path / name))
    assert status == 2 and out == ""
    assert re.match("headrace: " + said, err), err


WRONG = {
    "--device tpu": "give h200, h100",
    "--device h200 --request-rate 0": "request rate is 0",
    "--device h200 --request-rate nan": "request rate is nan",
    "--device h200 --num-prompts 0": "argument --num-prompts: '0' is not a whole number",
    "--device h200 --max-concurrency 0": "argument --max-concurrency: '0'",
    "--device h200 --device-memory 0": "--device-memory is 0",
    "--device h200 --metric-percentiles 50 101": "argument --metric-percentiles: '101' is not a number from 0 to 100",
    "--device h200 --kv-cache-dtype float16": "the model computes in bfloat16; leave it at auto, or choose one of fp8_e4m3",
    "--device h200 --random-range-ratio nan": "argument --random-range-ratio: 'nan' is not a number from 0 to 1",
    "--device h200 --max-model-len 100": "64 of 64 requests are longer than the 100 tokens",
    "--device h200 --goodput ttft:0.000001": "cannot be met: the least step",
    "--device h200 --technique flat_gemm=off": "was calibrated with flat_gemm",
    "--device h200 --workload trace": "--trace FILE",
    "--device h200 --device-memory 1GB": "does not fit on NVIDIA H200",
    "--device h200 --advise --sweep-rate 1": "--advise and --sweep-rate ask for different things",
    "--device h200 --calibrate x --four-costs": "--calibrate and --four-costs ask for different things",
    "--device h200 --front-of x": "--front-of is only valid with --calibrate",
    "--device h200 --columns mean_qoe": "--columns is only valid with --sweep-rate or --compare",
    "--device h200 --advise --host-link 1GB": "--host-link is only valid with --four-costs",
    "--device h200 --calibration x --assumed-prices": "--calibration has no effect with --assumed-prices",
    "--device h200 --advise --against x": "--against has no effect with --advise",
    "--device h200 --request-rate 1 --sweep-rate 1 2": "--request-rate has no effect with --sweep-rate",
    "--device h200 --turns 3": "--turns 3 has no effect in the workload random; give --workload conversation",
    "--device h200 --workload trace --trace x --input-len 9": "--input-len 9 has no effect in the workload trace",
    "--device h200 --burstiness 2": "--burstiness 2.0 needs a rate",
    "--device h200 --request-rate 1 --diurnal-period 9": "the rate does not vary",
    "--device h200 --request-rate 1 --burstiness 1e-9 --gaps weibull": "from 0.01 on",
    "--device h200 --lengths-from x --output-len 3": "--lengths-from sets its own lengths",
    "--device h200 --seed -1": "--seed is -1; give at least 0",
    "--device h200 --input-len 2000000000": "--input-len is 2,000,000,000; give at most 10,000,000",
    "--device h200 --workload shared-prefix --prefix-len 90000 --num-prefixes 90000": "90,000 prefixes of 90,000 tokens",
    "--device h200 --workload conversation --turns 90000000": "That is 5,760,000,000 requests",
}


def test_rules_of_flags_name_flags() -> None:
    parser = CommandParser(prog="headrace simulate")
    command.add_arguments(parser)
    rules = [rule for section in declared()["conflicts"].values() for rule in section]
    named = {name for rule in rules for case in rule["when"] for name in case}
    assert named <= {action.dest for action in parser.options().values()}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_simulated_is_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, *words.split())
    assert status == 2 and out == "" and WRONG[words] in err and err.count("\n") == 1


def test_a_file_nested_without_end_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 20_000)
    for words in (
        ("--device", "h200", "--calibration"),
        ("--device",),
        ("--device", "h200", "--config"),
        ("--device", "h200", "--against"),
    ):
        status, _, err = call(capsys, "--num-prompts", "1", *words, str(deep))
        assert status == 2 and "maximum recursion" in err and err.count("\n") == 1, words


def test_reports_are_of_the_demo_model_too_and_of_one_behind_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "--device", "h200", "--four-costs", "1000")
    assert status == 0 and "model:     demo, " in out and "by this engine" in out, err


def test_a_model_that_fits_nowhere_says_so_with_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = shared("data", "model_configs", "Llama-3.3-70B-Instruct", "config.json")
    twice = json.loads(config.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(twice | {"num_hidden_layers": 2 * twice["num_hidden_layers"]}))
    for device in ("h200", "rtx4090"):
        status, _, err = call(capsys, "--device", device, "--model", str(config))
        assert status == 2 and "weights 131.4 GiB" in err and "It would fit on: b200." in err
        status, _, err = call(capsys, "--device", device, "--model", str(tmp_path / "config.json"))
        assert status == 2 and "weights 258.9 GiB" in err and "No device that is known here holds it" in err
    status, _, err = call(capsys, "--device", "rtx4090", "--model", str(config.parents[1] / "Qwen2.5-14B"))
    assert status == 2 and "It would fit on: h200, h100, b200, a100, l40s." in err


def test_a_real_trace_runs_on_a_real_shape(capsys: pytest.CaptureFixture[str]) -> None:
    trace = shared("data", "traces", "mooncake_conversation.jsonl")
    model = shared("data", "model_configs", "Llama-3.1-8B")
    words = (
        "--device",
        "h200",
        "--model",
        str(model),
        "--workload",
        "trace",
        "--trace",
        str(trace),
        "--num-prompts",
        "20",
    )
    status, out, err = call(capsys, *words)
    assert status == 0, err
    assert "completed               20" in out


def test_replicas_share_a_load_and_conversations_find_their_prefixes() -> None:
    """Two devices end twice the work in about the time of one; each conversation stays where its beginning is."""
    talks = [LoadRequest(64, 16, at=0.1 * number) for number in range(24)]
    alone, both = (simulate(SPEC, _replicated(count), tiny_device(), Load(talks)).figures for count in (1, 2))
    assert both["duration"] < 0.7 * alone["duration"] and both["completed"] == 24
    assert both["computed_tokens"] == alone["computed_tokens"]


def test_conversations_find_their_prefixes_where_requests_in_turn_do_not() -> None:
    """Five conversations over two replicas: in turn, every second turn comes to the wrong one."""
    talks = [
        LoadRequest(
            96 + 96 * turn,
            16,
            at=0.0 if not turn else None,
            follows=5 * (turn - 1) + talk if turn else None,
            think=20.0,
        )
        for turn in range(4)
        for talk in range(5)
    ]
    shares = {
        how: simulate(SPEC, _replicated(2, how), tiny_device(), Load(talks)).figures["prefix_hit_share"]
        for how in ("prefix", "turns")
    }
    assert shares["prefix"] > 0.5 > 0.45 > shares["turns"]


def _replicated(count: int, routing: str = "prefix") -> EngineConfig:
    device = DeviceConfig(data_parallel_size=count, data_parallel_routing=routing)
    return EngineConfig(device=device, cache=CacheConfig(block_size=16))


def test_prompts_apart_keep_tokens_close_together_and_pay_for_the_link() -> None:
    """The same prompts are computed; a device that only decodes has no steps with prompts of others."""
    talks = [LoadRequest(160, 12, at=1.5 * number) for number in range(16)]
    both = simulate(SPEC, _replicated(2), tiny_device(), Load(talks)).figures
    device = DeviceConfig(data_parallel_size=2, prefill_replicas=1)
    config = EngineConfig(
        device=device, cache=CacheConfig(block_size=16), scheduler=SchedulerConfig(max_num_batched_tokens=64)
    )
    fast, slow = (
        simulate(SPEC, config, replace(tiny_device(), host_link=link), Load(talks)).figures for link in (1e9, 1e5)
    )
    assert fast["completed"] == both["completed"] == fast["handed_over_prompts"] == 16
    # of 160 tokens nine blocks are handed over: the tenth is computed where the answer is
    assert fast["computed_tokens"] == both["computed_tokens"] + 16 * 16
    assert fast["p99_itl_ms"] < 0.8 * both["p99_itl_ms"] and fast["prefix_hit_share"] == 0.0
    crossed = 2 * 9 * 16 * 2 * SPEC.num_kv_heads * SPEC.head_dim * 2 * SPEC.num_layers / 1e5 * 1e3  # ms, twice
    waits = slow["mean_ttft_ms"] - fast["mean_ttft_ms"]
    assert 0.2 * crossed < waits < crossed  # most of it goes ahead
    assert 0.3 < fast["handed_over_early_share"] < 1.0


def test_roles_follow_the_load() -> None:
    """First prompts are long and answers short, then the other way round: one of three replicas is too few for prompts,
    and then enough, and then more than they fill."""
    heavy = [LoadRequest(400, 2, at=1.3 * number) for number in range(40)]
    light = [LoadRequest(80, 40, at=60.0 + 1.0 * number) for number in range(40)]
    scheduler = SchedulerConfig(max_num_batched_tokens=64, expected_ttft=3.0, reading_speed=2.8)
    found = {
        swaps: simulate(
            SPEC,
            EngineConfig(
                device=DeviceConfig(data_parallel_size=3, prefill_replicas=1, swap_roles=swaps),
                cache=CacheConfig(block_size=16),
                scheduler=scheduler,
            ),
            tiny_device(),
            Load([*heavy, *light], limits={"ttft": 2.0}),
        ).figures
        for swaps in (False, True)
    }
    assert found[True]["completed"] == found[False]["completed"] == 80
    assert found[True]["role_changes"] == 3 and found[False]["role_changes"] == 0
    assert found[True]["mean_ttft_ms"] < found[False]["mean_ttft_ms"] / 2
    assert found[True]["request_goodput"] > 1.5 * found[False]["request_goodput"]
