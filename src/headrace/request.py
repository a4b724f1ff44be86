"""The nouns that travel: what was asked (Request), and what a caller may ask of an answer (SamplingParams: how tokens are
picked, what the text must be, when it counts as stuck, how soon it is wanted); what one step does (StepPlan,
StepResult); what comes back (SequenceOutput, RequestOutput).

What lives here: data, and the checks of parameters, one for every route. What may not: the scheduler's record of a
sequence (scheduler/roster.py), torch, scheduling, text processing, wire formats, what needs the model's sizes beyond
the vocabulary (engine/inputs.py).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    TokenArray = array[int]
else:
    TokenArray = array  # what msgspec asks for when a request is sent
Json = dict[str, Any]  # an object of JSON's
Given = Mapping[str, Any]  # one that is read alone

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_ID_ENTRIES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 8192  # of all bad words together: each is tokenised where requests are checked
MAX_GRAMMAR_CHARACTERS = 2**20  # of one structured_outputs constraint
MAX_PATTERN_SIZE = 2048  # tokens of a cycle that repetition detection looks for
_MAX_SHOWN = 80  # characters of a wrong value in a message


def shown(value: Any) -> str:
    """A user's value for an error message: never long, whatever it is."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "an integer of more than 64 bits"
    try:
        text = repr(value)
    except ValueError:  # an integer inside has more digits than Python will write
        return f"of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a number. ``open_low``: the lower one itself is not taken. ``optional``: None is."""

    low: float
    high: float
    integer: bool = False
    open_low: bool = False
    optional: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidRequest."""
        if value is None and self.optional:
            return
        fits = isinstance(value, int if self.integer else (int, float)) and not isinstance(value, bool)
        if not fits or not self.low <= value <= self.high or (self.open_low and value == self.low):
            kind, above = "an integer" if self.integer else "a number", f", above {self.low}" if self.open_low else ""
            raise InvalidRequest(
                f"{name} is {shown(value)}; give {kind} from {self.low} to {self.high}{above}.", param=name
            )


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raises InvalidRequest."""
    Bounds(low, high, integer=True).check(name, value)


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}; give true or false.", param=name)


def _string_list(name: str, value: Any, max_items: int, max_length: int) -> None:
    if not isinstance(value, tuple) or len(value) > max_items:
        raise InvalidRequest(f"{name} must be a list of at most {max_items} strings; shorten it.", param=name)
    for item in value:
        if not isinstance(item, str) or not item or len(item) > max_length:
            raise InvalidRequest(
                f"{name} holds {shown(item)}; give non-empty strings of at most {max_length} characters.", param=name
            )
        if has_surrogate(item):
            raise InvalidRequest(f"{name} holds {shown(item)}, a lone surrogate in it; give valid text.", param=name)


def has_surrogate(text: str) -> bool:
    """It cannot be written as UTF-8."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _id_list(name: str, value: Any, max_items: int) -> None:
    if not isinstance(value, tuple) or len(value) > max_items:
        raise InvalidRequest(f"{name} must be a list of at most {max_items} token ids; shorten it.", param=name)
    for item in value:
        check_integer(name, item, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids in order, each once, without an object for each: 32-bit integers in ``packed``. A list of them may be
    as long as a vocabulary, and the requests that name one many."""

    packed: bytes

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.packed).cast("i"))

    def check(self, name: str, vocab_size: int) -> None:
        """By the first and the last."""
        ids = memoryview(self.packed).cast("i")
        check_token_ids(name, (ids[0], ids[-1]) if len(ids) else (), vocab_size)


