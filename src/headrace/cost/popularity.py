"""How many experts of a sparse layer a step touches when tokens pick some of them more often than others.

    p_e   probability that a token picks expert e; they sum to top_k
    touched(tokens) = Σ_e 1 − (1 − p_e)^tokens

Even routing has p_e = top_k / num_experts. With popularities q_e (a Zipf law, or measured counts), an expert is picked
at least once in d draws with probability 1 − (1 − q_e)^d; d is chosen so that these sum to top_k. The steeper the
popularity, the fewer experts a batch touches.

What lives here: those sums, and reading measured counts. What may not: prices, layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from headrace.errors import ConfigError
from headrace.spec import Held

_ROUNDS = 200  # of bisection: to the last bit of a float
MOST_SKEW = 10.0


def touched_experts(
    num_experts: int,
    top_k: int,
    tokens: int,
    popularity: Sequence[float] = (),
    held: tuple[Held, ...] | None = None,
) -> float:
    """Distinct experts that ``tokens`` tokens touch. ``popularity``: one weight per expert, in any unit; empty: all
    equal. ``held``: of those that a rank has, each with its part of the tokens; None: of all."""
    if not popularity and held is None:
        return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
    return _touched(num_experts, top_k, tokens, tuple(popularity), held)


@lru_cache(maxsize=4096)
def _touched(
    num_experts: int, top_k: int, tokens: int, popularity: tuple[float, ...], held: tuple[Held, ...] | None
) -> float:
    chances = _chances(num_experts, top_k, popularity, held)
    return sum(1.0 - math.pow(1.0 - each, tokens / copies) for each, copies in chances)


def share_of_rows(num_experts: int, top_k: int, popularity: Sequence[float], held: tuple[Held, ...] | None) -> float:
    """Of all pairs of token and expert, those that a rank with these experts computes."""
    return sum(each / copies for each, copies in _chances(num_experts, top_k, tuple(popularity), held)) / top_k


def _chances(
    num_experts: int, top_k: int, popularity: tuple[float, ...], held: tuple[Held, ...] | None
) -> list[tuple[float, int]]:
    """(how probably a token picks it, ranks that share its tokens) of each expert."""
    chances = picked(popularity, top_k) if popularity else (top_k / num_experts,) * num_experts
    if held is None:
        return [(each, 1) for each in chances]
    return [(chances[each.expert], each.copies) for each in held]


@lru_cache(maxsize=64)
def picked(popularity: tuple[float, ...], top_k: int) -> tuple[float, ...]:
    """The probability that a token picks each expert, with ``top_k`` different ones in all."""
    total = sum(popularity)
    shares = [each / total for each in popularity]
    low, high = 0.0, 1.0
    while sum(_hit(each, high) for each in shares) < top_k and high < 1e18:
        high *= 2.0
    for _ in range(_ROUNDS):
        draws = (low + high) / 2
        low, high = (draws, high) if sum(_hit(each, draws) for each in shares) < top_k else (low, draws)
    return tuple(_hit(each, high) for each in shares)


def _hit(share: float, draws: float) -> float:
    return 1.0 if share >= 1.0 else -math.expm1(draws * math.log1p(-share))


def zipf(num_experts: int, exponent: float) -> tuple[float, ...]:
    """The n-th most popular expert is picked n^-exponent times as often as the first; 0 is even. Raises ConfigError."""
    if not 0.0 <= exponent <= MOST_SKEW:
        raise ConfigError(
            f"--expert-skew is {exponent:g}; give the exponent of a Zipf law from 0 (even) to {MOST_SKEW:g}, or a file of counts."
        )
    return tuple((1.0 + index) ** -exponent for index in range(num_experts))


def read_popularity(path: Path, num_experts: int, top_k: int) -> tuple[float, ...]:
    """Measured counts: a JSON list with one number per expert. Raises ConfigError."""
    import msgspec  # not for --help

    wanted = f"give a JSON list of {num_experts} counts, one per expert"
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=list[Annotated[float, msgspec.Meta(ge=0)]])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"--expert-skew {path} cannot be read ({error}); {wanted}.") from error
    if len(counts) != num_experts:
        raise ConfigError(f"--expert-skew {path} has {len(counts)} counts; {wanted}.")
    if sum(each > 0 for each in counts) < top_k:
        raise ConfigError(
            f"--expert-skew {path}: fewer than {top_k} experts were ever picked, but each token picks {top_k}; {wanted}."
        )
    return tuple(counts)
