"""What ranks of one model send each other in a step, and how long that takes over their link.

What lives here: that arithmetic. What may not: torch, who sends (parallel/), which devices have which link
(planner/devices.py).

A sum over n ranks of S bytes takes each of them 2 (n - 1) / n · S bytes, one way (Patarasuk and Yuan 2009); side by
side, (n - 1) / n · S.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Link:
    """``bandwidth``: bytes/s of one rank to the others, one way. ``latency``: seconds of one meeting, however little is
    sent."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one rank in a step: how often it meets the others, and what it sends for each token, and for each row of
    logits."""

    meetings: int
    token_bytes: float
    row_bytes: float

    def seconds(self, link: Link, tokens: int, rows: int) -> tuple[float, float]:
        """(all in all, at the link's bandwidth alone)."""
        sent = (tokens * self.token_bytes + rows * self.row_bytes) / link.bandwidth if tokens else 0.0
        return sent + (self.meetings * link.latency if tokens else 0.0), sent


def traffic_of(spec: DecoderSpec, element_bytes: float) -> Traffic:
    """``spec``: one rank's share, of a stage or of all. Behind both halves of every layer, of the embedding, and of the
    logits."""
    if spec.ranks == 1:
        return Traffic(0, 0.0, 0.0)
    sums, share = 2 * len(spec.held_layers) + spec.embeds, (spec.ranks - 1) / spec.ranks
    logits = share * spec.vocab_size * element_bytes if spec.answers else 0.0
    return Traffic(sums + spec.answers, 2 * share * sums * spec.hidden_size * element_bytes, logits)
