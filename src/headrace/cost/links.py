"""What ranks of one model send each other in a step, and how long that takes over their link.

What lives here: that arithmetic. What may not: torch, who sends (parallel/), which devices have which link
(cards.py).

A sum over n ranks of S bytes takes each of them 2 (n - 1) / n · S bytes, one way (Patarasuk and Yuan 2009); side by
side, (n - 1) / n · S. In one shot (parallel/one_shot.py) all goes to every other rank: (n - 1) · S; where the rows are
shared out, in two shots, it is what a sum takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from headrace.spec import DecoderSpec

FULL = 2.0**21  # bytes of a sum: 256 rows of an 8B's
LARGEST = 16.0  # bytes: a logit and its token, as one-shot sums send it
MOST_PASSED = 2.0**30  # bytes of a layer's keys and values that come to a rank at once: no memory is set aside for them


@dataclass(frozen=True, slots=True)
class SmallSums:
    """Sums in one shot. ``bandwidth``: bytes/s, as Link has it. ``latency``: seconds of one, and ``each`` more for every
    other rank. ``most``: bytes of one for all others, or of one in two shots."""

    bandwidth: float
    latency: float
    each: float
    most: float


@dataclass(frozen=True, slots=True)
class Link:
    """``bandwidth``: bytes/s of one rank to the others, one way. ``latency``: seconds of one meeting, however little is
    sent. ``small``: where small sums go another way; ``around``: seconds that GEMMs before and behind the smallest lose, for
    a part of a weight fills the device less than all of it; none from FULL bytes on. ``taken``: of the time in which keys are on their way, how much
    attention beside it loses: NCCL holds processors, keys are put together before, and what was found is merged."""

    bandwidth: float
    latency: float
    small: SmallSums | None = None
    around: float = 0.0
    taken: float = 0.0

    def sum_seconds(self, num_bytes: float, ranks: int, *, shared: bool = False) -> float:
        """``shared``: its rows may be shared out."""
        others, small = ranks - 1, self.small
        if small is not None and others * num_bytes <= small.most:
            return small.latency + others * (small.each + num_bytes / small.bandwidth)
        sent = 2 * others / ranks * num_bytes
        if small is not None and shared and num_bytes <= small.most:
            return 2 * (small.latency + others * small.each) + sent / small.bandwidth
        return self.latency + sent / self.bandwidth


HOST_WAIT = 50e-6  # seconds that a device loses where its host reads sizes in the middle of a step
BESIDE = 0.75  # of a sum that its halves must gain: of a 70B over four H200 they took 0.7 % off 8,192 tokens, nothing off 2,048


def shared_rows(link: Link, ranks: int, row_bytes: float, bandwidth: float, top_k: int = 0) -> int | None:
    """From how many rows of a step on it pays that ranks share them out (layers/shared_rows.py); None: never.

    Each norms its share alone, which reads and writes two such rows at a device's ``bandwidth``. But a sum is two
    meetings then, which gained next to nothing where it was timed. Of ranks of whole experts, ``top_k`` a row, rows go to these alone, and what
    comes back needs no sum; for that a host waits."""
    share = 1 - 1 / ranks
    norm, half = 4 * row_bytes * share / bandwidth, share * row_bytes / link.bandwidth
    gain, loss = norm - 2 * BESIDE * half, link.latency
    if top_k:
        spared = share**top_k  # of the ranks, where tokens pick experts evenly
        gain, loss = gain + norm + 2 * half * spared, 2 * loss + HOST_WAIT
    return ceil(loss / gain) if gain > 0 else None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one of ``ranks`` in a step: how many sums it takes part in, of so many bytes for each token, and what it sends
    for each row of logits, where it has any: of greedy ones where small sums go another way, no more than the largest."""

    ranks: int
    sums: int
    token_bytes: float
    row_bytes: float

    def seconds(self, link: Link, tokens: int, rows: int) -> tuple[float, float]:
        """(all in all, at the link's bandwidth alone)."""
        if self.ranks == 1 or not tokens:
            return 0.0, 0.0
        size = tokens * self.token_bytes
        logits = rows * (LARGEST if link.small and self.row_bytes else self.row_bytes) / link.bandwidth
        sent = self.sums * 2 * (self.ranks - 1) / self.ranks * size / link.bandwidth + logits
        met = (link.sum_seconds(0.0, self.ranks) if link.small else link.latency) if self.row_bytes else 0.0
        each = link.sum_seconds(size, self.ranks, shared=True) + link.around * max(0.0, 1.0 - size / FULL)
        return self.sums * each + met + logits, sent


