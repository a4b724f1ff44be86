"""What counts as a hang: one turn of the loop, one call to the device, or silence, each longer than it may take."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.engine import loop
from headrace.engine.assembly import Engine
from headrace.engine.connection import Beat, EngineSocket, Shutdown
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.engine.loop import EngineLoop, LoopState, StampedExecutor
from headrace.engine.process import take_first_step
from headrace.errors import StepFailed
from headrace.observe.metrics import StepRecorder
from tests.support import hash_engine
from tests.support.hash_engine import CheckedExecutor


class Device:
    """Steps that take ``seconds`` while they are collected; notes how the pulse stood then."""

    info: Any = None

    def __init__(self, pulse: LoopState, seconds: float = 0.0) -> None:
        self._pulse, self.seconds = pulse, seconds
        self.limits: list[float] = []

    def submit(self, plan: Any) -> Any:
        return SimpleNamespace(step_id=plan.step_id)

    def collect(self, ticket: Any) -> Any:
        assert self._pulse.phase == "device"
        self.limits.append(self._pulse.limit)
        time.sleep(self.seconds)


def limits(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], *, predicted: float, least: float = 0.0, seconds: float = 0.0
) -> list[float]:
    monkeypatch.setattr(loop, "_SLOW_SECONDS", 0.01)
    pulse = LoopState()
    device = Device(pulse, seconds)
    executor = StampedExecutor(device, SimpleNamespace(predict=lambda plan: predicted), pulse, least)  # type: ignore[arg-type]
    for step, count in enumerate(tokens):
        executor.collect(executor.submit(SimpleNamespace(step_id=step, num_tokens=count)))  # type: ignore[arg-type]
        assert (pulse.phase, pulse.limit) == ("host", loop.HOST_LIMIT)
    return device.limits


def test_a_device_call_may_take_thirty_seconds_or_ten_times_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, [1, 4096], predicted=6.0) == [30.0, 60.0]
    assert limits(monkeypatch, [4096], predicted=1.0) == [30.0]
    assert limits(monkeypatch, [1], predicted=0.0, least=60.0) == [600.0]


def test_after_a_slow_step_the_next_small_one_is_predicted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, [1, 1], predicted=6.0, seconds=0.02) == [30.0, 60.0]


class Judged(EngineSocket):
    def lost(self) -> None: ...


def ailment(beat: Beat, silence: float = 0.0, death: Any = None) -> str | None:
    async def judged() -> str | None:
        connection = Judged()
        connection.death, connection.last_beat, connection.last_heard = death, beat, time.perf_counter() - silence
        return connection.ailment

    return asyncio.run(judged())


def test_health_is_what_the_stamps_say() -> None:
    assert ailment(Beat(1, "idle", 9999.0, 0.0)) is None
    assert ailment(Beat(1, "host", 4.9, 5.0)) is None and "host" in str(ailment(Beat(1, "host", 5.1, 5.0)))
    assert ailment(Beat(1, "device", 59.0, 60.0)) is None and "device" in str(ailment(Beat(1, "device", 61.0, 60.0)))
    assert ailment(Beat(1, "idle", 0.0, 0.0), silence=4.5) is None and "silent" in str(
        ailment(Beat(1, "idle", 0.0, 0.0), silence=5.5)
    )


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_says_it_can_serve_has_taken_a_step(fails: bool) -> None:
    info = keyed_hash_info(vocab_size=64, max_model_len=64, num_blocks=8, block_size=4)
    recorder = StepRecorder()
    core = hash_engine.engine(info=info, executor=CheckedExecutor(info, fault=lambda plan: fails))
    engine = cast(Engine, SimpleNamespace(core=core, recorder=recorder, trace=None))
    if fails:
        with pytest.raises(StepFailed, match="first step"):
            take_first_step(engine)
        return
    take_first_step(engine)
    hash_engine.assert_at_rest(core)
    core.add(hash_engine.request(0, [1, 2], max_tokens=3))
    while core.has_work:
        core.step()
    assert recorder.summary()["steps"] == 3  # the clients' alone


def test_an_idle_loop_prepares_a_little_at_a_time_and_listens_in_between() -> None:
    """It blocks on its sockets once nothing is left to prepare; what it prepares counts as the device's time."""
    pulse, heard, phases = LoopState(), list[str](), list[str]()
    left = iter((True, True, False))

    def prepare() -> bool:
        phases.append(pulse.phase)
        return next(left)

    def poll() -> list[Any]:
        heard.append("poll")
        return []

    def wait() -> list[Any]:
        heard.append("wait")
        assert pulse.phase == "idle"
        return [(None, Shutdown())]

    executor = StampedExecutor(SimpleNamespace(info=None, prepare=prepare), cast(StepRecorder, None), pulse, 0.0)  # type: ignore[arg-type]
    core = SimpleNamespace(has_work=False, executor=executor, hand_over=None)
    EngineLoop(cast(Engine, SimpleNamespace(core=core)), cast(Any, SimpleNamespace(poll=poll, wait=wait)), pulse).run()
    assert heard == ["poll", "poll", "wait"] and phases == ["device"] * 3
