"""``python -m lab masks``: what structured output costs beside a step: a schema's first mask, and each token's.

Valid instances of JSON schemas are followed token by token through the engine's own masks: one answer alone, and many
side by side, each under another schema. CPU time is told beside wall time: on a machine that does other things they
differ.

What lives here: these measurements. What may not: torch, a model's weights.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from headrace.bench.arguments import count, output
from headrace.cache.manager import SequenceKV
from headrace.config import ModelConfig
from headrace.engine.grammar import Vocabulary, vocabulary_of
from headrace.engine.grammar_masks import GrammarMasks
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import ConfigError
from headrace.models.source import find_model, find_tokenizer_files
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.request import Request, SamplingParams, StructuredOutputs
from headrace.scheduler.events import AddRequest
from headrace.scheduler.roster import Sequence as LiveSequence

MASK_BUDGET, FIRST_BUDGET = 50.0, 20.0  # µs a token, ms at the median schema
MOST_TOKENS = 300  # of an instance
_LETTERS = "etaoinshrdlucmfwyp"

_NAME = {"type": "string", "minLength": 1, "maxLength": 40}
# Without a file: a few of the kinds that people send, each with an instance.
EXAMPLES: tuple[tuple[Any, Any], ...] = (
    (
        {"type": "object", "properties": {"name": _NAME, "age": {"type": "integer"}}, "required": ["name", "age"]},
        {"name": "Ada Lovelace", "age": 36},
    ),
    ({"enum": ["positive", "negative", "neutral"]}, "neutral"),
    ({"type": "array", "items": {"type": "number"}, "maxItems": 20}, [1.5, -2, 3e4, 0.125, 17]),
    ({"type": "object"}, {"any": {"thing": [True, None, "at all"]}, "may": "stand here"}),
    (
        {"type": "object", "properties": {"when": {"type": "string", "format": "date-time"}}, "required": ["when"]},
        {"when": "2026-11-20T17:00:00Z"},
    ),
    (
        {"type": "object", "properties": {"tel": {"type": "string", "pattern": "^\\+[0-9 ]{6,20}$"}}},
        {"tel": "+33 6 12 34 56 78"},
    ),
    (
        {"type": "object", "properties": {f"field_{i}": _NAME for i in range(60)}},
        {f"field_{i}": f"value {i}" for i in range(0, 60, 4)},
    ),
    (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {"type": "object", "properties": {"id": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
            },
        },
        {"id": 1, "next": {"id": 2, "next": {"id": 3, "next": {}}}},
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="FOLDER", help="whose vocabulary (default: the bundled model's)")
    parser.add_argument(
        "--vocabulary",
        type=count,
        default=128_000,
        metavar="N",
        help="made-up words fill it up to this size (default: 128000)",
    )
    parser.add_argument(
        "--schemas",
        type=Path,
        metavar="FILE",
        help='lines of {"schema": …, "tests": [{"data": …, "valid": true}]}, also .gz',
    )
    parser.add_argument(
        "--every", type=count, default=1, metavar="N", help="take each so many-th schema of the file (default: 1)"
    )
    parser.add_argument(
        "--rows",
        type=count,
        nargs="+",
        default=[1, 16, 64],
        metavar="N",
        help="answers side by side (default: 1 16 64)",
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


@dataclass(slots=True)
class Case:
    """A schema that is followed: ``first`` seconds from text to first mask, ``tokens`` of its instance, seconds of each
    mask."""

    schema: str
    tokens: list[int]
    first: float = 0.0
    wall: list[float] | None = None
    cpu: list[float] | None = None


def run(args: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(find_model(ModelConfig())) if args.tokenizer is None else _load(args.tokenizer)
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise ConfigError("there is no tokenizer that names its end; give one with --tokenizer.")
    vocabulary = widened(tokenizer, args.vocabulary)
    facts = machine_facts("none: no model is computed", shape=f"{len(vocabulary.tokens):,} tokens in the vocabulary")
    print_facts(facts)
    masks = GrammarMasks(lambda: vocabulary)
    try:
        figures = measure(masks, list(_cases(args.schemas, args.every, tokenizer)), args.rows)
    finally:
        masks.close()
    _show(figures)
    if args.output_json:
        write_json(args.output_json, {"facts": facts, **figures})
    return 0


def _load(folder: str) -> Tokenizer | None:
    """A tokenizer that belongs to no model here."""
    files = find_tokenizer_files(folder)
    return None if files is None else Tokenizer(files)


def widened(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The tokenizer's own tokens, then made-up words, as many as large models have."""
    assert tokenizer.eos_token_id is not None
    own = vocabulary_of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))
    further = [_word(index).encode() for index in range(max(0, size - tokenizer.vocab_size))]
    return replace(own, tokens=[*own.tokens, *further])


def _word(index: int) -> str:
    word, rest = "", index
    while rest or not word:
        word, rest = word + _LETTERS[rest % len(_LETTERS)], rest // len(_LETTERS)
    return (" " if index % 2 else "") + word


def _cases(path: Path | None, every: int, tokenizer: Tokenizer) -> Iterable[Case]:
    pairs: Iterable[tuple[Any, Any]] = EXAMPLES if path is None else _read(path, every)
    for schema, instance in pairs:
        yield Case(json.dumps(schema), tokenizer.encode(json.dumps(instance, ensure_ascii=False), False)[:MOST_TOKENS])


