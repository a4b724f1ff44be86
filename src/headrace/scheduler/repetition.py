"""Whether a text of token ids has ended in a loop: the same cycle again and again.

A loop is a suffix of at least L(p) = max(min_count · p, min_tokens) tokens in which each token equals the one p before
it. The first position at which some allowed p has one is found exactly, at O(log p) amortised cost a token, and without
looking at every token:

    Periods are looked for by scale, those in [w, 2w) at every w-th token, where a period p shows as a square: the last
    2p tokens are
    twice the same. Since L(p) >= 3p, a loop has been a square at such a token before it is long enough. A found period
    is a candidate:
    its run is extended by comparing slices, until it is long enough or breaks. A candidate that covers what a longer
    period would
    (Fine and Wilf 1965) makes that one superfluous, so few are alive at a time.

Between ``next_look``s nothing can become a loop, so a token costs the caller one comparison.

What lives here: the search. What may not: whether to look, what an end means (scheduler.py), text.
"""

from __future__ import annotations

from array import array

from headrace.request import RepetitionDetection

FIRST_SCALE = 8  # tokens between looks; periods below twice that are looked for together
_ID_BYTES = array("i").itemsize


class RepetitionDetector:
    """Looks at ``ids`` from ``start`` on. ``next_look``: the length of ``ids`` at which ``look`` wants to be called
    next, at the latest."""

    __slots__ = ("_max", "_min", "_min_count", "_min_tokens", "_runs", "_seen", "_start", "next_look")

    def __init__(self, asked: RepetitionDetection, start: int) -> None:
        self._min, self._max = asked.min_pattern_size, asked.max_pattern_size
        self._min_count, self._min_tokens = asked.min_count, asked.min_tokens
        self._start = start
        self._seen = start
        self._runs: dict[int, int] = {}  # period → length of the suffix that has it
        self.next_look = start + FIRST_SCALE

    def look(self, ids: array[int]) -> bool:
        """Whether ``ids`` end in a loop. At most up to ``next_look`` tokens may have come since the last call."""
        end = len(ids)
        self._extend(ids, end)
        new = end - self._start
        scale = FIRST_SCALE
        while new and new % scale == 0 and scale <= max(self._max, FIRST_SCALE):
            self._search(ids, end, scale)
            scale *= 2
        missing = min((self._needed(period) - length for period, length in self._runs.items()), default=FIRST_SCALE)
        self.next_look = end + max(1, min(missing, FIRST_SCALE - new % FIRST_SCALE))
        return missing <= 0

    def _needed(self, period: int) -> int:
        """L(p). A cycle shorter than the smallest that counts counts as several of itself."""
        size = -(-self._min // period) * period
        return max(self._min_count * size, self._min_tokens) if size <= self._max else 2**62

    def _extend(self, ids: array[int], end: int) -> None:
        seen, self._seen = self._seen, end
        if self._runs:
            new = ids[seen:end]
            self._runs = {
                period: length + end - seen
                for period, length in self._runs.items()
                if ids[seen - period : end - period] == new
            }

    def _search(self, ids: array[int], end: int, scale: int) -> None:
        """New candidates with periods in [scale, 2 · scale); at the first scale also below."""
        low, high = (1 if scale == FIRST_SCALE else scale), min(2 * scale - 1, self._max, (end - self._start) // 2)
        if any(length >= 2 * high for period, length in self._runs.items() if period < low) or high < low:
            return
        for period in _square_periods(ids, end, low, high):
            covered = any(length >= 2 * period for shorter, length in self._runs.items() if shorter <= period)
            if not covered:
                self._runs[period] = self._length(ids, end, period)

    def _length(self, ids: array[int], end: int, period: int) -> int:
        """Of the suffix with this period. It is short: a longer one would have been found before."""
        begin = end - 2 * period
        while begin > self._start and ids[begin - 1] == ids[begin - 1 + period]:
            begin -= 1
        return end - begin


def _square_periods(ids: array[int], end: int, low: int, high: int) -> list[int]:
    """Every p in [low, high] with which the last 2p tokens are twice the same, ascending. Candidates are places where
    the last ``low`` tokens stand p before the end."""
    data = ids[end - 2 * high : end].tobytes()
    needle = data[-low * _ID_BYTES :]
    last = len(data) - len(needle)
    first, at = last - high * _ID_BYTES, last - (low - 1) * _ID_BYTES
    found = []
    while (at := data.rfind(needle, first, at + len(needle) - 1)) >= 0:
        size = last - at
        if at % _ID_BYTES == 0 and data[-size:] == data[-2 * size : -size]:
            found.append(size // _ID_BYTES)
    return found
