"""One start of an engine in a fresh process, timed from inside. Run as a program by ``headrace bench startup``.

What lives here: the clock around imports, the engine's start and the first requests, in this order. What may not:
printing tables.

``python -m headrace.bench.startup_child BEGIN FLAGS …`` prints one JSON object. BEGIN: when the parent started it, in
``time.time()``.

The engine is *ready* when the next 100 steps stay within STEP_BOUND of the steady time and the first time to first
token within FIRST_BOUND. A round is one request with its own prompt and 101 tokens; the steady figures are the medians
of the last rounds, and every round before the first that meets both bounds is part of the start.
"""

from __future__ import annotations

import time

_FIRST = time.time()  # before anything that takes long is imported

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from statistics import median  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from headrace.engine.llm import LLM
    from headrace.request import SamplingParams

STEP_BOUND, FIRST_BOUND = 1.5, 2.0
ROUNDS, STEADY_ROUNDS = 8, 4
PROMPT, STEPS = 128, 100
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


class _Marks:
    """Seconds by part, in order."""

    def __init__(self, begin: float) -> None:
        self.seconds: dict[str, float] = {"interpreter": _FIRST - begin}
        self._last = _FIRST

    def done(self, name: str) -> None:
        now = time.time()
        self.seconds[name], self._last = now - self._last, now

    def note(self, name: str, seconds: float) -> None:
        """Adds a part that was timed elsewhere; the remaining time counts towards the next part."""
        self.seconds[name] = seconds
        self._last += seconds


def main(begin: float, flags: Sequence[str]) -> dict[str, Any]:
    marks = _Marks(begin)
    from headrace.config import EngineConfig, ServerConfig
    from headrace.flags import CommandParser, add_config_flags, add_model_argument, engine_config

    marks.done("import headrace")
    parser = CommandParser(prog="headrace serve")
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig, ServerConfig)
    config = engine_config(parser.parse_args(list(flags)))
    from headrace.engine.llm import LLM

    marks.done("import the engine")
    llm = LLM.from_config(config)
    stages = dict(llm.engine.core.executor.info.start_seconds)
    if "imports" in stages:  # an executor without a model has none
        marks.note("import torch", stages.pop("imports"))
    marks.done("load the model")
    opened = time.time() - begin
    rounds = _rounds(llm)
    found = judge(rounds)
    waited = None if found.ready is None else rounds[found.ready].sent - rounds[0].sent
    return {
        "marks": {**marks.seconds, "first token": rounds[0].first, "a later first token": found.steady_first},
        "stages": stages,
        "ready": None if waited is None else opened + waited,
        "readiness": asdict(found),
        "batch": _batches(llm),
        "all_kernels": _all_kernels(llm, begin, opened),
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
    return [_round(llm, params, _ids(llm, prompt, index), steps) for index in range(ROUNDS)]


def _request(llm: LLM) -> tuple[SamplingParams, int, int]:
    """As long as the model's context allows: parameters, ids of the prompt, steps after the first token."""
    from headrace.request import SamplingParams

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
    from headrace.request import SamplingParams

    longest = max(2, min(1024, llm.info.max_sequence_tokens // 2))
    params = SamplingParams(temperature=0.0, max_tokens=min(16, longest), ignore_eos=True, detokenize=False)
    seconds = []
    for turn in range(3):
        prompts = [
            {"prompt_token_ids": _ids(llm, 1 + (longest - 1) * index // BATCH, 1000 + turn * BATCH + index)}
            for index in range(BATCH)
        ]
        begin = time.time()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.time() - begin)
    return seconds


def _ids(llm: LLM, count: int, seed: int) -> list[int]:
    """No two prompts have the same beginning, so that no cached prefix shortens one."""
    return [(seed * 997 + index * 31 + 7) % llm.info.vocab_size for index in range(count)]


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), sys.argv[2:])))
