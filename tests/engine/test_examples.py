"""The Python examples of README.md and the quickstart run as they stand, with the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def example(page: str, number: int) -> str:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))[number]


@pytest.mark.parametrize(
    ("page", "number", "told"),
    [
        ("README.md", 0, "The capital of France is"),
        ("docs/quickstart.md", 0, "length 32 0"),
        ("docs/quickstart.md", 1, "\n"),
    ],
    ids=["readme", "offline", "asynchronous"],
)
def test_python_examples_run(page: str, number: int, told: str) -> None:
    done = subprocess.run([sys.executable, "-c", example(page, number)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout
