"""``python -m lab trees``: what a verification accepts, of a tree of drafts and of a chain of as many tokens.

The same requests in one engine after another, which differ in ``speculative_config`` alone: chains, then trees with so
many continuations of each token looked at. What is counted depends on no clock, so a busy machine may do it.

What lives here: that comparison. What may not: drafting, loads (lab/speculation.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.bench.arguments import count, output
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.request import SamplingParams
from headrace.speculative.settings import read_settings
from lab.speculation import add_prompts_flag, read_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts_flag(parser)
    parser.add_argument("--requests", type=count, default=8, help="(default: 8)")
    parser.add_argument("--tokens", type=count, default=64, help="of each answer (default: 64)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="in turn (default: 0)")
    parser.add_argument(
        "--budget", type=count, nargs="+", default=[8], help="drafts of a verification, in turn (default: 8)"
    )
    parser.add_argument("--topk", type=count, nargs="+", default=[2, 4], help="of the trees, in turn (default: 2 4)")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    settings = read_settings(config.scheduler.speculative_config)
    if settings is None or settings.method != "draft_model":
        raise ConfigError("python -m lab trees compares drafts of a model, so it needs --speculative-config with one.")
    facts = machine_facts("none: counts, no rates", model=config.model.model, draft=settings.model)
    print_facts(facts)
    rows = []
    for budget in args.budget:
        for topk in (None, *args.topk):
            drafting = {"model": settings.model, "num_speculative_tokens": budget, "tree": topk}
            if topk is None and budget > 16:
                continue
            asked = replace(config, scheduler=replace(config.scheduler, speculative_config=json.dumps(drafting)))
            rows += _counted(asked, args, budget, topk)
    print(table(tuple(rows[0]), [tuple(row.values()) for row in rows]))
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "rows": rows})
    return 0


def _counted(config: EngineConfig, args: argparse.Namespace, budget: int, topk: int | None) -> list[dict[str, Any]]:
    from headrace.engine.llm import LLM

    llm, rows = LLM.from_config(config), []
    try:
        prompts = read_prompts(llm, args.prompts, args.requests)
        for temperature in args.temperature:
            steps, accepted = _asked(llm, prompts, args.tokens, temperature)
            row = {"temperature": temperature, "budget": budget, "tree": topk or "chain", "verifications": steps}
            rows.append(row | {"accepted each": round(accepted / max(1, steps), 3)})
    finally:
        llm.shutdown()
    return rows


def _asked(llm: Any, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> tuple[int, int]:
    """Verifications, and drafts that were right."""
    counts = llm.engine.core.scheduler.speculation.counts
    before = counts.steps, sum(counts.accepted)
    params = [
        SamplingParams(temperature=temperature, seed=at, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for at in range(len(prompts))
    ]
    llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    return counts.steps - before[0], sum(counts.accepted) - before[1]
