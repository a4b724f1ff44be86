"""What a step's result means: tokens are appended, ends are found, scores are told once.

What lives here: reading results into the roster. What may not: planning (step_planner.py), text (engine/output.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.request import (
    REPETITION,
    Finished,
    FinishReason,
    SequenceOutput,
    SequenceStatus,
    Singles,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenOutputs,
)
from headrace.scheduler.plan_builder import Cohort
from headrace.scheduler.repetition import RepetitionDetector
from headrace.scheduler.roster import Roster
from headrace.sequence import Sequence


@dataclass(frozen=True, slots=True)
class InFlight:
    """A planned step whose result is not collected yet, with the sequences behind its arrays. ``settled``: samples
    whose drafts are known to be left out."""

    plan: StepPlan
    work: list[Sequence]
    sampled: list[Sequence]
    settled: set[int] = field(default_factory=set)


def take_result(roster: Roster, step: InFlight, result: StepResult, now: float) -> list[SequenceOutput]:
    """Reads one step's result; returns what is new. The hot loop takes rows below their ``checkpoint`` without
    thought."""
    scores = _fresh_scores(step, result) if result.prompt_logprobs else {}
    for j in result.errors:
        step.sampled[j].attentive = True
    if step.plan.drafts:
        _settle_drafts(roster, step, result)
    outputs = []
    step_id = result.step_id
    for j, (sequence, tokens) in enumerate(zip(step.sampled, result.tokens, strict=True)):
        if sequence.ignore_through >= step_id:
            continue
        ids = sequence.token_ids
        if (
            sequence.attentive
            or len(ids) + len(tokens) >= sequence.checkpoint
            or not sequence.stop_ids.isdisjoint(tokens)
        ):
            outputs.append(_accept(roster, sequence, j, result, scores.pop(sequence, ()), now))
        else:
            ids.extend(tokens)
            outputs.append(SequenceOutput(sequence.request_id, sequence.index, tokens))
    outputs.extend(SequenceOutput(s.request_id, s.index, (), prompt_logprobs=entries) for s, entries in scores.items())
    return outputs


def _settle_drafts(roster: Roster, step: InFlight, result: StepResult) -> None:
    """Counts of those whose drafts were refuted are what they really are."""
    for j, (sequence, work, tokens) in enumerate(zip(step.sampled, step.plan.sample_work, result.tokens, strict=True)):
        drafted = step.plan.drafts[work]
        if drafted and j not in step.settled and sequence.ignore_through < step.plan.step_id:
            roster.settle_drafts(sequence, drafted, drafted + 1 - max(1, len(tokens)))


def settle_forced(roster: Roster, step: InFlight, samples: Iterable[int]) -> None:
    """These are bound to be one token each: their drafts are left out before there is a result."""
    for j in samples if step.plan.drafts else ():
        drafted = step.plan.drafts[step.plan.sample_work[j]]
        if drafted:
            roster.settle_drafts(step.sampled[j], drafted, drafted)
            step.settled.add(j)


def take_cohort_result(
    roster: Roster, cohort: Cohort, result: StepResult, tokens: list[int], now: float
) -> Seq[SequenceOutput]:
    """Reads the result of a step in which every member of a cohort got one token and nothing else; the same as
    ``take_result``."""
    heeded, members = cohort.due_to_take(), cohort.members
    if not cohort.stop_ids.isdisjoint(tokens):
        heeded = sorted({*heeded, *(place for place, token in enumerate(tokens) if token in members[place].stop_ids)})
    outputs = TokenOutputs(cohort.request_ids, cohort.indices, result.tokens)
    taken = {}
    for place in heeded:
        sequence = cohort.settle(place)
        if _only_fills_a_block(sequence, tokens[place]):
            _append_plain(roster, sequence, tokens[place])
        else:
            taken[place] = _accept(roster, sequence, place, result, (), now)
    cohort.take(tokens, heeded)
    if all(output.finished is None for output in taken.values()):
        return outputs  # they are what they would have been without a thought
    return [taken.get(place, output) for place, output in enumerate(outputs)]


def _only_fills_a_block(sequence: Sequence, token: int) -> bool:
    """It ends neither by length, nor by this token, nor by a loop."""
    return (
        sequence.repetition is None
        and len(sequence.token_ids) + 1 < sequence.max_num_tokens
        and token not in sequence.stop_ids
    )


def _append_plain(roster: Roster, sequence: Sequence, token: int) -> None:
    """A running sequence's next token, which ends nothing."""
    sequence.token_ids.append(token)
    roster.link(sequence)
    roster.refresh(sequence)


