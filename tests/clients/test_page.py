"""The examples of docs/clients.md, run as they stand there but for the address."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.clients.questions import ABSENT
from tests.support.serving import ROOT, Server

PAGE = ROOT / "docs" / "clients.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_example_works(demo: Server, name: str) -> None:
    example = SECTIONS[name]
    for package in re.findall(r"^(?:from|import) ([\w.]+)", example, re.M):
        pytest.importorskip(package, reason=ABSENT)
    assert "http://localhost:8000" in example
    done = subprocess.run([sys.executable, "-c", example.replace("http://localhost:8000", demo.url)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
