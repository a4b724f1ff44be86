"""Sleep: what runs ends first, what comes meanwhile waits and is told why, memory is given up, and answers after waking
are those from before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.config import CacheConfig, EngineConfig
from headrace.engine.assembly import SleepingExecutor, of_same_size
from headrace.engine.executor import Control, Sleep, Wake
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.errors import HeadraceError, InvalidRequest, OutOfMemory
from headrace.lora.registry import AdapterRegistry
from headrace.request import FinishReason
from headrace.spec import AdapterSpace
from tests.support.hash_engine import Answers, CheckedExecutor, assert_at_rest, engine, expected, request, run

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=256, enable_sleep_mode=True, device="cpu", threads=1) as made:
        yield made


def answers(llm: LLM) -> tuple[list[tuple[int, ...]], int]:
    """And how many of their prompts' tokens were cached."""
    found = llm.generate(["Once upon a time there was a cat " * 6, "The sea"], GREEDY, use_tqdm=False)
    return [tuple(each.outputs[0].token_ids) for each in found], sum(each.num_cached_tokens or 0 for each in found)


@pytest.mark.parametrize("levels", [(1,), (1, 2), (2, 1)], ids=str)
def test_answers_are_the_same_afterwards_and_prefixes_are_forgotten(llm: LLM, levels: tuple[int, ...]) -> None:
    before, _ = answers(llm)
    assert answers(llm)[1] > 0
    for level in levels:
        llm.sleep(level)
    assert llm.is_sleeping and llm.engine.core.asleep == max(levels)
    with pytest.raises(InvalidRequest, match="wake_up"):
        llm.generate("x", use_tqdm=False)
    llm.wake_up()
    assert answers(llm) == (before, 0) and not llm.is_sleeping


def test_one_that_sleeps_prepares_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, what is prepared ahead reads weights, and these are not there."""
    executor: Any = llm.engine.core.executor
    monkeypatch.setattr(executor._inner._runner.passes, "prepare", lambda: True)
    assert executor.prepare()
    llm.sleep(1)
    assert not executor.prepare()
    llm.wake_up()
    assert executor.prepare()


def test_host_memory_that_cannot_be_had_is_told_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the system or the driver calls it: the engine stays awake, and goes on."""
    from headrace.worker import asleep

    def pinned(rows: int, columns: int, dtype: object) -> object:
        if columns == 3:
            raise OSError(12, "Cannot allocate memory")
        return columns

    monkeypatch.setattr(asleep, "pinned_zeros", pinned)
    memory = asleep.DeviceMemory.__new__(asleep.DeviceMemory)
    memory._host = {}
    regions = [asleep._Region(address, size, kept=True) for address, size in ((16, 2), (32, 3))]
    with pytest.raises(OutOfMemory, match="Cannot allocate"):
        memory._reserve_host(regions)
    assert not memory._host
    memory._reserve_host(regions[:1])
    assert memory._host == {16: 2}


def test_memory_is_given_up(llm: LLM) -> None:
    from headrace.worker.residency import resident_bytes

    answers(llm)
    inner: Any = llm.engine.core.executor._inner  # type: ignore[attr-defined]
    caches = inner._runner._kv_caches
    held = [weakref.ref(each) for each in (inner._runner.decoder, *caches)]
    assert all(resident_bytes(each) for each in caches)
    llm.sleep(1)
    assert sum(map(resident_bytes, caches)) <= 2 * 4096 * len(caches)
    del caches
    gc.disable()  # a GPU's memory is given back as the executor closes: nothing may wait for a collection
    inner.close()
    gc.enable()
    assert [each() for each in held] == [None] * len(held)
    llm.sleep(2)
    llm.wake_up()


def test_mistakes_are_told() -> None:
    with LLM(executor="keyed-hash") as plain, pytest.raises(InvalidRequest, match="--enable-sleep-mode"):
        plain.sleep()
    with LLM(executor="keyed-hash", enable_sleep_mode=True) as made:
        for level in (0, 3, "1"):
            with pytest.raises(InvalidRequest, match="level"):
                made.sleep(level)  # type: ignore[arg-type]
        made.wake_up()  # of one that is awake: nothing


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_those_who_run_end_and_those_who_come_wait(depth: int) -> None:
    core = engine(depth=depth)
    first, late, left = request(1, range(20), max_tokens=6), request(2, range(20), max_tokens=4), request(3, range(9))
    core.add(first)
    found = Answers()
    found.take(core.step())
    core.sleep(1)
    core.add(late)
    core.add(left)
    run(core, answers=found)
    assert core.asleep == 1 and found.tokens[1, 0] == expected(first) and (2, 0) not in found.tokens
    state = core.explain(2)
    assert state is not None and state.wait is not None and state.wait.kind == "asleep" and not state.running
    assert (core.stats().num_held, core.stats().num_waiting, core.stats().asleep) == (2, 2, 1)
    core.abort(3)
    run(core, answers=found)  # which leaves it asleep
    assert core.stats().num_held == 1 and core.explain(3) is None and core.asleep == 1
    core.wake()
    run(core, answers=found)
    assert found.tokens[2, 0] == expected(late) and (3, 0) not in found.tokens
    assert found.finished[2, 0].reason is FinishReason.LENGTH
    assert_at_rest(core)


