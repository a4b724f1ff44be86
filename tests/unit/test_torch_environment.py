"""How compute threads wait and in which pages tensors lie is said before torch is loaded, and never against the user's word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.torch_environment import HUGE_PAGES, SPIN_COUNT, prepare_for_torch

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


@pytest.mark.parametrize(
    ("said", "count", "pages"),
    [
        ({}, SPIN_COUNT, "1"),
        ({"GOMP_SPINCOUNT": "7"}, "7", "1"),
        ({"OMP_WAIT_POLICY": "active"}, None, "1"),
        ({HUGE_PAGES: "0"}, SPIN_COUNT, "0"),
    ],
)
def test_the_users_word_stands(said: dict[str, str], count: str | None, pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    prepare_for_torch()
    assert (os.environ.get("GOMP_SPINCOUNT"), os.environ[HUGE_PAGES]) == (count, pages)
    for name in ("GOMP_SPINCOUNT", HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps (Linux)")
def test_torch_advises_huge_pages() -> None:
    environment = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
    done = subprocess.run([sys.executable, "-c", SMAPS], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["True"]
