"""Testing by simulation (tests/support/simulation): a thousand seeds, every interleaving of a small world, planted
defects.

The command that does more of it is tests/reliability/simulate.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cache.block_pool import PrefixNode
from headrace.scheduler.policies import POLICIES
from headrace.scheduler.step_planner import StepPlanner
from tests.reliability import simulate
from tests.support.simulation import defects, drawing, exhaust
from tests.support.simulation.bounds import BOUNDS
from tests.support.simulation.broken import Broken
from tests.support.simulation.drawing import draw
from tests.support.simulation.life import Failure, Lived, live
from tests.support.simulation.order import OrderWatch
from tests.support.simulation.schedule import TURN, Asked, Schedule, Setting, from_text, to_text
from tests.support.simulation.shrinking import shrink
from tests.support.simulation.sweep import find, replays, sweep

EVENTS = 100  # a seed, here; the command's have 500
SCHEDULES = sorted((Path(__file__).parent / "schedules").glob("*.json"))
HAPPENINGS = (
    "aborts", "adapters", "cohort", "copies", "drafts", "error", "failed", "fell with a step", "hits", "journals", "length", "loops", "preemptions",
    "read adapters", "rebuilds", "stop", "stops", "turned away", "turned down",
)  # fmt: skip


@pytest.mark.timeout(240)  # where others take the cores; alone on two it is seconds
def test_a_thousand_seeds_keep_every_invariant() -> None:
    """On two processes, as CI has two cores. What happened in them is counted, so that a runner which tests nothing is
    noticed."""
    done = sweep(range(1000), events=EVENTS, jobs=2)
    assert not done.failures, (
        f"{simulate.__file__} --events {EVENTS} --seed {min(done.failures)}: {done.failures[min(done.failures)]}"
    )
    assert (done.lives, done.events) == (1000, 1000 * EVENTS)
    assert min(done.seen[happening] for happening in HAPPENINGS) > 20, done.seen


def test_every_policy_has_a_bound() -> None:
    assert set(POLICIES) == set(BOUNDS), (
        "tests/support/simulation/bounds.py says what each policy promises about order and waiting"
    )


def test_whom_no_step_has_met_is_nobodys_elder() -> None:
    """Else it would be taken for the one that nobody may pass, and be said to starve."""
    watch = OrderWatch(Setting(policy="shortest-remaining"))
    for number, now in enumerate((1e6, 2e6)):
        watch.arrived(number, Asked(prompt=(1,)))
        assert watch._find_first() == 0
        watch.met(now)


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_what_once_broke_holds(path: Path) -> None:
    """Shrunk schedules of defects that were found, and mended."""
    outcome = live(from_text(path.read_text()))
    assert isinstance(outcome, Lived), outcome


# --- a seed says all


def test_a_seed_replays_byte_for_byte_in_another_process() -> None:
    """Also where strings hash otherwise."""
    code = "from tests.support.simulation import drawing, sweep; print([sweep.replays(drawing.draw(seed, 100)) for seed in range(8)])"
    said = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
                          capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert said.strip() == str([replays(draw(seed, EVENTS)) for seed in range(8)])


def test_a_run_that_depends_on_more_than_its_seed_does_not_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    moods, fill = random.Random(), StepPlanner.fill
    monkeypatch.setattr(
        StepPlanner, "fill", lambda self, *given, **more: fill(self, *given, **more) if moods.random() < 0.8 else None
    )
    monkeypatch.setattr("tests.support.simulation.life.Life._turn", lambda self: self.take_turn(self.core.step()))
    with pytest.raises(AssertionError, match="does not replay"):
        for seed in range(5):
            replays(draw(seed, EVENTS))


def test_schedules_are_data() -> None:
    """Written and read again they are the same; what is no schedule is said in a sentence."""
    for seed in range(20):
        schedule = draw(seed, EVENTS)
        assert from_text(to_text(schedule)) == schedule
    for text in (
        "",
        "[]",
        "{}",
        '{"name": "x", "setting": {"depht": 1}, "events": []}',
        '{"name": "x", "setting": {}, "events": [["ad", 1]]}',
    ):
        with pytest.raises(ValueError, match="no schedule"):
            from_text(text)


def test_the_command_replays_what_it_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, lean = tmp_path / "schedule.json", ["--events", str(EVENTS)]
    with defects.planted(defects.a_block_is_freed_in_flight):
        seed = found[0] if (found := find(range(20), events=EVENTS)) else 0
        assert simulate.main(["--seed", str(seed), *lean, "--no-shrink", "--save", str(file)]) == 1
        assert simulate.main(["--replay", str(file), "--no-shrink"]) == 1
    assert capsys.readouterr().out.count("FAILED") == 2
    assert simulate.main(["--replay", str(file)]) == 0
    assert simulate.main(["--seeds", "3", "--first", "5", *lean]) == 0
    assert f"3 seeds, {3 * EVENTS} events" in capsys.readouterr().out


# --- planted defects


@pytest.mark.parametrize("plant", defects.DEFECTS, ids=lambda plant: plant.__name__)
def test_planted_defects_are_found(plant: defects.Plant) -> None:
    with defects.planted(plant):
        assert find(range(150), events=EVENTS) is not None


def test_what_fails_is_shrunk_to_what_matters() -> None:
    """A hundred events become a few, which fail alike, and hold once the defect is mended."""
    with defects.planted(defects.a_row_edit_is_forgotten):
        found = find(range(20), events=EVENTS)
        assert found is not None
        small, failure = shrink(draw(found[0], EVENTS), found[2], most=400)
        assert failure.kind == found[2].kind and len(small.events) <= 10
        again = live(from_text(to_text(small)))
        assert isinstance(again, Failure) and (again.kind, again.message, again.at) == (
            failure.kind,
            failure.message,
            failure.at,
        )
    assert isinstance(live(small), Lived)


def test_colliding_names_of_prefixes_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality is decided by token ids; the hash is only a name, and all names may be equal."""
    monkeypatch.setattr(PrefixNode, "hash", property(lambda self: b"same"))
    assert not sweep(range(515, 535), events=EVENTS).failures


# --- a small world


@pytest.mark.parametrize(("depth", "actions"), [(0, 1000), (1, 9)])
def test_every_interleaving_of_a_small_world_ends(depth: int, actions: int) -> None:
    """Synchronous, all there are; overlapped, those within nine actions (the command goes on to the end, and to depth
    2)."""
    explored = exhaust.explore(depth, most_actions=actions)
    print(explored)
    assert explored.states > 1500 and explored.whole == (depth == 0)


@pytest.mark.parametrize(
    "plant", [defects.a_block_is_freed_in_flight, defects.an_answer_ends_twice], ids=lambda plant: plant.__name__
)
def test_a_small_world_breaks_too(plant: defects.Plant) -> None:
    with defects.planted(plant), pytest.raises(Broken, match="after add 0"):
        exhaust.explore(1)


def test_a_small_world_in_which_nobody_is_admitted_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepPlanner, "_plan_waiting", lambda self, plan, now, idle: None)
    with pytest.raises(Broken, match="after add 0 → submit"):
        exhaust.explore(1)


def test_an_empty_schedule_is_a_life() -> None:
    assert isinstance(live(Schedule("nothing", drawing.draw_setting(random.Random(0)), (TURN,))), Lived)
