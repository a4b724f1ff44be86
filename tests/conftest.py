"""For all tests: the environment they run in, and the time each folder may take. Fixtures live in tests/support."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest

# Set before torch is imported: the models are tiny, and several processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("HEADRACE_API_KEY", None)
os.environ.pop("HEADRACE_LOG_LEVEL", None)
# Of the hundreds of processes that tests start, only the first may have to compile the package's source.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Seconds on two cores of a machine that counts to COUNT in COUNT_SECONDS. Where that takes longer while the tests run,
# so may they, up to MOST times (.ci/run stretches its stages alike): machines differ, and so does one from hour to
# hour. Folders that share a line share the budget.
BUDGETS = {"unit": 120, "engine + kernels": 300, "server": 210, "reliability": 180}
COUNT, COUNT_SECONDS, MOST = 100_000, 0.005, 5.0
COUNT_EVERY = 2.0  # seconds

SECONDS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--enforce-budgets", action="store_true", help="fail when the tests of a folder take longer than its budget"
    )
    if not pluginmanager.hasplugin(
        "timeout"
    ):  # a bare GPU machine may lack pytest-timeout; the setting in pyproject.toml is no mistake there
        parser.addini("timeout", "seconds a test may take, which nobody counts without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SECONDS] = Counter()
    config.pluginmanager.register(Budgets(config), "budgets")


@pytest.fixture(scope="session", autouse=True)
def limits_measured_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This CPU's profile, roughly, for the engines of all processes: each would measure it again when it starts, for
    0.2 s.

    In a cache folder of the tests' own, where the user's compiled kernels are. Tests of the control plane alone do
    without torch.
    """
    if all("unit" in item.path.parts for item in request.session.items):
        yield
        return
    import torch

    from headrace.cache_home import cache_home
    from headrace.cost.profile import save_profile
    from headrace.worker.profile import estimate_profile

    mine = tmp_path_factory.mktemp("cache") / "headrace"
    mine.mkdir()
    with suppress(OSError):  # a home that cannot be written: then kernels are compiled for these tests alone
        (kernels := cache_home() / "headrace" / "kernels").mkdir(parents=True, exist_ok=True)
        (mine / "kernels").symlink_to(kernels)
    for threads in (os.cpu_count() or 1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        save_profile(estimate_profile(), mine / "profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(mine.parent))
        yield


def seconds_to_count() -> float:
    begin, total = time.perf_counter(), 0
    for number in range(COUNT):
        total += number * number % 7
    return time.perf_counter() - begin


def slowness(counts: Sequence[float]) -> float:
    """How many times longer than the budgets suppose this machine counts, from 1 to MOST."""
    return min(max(median(counts) / COUNT_SECONDS, 1.0), MOST) if counts else 1.0


def slowness_now() -> float:
    """For promises of seconds, which are those of a machine as the budgets suppose it."""
    return slowness([seconds_to_count() for _ in range(5)])


class Budgets:
    """Adds up the time of each folder's tests, prints it, and fails the run where a budget counts and is exceeded."""

    def __init__(self, config: pytest.Config) -> None:
        self.seconds = config.stash[SECONDS]
        self.enforced = config.getoption("--enforce-budgets")
        self.counts: list[float] = []
        self.last = 0.0  # when it last counted

    def pytest_runtest_logfinish(self) -> None:
        if time.monotonic() - self.last >= COUNT_EVERY:
            self.counts.append(seconds_to_count())
            self.last = time.monotonic()

    @property
    def slowness(self) -> float:
        return slowness(self.counts)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = Path(report.nodeid.partition("::")[0]).parts
        folder = parts[parts.index("tests") + 1] if "tests" in parts[:-1] else "other"
        self.seconds[next((group for group in BUDGETS if folder in group.split(" + ")), folder)] += report.duration

    def exceeded(self) -> list[str]:
        return [group for group, budget in BUDGETS.items() if self.seconds[group] > budget * self.slowness]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.enforced and self.exceeded() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time by folder")
        for group, seconds in self.seconds.items():
            terminalreporter.line(f"{seconds:6.1f} s of {BUDGETS.get(group, '-'):>4}  {group}")
        if self.slowness > 1.0:
            terminalreporter.line(f"{self.slowness:6.2f} times as much is allowed: this machine counts so much slower")
        for group in self.exceeded() if self.enforced else ():
            allowed = BUDGETS[group] * self.slowness
            text = f"FAILED: {group} took {self.seconds[group]:.1f} s, more than its {allowed:.0f} s; make its slowest tests smaller"
            terminalreporter.line(text, red=True)
