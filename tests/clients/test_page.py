"""The examples of docs/clients.md, run as they stand there but for the address."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients import questions as q
from tests.support.serving import ROOT, Server

PAGE = ROOT / "docs" / "clients.md"
SECTIONS = dict(section.split("\n", 1) for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:])
EXAMPLES = {
    name: found.groups()
    for name, text in SECTIONS.items()
    if (found := re.search(r"^```(python|javascript)\n(.*?)^```$", text, re.S | re.M))
}
NODE = Path(os.environ.get("HEADRACE_TEST_NODE", Path(__file__).parent / "node"))


def program(name: str, folder: Path) -> list[str]:
    """What runs the example once it is written there, in whose folder Node looks for packages; skips where nothing
    can."""
    if EXAMPLES[name][0] == "javascript":
        if shutil.which("node") is None or not all(
            (NODE / "node_modules" / package).is_dir() for package in imports(name)
        ):
            pytest.skip(q.ABSENT)
        (folder / "node_modules").symlink_to(NODE / "node_modules")
        return ["node", str(folder / "example.mjs")]
    for package in imports(name):
        pytest.importorskip(package, reason=q.ABSENT)
    return [sys.executable, str(folder / "example.py")]


def imports(name: str) -> list[str]:
    language, text = EXAMPLES[name]
    return re.findall(r'from "([^"]+)"' if language == "javascript" else r"^(?:from|import) ([\w.]+)", text, re.M)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_works(demo: Server, tmp_path: Path, name: str) -> None:
    command, text = program(name, tmp_path), EXAMPLES[name][1]
    assert "http://localhost:8000" in text
    Path(command[-1]).write_text(text.replace("http://localhost:8000", demo.url))
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
