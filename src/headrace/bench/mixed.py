"""``headrace bench mixed``: kinds of clients at once on one server, each with an objective of its own, and the share of
its requests that met it (ConsumerBench, Gu et al. 2025, and its service-level objectives by application).

    chat         conversations with pauses to read         time to the first token, time per token
    agents       turns in quick succession, one system     time of a whole turn
    batch        long requests, a few clients              time of a whole request
    embeddings   short texts (with --embedding-model)      time of a whole request

What lives here: the kinds, running them together and one by one, attainment. What may not: sending (load.py), drawing
requests (planner/workload/).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.bench.arguments import add_server_arguments, declare
from headrace.bench.load import HttpClient, LoadGenerator, first_model
from headrace.bench.serve import limits_of
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.planner.workload.conversations import Conversation, conversations_of
from headrace.planner.workload.load import Lengths, LoadRequest, arriving, conversing, drawn
from headrace.planner.workload.statistics import failure_reasons, meets, parse_goodput, spread_of

EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Kind:
    """``requests``: so many conversations or requests without --requests. ``clients``: of a closed loop; None: they come
    at random times. ``objective``: as --goodput has it. ``endpoint``: that of ``bench serve``, or embeddings."""

    requests: int
    prompt: int
    output: int
    objective: tuple[str, ...]
    endpoint: str = "chat"
    turns: int = 1
    system: int = 0
    think: float = 0.0
    clients: int | None = None

    def asked(self, many: int, rate: float, scale: float, seed: int) -> list[LoadRequest]:
        prompt, answer, system = (math.ceil(size * scale) for size in (self.prompt, self.output, self.system))
        lengths = Lengths(prompt, answer, 0.25)
        if self.turns > 1:
            found = conversing(many, self.turns, lengths, system=system, think=self.think, seed=seed)
        else:
            found = drawn(many, lengths, seed=seed)
        return found if self.clients is not None else arriving(found, rate, seed=seed)


KINDS: Mapping[str, Kind] = {
    "chat": Kind(12, 48, 64, ("ttft:1000", "tpot:200"), turns=3, think=1.0),
    "agents": Kind(4, 64, 32, ("e2el:5000",), turns=6, system=256, think=0.05),
    "batch": Kind(24, 256, 128, ("e2el:60000",), "completions", clients=4),
    EMBEDDINGS: Kind(32, 64, 1, ("e2el:500",), EMBEDDINGS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    declare(parser, "mixed.arguments", kinds={"choices": KINDS})


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if every request failed."""
    names = args.kinds or [name for name in KINDS if name != EMBEDDINGS or args.embedding_model]
    if EMBEDDINGS in names and not args.embedding_model:
        raise ConfigError("--kinds has embeddings; name who computes them with --embedding-model.")
    shares = [_share(args, name) for name in dict.fromkeys(names)]
    limits_here = limits_of(HttpClient(args.base_url).host)
    found, seconds, model = asyncio.run(_measure(args, shares))
    facts = machine_facts(
        limits_here, shape=f"{', '.join(names)} at once, in {seconds:.1f} s", server=f"{args.base_url}, model {model}"
    )
    _show(args, facts, shares, found)
    return 0 if any(each["completed"] for each in found["together"].values()) else 1


