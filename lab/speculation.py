"""``python -m lab speculation``: the same requests with drafts and without, in one engine, turn by turn.

Requests opt out of drafts where they are measured without, so weights, graphs and caches are the same ones. A ratio
stands beside what the device's own times would allow: tokens a verification, times a plain step's seconds, over those
of a step that drafts and verifies. With ``--imposed`` a coin says which drafts are right, at that chance each while
those before it are: shapes with made-up weights can be measured so, their answers mean nothing.

What lives here: the loads, the coin, the figures. What may not: drafting.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace.bench.arguments import count, output, share
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.metrics import StepTimes
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.request import SamplingParams, StepPlan, StepResult, StructuredOutputs
from headrace.worker.judge import Coins
from headrace.worker.rows import Rows

PROMPT, COPIED = 48, 192  # tokens


def add_prompts_flag(parser: argparse.ArgumentParser) -> None:
    """What ``read_prompts`` reads."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with 'text' to go on from, or 'messages' (default: random tokens)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts_flag(parser)
    parser.add_argument(
        "--copying", action="store_true", help="each prompt says its text twice, and the answer begins a third time"
    )
    parser.add_argument(
        "--requests", type=count, default=4, help="one after the other, where one is at once (default: 4)"
    )
    parser.add_argument("--batch", type=count, nargs="+", default=[1], help="requests at once, in turn (default: 1)")
    parser.add_argument("--tokens", type=count, default=128, help="of each answer (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: 0)")
    parser.add_argument("--schema", type=Path, metavar="FILE", help="a JSON schema that every answer follows")
    parser.add_argument("--turns", type=count, default=3, help="of each side, of which the best counts (default: 3)")
    parser.add_argument("--imposed", type=share, nargs="+", help="drafts are right by chance, at these in turn")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


@dataclass(slots=True)
class Steps:
    """An observer of the engine's steps: seconds of those that decode, by whether they verify drafts, and of the host."""

    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # of those that verify drafts

    def on_step(self, plan: StepPlan, result: StepResult | None, times: StepTimes) -> None:
        if (
            result is None
            or not plan.rows
            or list(plan.counts) != [1 + each for each in plan.drafts or [0] * len(plan.rows)]
        ):
            return
        (self.drafted if sum(result.drafted) else self.plain).append(result.device_seconds)
        if sum(result.drafted):
            self.host.append(times.host_seconds)


@dataclass(frozen=True, slots=True)
class Side:
    """One turn. ``cpu``: seconds of this process."""

    tokens: int
    seconds: float
    cpu: float
    answers: tuple[tuple[int, ...], ...]


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace.engine.llm import LLM

    if config.scheduler.speculative_config is None:
        raise ConfigError("python -m lab speculation compares drafts with none, so it needs --speculative-config.")
    facts = machine_facts(
        "not measured: both sides ran in turn, in one engine", config=config.scheduler.speculative_config
    )
    print_facts(facts)
    rows = []
    for chance in args.imposed or [None]:
        llm = LLM.from_config(config if chance is None else _imposed(config, chance))
        try:
            prompts = _prompts(llm, args)
            if args.copying and chance is not None:
                speculator = llm.engine.core.executor._runner._speculator  # type: ignore[attr-defined]
                speculator.judge = _Copied(chance, speculator._rows, [each[:COPIED] for each in prompts])
            for batch in args.batch:
                rows.append(measure(llm, prompts, args, batch, chance))
                print(table(tuple(rows[-1]), [tuple(rows[-1].values())]), flush=True)
        finally:
            llm.shutdown()
    print(table(tuple(rows[0]), [tuple(row.values()) for row in rows]))
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "rows": rows})
    return 0


def _imposed(config: EngineConfig, chance: float) -> EngineConfig:
    """Coins judge, on every rank. Raises ConfigError where samples mean something."""
    if config.model.load_format != "dummy":
        raise ConfigError("--imposed is for random weights; give --load-format dummy, or leave it out.")
    drafts = json.loads(config.scheduler.speculative_config or "{}") | {"acceptance": chance}
    return replace(config, scheduler=replace(config.scheduler, speculative_config=json.dumps(drafts)))


