"""``headrace bench serve`` in a process of its own, against a server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import main
from tests.support.serving import Server, environment, serving, wait_for

KEY = "sk-of-the-bench"
# The server's machine counts as another one where the limits of this one are not to be measured, which loads torch.
LOOPBACK = "headrace.bench.serve.LOOPBACK"
UNMEASURED = (
    "import sys; from headrace.bench import serve; from headrace.cli import main; serve.LOOPBACK = (); sys.exit(main())"
)
LENGTHS = ("--input-len", "8", "--output-len", "2", "--num-warmups", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--token-seconds", "0.01", "--api-key", KEY) as running:
        yield running


def answered(server: Server) -> float:
    text = server.ask("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"}).body.decode()
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("headrace_request_success_total")
    )


def test_ctrl_c_tells_what_was_answered(server: Server, tmp_path: Path) -> None:
    written, before = tmp_path / "found.json", answered(server)
    words = ("--num-prompts", "4000", "--api-key", KEY, "--output-json", str(written))
    command = [sys.executable, "-c", UNMEASURED, "bench", "serve", "--base-url", server.url, *LENGTHS, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    wait_for(lambda: process.poll() is not None or answered(server) > before + 20, 30, "some are answered")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    found = json.loads(written.read_text())
    assert 20 <= found["completed"] == len(found["requests"]) and found["failed"] == 0
    assert (
        "of 4000 requests had ended" in found["facts"]["stopped"]
        and "of 4000 requests had ended" in err
        and "Traceback" not in err
    )
    assert f"completed {found['completed']}" in " ".join(out.split())
    wait_for(lambda: server.running({"Authorization": f"Bearer {KEY}"}) == 0, 10, "those under way are let go")


def test_kinds_of_clients_at_once_have_an_objective_each(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens take 10 ms: who wants a turn within a minute has it, who wants a whole request in 1 ms has not."""
    monkeypatch.setattr(LOOPBACK, ())
    sizes = ["--scale", "0.1", "--request-rate", "20", "--requests", "agents=1", "batch=3", "embeddings=2"]
    mixed = ["bench", "mixed", "--base-url", server.url, "--api-key", KEY, *sizes, "--kinds"]
    words = ["--objective", "batch=e2el:1", "agents=e2el:60000", "--output-json", str(tmp_path / "mixed.json")]
    assert main([*mixed, "agents", "batch", "--alone", *words]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "mixed.json").read_text())
    for run in (found["alone"], found["together"]):
        assert not any(each["reasons"] for each in run.values()), capsys.readouterr().out
        figures = {name: (each["completed"], each["failed"], each["attainment"]) for name, each in run.items()}
        assert figures == {"agents": (6, 0, 1.0), "batch": (3, 0, 0.0)}
    assert main([*mixed, "embeddings", "--embedding-model", "none"]) == 1
    assert "Every warm-up request failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--objective", "chats=ttft:5"), "chats=ttft:5"),
        (("--objective", "chat=speed:5"), "METRIC:MILLISECONDS"),
        (("--requests", "chat=x"), "whole number"),
        (("--kinds", "embeddings"), "--embedding-model"),
    ],
)
def test_kinds_that_are_wrong_are_told_before_anything_is_sent(
    wrong: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "mixed", *wrong]) == 2 and said in capsys.readouterr().err


FLAG = ("--api-key", KEY)


def test_the_key_is_the_flag_or_the_servers_environment_variable(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[str | None, tuple[str, ...], int]] = [
        (KEY, (), 0), (None, FLAG, 0), ("sk-other", FLAG, 0), (None, (), 1)
    ]  # fmt: skip
    for key, words, status in given:
        with monkeypatch.context() as patch:
            if key is not None:
                patch.setenv("HEADRACE_API_KEY", key)
            if key != KEY:  # once is enough
                patch.setattr(LOOPBACK, ())
            assert (
                main(["bench", "serve", "--base-url", server.url, *LENGTHS, "--num-prompts", "3", *words]) == status
            ), capsys.readouterr().err
    assert "HEADRACE_API_KEY" in capsys.readouterr().err
