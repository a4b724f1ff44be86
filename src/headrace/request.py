"""The nouns that travel: what was asked (Request), what one step does (StepPlan, StepResult), what comes back
(SequenceOutput, RequestOutput).

What lives here: data. What may not: what a caller may ask and its checks (sampling_params.py), the scheduler's record
of a sequence (sequence.py), torch, scheduling, text processing, wire formats.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.sampling_params import NO_EXPECTATIONS, Expectations, SamplingParams

if TYPE_CHECKING:
    TokenArray = array[int]
else:
    TokenArray = array  # what msgspec asks for when a request is sent

NO_SLOT = -1  # of a row without an adapter
REPETITION = "repetition"  # the stop_reason of an answer that ended in a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated, tokenised request, as it is sent to the engine, too. ``request_id`` is the engine's own number,
    never the client's string.

    ``prompt_token_ids`` is an ``array('i')``: compact, sliceable to bytes for the prefix tree. ``seed`` is resolved (64
    bits). ``bad_word_ids`` are the token sequences of ``params.bad_words``.
    """

    request_id: int
    prompt_token_ids: TokenArray
    params: SamplingParams
    seed: int = 0
    priority: int = 0  # lower goes first
    arrival_time: float = 0.0  # seconds, the engine's clock
    cache_salt: str = ""
    adapter: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    explain: bool = False  # its steps are counted
    tenant: str = ""  # who asks, for policies that share out
    expects: Expectations = NO_EXPECTATIONS
    grammar_seconds: float = 0.0  # that compiling its grammar took when it was tried out


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a prompt is answered with, as vLLM's: by its name; ``lora_path``: PEFT's folder, where the engine
    does not know the name yet. ``lora_int_id`` is of no use here."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client left: nobody is told
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class NewRow:
    """Everything a worker needs to (re)build one row from the scheduler's state."""

    row: int
    sequence_id: int
    token_ids: TokenArray  # known ids: prompt, then outputs
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # of this sequence: differs between the n of one request
    stop_token_ids: tuple[int, ...]  # EOS and the request's own: masked while fewer than min_tokens are out
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    pool: tuple[str, str] = ("", "")  # tenant and salt: whose earlier answers may be looked up
    adapter_slot: int = NO_SLOT


def _nothing() -> array[int]:
    return array("i")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as a delta on the workers' rows; all arrays are flat ``array('i')``, equal for every rank.

    In this order a worker: brings ``adapters`` (slot, name, blocks) in, drops rows, builds rows, applies block-table edits,
    copies blocks, computes, samples. A row that is built again without having been dropped keeps its block tables.
    ``rows[i]`` computes ``counts[i]`` tokens from position ``starts[i]``; a token id the scheduler does not know yet is
    taken from the worker's row, where the step that sampled it wrote it. ``sample_work[j]`` indexes ``rows``: the
    logits of that chunk's last token give one new token to row ``sample_rows[j]`` (n > 1: one chunk, several rows).
    ``sample_back``: how far before its chunk's last token each sample reads its logits; empty: all read the last one's.
    ``drafts``: by chunk, how many of its tokens, the last ones, nobody has sampled: the worker proposes them (or fewer,
    and then the chunk is as much shorter), and samples behind each as well as before the first. What it would have
    sampled anyway is accepted, up to the first that differs. Where it is not empty, starts of chunks that sample are
    upper bounds: the worker knows the length that is true, and shifts them. Empty: nothing is proposed, and no step in
    flight proposes anything. ``prompt_logprobs`` indexes ``rows``: chunks whose every position is scored.
    ``shared_tokens``: tokens of KV that block tables name, once for each table but the first: what reading them once
    can spare. None: not counted. ``masked`` indexes ``sample_rows``: what may be sampled there is known only once the
    step before is collected. Where it is not empty a step is two submissions: it is computed at once, and samples when
    it is given its TokenMasks.
    """

    step_id: int
    rows_dropped: TokenArray = field(default_factory=_nothing)
    rows_added: tuple[NewRow, ...] = ()
    # block-table edits, parallel arrays: row, KV group, index in the table, block id
    table_row: TokenArray = field(default_factory=_nothing)
    table_group: TokenArray = field(default_factory=_nothing)
    table_index: TokenArray = field(default_factory=_nothing)
    table_block: TokenArray = field(default_factory=_nothing)
    # whole-block copies, before anything is written by this step, in order
    copy_group: TokenArray = field(default_factory=_nothing)
    copy_source: TokenArray = field(default_factory=_nothing)
    copy_target: TokenArray = field(default_factory=_nothing)
    rows: TokenArray = field(default_factory=_nothing)
    starts: TokenArray = field(default_factory=_nothing)
    counts: TokenArray = field(default_factory=_nothing)
    sample_work: TokenArray = field(default_factory=_nothing)
    sample_rows: TokenArray = field(default_factory=_nothing)
    sample_back: TokenArray = field(default_factory=_nothing)
    drafts: TokenArray = field(default_factory=_nothing)
    prompt_logprobs: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    shared_tokens: int | None = None
    adapters: tuple[tuple[int, str, tuple[int, ...]], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be sampled. ``samples`` index a plan's ``sample_rows``; each has ``words_each`` int32 in
    ``words``, one bit a token id from the lowest bit of the first. Samples that are not named may be any token. One that
    is named several times in a row has drafts behind it: each further mask is for the place behind one draft more, and
    drafts beyond the last mask are refuted."""

    samples: tuple[int, ...] = ()
    words_each: int = 0
    words: bytes | bytearray = b""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the raw logits: the chosen token first, then the k best."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the chosen token, 1 = most probable


