"""The rows of the table: which requests each one gives to an engine, and what its figure is.

    decode-B        ms a step: (time of the run - time of the same run with one token out) / (tokens out - 1)
    prefill-NxL     ms until every prompt has its first token (one token out)
    mixed           s until the last of many requests of different lengths has ended, all given at once
    shared-prefix   s until the last of many requests that begin with the same ids has ended, all given at once
    answers-NxLxM   ms until each of N prompts of L tokens has M, by that name alone (not in the table)
    start           s from the command until the engine is ready, the caches of compiled kernels empty (lab startup)
    start-warm      the same with what the start before it left in these caches

Lengths that differ are evenly spaced over their range and shuffled, always in the same order: every repeat does the
same work. Ids are random and new in every repeat, so that none is answered from the last one's cache.

What lives here: rows and their requests. What may not: torch, clocks, engines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.errors import ConfigError
from headrace.request import SamplingParams

Range = tuple[int, int]  # shortest and longest, tokens


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``group`` says how its figure is made (see above); lengths in tokens."""

    name: str
    group: str
    says: str
    count: int = 0
    prompt: Range = (0, 0)
    output: Range = (1, 1)
    prefix: int = 0

    @property
    def unit(self) -> str:
        return "ms" if self.group in ("decode", "prefill", "answers") else "s"


def _decode(batch: int, output: int) -> Row:
    return Row(f"decode-{batch}", "decode", f"decode, batch {batch} (ms/step)", batch, (128, 128), (output, output))


def _prefill(count: int, length: int) -> Row:
    return Row(
        f"prefill-{count}x{length}",
        "prefill",
        f"prefill {count} × {length:,} (ms to first token)",
        count,
        (length, length),
    )


def _answers(count: int, length: int, output: int) -> Row:
    says = f"{count} × {length:,} tokens in, {output:,} out (ms)"
    return Row(f"answers-{count}x{length}x{output}", "answers", says, count, (length, length), (output, output))


_ANSWERS = re.compile("answers-([1-9][0-9]{0,6})x([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")
ROWS = (
    _decode(1, 256),
    *(_decode(batch, 128) for batch in (8, 32, 128, 256)),
    _prefill(1, 2048),
    _prefill(1, 8192),
    _prefill(16, 2048),
    Row("mixed", "requests", "512 mixed requests, 128–2,048 in, 16–256 out (s)", 512, (128, 2048), (16, 256)),
    Row(
        "shared-prefix",
        "requests",
        "256 requests sharing a 2,048-id prefix, +64 ids, 64 out (s)",
        256,
        (64, 64),
        (64, 64),
        2048,
    ),
    Row("start", "start", "start: command to ready, caches empty (s)"),
    Row("start-warm", "start", "start again, caches filled (s)"),
)


def select_rows(names: Sequence[str]) -> tuple[Row, ...]:
    """Rows by name, or by the word before its hyphen; all of them for no names. Raises ConfigError with the names there
    are."""
    answers = tuple(_answers(*map(int, found.groups())) for name in names if (found := _ANSWERS.fullmatch(name)))
    for name in names:
        if not any(_is_called(row, name) for row in (*ROWS, *answers)):
            raise ConfigError(
                f"There is no row {name!r}; choose of decode, prefill, {', '.join(row.name for row in ROWS)}, "
                f"or answers-NxLxM."
            )
    return (*(row for row in ROWS if not names or any(_is_called(row, name) for name in names)), *answers)


def _is_called(row: Row, name: str) -> bool:
    return row.name == name or row.name.startswith(name + "-")


def scaled(row: Row, scale: float) -> Row:
    """The row with its requests and lengths multiplied: for trying out, comparable with nothing."""
    if scale == 1.0:
        return row

    def times(value: int, least: int = 1) -> int:
        return max(least, round(value * scale)) if value else 0

    output = row.output if row.output == (1, 1) else (times(row.output[0], 2), times(row.output[1], 2))
    return replace(
        row,
        count=times(row.count),
        prompt=(times(row.prompt[0]), times(row.prompt[1])),
        output=output,
        prefix=times(row.prefix),
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests of one run, as ``LLM.generate`` takes them."""

    prompts: list[dict[str, list[int]]]
    params: list[SamplingParams]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt["prompt_token_ids"]) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(each.max_tokens or 0 for each in self.params)


def requests_of(row: Row, vocab_size: int, seed: int, *, one_token: bool = False) -> Asked:
    """Greedy requests whose lengths are the row's and whose ids are ``seed``'s. ``one_token``: the same prompts'
    lengths, one token out."""
    order = np.random.default_rng(0)
    prompts, outputs = _lengths(row.prompt, row.count, order), _lengths(row.output, row.count, order)
    ids = np.random.default_rng((1, seed))
    prefix = ids.integers(0, vocab_size, row.prefix).tolist()
    return Asked(
        [{"prompt_token_ids": prefix + ids.integers(0, vocab_size, length).tolist()} for length in prompts],
        [
            SamplingParams(temperature=0.0, max_tokens=1 if one_token else each, ignore_eos=True, detokenize=False)
            for each in outputs
        ],
    )


def _lengths(bounds: Range, count: int, order: np.random.Generator) -> list[int]:
    """Evenly spaced over the range, ends included where there are two or more; shuffled."""
    spaced = np.linspace(*bounds, count).round().astype(int)
    order.shuffle(spaced)
    return [int(length) for length in spaced]