def measure(
    llm: Any, prompts: Sequence[Sequence[int]], args: argparse.Namespace, batch: int, chance: float | None
) -> dict[str, Any]:
    """Both sides in turn; the first turn of each pays for first uses."""
    core, steps, sides = llm.engine.core, Steps(), dict[bool, list[Side]]()
    counts = core.scheduler.speculation.counts
    for turn in range(args.turns + 1):
        if turn == 1:
            core.observe(steps)
            before = counts.steps, sum(counts.drafted), sum(counts.accepted)
        for drafts in (False, True):
            side = _side(llm, prompts, args, batch, drafts)
            if turn:
                sides.setdefault(drafts, []).append(side)
    core.observe(None)
    verified, drafted, right = (
        now - old for now, old in zip((counts.steps, sum(counts.drafted), sum(counts.accepted)), before, strict=True)
    )
    off, on = (min(sides[drafts], key=lambda side: side.seconds) for drafts in (False, True))
    per_step = 1 + right / max(1, verified)
    plain, both, host = (median(each) if each else 0.0 for each in (steps.plain, steps.drafted, steps.host))
    equal = sum(a == b for a, b in zip(off.answers, on.answers, strict=True))
    return {
        "at once": batch,
        "imposed": chance,
        "off tok/s": round(off.tokens / off.seconds, 1),
        "on tok/s": round(on.tokens / on.seconds, 1),
        "ratio": round(on.tokens / on.seconds / (off.tokens / off.seconds), 2),
        "by CPU time": round(_best_cpu(sides[False]) / _best_cpu(sides[True]), 2),
        "allowed": round(per_step * plain / both, 2) if both else None,
        "plain ms": round(1e3 * plain, 3),
        "drafted ms": round(1e3 * both, 3),
        "host ms": round(1e3 * host, 3),
        "drafts a step": round(drafted / max(1, verified), 2),
        "right": round(right / max(1, drafted), 3),
        "tokens a step": round(per_step, 2),
        "equal answers": f"{equal}/{len(off.answers)}",
    }


def _best_cpu(sides: Sequence[Side]) -> float:
    return min(side.cpu / side.tokens for side in sides)


def _side(llm: Any, prompts: Sequence[Sequence[int]], args: argparse.Namespace, batch: int, drafts: bool) -> Side:
    wanted = [prompts[at % len(prompts)] for at in range(args.requests if batch == 1 else batch)]
    seconds, cpu, answers = time.perf_counter(), time.process_time(), list[tuple[int, ...]]()
    for first in range(0, len(wanted), batch):
        params = SamplingParams(
            temperature=args.temperature,
            seed=first,
            max_tokens=args.tokens,
            ignore_eos=args.prompts is None and args.schema is None,
            structured_outputs=None if args.schema is None else StructuredOutputs(json=args.schema.read_text("utf-8")),
            detokenize=False,
            speculative=None if drafts else False,
        )
        given = [{"prompt_token_ids": list(ids)} for ids in wanted[first : first + batch]]
        found = llm.generate(given, params, use_tqdm=False)
        answers += [tuple(each.outputs[0].token_ids) for each in found]
    return Side(sum(map(len, answers)), time.perf_counter() - seconds, time.process_time() - cpu, tuple(answers))


class _Copied(Coins):
    """Of answers that repeat ``texts`` (by their first token), but where a coin says otherwise."""

    alike = False

    def __init__(self, chance: float, rows: Rows, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(chance, *rows.token_ids.shape)
        self._rows = rows
        self._texts = {text[0]: text for text in texts}

    def accepted(
        self, row: int, length: int, drafts: Sequence[int], samples: Sequence[int | None]
    ) -> tuple[list[int], range]:
        text, tokens = self._texts[int(self._rows.token_ids[row, 0])], list[int]()
        for at, (draft, sample) in enumerate(zip([*drafts, None], samples, strict=True)):
            tokens.append(
                text[(length + at) % len(text)] if self.goes_on(row, length + at, equal=False) else int(sample or 0)
            )
            if tokens[-1] != draft:
                break
        places = np.arange(length, length + len(tokens), dtype=np.int32)
        self._rows.put(np.full_like(places, row), places, np.array(tokens, dtype=np.int32))
        return tokens, range(1, len(tokens))


def _prompts(llm: Any, args: argparse.Namespace) -> list[list[int]]:
    found = read_prompts(llm, args.prompts, max(args.requests, *args.batch), COPIED if args.copying else PROMPT)
    return [[*ids, *ids, *ids[:PROMPT]] for ids in found] if args.copying else found


def read_prompts(llm: Any, lines: Path | None, many: int, size: int = PROMPT) -> list[list[int]]:
    """``many`` prompts from a file of JSON lines, or of random tokens."""
    if lines is None:
        draw, vocab = random.Random(1), llm.info.vocab_size
        return [[draw.randrange(vocab) for _ in range(size)] for _ in range(many)]
    parts = (json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines())
    return [ids for line in parts for ids in _read(llm, line, size, many)][:many]


def _read(llm: Any, line: Mapping[str, Any], size: int, many: int) -> list[list[int]]:
    """Pieces of a text, each to go on from; or a conversation as far as its last answer."""
    tokenizer = llm.get_tokenizer()
    if "text" in line:
        ids = tokenizer.encode(line["text"][: 40 * size * many])
        return [ids[at : at + size] for at in range(size, len(ids) - size, 8 * size)]
    messages = line["messages"]
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    prompt = llm._inputs.chat_prompt(
        messages[:last], tools=line.get("tools"), add_generation_prompt=True, continue_final_message=False
    )
    return [list(prompt.token_ids)] if prompt.token_ids is not None else []
