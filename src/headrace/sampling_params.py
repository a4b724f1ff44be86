"""What a caller may ask of an answer: how tokens are picked, what the text must be, when it counts as stuck, how soon
it is wanted.

What lives here: these parameters and their checks, one for every route. What may not: torch, wire formats, what needs
the model's sizes beyond the vocabulary (engine/inputs.py).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest

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
    if len(ids) and (min(ids) < 0 or max(ids) >= vocab_size):
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
