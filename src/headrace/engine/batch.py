"""What holds of requests that are all there at once, as an offline call gives them.

What lives here: which of them make a first step. What may not: requests that come one by one, planning steps (scheduler/).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.request import Request

SHARE = 4  # of which the first step is given one: simulated at an H200's prices, a sixth to a half of 256 requests that share a prefix do well


def first_part(requests: Sequence[Request], *, tokens: int, rows: int) -> int:
    """How many of them, in their order, the first step is made of: as many as fill so many rows, or so many tokens if nothing of their prompts
    is cached. But a share of all at least, for prompts that begin alike are computed once; a step of little work would be done before the
    others are planned."""
    least = len(requests) / SHARE
    for count, request in enumerate(requests, start=1):
        tokens -= len(request.prompt_token_ids)
        rows -= request.params.n
        if rows <= 0 or (tokens <= 0 and count >= least):
            return count
    return len(requests)
