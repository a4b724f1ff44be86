"""Kernels that come when a start is over: nothing waits for them, nothing is half there, and nothing is left of
them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace.kernels as registry
from headrace.engine.assembly import Engine
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.errors import ConfigError
from headrace.kernels import Kernels
from headrace.kernels.build import ahead as ahead_module
from headrace.kernels.build.ahead import CompileAhead
from headrace.kernels.build.later import Ended, Later, Missing
from headrace.kernels.candidate import Candidate, Sizes
from headrace.request import StepPlan
from headrace.worker.executor import DeviceExecutor
from tests.support.kernel_cases import called, carried_out

CPU = torch.device("cpu")
SIZES = Sizes(None, torch.float32, 16, 64, 4, 64)  # type: ignore[arg-type]


class Workshop:
    """Warm-ups that say when they run. A kernel is built when ``door`` is open."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.door = threading.Event()
        self.closed = threading.Event()
        self.kept: set[str] = set()
        self.wrong: dict[str, Exception] = {}
        self.ends: list[bool] = []
        self.ahead: CompileAhead[None] | None = None

    def plain(self, name: str) -> tuple[str, Callable[[], object]]:
        return name, lambda: self.said.append(name)

    def later(self, name: str) -> tuple[str, Later]:
        def find() -> None:
            if name not in self.kept:
                raise Missing
            self.said.append(f"found {name}")

        def build() -> None:
            self.said.append(f"began {name}")
            while not self.door.wait(0.01):
                if self.closed.is_set():
                    raise Ended
            if name in self.wrong:
                raise self.wrong[name]
            self.said.append(f"built {name}")

        return name, Later(lambda: self.said.append(f"called {name}"), find, build)

    def start(
        self, *warm_ups: tuple[str, Any], threads: int = 2, strict: bool = False, **more: Any
    ) -> CompileAhead[None]:
        candidate = Candidate("kernel", lambda site: lambda *_: None, warm_up=lambda *_: warm_ups)
        self.ahead = CompileAhead(lambda: None, strict=strict, threads=threads, **{"later": True, **more})
        registry.OPERATIONS = carried_out("rms_norm", candidate)  # type: ignore[misc]
        kernels = Kernels(CPU)
        kernels.choose(*called("rms_norm", dtype=torch.float32))
        self.ahead.start(kernels, SIZES, lambda: None)
        return self.ahead

    def end(self, there: bool) -> None:
        self.closed.set()
        self.ends.append(there)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    monkeypatch.setattr(registry, "OPERATIONS", registry.OPERATIONS)
    shop = Workshop()
    yield shop
    shop.door.set()
    if shop.ahead is not None:
        shop.ahead._threads.close(5)
        assert not any(thread.is_alive() for thread in shop.ahead._threads._threads)


def test_a_start_waits_for_none_of_them_and_they_come_behind_all_others(shop: Workshop) -> None:
    ahead = shop.start(shop.later("shared"), shop.plain("one"), shop.later("plan"), shop.plain("two"), threads=1)
    assert list(ahead.finish()) == [f"rms_norm torch.float32: {name}" for name in ("shared", "one", "plan", "two")]
    assert shop.said[:2] == ["one", "two"] and "built shared" not in shop.said
    assert ahead.coming == ("rms_norm torch.float32: shared", "rms_norm torch.float32: plan")
    behind = ahead.hand_over(shop.end)
    ahead.close()
    assert not behind.there and not behind.wait(0.01) and shop.ends == []
    shop.door.set()
    assert behind.wait(5) and behind.there
    assert shop.said == ["one", "two", "began shared", "built shared", "began plan", "built plan"]
    assert shop.ends == [True], "once, when all were there"
    assert behind.arrived is not None and 0 <= time.time() - behind.arrived < 5
    behind.close()
    assert shop.ends == [True] and behind.there


def test_what_a_cache_holds_is_there_when_the_start_is_over(shop: Workshop) -> None:
    shop.kept = {"shared"}
    ahead = shop.start(shop.later("shared"), shop.plain("one"))
    ahead.finish()
    assert sorted(shop.said) == ["found shared", "one"] and ahead.coming == ()
    ahead.close()


def test_without_processes_that_compile_they_are_warm_ups_as_any(shop: Workshop) -> None:
    ahead = shop.start(shop.later("shared"), later=False)
    ahead.finish()
    assert shop.said == ["called shared"] and ahead.coming == ()
    ahead.close()


