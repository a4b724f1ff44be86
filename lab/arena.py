"""``python -m lab arena``: what planning a step's activations saves, over a run of changing lengths (GPU).

First the engine with its arena and without: prompts one after the other, what they ask torch's allocator for, what the
host takes for each. Then a step by itself: two lengths are recorded without the arena, from these every other length
follows, and the same requests go to torch's caching allocator, really, and to a plan of lifetimes.

What lives here: running, recording, replaying on the card, the tables. What may not: planning (worker/arena.py).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from headrace.bench.arguments import count, output
from headrace.bench.driver import drive
from headrace.config import EngineConfig
from headrace.engine.assembly import Engine
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.planner.workload.conversations import Conversation, random_conversations
from headrace.planner.workload.load import Lengths
from headrace.techniques import find_technique
from headrace.worker.arena import Use, plan
from lab.arena_model import between, compare, most_alive

LENGTHS = 64  # steps of a run
RANGES = ((64, 1024), (4096, 8192))  # tokens of its prompts: few, which the host bounds, and many
_MOST_EVENTS = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=count, default=LENGTHS, help=f"steps of the run, of random lengths (default: {LENGTHS})"
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace.worker.settings import device_kind

    if device_kind(config.device.device) != "cuda":
        raise ConfigError(
            "python -m lab arena replays on a GPU's allocator; run it where torch finds a CUDA device, without --device cpu."
        )
    facts = machine_facts("not measured: bytes and counts, no rates")
    print_facts(facts)
    draw, served = random.Random(0), []
    for low, high in RANGES:
        asked = [draw.randint(low, high) for _ in range(args.steps)]
        served += [
            {"tokens": f"{low} to {high}", "arena": mode, **run_engine(config, mode, asked)} for mode in ("off", "on")
        ]
    print(table(tuple(served[0]), [tuple(each.values()) for each in served]))
    tokens, traces = _record(config)
    lengths = [draw.randint(tokens[0], tokens[1]) for _ in range(args.steps)]
    figures = measure(tokens, traces, lengths)
    print(table(("over the run", "figure"), list(figures.items())))
    if args.output_json:
        uses = [asdict(use) for use in traces[1]]
        write_json(
            args.output_json, {"facts": facts, "served": served, "lengths": lengths, "figures": figures, "uses": uses}
        )
    return 0


def run_engine(config: EngineConfig, mode: str, lengths: Sequence[int]) -> dict[str, float]:
    """Prompts of these lengths, as far as a step takes them, one step each; all twice, the second time is measured.
    Bytes are MiB."""
    import torch

    from headrace.engine.assembly import create_engine

    technique = find_technique("activation_arena")
    value = technique.on if mode == "on" else technique.off
    engine = create_engine(
        replace(config, device=replace(config.device, activation_arena=value, overlap=0)), with_tokenizer=False
    )
    try:
        most = min(engine.info.max_num_batched_tokens, engine.info.max_sequence_tokens - 1)
        host = _timed_submissions(engine)
        for turn in range(2):
            prompts = [_prompt(engine, min(length, most), 1000 * turn + at) for at, length in enumerate(lengths)]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, alive = torch.cuda.memory_stats(), torch.cuda.memory_allocated()
            host.clear()
            for prompt in prompts:
                drive(engine.core, prompt)
        after = torch.cuda.memory_stats()
        return {
            "MiB alive at once": _mib(torch.cuda.max_memory_allocated() - alive),
            "requests a step": round(
                (after["allocation.all.allocated"] - before["allocation.all.allocated"]) / len(lengths), 1
            ),
            "segments taken": after["num_device_alloc"] - before["num_device_alloc"],
            "host ms a step": round(1e3 * median(host), 3),
            "MiB set aside at start": _mib(engine.info.memory["activations"]),
        }
    finally:
        engine.close()


def _prompt(engine: Engine, length: int, seed: int) -> list[Conversation]:
    return random_conversations(1, Lengths(length, 1), vocab_size=engine.info.vocab_size, seed=seed)


def _timed_submissions(engine: Engine) -> list[float]:
    """Seconds that the host takes for each step to be queued, from now on."""
    submit, seconds = engine.core.executor.submit, []  # type: Any, list[float]

    def timed(plan: Any) -> Any:
        begin = time.perf_counter()
        ticket = submit(plan)
        seconds.append(time.perf_counter() - begin)
        return ticket

    engine.core.executor.submit = timed  # type: ignore[method-assign]
    return seconds


def measure(
    tokens: tuple[int, int], traces: tuple[Sequence[Use], Sequence[Use]], lengths: Sequence[int]
) -> dict[str, float]:
    """Bytes are MiB. On the card, with nothing else allocated."""
    steps = [between(*traces, tokens, length) for length in lengths]
    begin = time.perf_counter()
    found = compare(steps)
    planning = time.perf_counter() - begin
    held, taken, seconds = _replayed(steps)
    longest = between(*traces, tokens, max(lengths))
    requests = sum(map(len, steps))
    return {
        "tensors of a step": len(steps[0]),
        "alive at once, longest step": _mib(most_alive(longest)),
        "one planned buffer": _mib(found.planned),
        "torch's allocator, longest step alone": _mib(_replayed([longest])[0]),
        "torch's allocator, the run": _mib(held),
        "torch's allocator, the run, by our model of it": _mib(found.cached),
        "tensors requested in the run": requests,
        "segments taken from the driver": taken,
        "µs a request": 1e6 * seconds / requests,
        "ms to plan one step": 1e3 * _planning(longest),
        "s of the comparison": planning,
    }


def _planning(uses: Sequence[Use]) -> float:
    begin = time.perf_counter()
    plan(uses)
    return time.perf_counter() - begin


def _mib(size: int) -> float:
    return round(size / 2**20, 1)


def _replayed(steps: Sequence[Sequence[Use]]) -> tuple[int, int, float]:
    """Bytes torch's allocator came to hold above what it held before, segments it took for that, seconds of the second
    turn."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, taken = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["num_device_alloc"]
    events = [list(_events(uses)) for uses in steps]
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        for uses, order in zip(steps, events, strict=True):
            tensors: dict[int, Any] = {}
            for index, begins in order:
                if begins:
                    tensors[index] = torch.empty(uses[index].size, dtype=torch.uint8, device="cuda")
                else:
                    del tensors[index]
        seconds = time.perf_counter() - begin
    return torch.cuda.max_memory_reserved() - held, torch.cuda.memory_stats()["num_device_alloc"] - taken, seconds


