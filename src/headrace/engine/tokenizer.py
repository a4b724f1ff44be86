"""Text to token ids and back: a model's tokenizer, its special tokens and its chat template behind one face.

What lives here: building a tokenizer from its files, encode, decode, chat. What may not: torch, finding files
(models/source.py), incremental decoding and stop strings (output.py), rendering (template.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from headrace.engine.output import (
    ByteDecoder,
    IncrementalDecoder,
    PieceDecoder,
    PieceRules,
    WindowDecoder,
    bytes_of_token,
    is_byte_level,
    piece_of_token,
    piece_rules,
)
from headrace.engine.template import MARK, Boundaries, ChatTemplate, check_template_variables
from headrace.engine.text_growth import check_normalizer, check_other_parts
from headrace.errors import ConfigError, InvalidRequest, ModelError
from headrace.models.files import MAX_TEMPLATE_BYTES, TokenizerFiles, read_bounded
from headrace.models.source import ModelSource, as_path, find_tokenizer_files
from headrace.request import Given, Json
from headrace.spec import PoolHead

_SHORT = 4096  # characters
CHANGES = "this model's chat template changes texts, or its tokenizer cannot tell them apart"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# How a language model is asked about a pair whose score is "yes" against "no", as Qwen3-Reranker was trained.
_YES_OR_NO = Path(__file__).with_name("yes_or_no.jinja")

log = logging.getLogger("headrace.tokenizer")


def check_texts(source: ModelSource, tokenizer: Tokenizer | None) -> None:
    """For who has nothing but texts to ask. Raises ConfigError."""
    if tokenizer is None:
        raise ConfigError(
            f"{source.name} has no tokenizer, so it takes and gives token ids only; --tokenizer takes another model's folder, "
            "and headrace generate --input FILE takes lines with prompt_token_ids."
        )


def load_tokenizer(
    source: ModelSource,
    override: str | None = None,
    *,
    chat_template: str | None = None,
    special_tokens_in_messages: bool = False,
) -> Tokenizer | None:
    """The model's tokenizer, or that of ``override``; None when the model has none (prompts must then be token ids).

    ``chat_template``: a file or a template's text, instead of the model's own. Raises ModelError for a damaged
    tokenizer and for one with more ids than the model's logits have columns.
    """
    files = source.tokenizer_files() if override is None else find_tokenizer_files(override)
    if files is None:
        return None
    template = None if chat_template is None else read_chat_template(chat_template)
    pooling = source.pooling
    if pooling is not None and template is None:  # conversations are none of its inputs
        files = replace(
            files,
            templates={"default": _YES_OR_NO.read_text("utf-8")} if pooling.get("head") == PoolHead.TOKENS else {},
        )
    tokenizer = Tokenizer(files, chat_template=template, special_tokens_in_messages=special_tokens_in_messages)
    width = source.config.get("vocab_size")
    if isinstance(width, int) and tokenizer.vocab_size > width:
        raise ModelError(
            f"the tokenizer of {files.origin} has ids up to {tokenizer.vocab_size - 1}, but the model's vocab_size is {width}; "
            f"they do not belong together. Use the model's own tokenizer."
        )
    return tokenizer


def read_chat_template(value: str) -> str:
    """``--chat-template``: Jinja text is recognised by its braces, anything else is a file."""
    if "{{" in value or "{%" in value or "\n" in value:
        return value
    path = as_path(value)
    if not path.is_file():
        raise ModelError(f"--chat-template is {value!r}, which is neither a file nor a Jinja template; check the path.")
    return read_bounded(path, MAX_TEMPLATE_BYTES)


def check_chat_template(value: str) -> None:
    """``--chat-template``, tried before anything starts. Raises ModelError."""
    template = ChatTemplate({"default": read_chat_template(value)}, {})
    try:
        template.check()
    finally:
        template.close()


class Tokenizer:
    """Thread-safe. ``vocab_size`` is the highest id + 1, added tokens included."""

    def __init__(
        self, files: TokenizerFiles, *, chat_template: str | None = None, special_tokens_in_messages: bool = False
    ) -> None:
        self._files = files
        self._named = named = _named_tokens(files)
        check_normalizer(files.tokenizer_json, files.origin)
        with _damage_explained(f"the tokenizer of {files.origin} cannot be read"):
            self._backend = _create_backend(files)
            check_other_parts(self._backend, files.origin)
            _add_special_tokens(self._backend, files)
            _apply_bos_eos(self._backend, files.config, named)
        self.bos_token_id = _id_of(self._backend, named.get("bos_token"))
        self.eos_token_id = _id_of(self._backend, named.get("eos_token"))
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, content in added.items() if content.special)
        self.vocab_size = _highest_id(self._backend, added) + 1
        self._pieces = _Pieces(self._backend, self._special_ids)
        templates = dict(files.templates) if chat_template is None else {"default": chat_template}
        self._template = ChatTemplate(templates, named)
        specials = (
            () if special_tokens_in_messages else (content.content for content in added.values() if content.special)
        )
        self._boundaries = Boundaries(self._backend, specials)
        self._warned = False  # of a text that could not be kept apart
        self.chat_templates: Mapping[str, str] = templates

    @property
    def description(self) -> Json:
        """tokenizer_config.json as it holds here: tokens by their texts, and the chat template."""
        config = {name: value for name, value in self._files.config.items() if name != "chat_template"}
        template = self.chat_templates.get("default") or next(iter(self.chat_templates.values()), None)
        return {"tokenizer_class": "PreTrainedTokenizerFast", **config, **self._named, "chat_template": template}

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_special(self, text: str) -> bool:
        """Whether ``text`` is one token that ``skip_special_tokens`` leaves out."""
        return self._backend.token_to_id(text) in self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. ``add_special_tokens`` adds what the model wants around a plain text (a BOS, mostly)."""
        try:
            with _damage_explained("the tokenizer fails on this text"):
                # of the library's calls only those for batches leave the interpreter to others meanwhile
                if len(text) > _SHORT:
                    [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                else:
                    found = self._backend.encode(text, add_special_tokens=add_special_tokens)
                ids: list[int] = found.ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"the text cannot be encoded as UTF-8 ({_surrogate(text)}); send valid text.", param="prompt"
            ) from error
        return ids

    def encode_around(
        self, text: str, second: str | None = None, keep: int | None = None
    ) -> tuple[list[int], list[int]]:
        """A text, or a pair, with special tokens as the model wants them: (ids, of which text each is).

        ``keep``: at most so many; what is left out is the end of the last text, inside of the special tokens.
        """
        with _damage_explained("the tokenizer fails on this text"):
            try:
                parts = [
                    self._backend.encode(each, add_special_tokens=False) for each in (text, second) if each is not None
                ]
            except (TypeError, UnicodeEncodeError) as error:
                told = f"the text cannot be encoded as UTF-8 ({_surrogate(text + (second or ''))}); send valid text."
                raise InvalidRequest(told, param="prompt") from error
            if keep is not None:
                around = self._backend.num_special_tokens_to_add(second is not None)
                room = keep - around - sum(len(each) for each in parts[:-1])
                if room < 1:
                    told = f"is {keep}, but {keep - room} tokens stand around what may be left out; give {keep - room + 1} or more"
                    raise InvalidRequest(f"truncate_prompt_tokens {told}.", param="truncate_prompt_tokens")
                parts[-1].truncate(room)
            whole = self._backend.post_process(parts[0], parts[1] if second is not None else None)
        return whole.ids, whole.type_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoder = self.stream_decoder(skip_special_tokens)
        return decoder.push(ids) + decoder.flush()

    def stream_decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        return self._pieces.create_decoder(skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for, by itself; empty for an id without a token."""
        return self._pieces.token_bytes(token)

    @property
    def composes(self) -> bool:
        """A text's bytes are those of its tokens, one after another (but for a space that may be left out before the
        first)."""
        return self._pieces.composes

    @property
    def drops_first_space(self) -> bool:
        """A text is one space shorter than its tokens where these begin with one."""
        return self._pieces.drops_first_space

    def token_text(self, token: int) -> str:
        """The text an id stands for; bytes that are no whole character read as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Given],
        /,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as prompt text; encode it with ``add_special_tokens=False``. ``kwargs`` are the template's
        variables.

        ``add_generation_prompt``: None is True, unless the last message is continued.

        May take up to a second for a hostile template: do not call it where nothing else may wait. Raises
        InvalidRequest.
        """
        check_template_variables(kwargs)
        opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        return self._template.render(messages, tools, opens, kwargs, continue_final_message=continue_final_message)

    def encode_chat(
        self,
        text: str,
        messages: Sequence[Given],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool | None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of ``text``, which ``apply_chat_template`` made of these; special tokens are those of the template
        alone.

        Where a client's text holds one's text, the template is rendered once more with marks in it. One that changes
        texts, so that the renderings differ by more, cannot be helped: there such a text is the token, and that is
        logged.
        """
        given = {"messages": messages, "tools": tools, "kwargs": kwargs}
        marked = self._boundaries.marked(given)
        if marked is given:
            return self.encode(text, False)
        ids = self._encode_marked(text, marked, add_generation_prompt)
        if ids is None and not self._warned:
            self._warned = True
            log.warning("A message holds the text of a special token; %s, so it is read as that token.", CHANGES)
        return self.encode(text, False) if ids is None else ids

    def _encode_marked(self, text: str, marked: Given, add_generation_prompt: bool | None) -> list[int] | None:
        rendered = self.apply_chat_template(
            marked["messages"], marked["tools"], add_generation_prompt, **marked["kwargs"]
        )
        return self._boundaries.encode(rendered) if rendered.replace(MARK, "") == text else None

    def boundary_fault(self) -> str | None:
        """Why special tokens in messages would be read as such, if that is known; may take a second."""
        example = self._boundaries.example
        if example is None or self.template_fault() is not None:
            return None
        messages = [{"role": "user", "content": f"Say {example} twice."}]
        text = self.apply_chat_template(messages)
        marked = self._boundaries.marked({"messages": messages, "tools": None, "kwargs": {}})
        return CHANGES if self._encode_marked(text, marked, None) is None else None

    def warm_up(self) -> None:
        """Starts what the first chat would otherwise wait for; returns at once."""
        self._template.warm_up()

    def template_fault(self) -> str | None:
        """Why conversations will be refused, if that is known; may take a second."""
        return self._template.fault()

    def close(self) -> None:
        self._template.close()


