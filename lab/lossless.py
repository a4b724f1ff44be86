"""``python -m lab lossless``: random requests with drafts and without, bit for bit.

Each request draws what it asks for: how it is sampled, penalties, biases, stop strings and tokens, logprobs, several
answers, grammars, shared prefixes, an opt-out. They go to two engines, one of which drafts, in waves, so that prompts
are computed beside rows that decode, and with so few blocks that some are pushed out. Both are batch-invariant: tokens,
logprobs and ends must be equal.

What lives here: what is drawn, the comparison. What may not: drafting, other ways to run an engine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.bench.arguments import count, natural
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table
from headrace.request import SamplingParams, StructuredOutputs

SHOWN = 5  # requests that differ
_WORDS = (
    "the",
    "river",
    "of",
    "stone",
    "let",
    "mut",
    "I",
    "think",
    "that",
    "fn",
    "\n",
    "light",
    "and",
    "hello",
    "book",
    "a",
    ",",
    ".",
)
_GRAMMARS = (
    {"regex": r"[a-z]{3,9} [0-9]{1,4}"},
    {"choice": ("yes, surely", "no, never", "perhaps")},
    {
        "json": '{"type":"object","properties":{"name":{"type":"string"},"count":{"type":"integer"}},"required":["name","count"]}'
    },
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=count, default=1000, help="(default: 1000)")
    parser.add_argument("--wave", type=count, default=20, help="requests that are there at once (default: 20)")
    parser.add_argument("--draw", type=natural, default=0, help="another draw of requests (default: 0)")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    if config.scheduler.speculative_config is None:
        raise ConfigError("python -m lab lossless compares drafts with none, so it needs --speculative-config.")
    config = replace(config, device=replace(config.device, batch_invariant=True))
    plain = replace(config, scheduler=replace(config.scheduler, speculative_config=None))
    print_facts(machine_facts("none: equality, no rates", drafts=config.scheduler.speculative_config))
    wanted, _ = _answers(plain, args)
    found, counted = _answers(config, args)
    differ = [index for index, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]
    print(table(("figure", "value"), [("requests", len(found)), ("that differ", len(differ)), *counted.items()]))
    for index in differ[:SHOWN]:
        print(f"request {index}: {_requests(args)[index]}\n  with drafts {found[index]}\n  without     {wanted[index]}")
    return 1 if differ else 0


def _answers(config: EngineConfig, args: argparse.Namespace) -> tuple[list[Any], Mapping[str, float]]:
    from headrace.engine.llm import LLM

    llm, answers = LLM.from_config(config), list[Any]()
    try:
        asked = _requests(args)
        for first in range(0, len(asked), args.wave):
            prompts, params = zip(*asked[first : first + args.wave], strict=True)
            made = llm.generate([{"prompt": text} for text in prompts], params, use_tqdm=False)
            answers += [
                (
                    [(tuple(o.token_ids), o.finish_reason, o.stop_reason, o.logprobs, o.text) for o in each.outputs],
                    each.prompt_logprobs,
                )
                for each in made
            ]
        stats = llm.engine.core.stats()
    finally:
        llm.shutdown()
    drafts = stats.drafts
    drafted, right = (sum(drafts.drafted), sum(drafts.accepted)) if drafts is not None else (0, 0)
    return answers, {"drafted": drafted, "right": right, "pushed out": stats.counters.preemptions}


def _requests(args: argparse.Namespace) -> list[tuple[str, SamplingParams]]:
    draw = random.Random(args.draw)
    openings = [" ".join(draw.choices(_WORDS, k=draw.randint(20, 60))) for _ in range(6)]  # shared by some
    return [_request(draw, openings) for _ in range(args.requests)]


def _request(draw: random.Random, openings: Sequence[str]) -> tuple[str, SamplingParams]:
    text = draw.choice(openings) if draw.random() < 0.5 else ""
    text += " " + " ".join(draw.choices(_WORDS, k=draw.randint(1, 40)))
    if draw.random() < 0.25:  # says itself again
        text += text
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, 60), "seed": draw.randrange(2**40), "temperature": 0.0}
    if draw.random() < 0.5:
        fields |= {
            "temperature": draw.choice((0.3, 0.8, 1.2)),
            "top_p": draw.choice((1.0, 0.9)),
            "top_k": draw.choice((0, 20)),
        }
        fields |= {"min_p": draw.choice((0.0, 0.0, 0.05)), "n": draw.choice((1, 1, 2, 3))}
    choices: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.15, {"presence_penalty": 0.4, "frequency_penalty": 0.3}),
        (0.15, {"repetition_penalty": 1.2}),
        (0.15, {"logit_bias": {draw.randrange(8000): 3.0, draw.randrange(8000): -5.0}}),
        (0.1, {"bad_words": ("the river", "of")}),
        (0.2, {"logprobs": draw.randint(0, 4)}),
        (0.1, {"prompt_logprobs": 1}),
        (0.15, {"stop": ("and", "\n")}),
        (0.1, {"stop_token_ids": tuple(draw.choices(range(8000), k=40))}),
        (0.3, {"ignore_eos": True}),
        (0.1, {"min_tokens": min(10, fields["max_tokens"])}),
        (0.1, {"speculative": False}),
    )
    for chance, more in choices:
        if draw.random() < chance:
            fields |= more
    if draw.random() < 0.2:
        fields |= {"structured_outputs": StructuredOutputs(**draw.choice(_GRAMMARS)), "bad_words": ()}
    return text, SamplingParams(**fields)
