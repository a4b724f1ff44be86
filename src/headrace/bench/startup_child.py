"""One start of an engine in a fresh process, timed from inside. Run as a program by ``headrace bench startup``.

What lives here: the clock around imports, the engine's start and the first requests, in this order. What may not:
printing tables, when an engine counts as ready (lab/startup_child.py).

``python -m headrace.bench.startup_child BEGIN FLAGS …`` prints one JSON object. BEGIN: when the parent started it, in
``time.time()``.
"""

from __future__ import annotations

import time

_FIRST = time.time()  # before anything that takes long is imported

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from statistics import median  # noqa: E402
from typing import TYPE_CHECKING, NamedTuple  # noqa: E402

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

PROMPT = 128  # tokens, or as many as the context allows
REQUESTS = 5


class Opened(NamedTuple):
    """``seconds`` after the parent's ``begin``; ``parts``: seconds of each part of that, and of loading."""

    llm: LLM
    seconds: float
    parts: dict[str, float]


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


def opened(begin: float, flags: Sequence[str]) -> Opened:
    """The engine that these flags of ``headrace serve`` ask for."""
    marks = _Marks(begin)
    from headrace.config import EngineConfig, ServerConfig
    from headrace.flags import CommandParser, add_config_flags, add_model_argument, engine_config

    marks.done("import headrace")
    parser = CommandParser(prog="headrace serve")
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig, ServerConfig)
    config = engine_config(parser.parse_args(list(flags)))
    from headrace import LLM

    marks.done("import the engine")
    llm = LLM.from_config(config)
    stages = dict(llm.engine.core.executor.info.start_seconds)
    if "imports" in stages:  # an executor without a model has none
        marks.note("import torch", stages.pop("imports"))
    marks.done("load the model")
    loading = {f"load the model, {name}": seconds for name, seconds in stages.items()}
    return Opened(llm, time.time() - begin, marks.seconds | loading)


def main(begin: float, flags: Sequence[str]) -> dict[str, float]:
    llm, _, parts = opened(begin, flags)
    first, *later = (_first_token(llm, index) for index in range(REQUESTS))
    return {**parts, "first token": first, "a later first token": median(later)}


def _first_token(llm: LLM, index: int) -> float:
    from headrace.request import SamplingParams

    prompt = ids(llm, min(PROMPT, llm.info.max_sequence_tokens // 2), index)
    begin = time.time()
    for _ in llm.stream({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, detokenize=False)):
        pass
    return time.time() - begin


def ids(llm: LLM, count: int, seed: int) -> list[int]:
    """No two prompts have the same beginning, so that no cached prefix shortens one."""
    return [(seed * 997 + index * 31 + 7) % llm.info.vocab_size for index in range(count)]


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), sys.argv[2:])))