def _read(path: Path, every: int) -> list[tuple[Any, Any]]:
    """Schemas of the file that have a valid instance, each with its first. Raises ConfigError."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            entries = [json.loads(line) for line in list(lines)[::every]]
        pairs = [(each["schema"], [test["data"] for test in each["tests"] if test["valid"]]) for each in entries]
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--schemas {path} cannot be read ({type(error).__name__}: {error}); "
            'give lines of {"schema": …, "tests": [{"data": …, "valid": true}]}.'
        ) from error
    return [(schema, good[0]) for schema, good in pairs if good]


def measure(masks: GrammarMasks, cases: Sequence[Case], rows: Sequence[int]) -> dict[str, Any]:
    """All figures; schemas that cannot be followed are counted and left out."""
    _first(masks, Case('{"type": "null"}', []))  # reads the vocabulary
    followed = [case for case in cases if _first(masks, case)]
    if not followed:
        raise ConfigError("none of the schemas can be followed; give others with --schemas.")
    firsts = sorted(case.first for case in followed)
    for case in followed:
        case.wall, case.cpu = _follow(masks, [case])
    middle = sorted((case for case in followed if case.wall), key=lambda case: mean(case.cpu or [0.0]))[
        (len(followed) - 1) // 2
    ]
    return {
        "schemas": len(cases),
        "followed": len(followed),
        "first_ms": {
            "median": 1e3 * median(firsts),
            "p90": 1e3 * firsts[len(firsts) * 9 // 10],
            "worst": 1e3 * firsts[-1],
        },
        "median_schema": [_line("alone, the median schema", middle.wall or [], middle.cpu or [])],
        "spread": [_spread(masks, followed, side_by_side) for side_by_side in rows],
    }


def _spread(masks: GrammarMasks, followed: Sequence[Case], at_once: int) -> dict[str, Any]:
    if at_once == 1:
        return _line(
            "alone, every schema",
            [each for case in followed for each in case.wall or []],
            [e for case in followed for e in case.cpu or []],
        )
    groups = [followed[begin : begin + at_once] for begin in range(0, max(1, len(followed) - at_once + 1), at_once)]
    if len(groups[0]) < at_once:  # fewer schemas than rows
        groups = [[followed[index % len(followed)] for index in range(at_once)]]
    times = [_follow(masks, group) for group in groups]
    return _line(
        f"{at_once} side by side",
        [each for wall, _ in times for each in wall],
        [each for _, cpu in times for each in cpu],
    )


def _line(what: str, wall: list[float], cpu: list[float]) -> dict[str, Any]:
    wall, cpu = sorted(wall), sorted(cpu)
    figures = {name: f(each) for each, kind in ((wall, ""), (cpu, "cpu ")) for name, f in _statistics(kind)}
    return {"answers": what, "steps": len(wall), **figures}


def _statistics(kind: str) -> tuple[tuple[str, Callable[[list[float]], float]], ...]:
    return (
        (f"{kind}mean µs", lambda times: 1e6 * mean(times)),
        (f"{kind}median µs", lambda times: 1e6 * median(times)),
        (f"{kind}p99 µs", lambda times: 1e6 * times[len(times) * 99 // 100]),
    )


def _first(masks: GrammarMasks, case: Case) -> bool:
    """From the schema's text to its first mask, beside the loop as in the engine; False where it cannot be followed."""
    begin = time.perf_counter()
    masks.begin(_request(0, case))
    taken = masks.take_compiled(60.0)
    case.first = time.perf_counter() - begin
    masks.keep(())
    return bool(taken) and isinstance(taken[0], AddRequest)


def _request(number: int, case: Case) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputs(json=case.schema))
    return Request(request_id=number, prompt_token_ids=array("i"), params=params)


def _follow(masks: GrammarMasks, cases: Sequence[Case]) -> tuple[list[float], list[float]]:
    """Wall and CPU seconds a token of each step that all answers still take part in."""
    sequences = [_sequence(masks, number, case) for number, case in enumerate(cases)]
    wall, cpu = [], []
    for step in range(min(len(case.tokens) for case in cases) + 1):
        wanted = list(enumerate(sequences))
        begin, used = time.perf_counter(), time.process_time()
        masks.masks(wanted)
        cpu.append((time.process_time() - used) / len(wanted))
        wall.append((time.perf_counter() - begin) / len(wanted))
        for sequence, case in zip(sequences, cases, strict=True):
            sequence.token_ids.extend(case.tokens[step : step + 1])
    masks.keep(())
    return wall, cpu


def _sequence(masks: GrammarMasks, number: int, case: Case) -> LiveSequence:
    request = _request(number, case)
    masks.begin(request)
    masks.take_compiled(60.0)
    return LiveSequence(request, 0, frozenset(), MOST_TOKENS, (), SequenceKV("", None, []), array("i"))


def _show(figures: dict[str, Any]) -> None:
    first = figures["first_ms"]
    print(f"\n{figures['followed']} of {figures['schemas']} schemas are followed")
    print(
        f"first mask: median {first['median']:.2f} ms (budget {FIRST_BUDGET:g}), p90 {first['p90']:.2f}, worst {first['worst']:.0f}"
    )
    print(f"\na token's mask beside the step (budget: mean {MASK_BUDGET:g} µs)\n")
    lines = [*figures["median_schema"], *figures["spread"]]
    print(table(tuple(lines[0]), [list(line.values()) for line in lines]))
