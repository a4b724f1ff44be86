"""Many steps in one are the steps they stand for: the same samples, counts, decisions, blocks and prefix tree, whatever comes."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headrace.cache.prefix_tree import PrefixNode
from headrace.clock import VirtualClock
from headrace.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.executor import keyed_hash_info
from headrace.planner import drive as drive_module
from headrace.planner.devices import known_devices
from headrace.planner.drive import Drive
from headrace.planner.executor import ModelledExecutor
from headrace.planner.leap import Leapt
from headrace.planner.simulator import Load, simulate
from headrace.planner.step_time import StepPrice
from headrace.planner.workload import Asked, arriving, prompt_ids
from headrace.request import StepPlan
from headrace.sampling_params import NO_EXPECTATIONS, Expectations
from headrace.scheduler.policies import POLICIES
from headrace.spec import LayerSpec
from tests.support.specs import SMALL

SLIDING = replace(SMALL, layers=(LayerSpec(window=24), LayerSpec()) * 2)


EXPECTED = (NO_EXPECTATIONS, Expectations(ttft=1.0, reading_speed=5.0), Expectations(reading_speed=40.0))


def price_of(tokens: int, seen: int) -> StepPrice:
    seconds = 0.03 + 0.001 * tokens + 1e-5 * seen
    return StepPrice(seconds, seconds / 3, 7.0 * seen, 3.0 * tokens)


def of_plan(plan: StepPlan) -> StepPrice:
    return price_of(plan.num_tokens, sum(plan.starts))


def of_alike(starts: array[int], steps: int) -> list[StepPrice]:
    return [price_of(len(starts), sum(starts) + step * len(starts)) for step in range(steps)]


def asked_of(seed: int) -> list[Asked]:
    """Lengths, gaps and shared beginnings that hang on nothing but the seed: crowded, sparse, or both."""
    draw = random.Random(seed)
    count, longest = draw.randint(1, 18), draw.choice([3, 40, 160])
    made = [
        Asked(draw.randint(1, 60), draw.randint(1, longest), None, (draw.randint(0, 2),), 32, draw.choice("ab"), draw.choice(EXPECTED))
        for _ in range(count)
    ]
    rate = draw.choice([None, 0.3, 3.0, 100.0])
    return made if rate is None else arriving(made, rate, burstiness=draw.choice([0.3, 1.0]), seed=seed)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no host": {"host": 0.0},
    "slow host": {"host": 0.2},
    "few blocks": {"num_blocks": 22},
    "few rows": {"max_num_seqs": 3},
    "clients wait": {"room": 4},
    "sliding": {"window": 24},
    "no prefixes": {"cache": CacheConfig(enable_prefix_caching=False)},
    "reserved": {"cache": CacheConfig(paged_allocation=False)},
    "static": {"scheduler": {"continuous_batching": False}},
    "whole": {"scheduler": {"chunked_prefill": False}},
    "ticking": {"tick": 0.125, "host": 0.0},
    "front end": {"front": lambda tokens: 0.2 + 0.003 * tokens},
} | {f"policy {name}, {most} rows": {"scheduler": {"scheduling_policy": name}, "num_blocks": 60, "max_num_seqs": most}
     for name in POLICIES for most in (3, 12)}  # fmt: skip


def told(
    seed: int, depth: int, leaps: bool, *, host: float = 0.01, room: int | None = None, tick: float | None = None, front: Any = None, **more: Any
) -> tuple[Any, ...]:
    """All that can be told of a run, inside and outside. ``tick``: what steps take and arrivals are multiples of, so that they coincide."""
    asked, clock = asked_of(seed), VirtualClock()
    cache, scheduler = more.pop("cache", CacheConfig()), SchedulerConfig(max_num_batched_tokens=64, **more.pop("scheduler", {}))
    info = keyed_hash_info(max_model_len=400, **{"num_blocks": 200, "max_num_seqs": 12, "block_size": 8} | more)
    executor = ModelledExecutor(info, of_plan, clock, host_seconds=host, price_alike=of_alike)
    if tick is not None:
        asked = [replace(each, at=each.at and each.at // tick * tick) for each in asked]
        steady = StepPrice(tick, tick, 1.0, 1.0)
        executor = ModelledExecutor(info, lambda plan: steady, clock, host_seconds=host, price_alike=lambda starts, steps: [steady] * steps)
    core = EngineCore(executor, scheduler=scheduler, cache=cache, eos_token_ids=frozenset(), clock=clock, depth=depth)
    seen: list[Any] = []
    add = core.add
    core.add = lambda request: (seen.append((clock.now(), _tree(core), core.stats())), add(request))[1]  # type: ignore[method-assign]
    ids = partial(_ids, asked)
    outcome = Drive(core, asked, ids, room=room, max_queue=14, leaps=executor if leaps else None, front=front).run()
    manager = core.scheduler.cache
    pools = [(pool._free, list(pool._cached)) for pool in manager.pools]
    log = list(core.scheduler.log.after(0))
    return outcome, seen, executor.counts, core.stats(), log, _tree(core), pools, clock.now(), core.scheduler._next_step


def _ids(asked: list[Asked], index: int) -> array[int]:
    return prompt_ids(asked[index], index, vocab_size=512, seed=0)


def _tree(core: EngineCore) -> Any:
    """Every path with its blocks, siblings in the order they came."""
    root = core.scheduler.cache.tree.find_root("", None)
    return root and _below(root)


def _below(node: PrefixNode) -> Any:
    return [(key, child.blocks, _below(child)) for key, child in node.children.items()]


@pytest.fixture
def leapt(monkeypatch: pytest.MonkeyPatch) -> list[Leapt]:
    """All leaps that were taken."""
    taken: list[Leapt] = []
    leap = drive_module.try_leap

    def watched(*given: Any) -> Leapt | None:
        found = leap(*given)
        taken.extend([found] if found else [])
        return found

    monkeypatch.setattr(drive_module, "try_leap", watched)
    return taken


@pytest.mark.parametrize("name", SETTINGS)
def test_a_leap_is_the_steps_it_stands_for(name: str, leapt: list[Leapt]) -> None:
    for seed, depth in ((48, 2), (50, 1), (54, 0), (1, 1)):  # crowds, lulls, and answers that outlast them
        stepwise, leaping = (told(seed, depth, leaps, **dict(SETTINGS[name])) for leaps in (False, True))
        for mine, theirs in zip(leaping, stepwise, strict=True):
            assert mine == theirs, seed
    assert sum(len(each.times) for each in leapt) > 60 and max(len(each.times) for each in leapt) > 10


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_figures_of_a_device_are_equal_to_the_last_digit(rate: float, leapt: list[Leapt]) -> None:
    """Prices of many steps come from columns of numbers: windows, products and attention as one by one."""
    draw = random.Random(5)
    asked = [Asked(draw.randint(1, 200), draw.randint(1, 300)) for _ in range(20)]
    load = Load(arriving(asked, rate, burstiness=1.0, seed=1))
    runs = [simulate(SLIDING, EngineConfig(), known_devices()["l40s"], replace(load, stepwise=stepwise)) for stepwise in (False, True)]
    assert runs[0].figures == runs[1].figures and runs[0].samples == runs[1].samples
    assert sum(len(each.times) for each in leapt) > 300


def test_a_lone_answer_is_a_few_leaps(leapt: list[Leapt], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = EngineCore.step
    monkeypatch.setattr(EngineCore, "step", lambda core: (steps.append(1), step(core))[1])
    simulate(SLIDING, EngineConfig(), known_devices()["h200"], Load([Asked(10, 2000, at=0.0)]))
    assert len(steps) < 30 and len(leapt) < 20
