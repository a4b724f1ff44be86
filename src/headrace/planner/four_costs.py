"""The four costs of a long context: what a longer prompt costs to compute, how many users fit, how long their tokens
take, and what it costs to put one user's keys and values aside and to bring them back.

After Challenges in Deploying Long-Context Transformers: A Theoretical Peak Performance Analysis (Fu 2024). Each cost is
given twice: at the peak (the paper's way: published or measured limits, all memory but the weights for keys and values)
and as this engine would do it on the device (its prices of steps, its chunks of prompts, its rules for memory).

    cost              at the peak
    prompt            Σ operators max(bytes / bandwidth, FLOPs / rate), the whole prompt in one step
    users             (memory - weights) / bytes of one user's keys and values
    a token           bytes of the weights and of all these users' keys and values / bandwidth
    a switch          2 · bytes of one user's keys and values / the host link: out, and in again

What lives here: that arithmetic. What may not: printing, flags (commands/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.cost.cards import REACHED_BANDWIDTH, REACHED_RATE
from headrace.cost.cost_model import CostModel, StepLoad, keys_of, pairs_of
from headrace.cost.profile import DeviceProfile
from headrace.errors import ConfigError, OutOfMemory
from headrace.planner.devices import Device
from headrace.planner.pricing import Priced, decode_load
from headrace.sites import count_bytes
from headrace.spec import ELEMENT_BYTES

CONTEXTS = tuple(2**power for power in range(12, 21))  # 4,096 … 1,048,576


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds; ``users`` as they fit. ``own``: of one user alone, ``full``: with all that fit. None: it does not fit,
    or nobody knows."""

    prompt: float
    users: int
    own: float
    full: float | None
    switch: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """``engine`` None: the engine would not start there, or not with so long a context."""

    context: int
    kv_bytes: int
    peak: Costs
    engine: Costs | None


def four_costs(
    priced: Priced, contexts: Sequence[int], *, host_link: float | None = None
) -> tuple[list[Row], list[str]]:
    """A row for each context that the model allows, and what is to be said of those left out. ``host_link``: bytes/s,
    instead of what is known."""
    longest = priced.spec.max_positions
    wrong = [each for each in contexts if each < 1]
    if wrong or not contexts:
        raise ConfigError(
            f"The contexts are {' '.join(map(str, contexts)) or 'none'}; give whole numbers of tokens, at least 1 each."
        )
    allowed = [each for each in sorted(set(contexts)) if each <= longest]
    notes = (
        [f"the model has positions for {longest:,} tokens; longer contexts are left out"]
        if len(allowed) < len(set(contexts))
        else []
    )
    if not allowed:
        raise ConfigError(
            f"The model has positions for {longest:,} tokens, and the shortest context asked for is {min(contexts):,}; give less."
        )
    link = host_link if host_link is not None else priced.device.host_link
    if link is None:
        notes.append(
            "nobody knows this device's link to the host: no cost of a switch; give --host-link, in bytes a second"
        )
    capacity, note = _capacity(priced)
    notes += [note] if note else []
    peak = CostModel(
        priced.spec,
        priced.groups,
        peak_profile(priced.device),
        weight_bytes=ELEMENT_BYTES[priced.dtype],
        dtype=priced.dtype,
    )
    return [_row(priced, peak, capacity, each, link) for each in allowed], notes


def peak_profile(device: Device) -> DeviceProfile:
    """Limits that were lowered to what a like device reached are raised again."""
    profile = device.profile
    if profile.source != "published":
        return profile
    rates = {dtype: rate / REACHED_RATE for dtype, rate in profile.gemm_rates.items()}
    return replace(profile, read_bandwidth=profile.read_bandwidth / REACHED_BANDWIDTH, gemm_rates=rates)


def _capacity(priced: Priced) -> tuple[list[int] | None, str]:
    """Blocks the engine would have, by KV group, or why it has none."""
    try:
        return [group.num_blocks for group in priced.placed().kv_groups], ""
    except (ConfigError, OutOfMemory) as error:
        return None, f"the engine would not start: {error.message}"


def _row(priced: Priced, peak: CostModel, capacity: list[int] | None, context: int, link: float | None) -> Row:
    kv = priced.kv_bytes(context)
    switch = 2 * kv / link if link is not None else None
    return Row(context, kv, _at_peak(priced, peak, context, kv, switch), _by_engine(priced, capacity, context, switch))


def _at_peak(priced: Priced, peak: CostModel, context: int, kv: int, switch: float | None) -> Costs:
    left = priced.device.memory - count_bytes(priced.spec, ELEMENT_BYTES[priced.dtype])
    users = max(0, left // kv)

    def token(rows: int) -> float:
        return peak.estimate_load(decode_load(priced.groups, rows, context)).overlapped_floor_seconds

    prompt = peak.estimate_load(_chunk(priced, 0, context)).floor_seconds
    return Costs(prompt, users, token(1), token(users) if users else None, switch)


def _by_engine(priced: Priced, capacity: list[int] | None, context: int, switch: float | None) -> Costs | None:
    if capacity is None:
        return None
    users = min(have // need for have, need in zip(capacity, priced.blocks(context), strict=True))
    rows = min(users, priced.config.scheduler.rows)
    most = priced.config.scheduler.max_num_batched_tokens
    assert most is not None, "resolved"
    prompt = sum(_chunk_seconds(priced, start, min(most, context - start)) for start in range(0, context, most))
    return Costs(
        prompt, rows, priced.decode_seconds(1, context), priced.decode_seconds(rows, context) if rows else None, switch
    )


def _chunk_seconds(priced: Priced, start: int, count: int) -> float:
    return priced.step_time.of_load(_chunk(priced, start, count), decode=False).seconds


def _chunk(priced: Priced, start: int, count: int) -> StepLoad:
    pairs, keys = (tuple(of(start, count, group.window) for group in priced.groups) for of in (pairs_of, keys_of))
    return StepLoad(count, 1, pairs, keys, (0.0,) * len(pairs))
