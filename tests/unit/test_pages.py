"""Huge pages are asked for before torch allocates, and the user's word stands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.pages import HUGE_PAGES, prefer_huge_pages

SMAPS = """
import re
from headrace.pages import prefer_huge_pages
prefer_huge_pages()
import torch
tensor = torch.ones(2**23)
data = tensor.data_ptr()
for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())[1:]:
    low, high = (int(word, 16) for word in area.split(" ", 1)[0].split("-"))
    if low <= data < high:
        print("hg" in re.search(r"VmFlags:(.*)", area)[1].split())
"""


def test_the_users_word_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HUGE_PAGES, "0")
    prefer_huge_pages()
    assert os.environ[HUGE_PAGES] == "0"


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps (Linux)")
def test_torch_advises_huge_pages() -> None:
    environment = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
    done = subprocess.run([sys.executable, "-c", SMAPS], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["True"]
