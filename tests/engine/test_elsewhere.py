"""The ways taken where a system is not Linux, lived through on Linux: support/elsewhere takes from every process what
macOS does not have."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.serving import ROOT, SERVE, Server

ELSEWHERE = ROOT / "tests" / "support" / "elsewhere"
HERE = {
    "OMP_NUM_THREADS": "1",
    "PATH": "",
}  # no compiler: the kernels would be built anew, for a machine of another name
WRAPPER = """#!/bin/sh
export ELSEWHERE_PYTHON="$0" PYTHONPATH="{elsewhere}:{source}:$PYTHONPATH"
for each; do shift; [ "$each" = -S ] || set -- "$@" "$each"; done
exec {python} "$@"
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter there, whose children live there, too."""
    path = tmp_path_factory.mktemp("elsewhere") / "python"
    path.write_text(WRAPPER.format(elsewhere=ELSEWHERE, source=ROOT / "src", python=sys.executable))
    path.chmod(0o700)
    return str(path)


def run(command: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, **HERE}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def said(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err[-3000:]
    return out


def test_doctor_chat_and_a_server_live_there(python: str) -> None:
    small = [
        "--max-num-batched-tokens",
        "32",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "128",
    ]  # doctor takes the largest step
    words = [["doctor", *small], ["chat", "Hello!", "--max-tokens", "4", "--temperature", "0"]]
    commands = run(
        [python, "-c", f"from headrace.cli import main\nfor words in {words}: print(main(words), 'is its status')"]
    )
    server = Server((python, *SERVE[1:], "--supervise"), HERE)
    try:
        server.wait_ready()
        body = {
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 4,
            "temperature": 0,
            "response_format": {"type": "json_object"},
        }
        answer = server.ask("POST", "/v1/chat/completions", body)
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 4, answer
        assert any("bounded in time, not in memory" in line for line in server.lines)
    finally:
        server.stop()
    report, answered, nothing = said(commands).split("0 is its status\n")
    assert "free memory is taken to be what is installed" in report
    assert answered.strip() and not nothing


def test_a_child_notices_that_its_parent_was_killed(python: str) -> None:
    child = "import time; from headrace.processes.tree import end_with_parent; end_with_parent(); print('ready', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    process = run([python, "-c", parent])
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    began = time.monotonic()
    assert process.stdout.read() == "" and time.monotonic() - began < 10  # the child held the pipe, too
    process.communicate()


def test_here_nothing_is_missing() -> None:
    from headrace.portability import missing

    assert (missing() == []) == Path("/proc/self/status").exists()
