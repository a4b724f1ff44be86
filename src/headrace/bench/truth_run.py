"""Runs of ``headrace bench truth``: the loads' parts on a server of its own, or on an engine in this process; each run leaves a trace.

What lives here: starting, loading and stopping. What may not: loads (truth_loads.py), fitting, comparing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.bench.driver import drive
from headrace.bench.http_client import HttpClient
from headrace.bench.load import BenchFailed
from headrace.bench.report import write_json
from headrace.bench.startup import READY_TIMEOUT, await_ready
from headrace.bench.statistics import summarise
from headrace.bench.truth_loads import Part
from headrace.config import EngineConfig

_PRIMES = 7919
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Ran:
    """``trace``: of all parts. ``files``: what each part's clients saw, as bench serve writes it."""

    trace: Path
    files: Mapping[str, Path]

    def figures(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files[part].read_text(encoding="utf-8"))
        return found


# --- over HTTP


def run_served(flags: Sequence[str], parts: Sequence[Part], folder: Path, name: str) -> Ran:
    """A server with ``flags`` (MODEL and the engine's) for these parts, one after another. Raises BenchFailed."""
    trace = folder / f"{name}.trace.json"
    files = {part.name: folder / f"{name}.{part.name}.json" for part in parts}
    with _server([*flags, "--trace", str(trace)], folder / f"{name}.log") as url:
        _bench(url, Part("warm", 4, 40, 4, clients=2, seed=99), folder / f"{name}.warm.json")
        for part in parts:
            _bench(url, part, files[part.name])
    return Ran(trace, files)


@contextmanager
def _server(flags: Sequence[str], log: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as said:
        server = subprocess.Popen([sys.executable, "-m", "headrace", "serve", *flags, "--port", str(port)], stdout=said, stderr=said)
        try:
            asyncio.run(_wait(url, server, log))
            yield url
        finally:
            _stop(server)


async def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    client = HttpClient(url, timeout=READY_TIMEOUT)
    try:
        await await_ready(client, server)
    except BenchFailed as error:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        raise BenchFailed(f"{error.message} It said: {lines[-1]}") from error
    finally:
        await client.close()


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Asked to, so that its trace is whole."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _bench(url: str, part: Part, path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "bench", "serve", "--base-url", url, *part.flags(), "--num-warmups", "0", "--output-json", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode or not path.exists():
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise BenchFailed(f"headrace bench serve ended with status {done.returncode} in the part {part.name}: {lines[-1]}")


# --- in this process


@dataclass(slots=True)
class _Measured:
    """Device seconds of the steps of one part, in front of another observer."""

    inner: Any
    seconds: list[float] = field(default_factory=list)

    def on_step(self, *step: Any) -> Any:
        record = self.inner.on_step(*step)
        if not record.failed:
            self.seconds.append(record.measured_seconds)
        return record


def run_offline(config: EngineConfig, runs: Mapping[str, Sequence[Part]], folder: Path) -> dict[str, Ran]:
    """One engine, all runs after one another, each with other ids: no HTTP, as LLM.generate. Raises what the engine raises."""
    from headrace.engine.assembly import trace_into
    from headrace.engine.llm import LLM

    found, salts = {}, itertools.count(_PRIMES, _PRIMES)
    with LLM.from_config(config) as llm:
        engine, device = llm.engine, replace(config.device, overlap=llm.engine.core.depth)
        vocab = llm.info.vocab_size
        _warm_up(engine.core, next(salts), vocab)
        for name, parts in runs.items():
            trace = folder / f"{name}.trace.json"
            observer = trace_into(str(trace), engine, device)
            files = {part.name: folder / f"{name}.{part.name}.json" for part in parts}
            for part in parts:
                _drive(engine.core, observer, part, next(salts), vocab, files[part.name])
            observer.close()
            engine.core.observe(engine.recorder)
            found[name] = Ran(trace, files)
    return found


def _warm_up(core: Any, salt: int, vocab: int) -> None:
    """What is built or captured at first use."""
    for part in (Part("warm", 64, 300, 8, 0.9), Part("warm shared", 32, 64, 8, prefix=1024)):
        drive(core, part.dialogues(salt, vocab))


def _drive(core: Any, observer: Any, part: Part, salt: int, vocab: int, path: Path) -> None:
    measured = _Measured(observer)
    core.observe(measured)
    made = drive(core, part.dialogues(salt, vocab), max_concurrency=part.room)
    seconds = measured.seconds
    steps = {"steps": len(seconds), "mean_step_ms": sum(seconds) / len(seconds) * 1e3} if seconds else {}
    write_json(path, {**summarise(made.samples, made.seconds), **steps, "requests": [asdict(sample) for sample in made.samples]})