class _Pieces:
    """What each id stands for, found when first asked, in tables shared by all decoders."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        decoder = _decoder_json(backend)
        self._rules = piece_rules(decoder)
        self._bytes = is_byte_level(decoder)
        self._tables = {skip: self._table(special_ids if skip else frozenset()) for skip in (False, True)}

    def _table(self, skipped: frozenset[int]) -> _Table:
        if self._bytes:
            return _Table(self._backend, bytes_of_token, b"", skipped)
        rules = self._rules or PieceRules(False)
        return _Table(self._backend, lambda token: piece_of_token(token, rules), None, skipped)

    @property
    def composes(self) -> bool:
        return self._bytes or self._rules is not None

    @property
    def drops_first_space(self) -> bool:
        return (
            not self._bytes and self._rules is not None and bool(self._rules.strip_left or self._rules.drop_first_marks)
        )

    def create_decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        table = self._tables[skip_special_tokens]
        if self._bytes:
            return ByteDecoder(table)
        if self._rules is not None:
            return PieceDecoder(table, self._rules.strip_left, self._rules.drop_first_marks)
        return WindowDecoder(lambda ids: self._backend.decode(ids, skip_special_tokens=skip_special_tokens), table)

    def token_bytes(self, token: int) -> bytes:
        if self._bytes:
            return bytes(self._tables[False][token])
        if self._rules is None:
            return str(self._backend.decode([token], skip_special_tokens=False)).encode()
        piece = self._tables[False][token]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").replace("▁", " ").encode()


class _Table(dict[int, Any]):
    """id → value, computed from the id's token at first use; ids that are skipped or have no token map to ``empty``."""

    def __init__(
        self, backend: tokenizers.Tokenizer, convert: Callable[[str], Any], empty: Any, skipped: Iterable[int]
    ) -> None:
        super().__init__(dict.fromkeys(skipped, empty))
        self._backend = backend
        self._convert = convert
        self._empty = empty

    def __missing__(self, token: int) -> Any:
        text = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
        if text is None:
            return self._empty  # not stored: what a client names must not fill the table
        self[token] = value = self._convert(text)
        return value


