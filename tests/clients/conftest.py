"""Servers for the tests of other people's clients, and the mark that leaves them out of ordinary runs.

What lives here: two servers, each for the whole run. What may not: clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import SERVE, Server, serving

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Ordinary runs do not even import the clients."""
    return True if config.option.markexpr == "not slow" else None


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slow")


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """The real server with the bundled model, as a user starts it."""
    with serving("--served-model-name", "demo", "org/demo", command=SERVE) as running:
        yield running


@pytest.fixture(scope="session")
def scripted() -> Iterator[Server]:
    """Says what the message has in brackets."""
    with serving("--token-seconds", "0", "--max-model-len", "4096", "--reasoning-parser", "qwen3") as running:
        yield running
