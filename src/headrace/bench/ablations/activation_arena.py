"""The activation arena on and off: ms to the first token over the length of the prompt, and what torch's allocator is asked for meanwhile.

A step of few tokens is bound by the host, which the arena spares a few hundred requests. Bytes are those alive at once while a prompt is
computed and its token picked, above what was alive before. Graphs need no arena, so there are none of steps with prompts.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result, Side
from headrace.bench.ablations.prompt_graphs import FIRST, X, first_token, lone_prompt
from headrace.engine.assembly import Engine

BYTES, REQUESTS = Figure("MiB alive", False), Figure("requests", False)


def measure(lab: Lab) -> Result:
    lengths = (16, 48) if lab.quick else (64, 128, 256, 512, 2048)
    sides = {mode: Side({"device.prompt_graphs": False}) for mode in MODES}

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        first = 1e3 * first_token(lab, mode, engine, length, seed)
        return [{X: length, FIRST.name: first, **_asked_for(lambda: lone_prompt(lab, mode, engine, length, (seed, -1)))}]

    return lab.result("one prompt, one token out", X, (FIRST, BYTES, REQUESTS), lab.curves(X, lengths, point, sides), log="x")


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
