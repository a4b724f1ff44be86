"""What the core says of a step's time: the host's own CPU seconds, and whether there was work all along."""

from __future__ import annotations

from array import array

from headrace.clock import VirtualClock
from headrace.config import SchedulerConfig
from headrace.engine.executor import Ticket
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.observe.metrics import StepTimes
from headrace.request import Request, SamplingParams, StepPlan, StepResult
from tests.support.hash_engine import create_core


class CountingClock(VirtualClock):
    """Each look at the time takes a second; CPU seconds are what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now

    def thread_seconds(self) -> float:
        return self.used


class Busy(KeyedHashExecutor):
    """Submitting costs 3 CPU seconds, collecting 5, of which 4 go into waiting for the device."""

    def __init__(self, clock: CountingClock) -> None:
        super().__init__(keyed_hash_info())
        self._cpu = clock

    def submit(self, plan: StepPlan) -> Ticket:  # type: ignore[override]
        self._cpu.used += 3.0
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        self._cpu.used += 5.0
        result = super().collect(ticket)
        return StepResult(result.step_id, result.tokens, lent_seconds=4.0)


class Notes:
    def __init__(self) -> None:
        self.times: list[StepTimes] = []

    def on_step(self, plan: StepPlan, result: StepResult | None, times: StepTimes) -> None:
        self.times.append(times)


def run(depth: int, *, requests: int = 1) -> list[StepTimes]:
    clock, notes = CountingClock(), Notes()
    core = create_core(Busy(clock), SchedulerConfig(), clock, depth=depth, observer=notes)
    for number in range(requests):
        clock.used += 100.0  # whoever asks computes too: not the engine's business
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        core.add(Request(request_id=number, prompt_token_ids=array("i", [1, 2, 3]), params=params))
        while core.has_work:
            core.step()
    return notes.times


def test_host_time_is_cpu_time_between_submissions_without_the_wait_for_the_device() -> None:
    assert [times.host_seconds for times in run(depth=0)] == [
        0.0,
        4.0,
        4.0,
        4.0,
    ]  # 3 to submit, 5 to collect, 4 of them lent
    assert [times.host_seconds for times in run(depth=1)] == [
        0.0,
        3.0,
        4.0,
        4.0,
    ]  # the second is submitted before anything is collected


def test_what_happens_while_there_is_no_work_is_no_steps_time() -> None:
    for depth in (0, 1):
        times = run(depth, requests=2)
        assert [each.continuous for each in times] == [False, True, True, True] * 2
        assert max(each.host_seconds for each in times) == 4.0


def test_a_steps_times_rise() -> None:
    for depth in (0, 1, 2):
        for times in run(depth):
            assert times.scheduled < times.submitted < times.queued <= times.awaited < times.collected < times.settled
