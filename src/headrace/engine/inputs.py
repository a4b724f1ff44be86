"""From what users write to a Request: tokenise, check, resolve. The one validator of every route.

What lives here: prompts in every accepted form, and all checks that need the model's sizes. What may not: torch, wire
formats, queues. Checks that need no model are SamplingParams' own.
"""

from __future__ import annotations

import itertools
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import countOf
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from headrace.engine.grammar_check import GrammarCheck
from headrace.engine.info import EngineInfo
from headrace.errors import ContextLengthExceeded, InvalidRequest, ModelError
from headrace.request import (
    Expectations,
    Given,
    Json,
    Request,
    SamplingParams,
    StructuredOutputs,
    check_integer,
    check_token_ids,
    has_surrogate,
    shown,
)
from headrace.spec import PoolingSpec

if TYPE_CHECKING:
    from headrace.engine.tokenizer import Tokenizer

Prompt = str | Given | Sequence[int]
Message = Given
Words = tuple[tuple[int, ...], ...]  # each as ids

_MASK64 = 2**64 - 1
_EARLY_CHARS = 1 << 16  # texts beyond this are counted piece by piece before they are tokenised whole
_CHARS_A_TOKEN = 16  # of a text that is tokenised whole, at most: three times what any language needs
_CUT_TOKENS = 256  # after a cut, which may differ from those of the whole text
_MAX_SALT = 2048  # characters: servers put a tenant's name before their client's own
_PROMPT_FIELDS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "priority"})
_POOLED = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)  # of a vector, as of one token
_OTHERWISE = {
    "generate": "This model generates text and makes no embeddings or scores; serve an embedding model or a reranker, or start with --task embed "
    "or --task score.",
    "embed": "This model embeds texts and generates none; use /v1/embeddings, /v1/rerank or /v1/score (LLM.embed, LLM.score), or a model that "
    "generates.",
    "score": "This model scores pairs of texts and does nothing else; use /v1/rerank or /v1/score (LLM.score).",
}
_ALIKE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repetition_detection", "speculative")
_DEFAULTS = {**{name: name for name in _ALIKE}, "max_new_tokens": "max_tokens"}


def model_defaults(found: Given) -> Json:
    """A model's generation_config.json and a server's own defaults, by the names of SamplingParams."""
    return {ours: found[theirs] for theirs, ours in _DEFAULTS.items() if found.get(theirs) is not None}


def default_params(generation_defaults: Given) -> SamplingParams:
    """The model's own sampling defaults (its generation_config.json), where it has any. Raises ModelError for one out
    of range."""
    try:
        return SamplingParams(**model_defaults(generation_defaults))
    except InvalidRequest as error:
        raise ModelError(
            f"generation_config.json: {error.message} Correct it or use --generation-config headrace."
        ) from error


