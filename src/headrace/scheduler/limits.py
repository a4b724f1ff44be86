"""What bounds the scheduler, and what it counts.

What lives here: frozen numbers. What may not: using them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the executor and the switches allow. ``max_num_batched_tokens`` is resolved (never None) here."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logits_rows: int
    grows: bool = True  # a sequence gets blocks as it gets longer; else all that it may need, at admission
    keeps_kv: bool = True  # from step to step; else every token is recomputed at each
    padded: bool = False  # every chunk of a step counts as the longest one
    # of steps that compute single tokens too: prompts get the chunk that fits beside them
    max_step_seconds: float | None = None
    max_adapters: int = 0  # of one step; 0: none is asked about
    stages: int = 1  # of a pipeline, which compute as many steps at once
    runs_ahead: bool = False  # these may go on from guesses
    pooling: bool = False  # what a prompt is answered with is no token: it has no place in the context


@dataclass(frozen=True, slots=True)
class SchedulerCounters:
    """Monotone counts since the start, in requests, tokens or events."""

    requests: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
