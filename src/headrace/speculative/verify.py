"""What of a row's samples counts: those behind drafts that were right, and the one after them.

What lives here: the rule. What may not: sampling, trees (tree.py).
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted(drafts: Sequence[int], samples: Sequence[int | None]) -> tuple[list[int], range]:
    """``samples[i]`` was drawn behind ``drafts[:i]``: it is the true next token if all of these are. One more sample
    than drafts; None: one that is not usable, and none behind it is. Returns the tokens, and the places of the drafts
    that were right."""
    tokens = list[int]()
    for at, token in enumerate(samples):
        if token is None:
            break
        tokens.append(token)
        if at == len(drafts) or token != drafts[at]:
            break
    return tokens, range(1, len(tokens))