def derived_seed(seed: int, ordinal: int) -> int:
    """64 bits for the ``ordinal``-th request of an engine seeded with ``seed`` (the splitmix64 finaliser, Steele et al.
    2014)."""
    mixed = (seed + (ordinal + 1) * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


@dataclass(slots=True)
class ParsedPrompt:
    """One prompt as it was given: text or ids (or both: then the text is only shown). ``given``: the caller's own list
    of these ids."""

    text: str | None
    token_ids: array[int] | None
    cache_salt: str = ""
    priority: int | None = None
    given: Sequence[int] | None = None


def parse_prompt(prompt: Prompt, param: str = "prompt") -> ParsedPrompt:
    """A text, ``{"prompt": …}``, ``{"prompt_token_ids": […]}`` (either with "cache_salt"), or a list of ids."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, param)
    if isinstance(prompt, (list, tuple, array)):
        return ParsedPrompt(None, _id_array(prompt, param), given=prompt)
    forms = 'a text, {"prompt": text} or {"prompt_token_ids": [ids]}'
    raise InvalidRequest(f"{param} is of type {type(prompt).__name__}; give {forms}.", param=param)


def _parse_mapping(prompt: Given, param: str) -> ParsedPrompt:
    unknown = sorted(set(map(str, prompt)) - _PROMPT_FIELDS)
    if unknown:
        raise InvalidRequest(
            f"{param} has unknown fields {', '.join(unknown)}; known are {', '.join(sorted(_PROMPT_FIELDS))}.",
            param=param,
        )
    text = prompt.get("prompt")
    ids = prompt.get("prompt_token_ids")
    salt = prompt.get("cache_salt")
    priority = prompt.get("priority")
    if text is None and ids is None:
        raise InvalidRequest(f'{param} has neither "prompt" nor "prompt_token_ids"; give one of them.', param=param)
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt is of type {type(text).__name__}; give a text.", param="prompt")
    return ParsedPrompt(
        text, None if ids is None else _id_array(ids, "prompt_token_ids"), "" if salt is None else salt, priority, ids
    )


def _id_array(ids: Any, param: str) -> array[int]:
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    packed = try_pack(ids) if isinstance(ids, (list, tuple)) else None
    if packed is None:
        raise InvalidRequest(
            f"{param} must be a list of token ids, integers of 32 bits; give the model's own.", param=param
        )
    return packed


class RequestAttributes(TypedDict, total=False):
    """What a Request says beside its prompt and SamplingParams. ``priority``: lower goes first. ``explain``: the steps
    that compute it are counted. ``tenant`` (who asks) and ``expects`` are for policies that heed them.
    """

    priority: int
    cache_salt: str
    adapter: str | None
    explain: bool
    tenant: str
    expects: Expectations


class RequestOptions(RequestAttributes, total=False):
    """As a caller says it."""

    truncate_prompt_tokens: int | None


def attributes_of(request: Request) -> RequestAttributes:
    """For one that goes on from it."""
    found: Any = {name: getattr(request, name) for name in RequestAttributes.__annotations__}
    attributes: RequestAttributes = found
    return attributes


def _resolved_attributes(prompt: ParsedPrompt, options: RequestAttributes) -> RequestAttributes:
    """With what the prompt says itself. Raises InvalidRequest."""
    priority = prompt.priority if prompt.priority is not None else options.get("priority", 0)
    check_integer("priority", priority, -(2**31), 2**31 - 1)
    salt = _text("cache_salt", prompt.cache_salt or options.get("cache_salt", ""))
    return {**options, "priority": priority, "cache_salt": salt}


@dataclass(slots=True)
class InputProcessor:
    """``request()`` either returns a Request that the engine can serve or raises InvalidRequest naming the field.

    ``seed``: requests without their own seed get one derived from it in order of arrival, so runs repeat. ``ids``: of
    requests, in that order. ``all_below``: whether all of these ids are from 0 to that limit, it excluded; where
    there is a quicker way than looking at each.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None
    seed: int
    grammars: GrammarCheck | None = None  # None: this engine follows none
    all_below: Callable[[array[int], int], bool] | None = None
    ids: Iterator[int] = field(default_factory=itertools.count)
    _bad_words: tuple[tuple[str, ...], Words] = ((), ())

    def request(
        self,
        prompt: ParsedPrompt,
        params: SamplingParams,
        *,
        param: str = "prompt",
        clamp: bool = False,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[RequestAttributes],
    ) -> Request:
        """``param``: what errors call the prompt. ``clamp``: max_tokens is a default that was not asked for, so it may
        shrink to what fits."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params is of type {type(params).__name__}; give a SamplingParams.", param="sampling_params"
            )
        self.check_task("generate")
        ids = prompt.token_ids
        if ids is None:
            ids = array("i", self.encode(prompt.text or "", param=param, truncate=truncate_prompt_tokens))
        if truncate_prompt_tokens is not None:
            ids = ids[-self._num_kept(truncate_prompt_tokens) :]
        params = self._checked_params(ids, params, param, clamp)
        attributes = _resolved_attributes(prompt, options)
        bad_words = self._bad_word_ids(params.bad_words)
        self._check_allowed(params, bad_words)
        seconds = 0.0 if params.structured_outputs is None else self.check_grammar(params.structured_outputs)
        number = next(self.ids)  # of those that can be served
        seed = derived_seed(self.seed, number) if params.seed is None else params.seed & _MASK64
        return Request(
            request_id=number, prompt_token_ids=ids, params=params, seed=seed, arrival_time=time.perf_counter(),
            bad_word_ids=bad_words, grammar_seconds=seconds, **attributes,
        )  # fmt: skip

    def pooling_request(
        self,
        prompt: ParsedPrompt,
        *,
        param: str = "input",
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[RequestAttributes],
    ) -> Request:
        """What a model that pools is asked: one vector, or one score. ``truncate_prompt_tokens`` keeps the beginning of
        the prompt, and the special tokens around it (-1: as many as fit)."""
        self.check_task("embed", "score")
        keep = None if truncate_prompt_tokens is None else self._num_kept(truncate_prompt_tokens)
        ids = prompt.token_ids
        if ids is None:
            ids = array("i", self._encode_around(prompt.text or "", None, keep, param)[0])
            check_token_ids(param, ids, self.info.vocab_size)
        elif keep is not None:
            ids = ids[:keep]
        if not ids:
            raise InvalidRequest(f"{param} is empty; give at least one token.", param=param)
        self._check_prompt_length(len(ids), param)
        if prompt.given is not None:
            check_token_ids(param, ids, self.info.vocab_size)
        attributes, number = _resolved_attributes(prompt, options), next(self.ids)
        now = time.perf_counter()
        return Request(request_id=number, prompt_token_ids=ids, params=_POOLED, arrival_time=now, **attributes)

    def pair(
        self, query: str, document: str, *, instruction: str | None = None, truncate_prompt_tokens: int | None = None
    ) -> ParsedPrompt:
        """What a reranker reads of two texts: as its tokenizer joins them, or a language model's template."""
        self.check_task("score")
        tokenizer = self.tokenizer
        keep = None if truncate_prompt_tokens is None else self._num_kept(truncate_prompt_tokens)
        if tokenizer is not None and not self.info.segments and tokenizer.chat_templates:
            return self._templated_pair(tokenizer, query, document, instruction, keep)
        if instruction is not None:
            raise InvalidRequest("instruction has no place in this model's pairs; leave it out.", param="instruction")
        ids, kinds = self._encode_around(query, document, keep, "documents")
        check_token_ids("documents", ids, self.info.vocab_size)
        if self.info.segments > 1:
            ids = [token + kind * self.info.vocab_size for token, kind in zip(ids, kinds, strict=True)]
        return ParsedPrompt(None, array("i", ids))

    def _templated_pair(
        self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None, keep: int | None
    ) -> ParsedPrompt:
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        left = None if keep is None else tokenizer.encode(document[: self._most_characters(keep)], False)
        while True:
            said = [*system, {"role": "query", "content": query}, {"role": "document", "content": document}]
            parsed = self.chat_prompt(said, add_generation_prompt=False)
            over = 0 if keep is None else len(parsed.token_ids or ()) - keep
            if over <= 0 or keep is None or left is None:
                return ParsedPrompt(None, parsed.token_ids)
            if not left:
                told = f"is {keep}, but {keep + over} tokens stand around what may be left out; give more"
                raise InvalidRequest(f"truncate_prompt_tokens {told}.", param="truncate_prompt_tokens")
            left = left[: max(0, min(len(left), keep + over) - over)]
            document = tokenizer.decode(left, False)

    def _encode_around(
        self, text: str, second: str | None, keep: int | None, param: str
    ) -> tuple[list[int], list[int]]:
        """As the tokenizer's. Texts that are far too long are refused, or cut, before they are tokenised whole."""
        if self.tokenizer is None:
            told = f"{param} is a text, but this model has no tokenizer; give token ids."
            raise InvalidRequest(told, param=param)
        if keep is not None:
            most = self._most_characters(keep)
            text, second = text[:most] if second is None else text, None if second is None else second[:most]
        for each in (text, second):
            if each is not None and len(each) > _EARLY_CHARS:
                self._check_characters(len(each), param)
        if second is None and keep is None:
            return self.tokenizer.encode(text), []
        return self.tokenizer.encode_around(text, second, keep)

    @staticmethod
    def _most_characters(keep: int) -> int:
        """Of a text of which so many tokens are kept; the usual ones are a quarter as long."""
        return _EARLY_CHARS + _CHARS_A_TOKEN * keep

    def check_task(self, *tasks: str) -> None:
        """Raises InvalidRequest where the model is for something else."""
        if self.info.task not in tasks:
            raise InvalidRequest(_OTHERWISE[self.info.task], param="model", code="unsupported_task")

    @property
    def pooling(self) -> PoolingSpec:
        assert self.info.pooling is not None, "the task was checked"
        return self.info.pooling

    @property
    def _longest_prompt(self) -> int:
        """An answer takes a token at least."""
        return self.info.max_sequence_tokens - (self.info.pooling is None)

    def _check_prompt_length(self, count: int, param: str) -> None:
        if count > self._longest_prompt:
            limit = self.info.max_sequence_tokens
            if self.info.pooling is None:
                raise ContextLengthExceeded(count, limit, param=param)
            remedy = "Shorten the text, or set truncate_prompt_tokens."
            raise ContextLengthExceeded(count, limit, param=param, what="the text has", remedy=remedy)

    def tokenized(self, prompt: ParsedPrompt, truncate_prompt_tokens: int | None = None) -> ParsedPrompt:
        """A text prompt with its ids."""
        if prompt.token_ids is not None:
            return prompt
        ids = self.encode(prompt.text or "", truncate=truncate_prompt_tokens)
        return replace(prompt, token_ids=array("i", ids))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", truncate: int | None = None
    ) -> list[int]:
        """Token ids of a text; one that is far too long is refused before it is tokenised whole.

        ``truncate``: so many of the last tokens are wanted (-1: as many as fit); there may be more, and what is far
        before them is not looked at.
        """
        if self.tokenizer is None:
            raise InvalidRequest(
                f"{param} is a text, but this model has no tokenizer; give prompt_token_ids.", param=param
            )
        if len(text) <= _EARLY_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        if truncate is not None:
            return self._encode_end(text, self._num_kept(truncate), add_special_tokens, param)
        self._check_characters(len(text), param)
        self._refuse_early(text, param)
        return self.tokenizer.encode(text, add_special_tokens)

    def _encode_end(self, text: str, keep: int, add_special_tokens: bool, param: str) -> list[int]:
        """As much of the end as holds ``keep`` tokens that are those of the whole text (unless that is one word of so
        many characters)."""
        assert self.tokenizer is not None
        size = _EARLY_CHARS + 4 * keep
        while size < len(text):
            ids = self.tokenizer.encode(text[-size:], add_special_tokens)
            if len(ids) >= keep + _CUT_TOKENS:
                return ids
            size *= 4
            self._check_characters(min(size, len(text)), param)
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_characters(self, count: int, param: str) -> None:
        limit = self.info.max_sequence_tokens
        most = _CHARS_A_TOKEN * limit + 4 * _EARLY_CHARS
        if count > most:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens, for which at most {most} characters are tokenised, "
                f"but {count} would have to be. Shorten the prompt.",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool | None = None,
        **kwargs: Any,
    ) -> ParsedPrompt:
        """A conversation through the model's template; its special tokens are the template's own."""
        if self.tokenizer is None:
            raise InvalidRequest(
                "messages need a chat template, but this model has no tokenizer; give prompt_token_ids.",
                param="messages",
            )
        _check_messages(messages)
        text = self.tokenizer.apply_chat_template(list(messages), tools, add_generation_prompt, **kwargs)
        if len(text) > _EARLY_CHARS:
            self._check_characters(len(text), "messages")
            self._refuse_early(text, "messages")
        return ParsedPrompt(
            text, array("i", self.tokenizer.encode_chat(text, list(messages), tools, add_generation_prompt, **kwargs))
        )

    def _refuse_early(self, text: str, param: str) -> None:
        """Pieces tokenise to about as many tokens as the whole; twice the limit in pieces is beyond it in any case."""
        assert self.tokenizer is not None
        limit, counted = self.info.max_sequence_tokens, 0
        for start in range(0, len(text), _EARLY_CHARS):
            counted += len(self.tokenizer.encode(text[start : start + _EARLY_CHARS], False))
            if counted > 2 * limit + 1024:
                raise ContextLengthExceeded(limit + 1, limit, param=param, what="the prompt has more than")

    def _num_kept(self, keep: int) -> int:
        """-1: as many as the context allows, with room for one more."""
        longest = self._longest_prompt
        if type(keep) is not int or not (keep == -1 or 1 <= keep <= longest):
            wanted = f"give an integer from 1 to {longest}, or -1 for that"
            raise InvalidRequest(f"truncate_prompt_tokens is {shown(keep)}; {wanted}.", param="truncate_prompt_tokens")
        return longest if keep == -1 else keep

    def _checked_params(self, ids: array[int], params: SamplingParams, param: str, clamp: bool) -> SamplingParams:
        info, limit = self.info, self.info.max_sequence_tokens
        if not ids:
            raise InvalidRequest(f"{param} is empty; give at least one token.", param=param)
        self._check_prompt_length(len(ids), param)  # before the ids are looked at: they may be millions
        if self.all_below is None or not self.all_below(ids, info.vocab_size):
            check_token_ids(param, ids, info.vocab_size)
        params.check_token_ids(info.vocab_size)
        if params.n > info.max_num_seqs:
            raise InvalidRequest(
                f"n is {params.n}, but at most {info.max_num_seqs} sequences run at once; ask for fewer or raise --max-num-seqs.",
                param="n",
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(
                "stop strings are found in text, but this model has no tokenizer; use stop_token_ids.", param="stop"
            )
        return self._resolved_length(len(ids), limit, params, clamp)

    def close(self) -> None:
        """Ends the processes that try grammars out."""
        if self.grammars is not None:
            self.grammars.close()

    async def check_grammar_soon(self, params: SamplingParams, tenant: str = "") -> None:
        """Beside the event loop, what ``request`` will ask about its grammar."""
        if params.structured_outputs is not None and self.grammars is not None:
            await self.grammars.require_soon(params.structured_outputs, tenant)

    def check_count(self, messages: Sequence[Message], param: str) -> None:
        """Raises ContextLengthExceeded before anything is rendered: a message takes a token at least."""
        limit = self.info.max_sequence_tokens
        if len(messages) >= limit:
            raise ContextLengthExceeded(
                len(messages), limit, param=param, what=f"its {len(messages)} messages take at least"
            )

    def check_grammar(self, wanted: StructuredOutputs) -> float:
        """Seconds that compiling it takes. Raises InvalidRequest when it cannot be followed. Not for an event loop the
        first time: it may take seconds."""
        if self.grammars is None:
            needs = "structured_outputs needs a tokenizer whose tokens say what they write, and this model has none"
            raise InvalidRequest(f"{needs}; leave it out.", param="structured_outputs")
        return self.grammars.require(wanted)

    def _resolved_length(self, num_prompt: int, limit: int, params: SamplingParams, clamp: bool) -> SamplingParams:
        room = limit - num_prompt
        if clamp and params.max_tokens is not None:
            params = replace(params, max_tokens=min(room, params.max_tokens))
        if params.max_tokens is not None and params.max_tokens > room:
            what = f"{num_prompt} in the prompt and {params.max_tokens} asked for (max_tokens) make"
            raise ContextLengthExceeded(num_prompt + params.max_tokens, limit, param="max_tokens", what=what)
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but the prompt leaves room for {room} tokens; lower it.",
                param="min_tokens",
            )
        return params if params.max_tokens is not None else replace(params, max_tokens=room)

    def _check_allowed(self, params: SamplingParams, bad_words: Words) -> None:
        """Some token must be left for the first place of the answer."""
        barred = {ids[0] for ids in bad_words if len(ids) == 1}
        if params.min_tokens:
            barred.update(params.stop_token_ids, () if params.ignore_eos else self.info.eos_token_ids)
        allowed = params.allowed_token_ids
        if allowed is not None and len(allowed) <= len(barred) and barred.issuperset(allowed):
            told = "allowed_token_ids holds only tokens that bad_words or min_tokens (ends of the answer) forbid"
            raise InvalidRequest(f"{told}; allow others.", param="allowed_token_ids")

    def _bad_word_ids(self, words: tuple[str, ...]) -> Words:
        """The last words asked for are remembered: the prompts of one request share them."""
        if words != self._bad_words[0]:
            self._bad_words = words, self._find_bad_word_ids(words)
        return self._bad_words[1]

    def _find_bad_word_ids(self, words: tuple[str, ...]) -> Words:
        """Each word as it is tokenised at the start of a text and after a space (where that is not just a space before
        the same tokens)."""
        if words and self.tokenizer is None:
            raise InvalidRequest(
                "bad_words are texts, but this model has no tokenizer; use logit_bias with token ids.",
                param="bad_words",
            )
        found: list[tuple[int, ...]] = []
        for word in words:
            assert self.tokenizer is not None
            stem = word.lstrip() or word
            bare = tuple(self.tokenizer.encode(stem, False))
            spaced = tuple(self.tokenizer.encode(" " + stem, False))
            found.append(bare)
            if bare not in (spaced, spaced[1:]):
                found.append(spaced)
        sequences = tuple(ids for ids in found if ids)
        for ids in sequences:
            check_token_ids("bad_words", ids, self.info.vocab_size)
        return sequences