def single_tokens(result: StepResult) -> list[int] | None:
    """The tokens of a result that holds one for each sample and nothing else."""
    if result.errors or result.logprobs or result.prompt_logprobs or result.pooled:
        return None
    try:
        return result.tokens.column if isinstance(result.tokens, Singles) else [token for (token,) in result.tokens]
    except ValueError:
        return None


def take_failure(roster: Roster, step: InFlight, message: str, now: float) -> list[SequenceOutput]:
    """Ends every sequence of a failed step that no earlier failure has rolled back already."""
    failed = [s for s in dict.fromkeys([*step.work, *step.sampled]) if s.ignore_through < step.plan.step_id]
    ends = [(_fail(roster, sequence, message, now), siblings_to_come(sequence)) for sequence in failed]
    return [end._replace(index=index) for end, siblings in ends for index in (end.index, *siblings)]


def siblings_to_come(sequence: Sequence) -> range:
    """The answers that would have begun with this prompt: they end with it."""
    return range(0) if sequence.forked else range(1, sequence.request.params.n)


def _fail(roster: Roster, sequence: Sequence, message: str, now: float) -> SequenceOutput:
    finished = sequence.finish_record(FinishReason.ERROR, now, message=message)
    roster.end(sequence, trusted=False)
    return SequenceOutput(sequence.request_id, sequence.index, (), finished=finished)


def _accept(
    roster: Roster, sequence: Sequence, j: int, result: StepResult, scores: tuple[TokenLogprobs, ...], now: float
) -> SequenceOutput:
    """The thorough way to take one row's tokens."""
    if j in result.errors:
        return _fail(roster, sequence, result.errors[j], now)
    first = sequence.first_token is None
    if first:
        sequence.first_token = now
    tokens = result.tokens[j]
    if sequence.certain:
        assert tokens == sequence.certain[:1], "its mask allowed this token alone"
        tokens, sequence.certain = sequence.certain, ()
    accepted, finished = _append(sequence, tokens, roster.eos_token_ids, now)
    if j in result.pooled:
        accepted, finished = (), sequence.finish_record(FinishReason.STOP, now)
    if finished is not None:
        roster.end(sequence)
    elif sequence.status is SequenceStatus.RUNNING:
        roster.link(sequence)
        roster.refresh(sequence)
    sequence.attentive = sequence.request.params.logprobs is not None
    return SequenceOutput(
        sequence.request_id,
        sequence.index,
        accepted,
        logprobs=result.logprobs[j][: len(accepted)] if j in result.logprobs else (),
        prompt_logprobs=scores,
        num_cached_tokens=sequence.num_cached_tokens if first else None,
        finished=finished,
        first_scheduled=sequence.first_scheduled if first else None,
        pooled=result.pooled.get(j, b""),
    )


def _append(
    sequence: Sequence, tokens: Seq[int], eos: frozenset[int], now: float
) -> tuple[tuple[int, ...], Finished | None]:
    """Appends until something ends the sequence; returns what was kept, and the end if there is one."""
    params = sequence.request.params
    for count, token in enumerate(tokens, start=1):
        sequence.token_ids.append(token)
        # nothing else was left
        ended = sequence.num_output_tokens >= params.min_tokens or (sequence.structured and token in eos)
        if token in sequence.stop_ids and ended:
            reason = None if token in eos and (sequence.structured or not params.ignore_eos) else token
            return tuple(tokens[:count]), sequence.finish_record(FinishReason.STOP, now, stop_reason=reason)
        if sequence.repetition is not None and _loops(sequence, sequence.repetition):
            return tuple(tokens[:count]), sequence.finish_record(FinishReason.STOP, now, stop_reason=REPETITION)
        if len(sequence.token_ids) >= sequence.max_num_tokens:
            return tuple(tokens[:count]), sequence.finish_record(FinishReason.LENGTH, now)
    return tuple(tokens), None


def _loops(sequence: Sequence, detector: RepetitionDetector) -> bool:
    """Whether the answer has come to its end by repeating itself."""
    ids = sequence.token_ids
    return (
        len(ids) >= detector.next_look
        and detector.look(ids)
        and sequence.num_output_tokens >= sequence.request.params.min_tokens
    )


def _fresh_scores(step: InFlight, result: StepResult) -> dict[Sequence, tuple[TokenLogprobs, ...]]:
    """Prompt logprobs, each position once: a prompt recomputed after preemption scores some again."""
    fresh: dict[Sequence, tuple[TokenLogprobs, ...]] = {}
    for work_index, entries in result.prompt_logprobs.items():
        sequence = step.work[work_index]
        if sequence.ignore_through >= result.step_id:
            continue
        known = max(0, sequence.num_scored_tokens - step.plan.starts[work_index])
        if entries[known:]:
            fresh[sequence] = tuple(entries[known:])
            sequence.num_scored_tokens += len(entries) - known
    return fresh
