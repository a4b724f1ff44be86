"""One answer in the making: the scheduler's mutable record of a sequence.

What lives here: the record. What may not: decisions about it (scheduler/), blocks' rules (cache/), torch.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.cache.manager import SequenceKV
from headrace.request import NO_SLOT, Finished, FinishReason, Request, RequestTimes, SequenceStatus

if TYPE_CHECKING:
    from headrace.scheduler.repetition import RepetitionDetector

NEVER = -1
ALWAYS = 2**62


@dataclass(slots=True, eq=False)
class Sequence:
    """``num_tokens`` counts known ids and the placeholders of steps in flight; ``num_computed_tokens`` advances when
    planned. ``certain``: what the placeholders are bound to be, where that is known; of several, one is sampled and the
    others follow it.

        0 ........ num_prompt_tokens ........ len(token_ids) ........ num_tokens <= max_num_tokens
                                              | known         | placeholders: sampled, not collected yet
    """

    request: Request
    index: int
    stop_ids: frozenset[int]  # EOS (unless ignored) and the request's own
    max_num_tokens: int
    order: tuple[float, ...]  # the policy's: smaller goes first
    kv: SequenceKV
    token_ids: array[int]
    request_id: int = 0
    seed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    row: int | None = None
    structured: bool = False  # each of its tokens waits for a mask: planning them is never without thought
    adapter_slot: int = NO_SLOT  # while it runs
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    last_step: int = NEVER  # the last step that names it
    ignore_through: int = NEVER  # results of steps up to this one are dropped
    plain_until: int = 0  # while num_tokens is at most this, planning one more token needs no thought
    checkpoint: int = 0  # while fewer ids are known, a new one needs no thought
    certain: tuple[int, ...] = ()
    drafts: bool = False  # several of its tokens may be verified in a step
    slack: int = 0  # drafts in flight: both counts above are upper bounds, and too high by this at most
    row_lags: bool = False  # its row lacks ids that no step has sampled
    attentive: bool = True  # its outputs carry more than tokens (first token, logprobs)
    num_cached_tokens: int = 0
    num_scored_tokens: int = 0  # prompt logprobs delivered
    num_preemptions: int = 0
    sibling_rows: list[int] = field(default_factory=list)  # reserved for n > 1 until the prompt is computed
    forked: bool = False
    first_scheduled: float | None = None
    first_token: float | None = None
    repetition: RepetitionDetector | None = None  # where the request wants loops to end

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.seed = (self.request.seed + self.index * 0x9E3779B97F4A7C15) & (2**64 - 1)
        self.structured = self.request.params.structured_outputs is not None
        self.drafts = self.request.params.speculative is not False
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_scores(self) -> bool:
        """Prompt logprobs were asked for and not all are told yet: the prompt's positions must be computed, not
        found."""
        asked = self.request.params.prompt_logprobs is not None and self.index == 0
        return asked and self.num_scored_tokens < self.num_prompt_tokens - 1

    def finish_record(
        self, reason: FinishReason, now: float, stop_reason: int | str | None = None, message: str | None = None
    ) -> Finished:
        times = RequestTimes(self.request.arrival_time, self.first_scheduled, self.first_token, now)
        return Finished(reason, stop_reason, message, self.num_preemptions, times)
