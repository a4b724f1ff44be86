"""Which of two devices should have the target, and which its draft model (Dovetail: Zhang et al. 2024).

A verification of k drafts takes v seconds, a pass of the draft p, and a draft is right with probability a when those
before it are. One stream then gets

    tokens a verification   t = 1 + a + … + a^k
    beside, or waiting      t / (v + k·p)
    drafting ahead          r = a^(k+1) of the runs are right: t / (v + (1 - r)·(k + 1/2)·p + r·max(0, (k + 1)·p - v))

What lives here: that arithmetic, and what fits where. What may not: prices, printing, measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from headrace.config import EngineConfig
from headrace.cost.cost_model import StepLoad
from headrace.errors import ConfigError, OutOfMemory
from headrace.planner.devices import GIB, Device
from headrace.planner.pricing import Priced, priced
from headrace.sites import count_bytes
from headrace.spec import ELEMENT_BYTES, DecoderSpec
from headrace.speculative.settings import Acceptance, SpeculativeSettings, chance, read_settings


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, who drafts for it, as each device would hold it, and how that is asked for."""

    target: DecoderSpec
    drafts: Mapping[str, DecoderSpec]
    settings: SpeculativeSettings


@dataclass(frozen=True, slots=True)
class Placement:
    """``draft`` None: nothing is drafted. ``problem``: why it does not fit; the figures are 0 then. ``drafts``: tokens
    of each run, as many as are best where none are asked for."""

    target: str
    draft: str | None
    problem: str = ""
    tokens_a_second: float = 0.0
    drafts: int = 0

    @property
    def fits(self) -> bool:
        return not self.problem


def asked_of(config: EngineConfig) -> SpeculativeSettings | None:
    """Where a draft model is named."""
    settings = read_settings(config.scheduler.speculative_config)
    return None if settings is None or settings.method != "draft_model" else settings


def placements(pair: Pair, config: EngineConfig, devices: Mapping[str, Device], context: int) -> list[Placement]:
    """Each way to place the two on ``devices``, the fastest first, then those that do not fit. ``context``: tokens of
    the one stream. ``config``: as asked for, unresolved."""
    made = [
        _placement(pair, config, devices, at, drafts_at, context)
        for at in devices
        for drafts_at in (None, *devices)
    ]  # fmt: skip
    return sorted(made, key=lambda each: -each.tokens_a_second)


def advice(found: Sequence[Placement], own: str) -> str:
    """One sentence. ``own``: the device that would have been taken."""
    best = found[0]
    if not best.fits:
        return "Neither device has room for the target."
    elsewhere = best.target != own
    there = next((each.problem for each in found if each.target == own and each.draft is None), "")
    why = f"the target does not fit on {own} ({there}), " if elsewhere and there else ""
    if best.draft is None:
        return f"Chosen: {why}the target on {best.target}, without drafts."
    said = f"Chosen: {why}the target on {best.target}, the draft on {best.draft}, {best.drafts} tokens at a time"
    asked = f'"device": "{best.draft}"' if best.draft != best.target else 'no "device"'
    return f"{said}: --device {best.target}, and {asked} in --speculative-config."


def _placement(
    pair: Pair, config: EngineConfig, devices: Mapping[str, Device], at: str, drafts_at: str | None, context: int
) -> Placement:
    plain = replace(config, scheduler=replace(config.scheduler, speculative_config=None))
    try:
        if drafts_at is None:
            target = _placed(pair.target, plain, devices[at], at)
            return Placement(at, None, tokens_a_second=1.0 / target.decode_seconds(1, context))
        draft = _placed(pair.drafts[drafts_at], plain, devices[drafts_at], drafts_at)
        taken = _bytes(draft, context) if at == drafts_at else 0
        target = _placed(pair.target, plain, devices[at], at, taken)
    except (ConfigError, OutOfMemory) as error:
        return Placement(at, drafts_at, problem=error.message)
    apart = at != drafts_at
    lengths = [pair.settings.fixed] if pair.settings.fixed is not None else range(1, pair.settings.most + 1)
    ahead = apart and config.device.drafts_ahead
    speeds = {
        count: _speed(pair.settings.expected, count, *_seconds(target, draft, count, context), ahead=ahead)
        for count in lengths
    }
    best = max(speeds, key=speeds.__getitem__)
    return Placement(at, drafts_at, tokens_a_second=speeds[best], drafts=best)


def _placed(spec: DecoderSpec, config: EngineConfig, device: Device, kind: str, taken: int = 0) -> Priced:
    """On a device of which ``taken`` bytes are another's. Raises ConfigError or OutOfMemory where it does not fit."""
    left = replace(device, memory=device.memory - taken)
    found = priced(spec, replace(config, device=replace(config.device, device=kind)), left)
    found.placed()
    return found


def _bytes(draft: Priced, context: int) -> int:
    return count_bytes(draft.spec, ELEMENT_BYTES[draft.dtype]) + draft.kv_bytes(context)


def _seconds(target: Priced, draft: Priced, count: int, context: int) -> tuple[float, float]:
    """Of a verification, and of a pass."""
    keys = tuple(float(min(context, group.window or context)) for group in target.groups)
    load = StepLoad(1 + count, 1 + count, tuple((1 + count) * each for each in keys), keys)
    return target.step_time.of_load(load, decode=False).seconds, draft.decode_seconds(1, context)


def _speed(acceptance: Acceptance, count: int, verify: float, each: float, *, ahead: bool) -> float:
    right = [*accumulate((chance(acceptance, at) for at in range(count + 1)), mul, initial=1.0)]  # so many in a row
    tokens = sum(right[:-1])
    waiting = tokens / (verify + count * each)
    if not ahead:
        return waiting
    whole = right[-1]
    spent = verify + (1 - whole) * (count + 0.5) * each + whole * max(0.0, (count + 1) * each - verify)
    return max(waiting, tokens / spent)


def rows_of(found: Sequence[Placement]) -> list[list[str]]:
    """For a table: target on, draft on, drafts, tokens/s, why not."""
    return [
        [
            each.target,
            each.draft or "nothing",
            str(each.drafts or ""),
            f"{each.tokens_a_second:.1f}" if each.fits else "",
            "" if each.fits else each.problem,
        ]
        for each in found
    ]


def said_of(acceptance: Acceptance) -> str:
    return ", ".join(f"{each:g}" for each in (acceptance if isinstance(acceptance, tuple) else (acceptance,)))


def memory_of(devices: Mapping[str, Device]) -> str:
    return ", ".join(f"{kind} {device.memory / GIB:.1f} GiB" for kind, device in devices.items())