# --- who asks for what


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind sends, together with the others and ``alone``: other words of the same lengths, so that none finds
    its prefixes cached. ``limits``: of its objective, in seconds."""

    name: str
    kind: Kind
    together: Sequence[Conversation]
    alone: Sequence[Conversation]
    limits: Mapping[str, float]
    extra: Mapping[str, Any]


def _share(args: argparse.Namespace, name: str) -> Share:
    kind = KINDS[name]
    many = _whole(_of_kind(args.requests, name, "requests"), "requests") or kind.requests
    priority = _whole(_of_kind(args.priorities, name, "priorities"), "priorities")
    seed = args.seed + list(KINDS).index(name)
    asked = kind.asked(many, args.request_rate, args.scale, seed)
    limits = parse_goodput(_of_kind(args.objective, name, "objective") or kind.objective)
    extra = {} if priority is None else {"priority": priority}
    together, alone = (conversations_of(asked, vocab_size=args.vocab_size, seed=seed + apart) for apart in (0, 1000))
    return Share(name, kind, together, alone, limits, extra)


def _of_kind(entries: Sequence[str], name: str, flag: str) -> list[str]:
    """What is said of one kind. Raises ConfigError for an unknown one."""
    found = []
    for entry in entries:
        kind, there, value = entry.partition("=")
        if kind not in KINDS or not there:
            raise ConfigError(f"--{flag} has {entry[:80]!r}; give KIND=VALUE with one of {', '.join(KINDS)}.")
        found += [value] if kind == name else []
    return found


def _whole(values: Sequence[str], flag: str) -> int | None:
    if not values:
        return None
    if not (values[-1].isascii() and values[-1].isdecimal()):
        raise ConfigError(f"--{flag} has {values[-1][:80]!r}; give a whole number.")
    return int(values[-1])


# --- measuring


def _sender(client: HttpClient, model: str, share: Share) -> LoadGenerator:
    kind = share.kind
    clients, as_ids = math.inf if kind.clients is None else kind.clients, kind.endpoint == "completions"
    return LoadGenerator(client, model, kind.endpoint, clients, as_ids=as_ids, extra=share.extra)


async def _measure(args: argparse.Namespace, shares: Sequence[Share]) -> tuple[dict[str, Any], float, str]:
    client = HttpClient(args.base_url, api_key=args.api_key, timeout=args.timeout)
    model = args.model or await first_model(client)
    models = {share.name: args.embedding_model if share.kind.endpoint == EMBEDDINGS else model for share in shares}
    found: dict[str, Any] = {"alone": {}, "together": {}}
    try:
        for share in shares:
            await _sender(client, models[share.name], share).warm_up(share.together, 1)
        for share in shares if args.alone else ():
            found["alone"][share.name] = await _run(_sender(client, models[share.name], share), share, share.alone)
        begin = time.perf_counter()
        together = (_run(_sender(client, models[share.name], share), share, share.together) for share in shares)
        found["together"] = dict(zip((share.name for share in shares), await asyncio.gather(*together), strict=True))
        return found, time.perf_counter() - begin, model
    finally:
        await client.close()


async def _run(sender: LoadGenerator, share: Share, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Its figures. ``attainment``: of all its requests; a failed one has not met anything."""
    await sender.run(conversations)
    good = [sample for sample in sender.samples if sample.error is None and sample.arrivals]
    return {
        "completed": len(good),
        "failed": len(sender.samples) - len(good),
        "attainment": sum(meets(sample, share.limits) for sample in good) / max(1, len(sender.samples)),
        **spread_of([sample.ttft for sample in good], "ttft"),
        **spread_of([sample.e2e for sample in good], "e2el"),
        "reasons": failure_reasons(sender.samples),
        "requests": [asdict(sample) for sample in sender.samples],
    }


def _show(
    args: argparse.Namespace, facts: Mapping[str, Any], shares: Sequence[Share], found: Mapping[str, Any]
) -> None:
    print_facts(facts)
    print()
    columns = ("kind", "requests", "failed", "objective", "attainment", "alone", "TTFT p50, ms", "p99", "E2E p50, ms", "p99")  # fmt: skip
    rows = []
    for share in shares:
        each = found["together"][share.name]
        objective = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in share.limits.items())
        alone = found["alone"].get(share.name, {}).get("attainment")
        spread = (each[f"{what}_{name}_ms"] for name in ("ttft", "e2el") for what in ("median", "p99"))
        asked, met = each["completed"] + each["failed"], round(each["attainment"], 3)
        rows.append((share.name, asked, each["failed"], objective, met, alone, *spread))
    print(table(columns, rows))
    for share in shares:
        for reason, times in found["together"][share.name]["reasons"].items():
            print(f"{share.name} failed: {times} x {reason}")
    if args.output_json:
        write_json(args.output_json, {"facts": facts, **found})