@contextmanager
def _damage_explained(what: str) -> Iterator[None]:
    """The library says what is wrong with a tokenizer by bare Exceptions and by panics, which are not Exceptions at
    all."""
    try:
        yield
    except (TypeError, UnicodeEncodeError):
        raise
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what} ({str(error)[:200]}); download the tokenizer again.") from error


def _create_backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _decoder_json(backend: tokenizers.Tokenizer) -> Json | None:
    if backend.decoder is None:
        return None
    value: Json = json.loads(backend.decoder.__getstate__())
    return value


def _content(value: Any) -> str | None:
    """A token in tokenizer_config.json is a text or an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return (
        value if isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value) else None
    )


def _named_tokens(files: TokenizerFiles) -> dict[str, str]:
    found = {name: _content(files.config.get(name)) or _content(files.special_tokens.get(name)) for name in _NAMED}
    return {name: content for name, content in found.items() if content is not None}


def _add_special_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Tokens that only tokenizer_config.json names, and named ones that tokenizer.json does not mark as special."""
    listed = files.config.get("added_tokens_decoder")
    wanted = (
        [_added_token(value) for _, value in sorted(listed.items(), key=_numeric)] if isinstance(listed, dict) else []
    )
    wanted += [
        tokenizers.AddedToken(content, special=True, normalized=False) for content in _named_tokens(files).values()
    ]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in wanted:
        if token.content and token.content not in known:
            known.add(token.content)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _numeric(item: tuple[str, Any]) -> int:
    return int(item[0]) if item[0].isascii() and item[0].isdigit() and len(item[0]) < 20 else 0


