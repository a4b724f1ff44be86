"""Processes that build kernels: each names what it is done with, and none of them can keep a start waiting or make it fail."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from headrace import builders
from headrace.builders import Builders, Job, builders_wanted

JOB = Job({"model_type": "llama"}, "bfloat16", 16, 64, 4, 64, (), False, True, (("embedding", "int32"),), "a card", (9, 0), 132)
GOOD = """
import json, sys
index, count = map(int, sys.argv[1:])
job = json.loads(sys.stdin.readline())
assert job["capability"] == [9, 0] and job["config"] == {"model_type": "llama"}
for number in range(6):
    if number % count == index:
        print(json.dumps(f"kernel {number}"), flush=True)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "some_builder.py"


class Heard:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.ended = threading.Event()

    def of(self, made: Builders) -> Heard:
        made.tell(JOB, self.names.append, self.ended.set)
        assert self.ended.wait(20)
        return self


def test_shares_are_dealt_out_and_all_are_named(module: Path) -> None:
    module.write_text(GOOD)
    made = Builders(3, "some_builder")
    assert sorted(Heard().of(made).names) == [f"kernel {number}" for number in range(6)]
    made.close()


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "import sys; sys.stdin.readline(); print('no json')", "no python"])
def test_those_that_fail_just_end(module: Path, text: str) -> None:
    module.write_text(text)
    made = Builders(2, "some_builder")
    assert Heard().of(made).names == []
    made.close()


def test_closing_ends_those_that_hang_and_those_that_were_told_nothing(module: Path) -> None:
    module.write_text("import time; time.sleep(100)")
    begin = time.monotonic()
    Builders(2, "some_builder").close()
    made, heard = Builders(1, "some_builder"), Heard()
    made.tell(JOB, heard.names.append, heard.ended.set)
    made.close()
    assert heard.ended.wait(10) and time.monotonic() - begin < 10


def test_they_are_wanted_where_nothing_is_compiled_and_cores_are_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for cores, wanted in ((2, 0), (4, 1), (16, 4), (96, 4)):
        monkeypatch.setattr(builders.os, "cpu_count", lambda cores=cores: cores)
        assert builders_wanted() == wanted
    for index in range(100):
        (tmp_path / "cache" / str(index)).mkdir(parents=True)
    assert builders_wanted() == 0


def test_this_process_s_path_is_theirs(module: Path) -> None:
    module.write_text("import json, sys; sys.stdin.readline(); print(json.dumps(sys.path))")
    made = Builders(1, "some_builder")
    (path,) = Heard().of(made).names
    assert set(sys.path) - {""} <= set(path)
    made.close()
