"""``headrace bench startup``: times a start, from the command to readiness, by stage.

What lives here: timing child processes with empty or filled caches. What may not: the engine itself in this process,
what is timed inside a child (startup_child.py).

A start with empty caches finds no compiled kernel, whether ours, Triton's or the driver's (in which NVRTC keeps what it
compiles, from CUDA 12.9 on): all of them are pointed at a new folder. The start after it finds them. Python's bytecode
is not counted as a cache: it belongs to an installation. If this process may not write any (PYTHONDONTWRITEBYTECODE)
and libraries came without, the children are given a folder that has it; compiling torch's sources again takes seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.load import BrokenAnswer, HttpClient, LoadGenerator
from headrace.bench.serve import limits_of
from headrace.cache_home import cache_home
from headrace.errors import BenchFailed
from headrace.observe.report import machine_facts, print_facts, print_figures, write_json
from headrace.planner.workload.conversations import random_conversations
from headrace.planner.workload.load import Lengths

READY_TIMEOUT = 600.0  # s
_IMPORTED = (
    "headrace.bench.startup_child",
    "headrace.engine.llm",
    "headrace.worker.worker",
    "headrace.worker.profile",
    "triton",
)


def run(args: argparse.Namespace, child: str = "headrace.bench.startup_child") -> int:
    """``child``: the program that times one start."""
    facts = machine_facts(limits_of("localhost"), shape=f"{args.repeats} starts of each kind, median; page cache warm")
    print_facts(facts)
    print()
    each = {
        "headrace --help": [help_seconds() for _ in range(max(5, args.repeats))],
        **_starts(child, args.flags, args.repeats),
        **_by_name([served_start(args.flags) for _ in range(args.repeats)]),
    }
    figures = medians(each)
    print_figures({f"{name} (s)": value for name, value in figures.items()})
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "seconds": figures, "each": each})
    return 0


def _starts(child: str, flags: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Starts that found nothing compiled, and the starts after them."""
    cold, warm = [], []
    with bytecode() as installed:
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="headrace-caches-") as folder:
                environment = installed | _caches_in(Path(folder))
                cold.append(in_process(child, flags, environment))
                warm.append(in_process(child, flags, environment))
    return _by_name(cold, "empty caches: ") | _by_name(warm, "in one process: ")


@contextmanager
def bytecode() -> Iterator[dict[str, str]]:
    """The environment for children that find bytecode as an installation has it."""
    if not sys.dont_write_bytecode:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bytecode-") as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder
        subprocess.run(
            [sys.executable, "-c", f"import {', '.join(_IMPORTED)}"], env=environment, capture_output=True, check=False
        )
        yield environment


def _caches_in(folder: Path) -> dict[str, str]:
    """Where a child looks for compiled kernels; models stay where they are."""
    models = os.environ.get("HF_HOME") or str(cache_home() / "huggingface")
    own = {"TRITON_CACHE_DIR": str(folder / "triton"), "XDG_CACHE_HOME": str(folder)}
    return {**own, "CUDA_CACHE_PATH": str(folder / "cuda"), "HF_HOME": models}


def _by_name(runs: Sequence[dict[str, float]], kind: str = "") -> dict[str, list[float]]:
    """The times of each run for a part. A run that lacks it (it never became ready) is omitted."""
    return {f"{kind}{name}": [each[name] for each in runs] for name in runs[0] if all(name in each for each in runs)}


def medians(each: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in each.items()}


def help_seconds() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "headrace", "--help"], check=True, capture_output=True)
    return time.perf_counter() - begin


def in_process(child: str, flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds of each part of an offline start. Raises BenchFailed with the child's last line."""
    begin = time.time()
    command = [sys.executable, "-m", child, str(begin), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise BenchFailed(f"the engine did not start: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def served_start(flags: Sequence[str]) -> dict[str, float]:
    """Seconds from the command until /ready answers 200, and then until the first token of a first and of a later
    request."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headrace", "serve", *flags, "--port", str(port)]
    with tempfile.TemporaryFile() as said:
        begin = time.perf_counter()
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=keyless())
        try:
            return asyncio.run(_first_requests(f"http://127.0.0.1:{port}", server, begin))
        except ServerEnded as ended:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise BenchFailed(f"headrace serve ended with status {server.returncode}: {lines[-1]}") from ended
        finally:
            _stop(server)


class ServerEnded(BenchFailed):
    """The server ended before it was ready."""


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


async def _first_requests(url: str, server: subprocess.Popen[bytes], begin: float) -> dict[str, float]:
    client = HttpClient(url, timeout=READY_TIMEOUT)
    model = await await_ready(client, server)
    ready = time.perf_counter() - begin
    generator = LoadGenerator(client, model, "completions", 1, as_ids=True)
    await generator.run(random_conversations(6, Lengths(32, 8), vocab_size=1000))
    await client.close()
    for sample in generator.samples:
        if sample.error is not None:
            raise BenchFailed(f"a request after /ready failed: {sample.error}")
    first, *later = (sample.ttft for sample in generator.samples)
    return {
        "serve: ready": ready,
        "serve: first token after ready": first,
        "serve: first token, later requests": median(later),
    }


def keyless() -> dict[str, str]:
    """The environment of a benchmark's own server: the server requires no key unless a flag sets one."""
    return {name: value for name, value in os.environ.items() if name != "HEADRACE_API_KEY"}


async def await_ready(client: HttpClient, server: subprocess.Popen[bytes]) -> str:
    """Waits for /ready and returns the model's name. Raises BenchFailed if it takes too long, ServerEnded if the server
    ends."""
    deadline = time.perf_counter() + READY_TIMEOUT
    while time.perf_counter() < deadline:
        if server.poll() is not None:
            raise ServerEnded("The server ended before it was ready.")
        try:
            if (await client.get("/ready")).status == 200:
                models: Any = (await client.get("/v1/models")).json()
                return str(models["data"][0]["id"])
        except (OSError, BrokenAnswer):
            pass
        await asyncio.sleep(0.01)
    raise BenchFailed(f"headrace serve was not ready after {READY_TIMEOUT:.0f} s; start it by hand to see why.")