@dataclass(frozen=True, slots=True)
class KeyTraffic:
    """Of one of ``ranks`` that share the keys, in a step: what goes to all others is what they find; where each computes
    other rows, the queries, too, or keys and values instead. ``query``, ``found``: bytes of a row, ``key``: of a token in
    the cache, in a layer."""

    ranks: int
    layers: int
    query: float
    found: float
    key: float

    def passes_keys(self, link: Link, tokens: int, keys: float, meanwhile: float) -> bool:
        """Whether in a step whose rows are spread, over so many ``keys``, keys and values go to the queries (pass-KV), or
        queries to the keys, and what they find back (pass-Q): whichever is waited for less. ``meanwhile``: seconds of
        attention to a rank's own keys, which hide others' on their way."""
        if keys * self.key > MOST_PASSED:
            return False
        by_keys, by_queries = self._spread(link, tokens, keys)
        return by_keys[0] - meanwhile <= by_queries[0]

    def _spread(self, link: Link, tokens: int, keys: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """(all in all, at the link's bandwidth alone) where keys are passed, and where queries are."""
        ways = (keys * self.key, 1), (tokens * (self.query + self.found), 2)
        share = self.layers * (self.ranks - 1) / self.ranks / link.bandwidth
        found = [(size * share + self.layers * collectives * link.latency, size * share) for size, collectives in ways]
        return found[0], found[1]

    def seconds(
        self, link: Link, tokens: int, *, spread: bool, keys: float = 0.0, meanwhile: float = 0.0
    ) -> tuple[float, float]:
        """(all in all, at the link's bandwidth alone). ``spread``: ranks compute other rows. ``keys``, ``meanwhile``: as
        ``passes_keys`` has them."""
        if self.ranks == 1 or not tokens:
            return 0.0, 0.0
        if not spread:
            sent = self.layers * (self.ranks - 1) * tokens * self.found / link.bandwidth
            return sent + self.layers * link.latency, sent
        by_keys, by_queries = self._spread(link, tokens, keys)
        if not self.passes_keys(link, tokens, keys, meanwhile):
            return by_queries
        hidden = min(by_keys[0], meanwhile)
        return by_keys[0] - hidden + link.taken * hidden, max(0.0, by_keys[1] - meanwhile)


def key_traffic_of(spec: DecoderSpec, ranks: int, element_bytes: float) -> KeyTraffic:
    """A sum of exponentials, in float32, goes with what each head finds."""
    query = spec.num_heads * spec.head_dim * element_bytes
    key = 2 * query * spec.num_kv_heads / spec.num_heads
    return KeyTraffic(ranks, len(spec.held_layers), query, query + 4.0 * spec.num_heads, key)


def traffic_of(spec: DecoderSpec, element_bytes: float) -> Traffic:
    """``spec``: one rank's share, of a stage or of all. Behind both halves of every layer, of the embedding, and of the
    logits."""
    sums, share = 2 * len(spec.held_layers) + spec.embeds, (spec.ranks - 1) / spec.ranks
    logits = share * spec.vocab_size * element_bytes if spec.answers else 0.0
    return Traffic(spec.ranks, sums, spec.hidden_size * element_bytes, logits)
