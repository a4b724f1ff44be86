"""How many sequences at once are worth their memory: the knee of throughput over batch size, what lies beyond it, and
whether a second engine on the same device would use it.

After Mind the Memory Gap (Recasens et al. 2025): decoding stays bound by memory at any batch. A step reads the weights
once and every sequence's keys and values, so with a for the weights (and what a step costs anyway) and b for one
sequence at its context,

    seconds of a step   ≈ a + b · batch
    tokens a second     = batch / (a + b · batch)         → 1 / b, whatever the batch
    share q of the most ⇔ batch = (a / b) · q' / (1 - q'),  q' = q · (tokens/s at the most) · b

The knee is the least batch that reaches KNEE of the throughput at the batch that memory holds. It is searched with the
device's prices, which are not quite a line (products become bound by FLOPs, experts are touched one by one).

Two engines share one device's bandwidth and rate, but not each other's pauses. With s a step at the knee, m and f the
seconds that its bytes and its FLOPs take at the limits, both together give at most 2 · knee / max(s, 2m, 2f) tokens a
second. A CPU has no pauses to fill: each engine computes with all cores, so both together give what one gives at the
knee.

What lives here: that arithmetic. What may not: printing, running (the check runs in commands/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.executor import ExecutorInfo
from headrace.errors import ConfigError
from headrace.planner.pricing import Priced, decode_load

KNEE = 0.9  # of the throughput that all memory would give
WORTH = 1.1  # a second engine is worth its trouble from that ratio on
NOT_OURS = "in use before"  # on a card, by others (worker/allocation.py)


@dataclass(frozen=True, slots=True)
class Advice:
    """At ``context`` tokens a sequence. ``most``: sequences that memory holds; ``step``: seconds of one with ``knee``
    of them.

    ``spare_blocks``, ``spare_bytes``: KV beyond the knee, of all groups. ``replica_fits``: two engines with a knee each
    fit into the memory; ``replica_ratio``: their throughput together over that of one with all memory, at most.
    """

    context: int
    most: int
    knee: int
    step: float
    tokens_a_second: float
    most_tokens_a_second: float
    spare_blocks: int
    spare_bytes: int
    replica_bytes: int
    replica_fits: bool
    replica_ratio: float

    @property
    def replica_pays(self) -> bool:
        return self.replica_fits and self.replica_ratio >= WORTH


def advise(priced: Priced, context: int, info: ExecutorInfo | None = None) -> Advice:
    """``info``: of an engine that runs; None: as one would lie there. Raises ConfigError where not even one sequence of
    that context fits."""
    info = info or priced.placed()
    if not 1 <= context <= info.max_model_len:
        taken = f"this model on this device takes 1 to {info.max_model_len:,}"
        raise ConfigError(
            f"The context is {context:,} tokens, and {taken}; give less (a smaller --max-num-batched-tokens leaves it more)."
        )
    groups, need = info.kv_groups, priced.blocks(context)
    most = min(group.num_blocks // each for group, each in zip(groups, need, strict=True))
    if most < 1:
        raise ConfigError(
            f"Not one sequence of {context:,} tokens fits beside the model; take a shorter context or a larger device."
        )

    def rate(batch: int) -> float:
        return batch / priced.decode_seconds(batch, context)

    knee = least(lambda batch: rate(batch) >= KNEE * rate(most), most)
    spare = [group.num_blocks - knee * each for group, each in zip(groups, need, strict=True)]
    kept = sum(knee * each * group.spec.bytes_per_block for group, each in zip(groups, need, strict=True))
    memory = {purpose: size for purpose, size in info.memory.items() if purpose != NOT_OURS}
    replica = kept + sum(size for purpose, size in memory.items() if purpose != "kv_cache")
    return Advice(
        context=context,
        most=most,
        knee=knee,
        step=priced.decode_seconds(knee, context),
        tokens_a_second=rate(knee),
        most_tokens_a_second=rate(most),
        spare_blocks=sum(spare),
        spare_bytes=sum(blocks * group.spec.bytes_per_block for blocks, group in zip(spare, groups, strict=True)),
        replica_bytes=replica,
        replica_fits=2 * replica <= sum(memory.values()),
        replica_ratio=_two(priced, knee, context) / rate(most),
    )


def _two(priced: Priced, batch: int, context: int) -> float:
    """Tokens a second of two engines with so many sequences each, at most."""
    step = priced.decode_seconds(batch, context)
    busy = (
        priced.cost_model.estimate_load(decode_load(priced.groups, batch, context)).overlapped_floor_seconds
        if priced.device.overlaps
        else step
    )
    return 2 * batch / max(step, 2 * busy)


def least(holds: Callable[[int], bool], most: int) -> int:
    """The least whole number from 1 for which it holds; it holds for ``most``, and for all above the first."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
