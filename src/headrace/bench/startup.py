"""``headrace bench startup``: from the command to readiness, taken apart.

What lives here: timing child processes from outside and from inside. What may not: the engine itself in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.http_client import BrokenAnswer, HttpClient
from headrace.bench.load import BenchFailed, LoadGenerator
from headrace.bench.report import machine_facts, print_facts, print_figures, write_json
from headrace.bench.serve import limits_of
from headrace.bench.workload import Lengths, random_dialogues

READY_TIMEOUT = 600.0  # s

# Runs in a fresh interpreter: the engine in this order, each part timed.
IN_PROCESS = """
import json, sys, time
marks, last = {}, time.perf_counter()
def mark(name):
    global last
    now = time.perf_counter()
    marks[name], last = now - last, now
import headrace.cli
mark("import headrace")
import torch
mark("import torch")
from headrace.commands import serve
from headrace.flags import CommandParser, engine_config
parser = CommandParser(prog="headrace serve")
serve.add_arguments(parser)
config = engine_config(parser.parse_args(sys.argv[1:]))
from headrace.engine.llm import LLM
from headrace.request import SamplingParams
mark("import the engine")
llm = LLM.from_config(config)
mark("load the model")
vocab = llm.info.vocab_size
params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
def first_token(seed):
    llm.generate({"prompt_token_ids": [(seed * 997 + i * 31) % vocab for i in range(32)]}, params, use_tqdm=False)
first_token(1)
mark("first token")
first_token(2)
mark("a later first token")
print(json.dumps(marks))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="starts of each kind; the median is shown (default: 3)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="MODEL and flags of headrace serve, behind --")


def run(args: argparse.Namespace) -> int:
    facts = machine_facts(limits_of("localhost"), shape=f"{args.repeats} starts of each kind, median; page cache warm")
    print_facts(facts)
    print()
    parts = _median_of([in_process(args.flags) for _ in range(args.repeats)])
    served = _median_of([served_start(args.flags) for _ in range(args.repeats)])
    helped = median(help_seconds() for _ in range(max(5, args.repeats)))
    figures = {"headrace --help": helped, **{f"in one process: {name}": value for name, value in parts.items()}, **served}
    print_figures({f"{name} (s)": value for name, value in figures.items()})
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "seconds": figures})
    return 0


def _median_of(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in runs) for name in runs[0]}


def help_seconds() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "headrace", "--help"], check=True, capture_output=True)
    return time.perf_counter() - begin


def in_process(flags: Sequence[str]) -> dict[str, float]:
    """Seconds of each part of an offline start. Raises BenchFailed with the child's last line."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", IN_PROCESS, *flags], capture_output=True, text=True)
    if done.returncode:
        raise BenchFailed(f"the engine did not start: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    marks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**marks, "whole process": time.perf_counter() - begin}


def served_start(flags: Sequence[str]) -> dict[str, float]:
    """Seconds from the command until /ready answers 200, and then until the first token of a first and of a later request."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headrace", "serve", *flags, "--port", str(port)]
    with tempfile.TemporaryFile() as said:
        begin = time.perf_counter()
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        try:
            return asyncio.run(_first_requests(f"http://127.0.0.1:{port}", server, begin))
        except _Ended as ended:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise BenchFailed(f"headrace serve ended with status {server.returncode}: {lines[-1]}") from ended
        finally:
            _stop(server)


class _Ended(Exception):
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
    model = await _ready(client, server)
    ready = time.perf_counter() - begin
    generator = LoadGenerator(client, model, "completions", 1, as_ids=True)
    await generator.run(random_dialogues(6, Lengths(32, 8), vocab_size=1000))
    await client.close()
    for sample in generator.samples:
        if sample.error is not None:
            raise BenchFailed(f"a request after /ready failed: {sample.error}")
    first, *later = (sample.ttft for sample in generator.samples)
    return {"serve: ready": ready, "serve: first token after ready": first, "serve: first token, later requests": median(later)}


async def _ready(client: HttpClient, server: subprocess.Popen[bytes]) -> str:
    """Waits for /ready; the model's name. Raises BenchFailed when the server ends or takes too long."""
    deadline = time.perf_counter() + READY_TIMEOUT
    while time.perf_counter() < deadline:
        if server.poll() is not None:
            raise _Ended
        try:
            if (await client.get("/ready")).status == 200:
                models: Any = (await client.get("/v1/models")).json()
                return str(models["data"][0]["id"])
        except (OSError, BrokenAnswer):
            pass
        await asyncio.sleep(0.01)
    raise BenchFailed(f"headrace serve was not ready after {READY_TIMEOUT:.0f} s; start it by hand to see why.")