def _events(uses: Sequence[Use]) -> Iterator[tuple[int, bool]]:
    events = [(use.first, True, index) for index, use in enumerate(uses)] + [
        (use.last, False, index) for index, use in enumerate(uses)
    ]
    yield from ((index, begins) for _, begins, index in sorted(events, key=lambda event: event[0]))


def _record(config: EngineConfig) -> tuple[tuple[int, int], tuple[list[Use], list[Use]]]:
    """Prompts of half a step and of a whole one, launched kernel by kernel, one step at a time."""
    from headrace.engine.assembly import create_engine

    config = replace(config, device=replace(config.device, enforce_eager=True, overlap=0, activation_arena=False))
    engine = create_engine(config, with_tokenizer=False)
    try:
        most = min(engine.info.max_num_batched_tokens, engine.info.max_sequence_tokens - 1)
        tokens, vocab = (most // 2, most), engine.info.vocab_size

        def trace(length: int, seed: int) -> list[Use]:
            conversations = [
                random_conversations(1, Lengths(length, 1), vocab_size=vocab, seed=seed + turn) for turn in range(2)
            ]
            drive(engine.core, conversations[0])
            return _recorded(lambda: drive(engine.core, conversations[1]))

        return tokens, (trace(tokens[0], 0), trace(tokens[1], 2))
    finally:
        engine.close()


def _recorded(step: Any) -> list[Use]:
    """What torch's allocator was asked for meanwhile."""
    import torch

    torch.cuda.synchronize()
    record: Any = torch.cuda.memory._record_memory_history
    record("all", context=None, max_entries=_MOST_EVENTS, clear_history=True)
    try:
        step()
        torch.cuda.synchronize()
        entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        record(None)
    return uses_of(entries)


def uses_of(entries: Sequence[Mapping[str, Any]]) -> list[Use]:
    """Lifetimes from a record of requests; what is not freed within lives to the end of it. Small tensors (indexes) are
    left out."""
    begun: dict[int, tuple[int, int]] = {}  # address → (event, size)
    found: list[Use] = []
    count = 0
    for entry in entries:
        if entry["action"] == "alloc" and entry["size"] > _SMALLEST:
            begun[entry["addr"]] = (count, entry["size"])
        elif entry["action"] in ("free_requested", "free") and entry["addr"] in begun:
            first, size = begun.pop(entry["addr"])
            found.append(Use(size, first, count))
        else:
            continue
        count += 1
    found += [Use(size, first, count) for first, size in begun.values()]
    return sorted(found, key=lambda use: use.first)


_SMALLEST = 2**20  # bytes; below, sizes do not follow the tokens