def _added_token(value: Any) -> tokenizers.AddedToken:
    fields = value if isinstance(value, Mapping) else {}
    flags = {
        name: bool(fields.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    return tokenizers.AddedToken(_content(fields) or "", **flags)


def _apply_bos_eos(backend: tokenizers.Tokenizer, config: Given, named: Mapping[str, str]) -> None:
    """``add_bos_token``/``add_eos_token``, where tokenizer_config.json says them, replace tokenizer.json's
    post-processor."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before = named.get("bos_token") if config.get("add_bos_token") else None
    after = named.get("eos_token") if config.get("add_eos_token") else None
    around = {content: _id_of(backend, content) for content in (before, after) if content is not None}
    single = [_special(before), {"Sequence": {"id": "A", "type_id": 0}}, _special(after)]
    processor = {
        "type": "TemplateProcessing",
        "single": [item for item in single if item is not None],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            content: {"id": content, "ids": [token], "tokens": [content]} for content, token in around.items()
        },
    }
    # A post-processor can only be read as part of a tokenizer; an empty one carries it.
    carrier = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "post_processor": processor}
    backend.post_processor = tokenizers.Tokenizer.from_str(json.dumps(carrier)).post_processor


def _special(content: str | None) -> Json | None:
    return None if content is None else {"SpecialToken": {"id": content, "type_id": 0}}


def _id_of(backend: tokenizers.Tokenizer, content: str | None) -> int | None:
    return None if content is None else backend.token_to_id(content)


def _highest_id(backend: tokenizers.Tokenizer, added: Mapping[int, Any]) -> int:
    size = backend.get_vocab_size(with_added_tokens=True)
    highest = max(size - 1, max(added, default=-1))
    if size and backend.id_to_token(size - 1) is None:  # ids have gaps: look at every one
        highest = max(highest, *backend.get_vocab(with_added_tokens=True).values())
    return highest


def _surrogate(text: str) -> str:
    found = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    return "not a string" if found is None else f"it holds the lone surrogate U+{ord(found):04X}"
