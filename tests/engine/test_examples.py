"""The Python examples of README.md and the quickstart run as they stand, with the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def example(page: str, number: int) -> str:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))[number]


EXAMPLES = {
    "readme": ("README.md", 0, "The capital of France is"),
    "offline": ("docs/quickstart.md", 0, "length 32 0"),
    "asynchronous": ("docs/quickstart.md", 1, "\n"),
}


@cache
def runs() -> dict[str, subprocess.CompletedProcess[str]]:
    """All examples, each in a process of its own, two at a time."""

    def run(name: str) -> subprocess.CompletedProcess[str]:
        page, number, _ = EXAMPLES[name]
        return subprocess.run(
            [sys.executable, "-c", example(page, number)], capture_output=True, text=True, timeout=60, check=False
        )

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(EXAMPLES, pool.map(run, EXAMPLES), strict=True))


@pytest.mark.parametrize("name", EXAMPLES)
def test_python_examples_run(name: str) -> None:
    done = runs()[name]
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[name][2] in done.stdout
