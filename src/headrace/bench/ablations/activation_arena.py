"""The activation arena on and off: ms to the first token over the length of the prompt, and what torch's allocator is asked for meanwhile.

A step of few tokens is bound by the host, which the arena spares a few hundred requests. Bytes are those alive at once while a prompt is
computed and its token picked, above what was alive before.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "prompt tokens"
FIRST, BYTES, REQUESTS = Figure("ms to the first token", False), Figure("MiB alive", False), Figure("requests", False)
_TURNS = 5  # prompts of a length, one after the other


def measure(lab: Lab) -> Result:
    lengths = (16, 48) if lab.quick else (64, 128, 256, 512, 2048)

    def timed(mode: str, engine: Engine, length: int, seed: int) -> float:
        dialogues = random_dialogues(1, Lengths(length, 1), vocab_size=engine.info.vocab_size, seed=seed)
        return lab.run(mode, (length, seed), engine.core, dialogues).seconds

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        seeds = [1000 * seed + turn for turn in range(_TURNS)]
        timed(mode, engine, length, 10**7 + seed)  # what is compiled, or recorded, at first use is not timed
        first = 1e3 * min(timed(mode, engine, length, each) for each in seeds)
        return [{X: length, FIRST.name: first, **_asked_for(lambda: timed(mode, engine, length, 10**8 + seed))}]

    return lab.result("one prompt, one token out", X, (FIRST, BYTES, REQUESTS), lab.curves(X, lengths, point), log="x")


def _asked_for(step: Callable[[], object]) -> Point:
    """What torch's allocator is asked for meanwhile."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    alive, requests = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - alive
    return {BYTES.name: grown / 2**20, REQUESTS.name: torch.cuda.memory_stats()["allocation.all.allocated"] - requests}
