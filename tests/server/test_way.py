"""How many modules a streamed request passes, in the front end and in the engine: a figure that may only sink.

``python -m tests.server.test_way`` prints them. What other processes do (the chat template's) and what goes on beside
the request does not count: a module is passed if each of three requests in a row has run code of it.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path

from tests.support.serving import ROOT, SERVE, Server, environment, events_of, serving, wait_for

PASSED = 45  # of all the package's modules
_WATCHED = ROOT / "tests" / "support" / "watched"
_ASKED = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 6,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


def modules_passed() -> dict[str, set[str]]:
    """By process."""
    flags = ("--threads", "1", "--max-model-len", "256", "--kv-cache-memory", "16MiB")
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(_WATCHED), environment()["PYTHONPATH"]])
        with serving(*flags, command=SERVE, env={"PYTHONPATH": path, "WATCHED_TO": folder}) as server:
            processes = {"front end": server.process.pid, "engine": server.members("headrace.engine.process")[0]}
            _ask(server)
            rounds = [_watched(server, processes, Path(folder)) for _ in range(3)]
    return {name: set.intersection(*(each[name] for each in rounds)) for name in processes}


def _watched(server: Server, processes: dict[str, int], folder: Path) -> dict[str, set[str]]:
    server.wait_idle()
    _toggle(processes, folder)
    _ask(server)
    time.sleep(0.05)  # what is done once the client has its answer
    return _toggle(processes, folder)


def _toggle(processes: dict[str, int], folder: Path) -> dict[str, set[str]]:
    files = {name: folder / f"{pid}.json" for name, pid in processes.items()}
    for name, pid in processes.items():
        files[name].unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
    wait_for(lambda: all(file.exists() for file in files.values()), what="each process has heard the signal")
    return {name: set(json.loads(file.read_text())) for name, file in files.items()}


def _ask(server: Server) -> None:
    answer = server.ask("POST", "/v1/chat/completions", _ASKED)
    assert answer.status == 200 and len(events_of(answer.body)) >= 7, answer


def table(found: dict[str, set[str]]) -> str:
    rows = [f"{name}: {len(modules)}\n  " + "\n  ".join(sorted(modules)) for name, modules in found.items()]
    return "\n".join([*rows, f"together: {len(set.union(*found.values()))}"])


def test_modules_that_a_streamed_request_passes_only_sink() -> None:
    found = modules_passed()
    print(table(found))
    count = len(set.union(*found.values()))
    assert count <= PASSED, (
        f"{count} modules instead of {PASSED}: merge what only hands on, or record it with a reason\n{table(found)}"
    )


if __name__ == "__main__":
    print(table(modules_passed()))
