"""Log probabilities as the two APIs write them.

What lives here: TokenLogprobs to JSON-ready values, or to pieces of JSON where they are many. What may not: choosing tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from headrace.request import TokenLogprobs
from headrace.server.wire import encode_list, encode_object

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts(Protocol):
    """What logprobs need of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class LogprobFormat:
    """``tokenizer`` None: tokens are shown as ``token_id:N``."""

    def __init__(self, tokenizer: TokenTexts | None) -> None:
        self._tokenizer = tokenizer

    def chat(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """``choices[].logprobs`` of chat completions."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        chosen, *best = zip(entry.token_ids, entry.logprobs, strict=True)
        return {**self._token(*chosen), "top_logprobs": [self._token(*each) for each in best]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer is not None else None
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": raw}

    def chat_pieces(self, entries: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """As ``chat``, encoded."""
        return encode_object({"content": encode_list(map(self._chat_entry, entries)), "refusal": None})

    def completion(self, entries: Sequence[TokenLogprobs | None], offset: int, prompt_ids: Iterable[int] = ()) -> dict[str, list[Any]]:
        """``choices[].logprobs`` of completions. ``offset``: characters of text before. An entry of None is a prompt's first token."""
        return {name: list(column) for name, column in self.columns(entries, offset, prompt_ids).items()}

    def columns(self, entries: Sequence[TokenLogprobs | None], offset: int, prompt_ids: Iterable[int] = ()) -> dict[str, Iterable[Any]]:
        first = next(iter(prompt_ids), 0)
        texts = [self.text(first if entry is None else entry.token_ids[0]) for entry in entries]
        return {
            "text_offset": itertools.accumulate(map(len, texts[:-1]), initial=offset) if texts else (),
            "token_logprobs": (None if entry is None else finite(entry.logprobs[0]) for entry in entries),
            "tokens": texts,
            "top_logprobs": (None if entry is None else self._by_text(entry) for entry in entries),
        }

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """The k best and the chosen one; of tokens with equal text the more probable."""
        found: dict[str, float] = {}
        for token_id, logprob in (*zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), (entry.token_ids[0], entry.logprobs[0])):
            found.setdefault(self.text(token_id), finite(logprob))
        return found

    def prompt_pieces(self, entries: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """``prompt_logprobs``, encoded: nothing for the first token, then by token id: logprob, rank and text."""
        return encode_list(itertools.chain([None], map(self._by_id, entries)))

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        pairs = zip(entry.token_ids, entry.logprobs, strict=True)
        found: dict[str, Any] = {}
        for place, (token_id, logprob) in enumerate(pairs):
            rank = place or entry.rank
            found.setdefault(str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token_id)})
        return found

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
