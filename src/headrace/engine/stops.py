"""Stop strings in a text that arrives in pieces.

What lives here: one matcher. What may not: tokens, requests, decoding.

The stop string that is *complete first* wins (of those that complete at the same character the longest), so the answer
does not depend on how the text was cut into pieces. Text is held back only while it is the beginning of a stop string:
the held length is always the longest suffix that is a prefix of one, kept by a Knuth-Morris-Pratt state per string
(Knuth, Morris, Pratt 1977), so the cost a character does not depend on how long the strings are.
"""

from __future__ import annotations

from array import array


def _failure_links(word: str) -> array[int]:
    """links[i] = length of the longest proper prefix of ``word`` that ends at word[i]."""
    links = array("i", bytes(4 * len(word)))
    matched = 0
    for i in range(1, len(word)):
        while matched and word[i] != word[matched]:
            matched = links[matched - 1]
        matched += word[i] == word[matched]
        links[i] = matched
    return links


class StopMatcher:
    """Feeds on text, gives back what may be shown, and says when a stop string is complete."""

    __slots__ = ("_firsts", "_held", "_include", "_links", "_matched", "_words")

    def __init__(self, words: tuple[str, ...], include: bool) -> None:
        self._words = words
        self._include = include
        self._links: list[array[int]] | None = None  # made when a first character turns up
        self._firsts = frozenset(word[0] for word in words)
        self._matched = [0] * len(words)
        self._held = ""

    def push(self, text: str, armed: bool) -> tuple[str, str | None]:
        """``(text to show, the stop string that is complete or None)``. Not ``armed``: matches that end in ``text`` do not count."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None  # nothing has begun, and nothing begins here
        pending = self._held + text
        shown = len(self._held) if self._include else 0  # with the stop string included, nothing is ever held back
        for position, char in enumerate(text, len(self._held) + 1):
            word = self._advance(char)
            if word is not None and armed:
                return pending[shown : position if self._include else position - len(word)], word
        keep = len(pending) - max(self._matched)
        self._held = pending[keep:]
        return pending[shown : None if self._include else keep], None

    def flush(self) -> str:
        """The text ended without a stop string: what was held back is text after all."""
        return "" if self._include else self._held

    def _advance(self, char: str) -> str | None:
        """One character further in every string; the longest one that is complete now."""
        if self._links is None:
            self._links = [_failure_links(word) for word in self._words]
        complete: str | None = None
        for i, word in enumerate(self._words):
            matched, links = self._matched[i], self._links[i]
            while matched and word[matched] != char:
                matched = links[matched - 1]
            matched += word[matched] == char
            if matched == len(word):
                matched = links[matched - 1]
                if complete is None or len(word) > len(complete):
                    complete = word
            self._matched[i] = matched
        return complete
