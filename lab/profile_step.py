"""Brings an engine to one certain step: the child that ncu watches, and the same steps for whoever counts allocations.

``python -m lab.profile_step JOB.json`` under ncu: each case's step is run twice, and the second time counted.

What lives here: cases, and stepping a core by hand. What may not: counters (profile_ncu.py), figures of speed
(table_measure.py).
"""

from __future__ import annotations

import itertools
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headrace.bench.driver import greedy
from headrace.config import EngineConfig
from headrace.engine.assembly import Engine, create_engine
from headrace.errors import BenchFailed
from headrace.planner.workload.conversations import random_conversations
from headrace.planner.workload.load import Lengths
from headrace.request import Request
from lab.jobs import child_main

KV_BYTES = 12 * 2**30  # what the largest case needs and some; saving and restoring memory is part of counting
SETTLING = 3  # decode steps before one is looked at


@dataclass(frozen=True, slots=True)
class Case:
    """``count`` prompts of ``prompt`` ids: the step that computes them ("prefill"), or a later one in which all decode
    ("decode")."""

    kind: str
    count: int
    prompt: int

    @property
    def says(self) -> str:
        return f"prefill {self.count} × {self.prompt:,}" if self.kind == "prefill" else f"decode, batch {self.count}"


CASES = (Case("decode", 1, 128), Case("decode", 256, 128), Case("prefill", 1, 2048))


def scaled_cases(scale: float) -> list[Case]:
    return [
        replace(case, count=max(1, round(case.count * scale)), prompt=max(2, round(case.prompt * scale)))
        for case in CASES
    ]


@dataclass(slots=True)
class Stepper:
    """A core stepped by hand; prompts are new each time."""

    engine: Engine
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _seeds: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, case: Case, max_tokens: int) -> None:
        lengths = Lengths(case.prompt, max_tokens)
        for each in random_conversations(
            case.count, lengths, vocab_size=self.engine.info.vocab_size, seed=next(self._seeds)
        ):
            ids = array("i", each.turns[0].new_ids)
            request = Request(
                request_id=next(self._ids),
                prompt_token_ids=ids,
                params=greedy(each.turns[0]),
                arrival_time=time.perf_counter(),
            )
            self.engine.core.add(request)

    def decode_until_settled(self, case: Case, steps: int = SETTLING) -> None:
        """Steps until all rows have decoded together ``steps`` times. Raises BenchFailed when they never do."""
        seen = 0
        while seen < steps:
            if not self.engine.core.has_work:
                raise BenchFailed(
                    f"{case.says}: its requests ended before they decoded together; give the engine room for {case.count} sequences."
                )
            self.engine.core.step()
            records = self.engine.recorder.records
            seen += bool(records) and records[-1].kind == "decode" and records[-1].rows == case.count

    def finish(self) -> None:
        while self.engine.core.has_work:
            self.engine.core.step()


def counted_config(config: EngineConfig) -> EngineConfig:
    """As the engine, but launched kernel by kernel and one step at a time, over a cache that holds the cases and no
    more."""
    cache = (
        config.cache if config.cache.kv_cache_memory is not None else replace(config.cache, kv_cache_memory=KV_BYTES)
    )
    return replace(config, cache=cache, device=replace(config.device, enforce_eager=True, overlap=0))


def work(config: EngineConfig, job: Mapping[str, Any]) -> None:
    engine = create_engine(config, with_tokenizer=False)
    stepper = Stepper(engine)
    try:
        for case in scaled_cases(job["scale"]):
            _one(stepper, case)  # compiled and warm
            _one(stepper, case, counted=True)
    finally:
        engine.close()


def _one(stepper: Stepper, case: Case, *, counted: bool = False) -> None:
    stepper.add(case, 2 * SETTLING + 32)
    if case.kind == "decode":
        stepper.decode_until_settled(case)
    if counted:
        with _watched():
            stepper.engine.core.step()
    stepper.finish()


@contextmanager
def _watched() -> Iterator[None]:
    """ncu counts what is launched inside, after a marker."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    sys.exit(child_main(work))
