"""Prefix reuse on and off: a shared system prompt over its length, and a conversation turn by turn.

Nothing else is set differently: there is no setting that would help the side without it.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.driver import Run
from headrace.bench.statistics import Sample
from headrace.bench.workload import Lengths, conversations, shared_prefix_dialogues
from headrace.engine.assembly import Engine

PREFIX = "shared prefix tokens"
TURN = "turn of a conversation"
PREFIX_FIGURES = (Figure("mean ttft ms", False), Figure("total s", False), Figure("cached share", True))
TURN_FIGURES = (Figure("mean ttft ms", False), Figure("mean e2e ms", False), Figure("cached share", True))


def measure(lab: Lab) -> list[Result]:
    return [_shared_prefix(lab), _conversation(lab)]


def _shared_prefix(lab: Lab) -> Result:
    prefixes = (0, 64) if lab.quick else (0, 128, 256, 512, 1024, 2048)
    count, lengths = (4, Lengths(32, 4)) if lab.quick else (16, Lengths(32, 16))

    def point(mode: str, engine: Engine, prefix: int, seed: int) -> list[Point]:
        vocab = engine.info.vocab_size
        requests = shared_prefix_dialogues(count, lengths, num_prefixes=1, prefix_len=prefix, vocab_size=vocab, seed=seed)
        run = lab.run(mode, seed, engine.core, requests)
        return [{PREFIX: prefix, "mean ttft ms": _mean_ttft(run.samples), "total s": run.seconds, "cached share": _cached(run.samples)}]

    title = f"{count} requests at once: a shared system prompt, then {lengths.prompt} tokens; {lengths.output} out"
    return lab.result(title, PREFIX, PREFIX_FIGURES, lab.curves(PREFIX, prefixes, point))


def _conversation(lab: Lab) -> Result:
    turns, system, lengths = (3, 32, Lengths(16, 4)) if lab.quick else (8, 128, Lengths(64, 32))

    def points(mode: str, engine: Engine, count: int, seed: int) -> list[Point]:
        dialogues = conversations(count, turns, lengths, system_len=system, think_seconds=0.0, vocab_size=engine.info.vocab_size, seed=seed)
        return _by_turn(lab.run(mode, seed, engine.core, dialogues))

    title = f"4 conversations at once: system prompt of {system}, {lengths.prompt} new tokens a turn; {lengths.output} out"
    return lab.result(title, TURN, TURN_FIGURES, lab.curves(TURN, (4,), points))


def _by_turn(run: Run) -> list[Point]:
    """One point a turn: at the same turn every conversation's prompt has the same length."""
    points = []
    for number, length in enumerate(sorted({sample.prompt_tokens for sample in run.samples}), start=1):
        samples = [sample for sample in run.samples if sample.prompt_tokens == length]
        mean_e2e = sum(sample.e2e for sample in samples) / len(samples) * 1e3
        points.append({TURN: number, "mean ttft ms": _mean_ttft(samples), "mean e2e ms": mean_e2e, "cached share": _cached(samples)})
    return points


def _mean_ttft(samples: list[Sample]) -> float:
    return sum(sample.ttft for sample in samples) / len(samples) * 1e3


def _cached(samples: list[Sample]) -> float:
    return sum(sample.cached_tokens for sample in samples) / sum(sample.prompt_tokens for sample in samples)
