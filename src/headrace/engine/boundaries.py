"""Special tokens that a client wrote, kept apart from the template's own: in a message, a tool or a document they are plain text.

What lives here: finding their texts in what a client sends, marking them before the template is rendered, and encoding the rendering so
that a marked text is no token. What may not: rendering (template.py), other encoding (tokenizer.py).

A mark stands behind the first character of each such text, so the tokenizer, which looks for special tokens before its normaliser
runs, finds only the template's. Then the marks are taken out, and the text is encoded as any other. What has no such text in it never
comes here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

# Printable, without case, no white space: filters of templates leave it alone, and nobody writes it.
MARK = "\u2e13\ua8ce\u2e13"
_WINDOW = 1 << 15  # characters


class Boundaries:
    """For one tokenizer. A special token of one character cannot be marked, and stays one."""

    def __init__(self, backend: tokenizers.Tokenizer, specials: Iterable[str]) -> None:
        self._backend = backend
        texts = sorted((text for text in specials if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile(_any_of(texts)) if texts else None
        self._longest = len(texts[0]) if texts else 0
        self._marking: tokenizers.Tokenizer | None = None
        self.example = texts[0] if texts else None

    def marked(self, value: Any) -> Any:
        """The same with every special token's text in it marked; the very object where there is none."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            pairs = [(self.marked(key), self.marked(item)) for key, item in value.items()]
            same = all(new is item and name is key for (name, new), (key, item) in zip(pairs, value.items(), strict=True))
            return value if same else dict(pairs)
        if isinstance(value, (list, tuple)):
            return self._marked_list(value)
        return value

    def _marked_text(self, text: str) -> str:
        parts, at = [], 0
        while (found := self._find(text, at)) is not None:
            parts += [text[at : found + 1], MARK]
            at = found + 1  # the next may overlap
        return "".join([*parts, text[at:]]) if parts else text

    def _find(self, text: str, at: int) -> int | None:
        """Window by window: a search keeps the interpreter from everybody else until it returns."""
        assert self._pattern is not None
        for start in range(at, len(text), _WINDOW):
            found = self._pattern.search(text, start, start + _WINDOW + self._longest)
            if found is not None:
                return found.start()
        return None

    def _marked_list(self, items: list[Any] | tuple[Any, ...]) -> Any:
        """Parts of a message, which a template may join: none of them may begin within a special token."""
        marked = [self.marked(item) for item in items]
        texts = [_text_of(item) for item in marked]
        if len(texts) > 1 and all(text is not None for text in texts):
            joined = "".join(text or "" for text in texts)
            if self._marked_text(joined) is not joined:
                marked = [marked[0], *({**item, "text": MARK + item["text"]} for item in marked[1:])]
        return items if all(new is old for new, old in zip(marked, items, strict=True)) else marked

    def encode(self, marked: str) -> list[int] | None:
        """Token ids of a rendering with marks; None where this tokenizer cannot do it."""
        if self._marking is None:
            self._marking = _marking(self._backend)
        if self._marking.get_added_tokens_decoder().keys() != self._backend.get_added_tokens_decoder().keys():
            return None
        ids: list[int] = self._marking.encode_batch_fast([marked], add_special_tokens=False)[0].ids  # others have the interpreter meanwhile
        return ids


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for any of these that looks at each character once, however many hundred there are."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    ends = rests.pop("", None) is not None
    branches = [re.escape(first) + (_any_of(rest) if any(rest) else "") for first, rest in rests.items()]
    joined = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return joined + "?" * ends


def _text_of(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _marking(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, which shares the model's tables with it, but passes over marks."""
    made = tokenizers.Tokenizer(backend.model)
    added = backend.get_added_tokens_decoder().values()
    normal = [] if backend.normalizer is None else [backend.normalizer]
    before = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    if any(token.special and backend.model.token_to_id(token.content) is not None for token in added):
        before.insert(0, pre_tokenizers.Split(MARK, "removed"))  # the model could find them by itself in a text without a gap
    else:
        normal.insert(0, normalizers.Replace(MARK, ""))
    if normal:
        made.normalizer = normalizers.Sequence(normal)
    if before:
        made.pre_tokenizer = pre_tokenizers.Sequence(before)
    for _, token in sorted(backend.get_added_tokens_decoder().items()):
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        if token.special:
            flags["normalized"] = False  # else the normaliser would take the marks out before it is looked for
        (made.add_special_tokens if token.special else made.add_tokens)([tokenizers.AddedToken(token.content, **flags)])
    return made
