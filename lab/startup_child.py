"""A start as ``headrace bench startup`` times it, and when the engine was ready. Run as a program by ``python -m lab
startup``.

What lives here: rounds of requests after the start, and judging them. What may not: the start itself
(bench/startup_child.py).

The engine is *ready* when the next 100 steps stay within STEP_BOUND of the steady time and the first time to first
token within FIRST_BOUND. A round is one request with its own prompt and 101 tokens; the steady figures are the medians
of the last rounds, and every round before the first that meets both bounds is part of the start.
"""

from __future__ import annotations

from headrace.bench.startup_child import PROMPT, ids, opened  # isort: skip  (its clock begins here)

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from headrace.request import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

STEP_BOUND, FIRST_BOUND = 1.5, 2.0
ROUNDS, STEADY_ROUNDS = 8, 4
STEPS = 100
BATCH = 64


@dataclass(frozen=True, slots=True)
class Round:
    """One request alone, in seconds: when it was sent, its first token after that, the gaps between the other
    tokens."""

    sent: float
    first: float
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Readiness:
    """``ready``: rounds before the first one that meets both bounds; None: none of them did."""

    ready: int | None
    steady_first: float  # s
    steady_step: float  # s
    first: float  # s, of round 0
    slowest_step: float  # s, of round 0


def judge(rounds: Sequence[Round]) -> Readiness:
    steady_first = median(each.first for each in rounds[-STEADY_ROUNDS:])
    steady_step = median(gap for each in rounds[-STEADY_ROUNDS:] for gap in each.gaps)

    def keeps(each: Round) -> bool:
        return each.first <= FIRST_BOUND * steady_first and max(each.gaps) <= STEP_BOUND * steady_step

    ready = next((index for index, each in enumerate(rounds) if keeps(each)), None)
    return Readiness(ready, steady_first, steady_step, rounds[0].first, max(rounds[0].gaps))


def main(begin: float, flags: Sequence[str]) -> dict[str, float]:
    llm, seconds, parts = opened(begin, flags)
    rounds = _rounds(llm)
    found = judge(rounds)
    kernels, (batch, *later) = _all_kernels(llm, begin, seconds), _batches(llm)
    ready = {} if found.ready is None else {"ready": seconds + rounds[found.ready].sent - rounds[0].sent}
    return {
        **parts,
        "first token": found.first,
        "a later first token": found.steady_first,
        **ready,
        **({} if kernels is None else {"every kernel there": kernels}),
        "slowest of the first 100 steps": found.slowest_step,
        "steady step": found.steady_step,
        "a first batch of 64": batch,
        "a later batch of 64": min(later),
    }


def _all_kernels(llm: LLM, begin: float, opened: float) -> float | None:
    """When the last kernel was built, including those that a start does not wait for; None: one is missing. A start
    after this finds them all."""
    if not llm.engine.await_kernels():
        return None
    later = getattr(llm.engine.core.executor, "later", None)
    return opened if later is None else max(opened, later.arrived - begin)


def _rounds(llm: LLM) -> list[Round]:
    params, prompt, steps = _request(llm)
    return [_round(llm, params, ids(llm, prompt, index), steps) for index in range(ROUNDS)]


def _request(llm: LLM) -> tuple[SamplingParams, int, int]:
    """As long as the model's context allows: parameters, ids of the prompt, steps after the first token."""
    prompt = min(PROMPT, llm.info.max_sequence_tokens // 2)
    steps = min(STEPS, llm.info.max_sequence_tokens - prompt - 1)
    return SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True, detokenize=False), prompt, steps


def _round(llm: LLM, params: SamplingParams, ids: list[int], steps: int) -> Round:
    sent = last = time.time()
    arrivals: list[float] = []
    for _ in llm.stream({"prompt_token_ids": ids}, params):
        now = time.time()
        arrivals.append(now - last)
        last = now
    return Round(sent, arrivals[0], tuple(arrivals[1 : steps + 1]))


def _batches(llm: LLM) -> list[float]:
    """Seconds of concurrent mixed requests with prompts of many lengths: the first time, and twice more."""
    longest = max(2, min(1024, llm.info.max_sequence_tokens // 2))
    params = SamplingParams(temperature=0.0, max_tokens=min(16, longest), ignore_eos=True, detokenize=False)
    seconds = []
    for turn in range(3):
        prompts = [
            {"prompt_token_ids": ids(llm, 1 + (longest - 1) * index // BATCH, 1000 + turn * BATCH + index)}
            for index in range(BATCH)
        ]
        begin = time.time()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.time() - begin)
    return seconds


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), sys.argv[2:])))