def _packed(name: str, ids: Any, most: int) -> TokenIds:
    if not isinstance(ids, (list, tuple, array)) or len(ids) > most:
        raise InvalidRequest(f"{name} must be a list of at most {most} token ids; shorten it.", param=name)
    if any(type(item) is not int or not 0 <= item < 2**31 for item in ids):
        _id_list(name, tuple(ids), most)
    return TokenIds(array("i", sorted(set(ids))).tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the text of an answer must be. Exactly one of: a text that ``json`` (a JSON schema; a dict is taken too)
    accepts, any JSON object, a full match of ``regex``, one of ``choice``, a text of ``grammar`` (Lark).

    ``preface``: Lark that says what stands before it and refers to it as ``@answer``; the server's own, for models that
    reason first.

    Whether it can be compiled is found out later (engine/grammar_check.py). Raises InvalidRequest naming the field.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    preface: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.json, (Mapping, bool)):
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is None or isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice or ()))
        _boolean("structured_outputs", self.json_object)
        given = [name for name in ("json", "regex", "grammar") if getattr(self, name) is not None]
        given += [name for name in ("json_object", "choice") if getattr(self, name)]
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise InvalidRequest(
                f"structured_outputs holds {what}; give exactly one of json, json_object, regex, choice and grammar.",
                param="structured_outputs",
            )
        _string_list("structured_outputs.choice", self.choice, MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_CHARACTERS)
        self._check_text(given[0])

    def _check_text(self, name: str) -> None:
        texts = self.choice or (self.json, self.regex, self.grammar)
        if not all(text is None or isinstance(text, str) for text in texts):
            raise InvalidRequest(f"structured_outputs.{name} must be a text; give one.", param="structured_outputs")
        size = sum(len(text) for text in texts if text is not None)
        if size > MAX_GRAMMAR_CHARACTERS:
            shorten = f"give at most {MAX_GRAMMAR_CHARACTERS}"
            raise InvalidRequest(
                f"structured_outputs.{name} has {size} characters; {shorten}.", param="structured_outputs"
            )
        if any(has_surrogate(text) for text in texts if text is not None):
            raise InvalidRequest(
                f"structured_outputs.{name} holds a lone surrogate; send valid text.", param="structured_outputs"
            )


def _schema_text(schema: Any) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"structured_outputs.json is not plain JSON ({error}); give a JSON schema.", param="structured_outputs"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """When an answer counts as stuck: it ends in a cycle of ``min_pattern_size`` to ``max_pattern_size`` tokens that
    stands there at least ``min_count`` times in a row, and at least over ``min_tokens`` tokens. (A cycle shorter than
    that counts as several of itself.)

    The defaults leave ordinary text alone, also tables, rulers and indented code. Raises InvalidRequest naming the
    field.
    """

    max_pattern_size: int = 256
    min_pattern_size: int = 1
    min_count: int = 4
    min_tokens: int = 256

    def __post_init__(self) -> None:
        check_integer("repetition_detection.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        check_integer("repetition_detection.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        check_integer("repetition_detection.min_count", self.min_count, 3, 2**20)
        check_integer("repetition_detection.min_tokens", self.min_tokens, 24, 2**31 - 1)


def _repetition_detection(value: Any) -> RepetitionDetection | None:
    """True is the defaults, an object names what differs from them."""
    if value is None or isinstance(value, RepetitionDetection):
        return value
    if isinstance(value, bool):
        return RepetitionDetection() if value else None
    known = RepetitionDetection.__dataclass_fields__
    if not isinstance(value, Mapping) or not all(name in known for name in value):
        wanted = f"give true, false or an object with {', '.join(known)}"
        raise InvalidRequest(f"repetition_detection is {shown(value)}; {wanted}.", param="repetition_detection")
    try:
        return RepetitionDetection(**value)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="repetition_detection") from None


