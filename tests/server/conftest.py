"""What several files of this folder ask: two servers for the whole run, and a client of one of them.

What lives here: those that nobody configures, kills or fills. What may not: a server with flags of one file's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.serving import SERVE, Server, serving

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """The real server with the bundled model."""
    flags = (
        "--threads",
        "1",
        "--max-model-len",
        "1200",
        "--kv-cache-memory",
        "64MiB",
        "--served-model-name",
        "demo",
        "org/demo",
    )
    with serving(*flags, command=SERVE) as running:
        yield running


@pytest.fixture(scope="session")
def scripted() -> Iterator[Server]:
    """Says what the message has in brackets."""
    with serving("--token-seconds", "0", "--max-model-len", "2048", "--reasoning-parser", "qwen3") as running:
        yield running


@pytest.fixture(scope="session")
def client(demo: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made
