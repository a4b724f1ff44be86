"""The process that tries grammars out before the engine follows them. A grammar is a stranger's program for a
compiler: here it may use two seconds of CPU, 256 MiB and a small stack, and what it does beyond is the end of this
process alone.

What lives here: constraint in, verdict out, and its limits. What may not: state between grammars, anything of the
engine's.

Started as ``python -S -P -m headrace.engine.grammar_worker``; ends with its stdin.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from typing import Any

from headrace.engine.grammar import (
    GrammarError,
    Vocabulary,
    check_start,
    create_limits,
    create_matcher,
    create_tokenizer,
)
from headrace.portability import address_space, limit
from headrace.processes.sandbox import answer_lines
from headrace.request import StructuredOutputs

MEMORY_BYTES = 256 * 2**20  # of address space, above what the process has before its first grammar
NICENESS = 5  # the engine and the front end go first
STACK_BYTES = 2 * 2**20  # a quarter of what the engine's threads have: what fits here fits there


def limit_resources() -> None:
    if (used := address_space()) is not None:
        limit(resource.RLIMIT_AS, used + MEMORY_BYTES)
    limit(resource.RLIMIT_STACK, STACK_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    os.nice(NICENESS)


class Trial:
    """Compiles under a timer of CPU time; the kernel ends this process when that is used up first.

    The vocabulary is each byte alone and the model's special tokens: what a grammar costs to compile hardly depends on
    it.
    """

    def __init__(self, special: list[str]) -> None:
        tokens = [bytes([byte]) for byte in range(256)] + [name.encode() for name in special] + [b"<eos>"]
        self._tokenizer = create_tokenizer(Vocabulary(tokens, range(256, len(tokens)), (len(tokens) - 1,)))
        self._limits = create_limits()

    def run(self, wanted: StructuredOutputs, seconds: float) -> float:
        """CPU seconds that it took. Raises GrammarError."""
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            check_start(create_matcher(self._tokenizer, wanted, self._limits))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        return time.process_time() - begin


class Trials:
    """Answers {"special": names}, the opening, and {"wanted": fields of StructuredOutputs, "seconds"} with {"fine":
    true}, {"seconds": of CPU time} or {"error": reason}."""

    def __call__(self, body: bytes) -> dict[str, Any]:
        frame = json.loads(body)
        try:
            if "special" in frame:
                self._trial = Trial(frame["special"])
                limit_resources()
            else:
                return {"seconds": self._trial.run(StructuredOutputs(**frame["wanted"]), frame["seconds"])}
        except GrammarError as error:
            return {"error": str(error)}
        except (MemoryError, RecursionError):
            return {"error": "it is too large to compile"}
        return {"fine": True}


if __name__ == "__main__":
    answer_lines(Trials())
