"""The largest steps there can be, taken before the KV cache exists, to learn what steps hold at once.

Every position of every row lies in block 0 of a throw-away cache of one block a group: a row's table is zeros until it is edited.
What is computed is nonsense; what is allocated on the way is what a real step of that shape allocates.

What lives here: the two steps. What may not: sizing (memory.py), measuring (device_memory.py), making runners (worker.py).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.request import NewRow, StepPlan, StepResult, TokenMasks
from headrace.sampling_params import SamplingParams, StructuredOutputs
from headrace.worker.model_runner import Forwarded

DRAWN = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, detokenize=False)  # what graphs draw, at its most demanding
# Everything that makes a sampler keep something for a row.
DEMANDING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=20,
    structured_outputs=StructuredOutputs(json_object=True),
    detokenize=False,
)
SCORED = replace(DEMANDING, prompt_logprobs=20)


class RunsSteps(Protocol):
    def begin(self, plan: StepPlan) -> Forwarded: ...

    def finish(self, step: Forwarded, masks: TokenMasks) -> StepResult: ...

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step. ``longest``: tokens one sequence may have, the sampled one included."""

    max_num_seqs: int
    tokens_a_step: int
    max_logits_rows: int
    longest: int


def decode_step(limits: Limits) -> StepPlan:
    """One token of every row, drawn with every filter: the largest step that graphs cover."""
    return _plan([1] * min(limits.max_num_seqs, limits.tokens_a_step), [DRAWN])


def largest_step(limits: Limits) -> StepPlan:
    """As many tokens as a step may have, in as many rows; every row asks the sampler for all it has, the first one for its prompt's scores."""
    return _plan(chunks(limits), [SCORED, DEMANDING])


def chunks(limits: Limits) -> list[int]:
    """Tokens of each row of the largest step: enough in the first that a whole budget of logits rows is scored, the rest dealt out."""
    fitting = max(1, limits.longest - 1)  # every row samples a token
    count = min(limits.max_num_seqs, limits.tokens_a_step)
    first = min(fitting, limits.tokens_a_step - (count - 1), limits.max_logits_rows + 1)
    if count == 1:
        return [min(fitting, limits.tokens_a_step)]
    share, over = divmod(limits.tokens_a_step - first, count - 1)
    return [first, *(min(fitting, share + (index < over)) for index in range(count - 1))]


def rehearse(runner: RunsSteps, plan: StepPlan, masks: TokenMasks | None = None) -> None:
    """Takes the step and forgets its rows. ``runner``: over rows that nobody else uses, and a cache of at least one block a group."""
    runner.finish(runner.begin(plan), masks or TokenMasks())
    runner.forget()


def all_masked(plan: StepPlan, vocab_size: int) -> TokenMasks:
    """A mask for every sample of ``plan``, each of which allows every token."""
    words = -(-vocab_size // 32)
    return TokenMasks(tuple(range(len(plan.sample_rows))), words, b"\xff" * (4 * words * len(plan.sample_rows)))


def _plan(counts: list[int], params: list[SamplingParams]) -> StepPlan:
    """New rows of ``counts`` tokens each; the i-th params are for row i, the last for all that follow."""
    rows = array("i", range(len(counts)))
    added = tuple(
        NewRow(row, row, array("i", [0]) * count, count, params[min(row, len(params) - 1)], seed=row, stop_token_ids=())
        for row, count in enumerate(counts)
    )
    return StepPlan(
        step_id=-1,
        rows_added=added,
        rows=rows,
        starts=array("i", [0]) * len(counts),
        counts=array("i", counts),
        sample_work=rows,
        sample_rows=rows,
        prompt_logprobs=(0,) if params[0].prompt_logprobs is not None else (),
        shared_tokens=0,  # its kernels may still be missing; what it keeps beside what is there anyway are some KiB
    )