def _check_messages(messages: Any) -> None:
    """What every template relies on: objects with a role, and a text (or text parts) as content."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("messages must be a list of at least one message; give one.", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"messages[{index}] must be an object with a role and a content.", param=f"messages[{index}]"
            )
        content = message.get("content")
        parts = content if isinstance(content, (list, tuple)) else ()
        if not (content is None or isinstance(content, (str, list, tuple))) or any(
            not _is_text_part(part) for part in parts
        ):
            raise InvalidRequest(
                f"messages[{index}].content must be a text or a list of text parts; give one.",
                param=f"messages[{index}].content",
            )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_SALT or has_surrogate(value):
        raise InvalidRequest(
            f"{name} must be a text of at most {_MAX_SALT} characters, without lone surrogates; change it.", param=name
        )
    return value


_HIGHEST = 3 if sys.byteorder == "little" else 0  # of the four bytes of an id


def try_pack(ids: list[Any] | tuple[Any, ...]) -> array[int] | None:
    """The ids, if each of them is an ``int`` of 32 bits and nothing that only behaves like one (a bool, another
    library's integer, a float)."""
    if countOf(map(type, ids), int) != len(ids):
        return None
    with suppress(OverflowError):
        packed = array("I", ids).tobytes()  # three times as quick as array("i", ids), which asks for each by a format
        if packed[_HIGHEST::4].isascii():  # else some id takes the bit that is for the sign
            return array("i", packed)
    with suppress(OverflowError):
        return array("i", ids)
    return None