@pytest.mark.parametrize("comes", [True, False])
def test_what_another_process_is_long_at_is_waited_for(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Of four the second and the last are this one's; what the other has is looked for behind them."""
    monkeypatch.setattr(ahead_module, "_EXPECTED", 5.0 if comes else 0.1)
    warm_ups = shop.later("shared"), shop.plain("one"), shop.plain("two"), shop.later("plan")
    ahead = shop.start(*warm_ups, threads=1, later=False, share=(1, 2))
    while len(shop.said) < 3:
        time.sleep(0.001)
    shop.kept = {"shared"} if comes else set()
    ahead.finish()
    assert shop.said == ["one", "called plan", "two", "found shared" if comes else "called shared"]
    ahead.close()


@pytest.mark.parametrize("strict", [False, True])
def test_one_that_does_not_build_is_told_and_never_there(
    shop: Workshop, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    shop.wrong = {"shared": RuntimeError("no such instruction")}
    ahead = shop.start(shop.later("shared"), shop.later("plan"), strict=strict)
    ahead.finish()
    behind = ahead.hand_over(shop.end)
    shop.door.set()
    assert not behind.wait(5) and not behind.there and behind.arrived is None
    assert shop.ends == [False] and "built plan" in shop.said
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (
        "rms_norm torch.float32: shared: the kernel cannot be built" in record.getMessage()
        and "no such instruction" in caplog.text
    )
    assert ("--strict-kernels" in record.getMessage()) is strict
    behind.close()


def test_closing_ends_who_builds_drops_what_has_not_begun_and_keeps_nobody_waiting(shop: Workshop) -> None:
    ahead = shop.start(shop.later("shared"), shop.later("plan"), threads=1)
    ahead.finish()
    behind = ahead.hand_over(shop.end)
    while "began shared" not in shop.said:
        time.sleep(0.001)
    begin = time.monotonic()
    behind.close()
    assert time.monotonic() - begin < 1
    assert shop.ends == [False] and shop.said == ["began shared"] and not behind.there
    assert shop.ahead is not None and not any(thread.is_alive() for thread in shop.ahead._threads._threads)
    behind.close()
    assert shop.ends == [False], "closed once"
    begin = time.monotonic()
    assert not behind.wait(5), "and nothing is there"
    assert time.monotonic() - begin < 1, "nor is it waited for"


def test_a_start_that_fails_waits_for_none_of_them(shop: Workshop) -> None:
    ahead = shop.start(shop.later("shared"), shop.plain("one"))
    ahead.finish()
    begin = time.monotonic()
    ahead.close()
    assert time.monotonic() - begin < 1 and "built shared" not in shop.said


def test_a_compiler_that_hangs_over_what_others_wait_for_is_still_found(
    monkeypatch: pytest.MonkeyPatch, shop: Workshop
) -> None:
    stuck = threading.Event()
    ahead = shop.start(("one", lambda: stuck.wait(5)), shop.later("shared"))
    ahead._patience = 0.05
    with pytest.raises(ConfigError, match="hangs"):
        ahead.finish()
    stuck.set()
    ahead.close()


# --- steps meanwhile


class Coming:
    """PendingKernels which are there when they are told so."""

    def __init__(self) -> None:
        self.there = False
        self.arrived: float | None = None
        self.calls: list[object] = []

    def wait(self, seconds: float) -> bool:
        self.calls.append(seconds)
        return self.there

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("shared", [None, 4096, 0])
def test_until_they_are_there_steps_are_told_that_theirs_share_no_keys(shared: int | None) -> None:
    coming, told, runner = Coming(), list[StepPlan](), SimpleNamespace(queued=True)
    runner.submit = told.append
    executor = DeviceExecutor(runner, keyed_hash_info(), later=coming)  # type: ignore[arg-type]
    plan = StepPlan(7, shared_tokens=shared)
    executor.submit(plan)
    assert told[0].shared_tokens == 0 and told[0].step_id == 7 and told[0].rows is plan.rows
    coming.there = True
    executor.submit(plan)
    assert told[1] is plan


def test_who_compares_steps_can_wait() -> None:
    coming = Coming()

    def waits(executor: object) -> bool:
        engine: Any = SimpleNamespace(core=SimpleNamespace(executor=executor))
        return Engine.await_kernels(engine, 3.0)

    executor = SimpleNamespace(later=coming)
    assert not waits(executor) and coming.calls == [3.0]
    coming.there = True
    assert waits(executor) and waits(object()), "an executor that has all its kernels from the start"
