"""What of a row's samples counts: those behind drafts that were right, and the one after them.

What lives here: the rule. What may not: sampling.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted(drafts: Sequence[int], samples: Sequence[int]) -> list[int]:
    """``samples[i]`` was drawn behind ``drafts[:i]``: it is the true next token if all of these are. One more sample
    than drafts."""
    right = next((at for at, draft in enumerate(drafts) if draft != samples[at]), len(drafts))
    return list(samples[: right + 1])
