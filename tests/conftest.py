"""For all tests: the environment they run in, and the time each folder may take. Fixtures live in tests/support."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

# Set before torch is imported: the models are tiny, and several processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("HEADRACE_API_KEY", None)
os.environ.pop("HEADRACE_LOG_LEVEL", None)

# Seconds on two cores. Folders that share a line share the budget.
BUDGETS = {"unit": 60, "engine + kernels": 150, "server": 120, "reliability": 120}

SECONDS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--enforce-budgets", action="store_true", help="fail when the tests of a folder take longer than its budget")
    if not pluginmanager.hasplugin("timeout"):  # a bare GPU machine may lack pytest-timeout; the setting in pyproject.toml is no mistake there
        parser.addini("timeout", "seconds a test may take, which nobody counts without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SECONDS] = Counter()
    config.pluginmanager.register(Budgets(config), "budgets")


class Budgets:
    """Adds up the time of each folder's tests, prints it, and fails the run where a budget counts and is exceeded."""

    def __init__(self, config: pytest.Config) -> None:
        self.seconds = config.stash[SECONDS]
        self.enforced = config.getoption("--enforce-budgets")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = Path(report.nodeid.partition("::")[0]).parts
        folder = parts[parts.index("tests") + 1] if "tests" in parts[:-1] else "other"
        self.seconds[next((group for group in BUDGETS if folder in group.split(" + ")), folder)] += report.duration

    def exceeded(self) -> list[str]:
        return [group for group, budget in BUDGETS.items() if self.seconds[group] > budget]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.enforced and self.exceeded() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time by folder")
        for group, seconds in self.seconds.items():
            terminalreporter.line(f"{seconds:6.1f} s of {BUDGETS.get(group, '-'):>4}  {group}")
        for group in self.exceeded() if self.enforced else ():
            text = f"FAILED: {group} took {self.seconds[group]:.1f} s, more than its {BUDGETS[group]} s; make its slowest tests smaller"
            terminalreporter.line(text, red=True)