# Numbers among the sampling parameters; the server's schema is written from the same tables.
BOUNDS: Mapping[str, Bounds] = {
    "n": Bounds(1, MAX_N, integer=True),
    "temperature": Bounds(0.0, 100.0),
    "top_p": Bounds(0.0, 1.0, open_low=True),
    "top_k": Bounds(-1, 2**31 - 1, integer=True),
    "min_p": Bounds(0.0, 1.0),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "repetition_penalty": Bounds(0.0, 100.0, open_low=True),
    "max_tokens": Bounds(1, 2**31 - 1, integer=True, optional=True),
    "min_tokens": Bounds(0, 2**31 - 1, integer=True),
    "seed": Bounds(-(2**63), 2**64 - 1, integer=True, optional=True),
    "logprobs": Bounds(0, MAX_LOGPROBS, integer=True, optional=True),
    "prompt_logprobs": Bounds(0, MAX_LOGPROBS, integer=True, optional=True),
}
EXPECTED: Mapping[str, Bounds] = {
    "ttft": Bounds(0.0, 86_400.0, open_low=True, optional=True),
    "tpot": Bounds(0.0, 3_600.0, open_low=True, optional=True),
    "reading_speed": Bounds(0.0, 1e6, open_low=True, optional=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are picked. Field names and meanings are those of vLLM; everything is validated here, once, for every
    route.

    ``temperature`` 0 is greedy. ``top_k`` 0 (or -1) and ``top_p`` 1 and ``min_p`` 0 are off. ``max_tokens`` None means
    up to the model's context. ``logprobs`` k gives the k best of each position besides the chosen one.
    ``repetition_detection`` ends an answer that loops (True: with the defaults) with finish_reason "stop" and
    stop_reason "repetition".

    Raises InvalidRequest naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: TokenIds | None = None  # given as a list
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    speculative: bool | None = None  # False: nothing of it is drafted

    def __post_init__(self) -> None:
        self._accept_lists()
        object.__setattr__(self, "repetition_detection", _repetition_detection(self.repetition_detection))
        for name, bounds in BOUNDS.items():
            bounds.check(name, getattr(self, name))
        self._check_logit_bias()
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, TokenIds):
                object.__setattr__(
                    self, "allowed_token_ids", _packed("allowed_token_ids", self.allowed_token_ids, 2**18)
                )
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids is empty, so no token could be picked; name one or leave it out.",
                    param="allowed_token_ids",
                )
        _string_list("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH)
        length = sum(map(len, self.bad_words))
        if length > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words have {length} characters in all; give at most {MAX_BAD_WORD_CHARACTERS}.", param="bad_words"
            )
        _string_list("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        _id_list("stop_token_ids", self.stop_token_ids, MAX_ID_ENTRIES)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _boolean(name, getattr(self, name))
        if self.speculative is not None:
            _boolean("speculative", self.speculative)
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop strings are found in text, but detokenize is false; use stop_token_ids or set detokenize.",
                param="stop",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.structured_outputs is not None:
            self._check_structured_outputs()

    def _check_structured_outputs(self) -> None:
        """What only forbids tokens could leave a grammar none."""
        if not isinstance(self.structured_outputs, StructuredOutputs):
            raise InvalidRequest("structured_outputs is not a StructuredOutputs; give one.", param="structured_outputs")
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} and structured_outputs may leave no token to pick; give one of them.", param=name
                )

    def _accept_lists(self) -> None:
        """Lists (and a lone stop string) are taken as users write them and stored as tuples."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if value is None or isinstance(value, list):
                object.__setattr__(self, name, tuple(value or ()))

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_ID_ENTRIES:
            raise InvalidRequest(
                f"logit_bias must map at most {MAX_ID_ENTRIES} token ids to numbers; shorten it.", param="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias", token, 0, 2**31 - 1)
            Bounds(-100.0, 100.0).check("logit_bias", bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_token_ids(self, vocab_size: int) -> None:
        """Every id the caller names must be a column of the logits ([rows, vocab_size])."""
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", tuple(self.logit_bias or ()), vocab_size)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids.check("allowed_token_ids", vocab_size)


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest when an id is negative or not a column of the logits."""
    if isinstance(ids, array) and ids.typecode == "i":  # a prompt: as unsigned numbers, negative ones are the largest
        wrong = len(ids) > 0 and max(array("I", ids.tobytes())) >= vocab_size
    else:
        wrong = len(ids) > 0 and (min(ids) < 0 or max(ids) >= vocab_size)
    if wrong:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{name} holds token id {bad}; this model's ids are 0 to {vocab_size - 1}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What a reader expects of an answer's timing, for policies that heed it; None: what the engine is configured for.

    Raises InvalidRequest naming the field.
    """

    ttft: float | None = None  # seconds from arrival to the first token
    tpot: float | None = None  # seconds from one token to the next
    reading_speed: float | None = None  # tokens a second

    def __post_init__(self) -> None:
        for name, bounds in EXPECTED.items():
            bounds.check(name, getattr(self, name))


NO_EXPECTATIONS = Expectations()


NO_SLOT = -1  # of a row without an adapter
REPETITION = "repetition"  # the stop_reason of an answer that ended in a loop


def adapter_name(key: str) -> str:
    """As clients call the adapter that has this key (lora/registry.py); no name has a #."""
    return key.partition("#")[0]


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
    does not know the name yet. ``load_inplace``: what lies there by now is read, though the name is known.
    ``lora_int_id`` is of no use here."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    load_inplace: bool = False


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client left
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
    ``drafts``: by chunk, how many of its tokens, the last ones, have not been sampled: the worker proposes them (or fewer,
    and then the chunk is as much shorter), and samples behind each as well as before the first. What it would have
    sampled anyway is accepted, up to the first that differs. A chunk that is proposed whole goes on behind drafts in
    flight, from what is guessed to be sampled there: where that turns out wrong, its row gets nothing. Where it is not
    empty, starts of chunks that sample are upper bounds: the worker knows the length that is true, and shifts them.
    Empty: nothing is proposed, and no step in flight proposes anything. ``prompt_logprobs`` indexes ``rows``: chunks
    whose every position is scored.
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
    """One token of each of many samples, as a column: a tuple is made when it is read. ``values``: a list, or what has
    ``tolist``."""

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values

    @property
    def column(self) -> list[int]:
        if not isinstance(self.values, list):
            self.values = self.values.tolist()
        return self.values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(self.column)

    def __getitem__(self, at: Any) -> Any:
        return list(zip(self.column[at])) if isinstance(at, slice) else (self.column[at],)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seq) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Runs(Seq[tuple[int, ...]]):
    """Some tokens of each of many samples: all of them as one column, and how many are whose."""

    __slots__ = ("_ends", "column", "counts")

    def __init__(self, column: list[int], counts: list[int]) -> None:
        self.column = column
        self.counts = counts
        self._ends: list[int] | None = None  # where each begins, and the last one ends

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        left = iter(self.column)
        return (tuple(islice(left, count)) for count in self.counts)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(self)[at]
        if self._ends is None:
            self._ends = list(accumulate(self.counts, initial=0))
        at = range(len(self.counts))[at]
        return tuple(self.column[self._ends[at] : self._ends[at + 1]])

    __eq__ = Singles.__eq__
    __hash__ = None  # type: ignore[assignment]


def column_of(tokens: Seq[tuple[int, ...]]) -> list[int]:
    """All tokens, sample by sample."""
    return tokens.column if isinstance(tokens, (Singles, Runs)) else list(chain.from_iterable(tokens))


def counts_of(tokens: Seq[tuple[int, ...]]) -> list[int]:
    """How many are each sample's."""
    return tokens.counts if isinstance(tokens, Runs) else list(map(len, tokens))


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
    graph_tokens: int = 0  # that a step with prompts was filled up to by the capture that computed it; 0: none did
    recorded: bool = False  # something was captured behind the step: host time that comes once
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
    index: int  # type: ignore[assignment]  # 0 … n-1; hides tuple.index, which is not used
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None
    finished: Finished | None = None
    first_scheduled: float | None = None
    pooled: bytes = b""  # float32: what a model that pools makes of the prompt


class TokenOutputs(Seq[SequenceOutput]):
    """One new token for each of many sequences and nothing else, as columns: an output is made when it is
    read."""

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