class Singles(Seq[tuple[int, ...]]):
    """One token of each of many samples, as a column: a tuple is made when somebody looks at it."""

    __slots__ = ("column",)

    def __init__(self, column: list[int]) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(self.column)

    def __getitem__(self, at: Any) -> Any:
        return list(zip(self.column[at])) if isinstance(at, slice) else (self.column[at],)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seq) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def column_of(tokens: Seq[tuple[int, ...]]) -> list[int]:
    """All tokens, sample by sample."""
    return tokens.column if isinstance(tokens, Singles) else list(chain.from_iterable(tokens))


@dataclass(frozen=True, slots=True)
class DraftsAhead:
    """Drafts that were drawn while those before them were verified. ``used``: in this step; ``refuted``: drawn before
    it, for nothing; ``spared``: not drawn, because a run was cancelled first."""

    used: int = 0
    refuted: int = 0
    spared: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced. ``tokens[j]`` belongs to ``plan.sample_rows[j]``: 0 to k+1 ids (more than one only with
    speculation).

    ``drafted[j]``: so many of them were proposed; empty: none anywhere. ``ahead``: of them, where drafts are drawn
    ahead."""

    step_id: int
    tokens: Seq[tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # j → one entry a token
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    # index into plan.rows → one entry for each next token: position p scores token p + 1 (the last position of the
    # prompt scores nothing)
    errors: Mapping[int, str] = field(default_factory=dict)  # j → why this row's logits were unusable
    device_seconds: float = 0.0
    # the device had nothing to do between the step before and this one; None: it has no clock to tell
    idle_seconds: float | None = None
    graph_tokens: int = 0  # that a step with prompts was filled up to by the graph that computed it; 0: none did
    recorded_graph: bool = False  # a graph was recorded behind the step: host time that comes once
    # CPU time of the submitting thread that was the device's: computing inline, or spinning until it was done
    lent_seconds: float = 0.0
    drafted: Seq[int] = ()
    ahead: DraftsAhead | None = None
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    # j → float32, of a model that pools: a vector or a score; its token is none


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds on the engine's clock; None = has not happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class StepAccount:
    """The steps that computed a request. ``limit_share``: the mean of their fractions of the physical limit, where that
    is known."""

    steps: int
    limit_share: float | None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a sequence ended. ``stop_reason`` is the stop token id, REPETITION, or (set by the output processor) the stop
    string."""

    reason: FinishReason
    stop_reason: int | str | None = None
    message: str | None = None  # with ERROR
    num_preemptions: int = 0
    times: RequestTimes | None = None
    account: StepAccount | None = None  # where the request asked for it
    retry_after: float | None = None  # seconds; with ERROR, where a policy turned it away before its first token
    param: str | None = None  # with ERROR, where it can never be met: the field that asks too much


class SequenceOutput(NamedTuple):
    """New tokens of one sequence after one step; the last one carries ``finished``.

    ``prompt_logprobs`` come in pieces, in order. ``num_cached_tokens`` and ``first_scheduled`` (seconds on the engine's
    clock) are set on a sequence's first output. A NamedTuple, because one is made for every row of every step.
    """

    request_id: int
    index: int  # type: ignore[assignment]  # 0 … n-1; hides tuple.index, which nobody needs here
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None
    finished: Finished | None = None
    first_scheduled: float | None = None
    pooled: bytes = b""  # float32: what a model that pools makes of the prompt


class TokenOutputs(Seq[SequenceOutput]):
    """One new token for each of many sequences and nothing else, as columns: an output is made when somebody looks at
    it."""

    __slots__ = ("indices", "request_ids", "tokens")

    def __init__(self, request_ids: Seq[int], indices: Seq[int], tokens: Seq[tuple[int, ...]]) -> None:
        self.request_ids = request_ids
        self.indices = indices
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[SequenceOutput]:
        return map(SequenceOutput, self.request_ids, self.indices, self.tokens)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(self)[at]
        return SequenceOutput(self.request_ids[at], self.indices[at], self.tokens[at])


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry of the public logprobs: as vLLM's."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers. ``logprobs[i]`` maps token ids to Logprob at output position i."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's answer so far (streams) or whole. ``metrics`` are the times of its first sequence."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestTimes | None = None
    pooled: bytes = b""  # see SequenceOutput
