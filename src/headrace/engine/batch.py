"""What holds of requests that are all there at once, as an offline call gives them.

What lives here: which of them make a first step. What may not: requests that come one by one, planning steps (scheduler/).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.request import Request


def first_part(requests: Sequence[Request], *, tokens: int, rows: int) -> int:
    """How many of them, in their order, are a whole step of so many tokens, or of so many rows, if nothing of their prompts is cached."""
    for count, request in enumerate(requests, start=1):
        tokens -= len(request.prompt_token_ids)
        rows -= request.params.n
        if tokens <= 0 or rows <= 0:
            return count
    return len(requests)