def test_who_has_waited_is_served_however_soon_it_sleeps_again() -> None:
    core = engine()
    core.sleep(1)
    run(core)
    core.add(request(1, range(9)))
    core.wake()
    core.sleep(1)
    core.add(request(2, range(9)))
    assert sorted(core.request_ids) == [1, 2]
    found = run(core)
    assert found.tokens[1, 0] == expected(request(1, range(9))) and core.asleep and core.request_ids == [2]


def test_who_still_waits_for_an_adapter_came_before() -> None:
    executor = CheckedExecutor(keyed_hash_info(num_blocks=64, adapters=AdapterSpace(2, 2)), check=False)
    core = engine(executor=executor)
    core.adapters = AdapterRegistry(lambda folder: None, executor.control, 2)
    for name in ("a", "b"):
        core.adapters.register(name, "folder")
    core.add(request(1, range(9), adapter="a"))
    core.sleep(2)
    core.add(request(2, range(9), adapter="b"))
    found = run(core)
    assert len(found.tokens[1, 0]) == 8 and core.asleep and core.request_ids == [2]
    core.wake()
    assert len(run(core).tokens[2, 0]) == 8


def test_woken_before_it_sleeps_goes_on() -> None:
    core = engine()
    core.add(request(1, range(20)))
    found = Answers()
    found.take(core.step())
    core.sleep(2)
    core.wake()
    with pytest.raises(HeadraceError, match="woken"):
        core.check_asleep()
    assert run(core, answers=found).tokens[1, 0] == expected(request(1, range(20)))


class Short(CheckedExecutor):
    """Has no memory for the orders in ``lacks``."""

    lacks: tuple[type, ...] = ()
    heard: list[Control]

    def control(self, order: Control) -> None:
        if isinstance(order, self.lacks):
            raise OutOfMemory("There is no memory.")
        super().control(order)


def test_without_memory_it_stays_as_it_is() -> None:
    executor = Short(keyed_hash_info(vocab_size=512, max_model_len=200, num_blocks=64, block_size=4), check=True)
    core = engine(executor=executor)
    executor.lacks = (Sleep,)
    core.sleep(1)
    run(core)
    with pytest.raises(HeadraceError, match="no memory"):
        core.check_asleep()
    core.add(request(1, range(9)))
    assert run(core).tokens[1, 0] == expected(request(1, range(9)))
    executor.lacks = (Wake,)
    core.sleep(1)
    run(core)
    core.add(request(2, range(9)))
    with pytest.raises(OutOfMemory):
        core.wake()
    assert core.asleep == 1 and not core.has_work
    executor.lacks = ()
    core.wake()
    assert run(core).tokens[2, 0] == expected(request(2, range(9)))


def test_the_same_size_again() -> None:
    """An encoder has no KV, and what was counted is counted again."""
    info, config = keyed_hash_info(num_blocks=64, max_model_len=100), EngineConfig()
    again = of_same_size(config, info)
    assert (again.cache.kv_cache_memory, again.model.max_model_len) == (
        64 * info.kv_groups[0].spec.bytes_per_block,
        100,
    )
    assert of_same_size(config, replace(info, kv_groups=())).cache == config.cache
    counted = replace(config, cache=CacheConfig(num_blocks=64))
    assert of_same_size(counted, info).cache == counted.cache


def test_what_is_made_again_with_fewer_blocks_is_refused() -> None:
    sizes = iter((64, 32, 64))

    def create() -> CheckedExecutor:
        return CheckedExecutor(keyed_hash_info(num_blocks=next(sizes)), check=False)

    executor = SleepingExecutor(create(), create)
    executor.control(Sleep(2))
    with pytest.raises(OutOfMemory, match=r"\[64\].*\[32\]"):
        executor.control(Wake())
    executor.control(Wake())
    assert not executor.prepare() and executor.outcomes() == []
