"""What only an interpreter of its own shows: rooms imported with modules blocked, and pages that torch's tensors lie
in."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from headrace.torch_environment import HUGE_PAGES
from tests.support.rooms import below, modules

TORCH_FREE = (
    "request", "spec", "clock", "config", "errors", "metrics", "trace", "techniques", "flags", "cli",
    "cost", "scheduler", "cache", "server", "planner",
    "lora.peft", "lora.registry",
    "engine.core", "engine.executor", "engine.tokenizer", "engine.output", "engine.client", "models.families", "models.source",
)  # fmt: skip
WEB_FREE = tuple(name for name in TORCH_FREE if name != "server")
BARE = (
    "engine.llm",
    "worker",
    "models",
    "layers",
    "quant",
    "kernels.operations",
    "lab.table",
)  # what a bare GPU machine runs

BLOCKED_IMPORTS = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked here")

sys.meta_path.insert(0, Blocker())
failed = 0
for name in NAMES:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed = 1
        print(f"{name}: {error}")
sys.exit(failed)
"""

SMAPS = """
import re
from headrace.torch_environment import prepare_for_torch
prepare_for_torch()
import torch
tensor = torch.ones(2**23)
data = tensor.data_ptr()
for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())[1:]:
    low, high = (int(word, 16) for word in area.split(" ", 1)[0].split("-"))
    if low <= data < high:
        print("hg" in re.search(r"VmFlags:(.*)", area)[1].split())
"""

BLOCKED = {
    "without torch": (TORCH_FREE, ("torch", "triton", "transformers")),
    "without torch and the web stack": (
        WEB_FREE,
        ("torch", "fastapi", "starlette", "uvicorn", "pydantic", "httpx", "yaml"),
    ),
    "with torch alone": (BARE, ("msgspec", "uvicorn", "uvloop", "llguidance", "transformers", "matplotlib")),
}


@cache
def fresh_imports() -> dict[str, subprocess.CompletedProcess[str]]:
    """Each of BLOCKED in an interpreter of its own, two at a time."""

    def run(case: str) -> subprocess.CompletedProcess[str]:
        rooms, blocked = BLOCKED[case]
        names = [f"headrace.{name}" for name, _ in modules() if any(below(name, room) for room in rooms)]
        names += [room for room in rooms if below(room, "lab")]
        script = f"BLOCKED = {blocked!r}\nNAMES = {names!r}\n{BLOCKED_IMPORTS}"
        return subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=Path(__file__).parents[2],
        )

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(BLOCKED, pool.map(run, BLOCKED), strict=True))


@pytest.mark.parametrize("case", BLOCKED)
def test_imports_with_modules_blocked(case: str) -> None:
    """Also what is imported indirectly counts: a fresh interpreter in which the import itself fails."""
    done = fresh_imports()[case]
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps (Linux)")
def test_torch_advises_huge_pages() -> None:
    environment = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
    done = subprocess.run([sys.executable, "-c", SMAPS], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["True"]
