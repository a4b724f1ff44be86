"""Plans made by hand, so that a worker can be tested without a scheduler.

What lives here: a planner that gives every sequence its own blocks, in shuffled order, and says what each step does.
What may not: tests.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.executor import Executor
from headrace.models.source import find_model
from headrace.request import NO_SLOT, NewRow, SamplingParams, StepPlan, StepResult
from headrace.spec import KVGroup
from headrace.worker.worker import create_executor

GREEDY = SamplingParams(temperature=0.0)
_EDITS = ("table_row", "table_group", "table_index", "table_block", "copy_group", "copy_source", "copy_target")


def worker_for(
    folder: Path,
    *,
    cache: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    device: Mapping[str, Any] | None = None,
    **model: Any,
) -> Executor:
    """An executor over the checkpoint in ``folder``: 8 rows, 96 blocks of 8 tokens, float32, one thread, inline unless
    said otherwise."""
    config = EngineConfig(
        model=ModelConfig(model=str(folder), **{"dtype": "float32", **model}),
        cache=CacheConfig(**{"num_blocks": 96, "block_size": 8, **(cache or {})}),
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 128, **(scheduler or {})}),
        device=DeviceConfig(**{"device": "cpu", "overlap": 0, "threads": 1, **(device or {})}),
    )
    return create_executor(config, find_model(config.model))[0]


@dataclass
class Planned:
    """One sequence as the planner sees it. ``num_tokens`` counts tokens that a submitted step samples, known or not."""

    row: int
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    adapter_slot: int = NO_SLOT
    output: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def next(self) -> tuple[Planned, int, int]:
        """The work of one more token: the last one known is computed."""
        return self, len(self.ids) - 1, 1


class Planner:
    """Builds plans over the block pools of ``groups``."""

    def __init__(self, groups: Sequence[KVGroup], seed: int = 0) -> None:
        self._groups = groups
        self._free = [list(range(group.num_blocks)) for group in groups]
        for blocks in self._free:
            random.Random(seed).shuffle(blocks)
        self._step = 0
        self.reset()

    def reset(self) -> None:
        """Forgets what was collected for the next plan."""
        self._dropped: list[int] = []
        self._added: list[NewRow] = []
        self._edits: list[tuple[int, int, int, int]] = []
        self._copies: list[tuple[int, int, int]] = []

    def add(self, sequence: Planned) -> Planned:
        """The row is built in the next plan, from what is known now; blocks it already has are told again."""
        sequence.tables = sequence.tables or [[] for _ in self._groups]
        self._added.append(
            NewRow(
                row=sequence.row,
                sequence_id=sequence.row,
                token_ids=array("i", sequence.ids),
                num_prompt_tokens=len(sequence.prompt),
                params=sequence.params,
                seed=sequence.seed,
                stop_token_ids=sequence.stop_token_ids,
                bad_word_ids=sequence.bad_word_ids,
                adapter_slot=sequence.adapter_slot,
            )
        )
        for group, table in enumerate(sequence.tables):
            self._edits += [(sequence.row, group, index, block) for index, block in enumerate(table)]
        return sequence

    def drop(self, sequence: Planned) -> None:
        self._dropped.append(sequence.row)

    def fork(self, source: Planned, target: Planned, num_tokens: int) -> Planned:
        """``target`` gets copies of the blocks that hold ``source``'s first ``num_tokens`` tokens."""
        self.add(target)
        for group, table in enumerate(source.tables):
            for index in range(-(-num_tokens // self._groups[group].spec.block_size)):
                block = self._free[group].pop()
                target.tables[group].append(block)
                self._edits.append((target.row, group, index, block))
                self._copies.append((group, table[index], block))
        return target

    def plan(
        self,
        work: Sequence[tuple[Planned, int, int]],
        samples: Iterable[tuple[int, Planned]] | None = None,
        prompt_logprobs: tuple[int, ...] = (),
    ) -> StepPlan:
        """``work``: (sequence, start, count). ``samples``: (index of work, sequence); by default each chunk's own
        sequence.

        Every other step says that many tokens are shared; whether it is true changes no token.
        """
        for sequence, start, count in work:
            self._reserve(sequence, start + count)
        pairs = [(index, entry[0]) for index, entry in enumerate(work)] if samples is None else list(samples)
        self._step += 1
        columns = [array("i", column) for column in zip(*self._edits, strict=True)] or [array("i")] * 4
        copies = [array("i", column) for column in zip(*self._copies, strict=True)] or [array("i")] * 3
        plan = StepPlan(
            self._step,
            rows_dropped=array("i", self._dropped),
            rows_added=tuple(self._added),
            **dict(zip(_EDITS, (*columns, *copies), strict=True)),
            rows=array("i", [sequence.row for sequence, _, _ in work]),
            starts=array("i", [start for _, start, _ in work]),
            counts=array("i", [count for _, _, count in work]),
            sample_work=array("i", [index for index, _ in pairs]),
            sample_rows=array("i", [sequence.row for _, sequence in pairs]),
            prompt_logprobs=prompt_logprobs,
            shared_tokens=self._step % 2 * 10_000,
        )
        self.reset()
        return plan

    def _reserve(self, sequence: Planned, num_tokens: int) -> None:
        for group, table in enumerate(sequence.tables):
            while len(table) * self._groups[group].spec.block_size < num_tokens:
                block = self._free[group].pop()
                self._edits.append((sequence.row, group, len(table), block))
                table.append(block)


def run(executor: Executor, plan: StepPlan) -> StepResult:
    return executor.collect(executor.submit(plan))


def take(result: StepResult, sequences: Iterable[Planned]) -> None:
    """Appends what a step sampled; ``sequences`` in the order of the plan's samples."""
    for sequence, tokens in zip(sequences, result.tokens, strict=True):
        sequence.output += tokens


def generate(
    executor: Executor,
    sequences: Sequence[Planned],
    num_tokens: int,
    *,
    chunk: int = 1000,
    planner: Planner | None = None,
) -> list[StepResult]:
    """Prefills in chunks, then decodes all sequences together until each has ``num_tokens`` more."""
    planner = planner or Planner(executor.info.kv_groups)
    results = []
    for sequence in sequences:
        planner.add(sequence)
    longest = max(len(sequence.ids) for sequence in sequences)
    for first in range(0, longest, chunk):
        work = [(s, first, min(chunk, len(s.ids) - first)) for s in sequences if len(s.ids) > first]
        done = [(index, s) for index, (s, start, count) in enumerate(work) if start + count == len(s.ids)]
        results.append(run(executor, planner.plan(work, done)))
        take(results[-1], [s for _, s in done])
    while pending := [s for s in sequences if len(s.output) < num_tokens]:
        results.append(decode(executor, planner, pending))
    return results


def decode(executor: Executor, planner: Planner, sequences: Sequence[Planned]) -> StepResult:
    """One more token of each."""
    result = run(executor, planner.plan([each.next for each in sequences]))
    take(result, sequences)
    return result
