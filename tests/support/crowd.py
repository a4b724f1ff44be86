"""A few requests by themselves, then among a crowd; who was in which step is read from the StepPlans.

What lives here: both ways to run them, the recorder of plans, what a request's company was. What may not: tests,
expectations.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace import LLM, SamplingParams
from headrace.engine.executor import Executor, Ticket
from headrace.request import NewRow, RequestOutput, StepPlan, StepResult

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. Prompts tell requests apart, so no two may be equal."""

    prompt: Prompt
    params: SamplingParams


class Recorder:
    """An executor that keeps every plan it passes on."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.info = executor.info
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._executor.collect(ticket)

    def recover(self) -> None:
        self._executor.recover()

    def close(self) -> None:
        self._executor.close()


@dataclass(slots=True)
class Company:
    """What the plans say of one sequence: for each of its steps how many others took part, and how many tokens it
    computed there."""

    others: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    starts: int = 0  # times its row was built: once more for every preemption


def company(plans: Iterable[StepPlan]) -> dict[Prompt, Company]:
    owners: dict[int, NewRow] = {}
    found: dict[Prompt, Company] = defaultdict(Company)
    for plan in plans:
        for row in plan.rows_dropped:
            owners.pop(row)
        for new in plan.rows_added:
            owners[new.row] = new
            found[_prompt(new)].starts += 1
        for row, count in zip(plan.rows, plan.counts, strict=True):
            each = found[_prompt(owners[row])]
            each.others.append(len(plan.rows) - 1)
            each.counts.append(count)
    return found


def _prompt(new: NewRow) -> Prompt:
    return tuple(new.token_ids[: new.num_prompt_tokens])


def draw_crowd(rng: random.Random, vocab_size: int, count: int, *, longest: int, trunk: Prompt) -> list[Asked]:
    """Prompts of 1 to ``longest`` ids, a few of them after ``trunk``, that answer for a long time in every way there is
    to sample."""
    crowd = []
    for number in range(count):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, longest)))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.3)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            presence_penalty=rng.choice((0.0, 0.0, 0.5)),
            seed=number,
            logprobs=rng.choice((None, None, 0, 1, 20)),
            prompt_logprobs=rng.choice((None, None, None, 7)),
            max_tokens=150,
            ignore_eos=True,
            detokenize=False,
        )
        crowd.append(Asked(trunk + prompt if number % 9 == 0 else (number, *prompt), params))
    return crowd


def draw_subjects(
    rng: random.Random, vocab_size: int, *, trunk: Prompt, long: int, max_tokens: int = 20
) -> list[Asked]:
    """A prompt of ``long`` ids, one that continues ``trunk``, one of a single id, and a sampled one: all with
    logprobs."""

    def asked(prompt: Prompt, **fields: Any) -> Asked:
        return Asked(
            prompt,
            SamplingParams(
                **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, **fields}
            ),
        )

    def ids(count: int) -> Prompt:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    return [
        asked(ids(long), logprobs=5, prompt_logprobs=2),
        asked(trunk + ids(5), logprobs=3),
        asked(ids(1), temperature=1.2, seed=5, repetition_penalty=1.2, logprobs=0),
        asked(ids(17), temperature=0.8, top_p=0.9, min_p=0.01, seed=6, logprobs=2, prompt_logprobs=0),
    ]


def answers_alone(llm: LLM, subjects: Sequence[Asked]) -> list[RequestOutput]:
    """Each by itself, one after the other."""
    return [llm.generate({"prompt_token_ids": list(each.prompt)}, each.params, use_tqdm=False)[0] for each in subjects]


def answers_among(
    llm: LLM, crowd: Sequence[Asked], subjects: Sequence[Asked]
) -> tuple[list[RequestOutput], dict[Prompt, Company]]:
    """The subjects' answers when they come after all of the crowd has begun to answer, and everybody's company."""
    core = llm.engine.core
    core.executor = recorder = Recorder(core.executor)
    for each in crowd:
        llm.submit({"prompt_token_ids": list(each.prompt)}, each.params)
    while not recorder.plans or len(recorder.plans[-1].rows) < len(crowd):
        assert core.has_work, (
            "the crowd never took part in one step all together; give it more blocks or a longer answer"
        )
        llm.turn()
    collectors = [llm.submit({"prompt_token_ids": list(each.prompt)}, each.params) for each in subjects]
    while not all(collector.finished for collector in collectors):
        assert core.has_work, "requests are waiting, but the engine has nothing to do"
        llm.turn()
    found = company(recorder.plans)
    return [collector.output() for collector in collectors], {
        each.prompt: found[each.prompt] for each in (*crowd, *subjects)
    }


def assert_same_bits(found: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> None:
    """Tokens, logprobs and prompt logprobs: ids, ranks and every bit of the numbers."""
    for got, want in zip(found, wanted, strict=True):
        assert [each.token_ids for each in got.outputs] == [each.token_ids for each in want.outputs]
        assert got.outputs == want.outputs
        assert got.prompt_logprobs == want.prompt_logprobs
