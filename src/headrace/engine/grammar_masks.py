"""Grammars followed token by token: compiled in threads beside the engine's loop, kept by size, asked for masks between
two steps.

A matcher is a cache of (grammar, tokens of one answer): it catches up with what is known when its mask is wanted, so
preemption, failed steps and steps in flight are nothing to it. What a grammar may cost was tried out elsewhere
(grammar_check.py).

Where a grammar leaves exactly one token at several places in a row (the keys of a JSON schema, the markup of a tool
call), all of them are known before the first is sampled. Such a run is found when its first token gets its mask: the
step that samples it is under way, it can sample nothing else, and no other is in flight (core.py). From then on the
scheduler plans with the whole run (``Scheduler.force_tokens``), and one step computes it as a chunk, like a prompt's; what
is told, where the answer ends and what is sampled next are what they are one token at a time.

What lives here: compiled grammars, matchers of live answers, masks. What may not: what a grammar is (grammar.py),
scheduling, torch.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.engine.fair_threads import CompileQueue
from headrace.engine.grammar import (
    GrammarError,
    Vocabulary,
    characters,
    check_start,
    create_limits,
    create_matcher,
    create_spaced_matcher,
    create_tokenizer,
    forced_run,
    why_stuck,
)
from headrace.portability import open_cpus
from headrace.request import Request, StructuredOutputs, TokenMasks
from headrace.scheduler.events import AddRequest, RefuseRequest
from headrace.scheduler.roster import Sequence as LiveSequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_REFUSAL = "the grammar cannot be followed with this model's tokens"
_log = logging.getLogger(__name__)

Mask = NDArray[np.uint32]
Wanted = Sequence[tuple[int, LiveSequence]]  # samples by their place, and whose they are
Drafts = Mapping[int, Sequence[int]]
NO_DRAFTS: Drafts = MappingProxyType({})
CACHE_BYTES = 256 * 2**20
_BYTES_EACH = 2**18  # of a compiled grammar, about: measured over 1,200 JSON schemas, on the high side;
_BYTES_A_CHARACTER = 160  # and for each character of it
_MAX_THREADS = 8
# So many masks one thread makes sooner than threads are woken for them. Besides, llguidance's executor lets go of the
# interpreter, which a busy thread then keeps for milliseconds; a matcher's own calls do not.
_ROWS_ALONE = 32
_FADING = 0.25  # of what a mask took less than expected
# So many tokens a grammar is followed before it is taken: what is too much for the lexer mostly shows within a few, and
# an answer that has begun cannot be refused.
_PROBED = 12
_CLOSING = (b'"', b",", b"]", b"}", b")")


@dataclass(slots=True)
class GrammarStats:
    """Counters since the start (seconds are wall time: of compiling, beside the steps; of masks, in the loop), and the
    cache."""

    compiled: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    cached: int = 0
    cached_bytes: int = 0
    compiling: int = 0  # requests whose grammar is under way
    forced: int = 0  # tokens that no step sampled


@dataclass(frozen=True, slots=True)
class _Bridge:
    """The model's vocabulary, as all its grammars use it. ``spaced``: tokens that begin with a space, where a text's
    first one is dropped."""

    tokenizer: LLTokenizer
    eos: tuple[int, ...]
    words: int  # of a mask
    spaced: tuple[int, ...]
    closing: tuple[int, ...]  # tokens that begin with what ends a text or a list

    def create_matcher(self, wanted: StructuredOutputs) -> LLMatcher:
        """Raises GrammarError."""
        if self.spaced:
            return create_spaced_matcher(self.tokenizer, wanted, create_limits(), self.spaced)
        return create_matcher(self.tokenizer, wanted, create_limits())


@dataclass(slots=True)
class _Follower:
    """One answer's matcher and how many of its tokens it has seen."""

    matcher: LLMatcher
    seen: int = 0


@dataclass(frozen=True, slots=True)
class _Compiled:
    """``matcher`` stands at the beginning of an answer; ``mask``: of its first token."""

    matcher: LLMatcher
    mask: bytes
    seconds: float = 0.0  # 0: it was there already
    mask_seconds: float = 0.0  # the longest of the first
    size: int = 0  # bytes, about
    forced: tuple[int, ...] = ()  # what every answer begins with


@dataclass(slots=True)
class _Live:
    """One request's: whoever follows has a copy of ``start``'s matcher."""

    start: _Compiled
    followers: dict[int, _Follower] = field(default_factory=dict)  # by index of the answer


class GrammarMasks:
    """``begin`` a request, take it once compiled, ask for masks of its sequences, ``drop`` or stop to ``keep`` it.

    ``vocabulary`` is asked once, in a thread, when the first grammar comes. ``compiling``: requests that have begun and
    are not taken yet; ``seconds``: what one mask is likely to take, for each request that has been taken.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._bridge: _Bridge | None = None
        self._executor: LLExecutor | None = None
        self._threads = max(1, min(_MAX_THREADS, len(open_cpus()) - 1))
        self._queue = CompileQueue[_Compiled]()
        self._loading = threading.Lock()  # of the bridge
        self._cache: OrderedDict[StructuredOutputs, _Compiled] = OrderedDict()
        self._cache_bytes = cache_bytes
        self.compiling: dict[int, tuple[Request, Future[_Compiled]]] = {}
        self._live: dict[int, _Live] = {}
        self.seconds: dict[int, float] = {}
        self._stats = GrammarStats()

    @property
    def stats(self) -> GrammarStats:
        return replace(self._stats, cached=len(self._cache), compiling=len(self.compiling))

    def close(self) -> None:
        self._queue.close()

    # --- requests

    def begin(self, request: Request) -> None:
        wanted = request.params.structured_outputs
        assert wanted is not None
        known = self._cache.get(wanted)
        if known is not None:
            self._cache.move_to_end(wanted)
            future: Future[_Compiled] = Future()
            future.set_result(replace(known, seconds=0.0))
        else:
            future = self._queue.submit(partial(self._compile, wanted), request.grammar_seconds, request.tenant)
        self.compiling[request.request_id] = request, future

    def take_compiled(self, wait_seconds: float) -> list[AddRequest | RefuseRequest]:
        """Requests that can run, or why not; waits up to so many seconds for the first."""
        if wait_seconds:
            wait([future for _, future in self.compiling.values()], wait_seconds, FIRST_COMPLETED)
        ready = [request_id for request_id, (_, future) in self.compiling.items() if future.done()]
        return [self._take(*self.compiling.pop(request_id)) for request_id in ready]

    def drop(self, request_id: int) -> None:
        """A request that has begun is not wanted any more."""
        dropped = self.compiling.pop(request_id, None)
        if dropped is not None:
            dropped[1].cancel()

    def keep(self, request_ids: Container[int]) -> None:
        """Forgets the requests that have been taken and are none of these."""
        for request_id in [each for each in self._live if each not in request_ids]:
            del self._live[request_id], self.seconds[request_id]

    def dead_end(self, request_id: int, index: int) -> str | None:
        """Why nothing at all may follow in this answer of a request that is kept; None: something may."""
        live = self._live.get(request_id)
        follower = live.followers.get(index) if live is not None else None
        reason = why_stuck(follower.matcher) if follower is not None else None
        return None if reason is None else f"{_REFUSAL} beyond what was written: {reason}. Change it."

    def _take(self, request: Request, future: Future[_Compiled]) -> AddRequest | RefuseRequest:
        try:
            compiled = future.result()
        except GrammarError as error:
            return RefuseRequest(request, f"{_REFUSAL}: {error}. Change it.", param="structured_outputs")
        except Exception as error:  # a tokenizer that is gone, no memory …: whatever it is, this request's alone
            _log.exception("the grammar of a request could not be compiled")
            name = type(error).__name__
            return RefuseRequest(
                request,
                f"the grammar could not be compiled ({name}). The engine's log has the details; other requests go on.",
            )
        assert request.params.structured_outputs is not None
        self._remember(request.params.structured_outputs, compiled)
        self._live[request.request_id] = _Live(compiled)
        self.seconds[request.request_id] = compiled.mask_seconds
        return AddRequest(request)

    def _remember(self, wanted: StructuredOutputs, compiled: _Compiled) -> None:
        """The least recently used give way; one that is larger than the whole cache is not kept."""
        stats = self._stats
        if wanted not in self._cache:
            self._cache[wanted] = compiled
            stats.cached_bytes += compiled.size
        self._cache.move_to_end(wanted)
        while stats.cached_bytes > self._cache_bytes:
            stats.cached_bytes -= self._cache.popitem(last=False)[1].size
        stats.compiled += compiled.seconds > 0.0
        stats.compile_seconds += compiled.seconds

    # --- in a thread

    def _compile(self, wanted: StructuredOutputs) -> _Compiled:
        """Raises GrammarError."""
        with self._loading:
            bridge = self._bridge = self._bridge or self._load_bridge()
        begin = time.perf_counter()
        matcher = bridge.create_matcher(wanted)
        mask_seconds = _probe(bridge, matcher.deep_copy())
        mask, seconds = check_start(matcher), time.perf_counter() - begin
        return _Compiled(matcher, mask, seconds, mask_seconds, _size(wanted), forced_run(matcher))

    def _load_bridge(self) -> _Bridge:
        vocabulary = self._vocabulary()
        if not vocabulary.eos:
            raise GrammarError("the model names no end-of-sequence token, which would end it")
        tokens = vocabulary.tokens
        spaced = (
            [id for id, token in enumerate(tokens) if token.startswith(b" ")] if vocabulary.drops_first_space else []
        )
        closing = [id for id, token in enumerate(tokens) if token.startswith(_CLOSING)]
        words = -(-len(tokens) // 32)
        return _Bridge(create_tokenizer(vocabulary), tuple(vocabulary.eos), words, tuple(spaced), tuple(closing))

    # --- masks

    def masks(self, wanted: Wanted, drafts: Drafts = NO_DRAFTS) -> TokenMasks:
        """What each sample may be, after all that is known of its sequence; and then what may follow each of its
        ``drafts``, up to the first that may not stand there, or that ends the answer."""
        assert self._bridge is not None
        begin = time.perf_counter()
        firsts, spent = self._first_masks(wanted, self._bridge)
        paths = [[first] for first in firsts]
        self._follow(wanted, drafts, paths, spent, self._bridge)
        for (_, sequence), seconds in zip(wanted, spent, strict=True):
            self._note_seconds(sequence.request_id, seconds)
        samples = tuple(j for (j, _), path in zip(wanted, paths, strict=True) for _ in path)
        self._stats.masks += len(samples)
        self._stats.mask_seconds += time.perf_counter() - begin
        return TokenMasks(samples, self._bridge.words, b"".join([mask.tobytes() for path in paths for mask in path]))

    def _first_masks(self, wanted: Wanted, bridge: _Bridge) -> tuple[Mask, list[float]]:
        """And the seconds that each took."""
        words = np.zeros((len(wanted), bridge.words), dtype=np.uint32)
        jobs, spent = [], []
        for row, (_, sequence) in enumerate(wanted):
            since = time.perf_counter()
            live, follower = self._caught_up(sequence)
            if not follower.seen:
                words[row] = np.frombuffer(live.start.mask, dtype=np.uint32, count=bridge.words)
            elif not follower.matcher.is_error():
                jobs.append((follower.matcher, row))
            spent.append(time.perf_counter() - since)
        for (_, row), seconds in zip(jobs, self._fill(words, jobs), strict=True):
            spent[row] += seconds
        for row, (_, sequence) in enumerate(wanted):
            self._hold_open(words[row], sequence, bridge.eos)
        return words, spent

    def _follow(
        self, wanted: Wanted, drafts: Drafts, paths: list[list[Mask]], spent: list[float], bridge: _Bridge
    ) -> None:
        """Lengthens ``paths`` by the mask after each draft, as it is when the answer has these tokens; all rows'
        first ones, then the second …"""
        walkers = {  # copies, as in ``forced_run``
            row: self._caught_up(sequence)[1].matcher.deep_copy()
            for row, (j, sequence) in enumerate(wanted)
            if drafts.get(j)
        }
        depth = 0
        while walkers:
            walkers = {
                row: walker
                for row, walker in walkers.items()
                if _goes_on(walker, drafts[wanted[row][0]], depth, paths[row][-1], wanted[row][1])
            }
            words = np.zeros((len(walkers), bridge.words), dtype=np.uint32)
            depth += 1
            times = self._fill(words, [(walker, place) for place, walker in enumerate(walkers.values())])
            for row, mask, seconds in zip(tuple(walkers), words, times, strict=True):
                spent[row] += seconds
                self._hold_open(mask, wanted[row][1], bridge.eos, depth)
                if mask.any():
                    paths[row].append(mask)
                else:
                    del walkers[row]

    def forced(self, wanted: Wanted) -> dict[int, tuple[int, ...]]:
        """Of samples that were just given their masks: those that can be but one token, with the tokens that must
        follow it. Logprobs want every token's distribution."""
        runs = {j: self._forced_of(sequence) for j, sequence in wanted if sequence.request.params.logprobs is None}
        runs = {j: run for j, run in runs.items() if run}
        self._stats.forced += sum(map(len, runs.values())) - len(runs)
        return runs

    def _forced_of(self, sequence: LiveSequence) -> tuple[int, ...]:
        live, follower = self._caught_up(sequence)
        return forced_run(follower.matcher) if follower.seen else live.start.forced

    def _caught_up(self, sequence: LiveSequence) -> tuple[_Live, _Follower]:
        live = self._live[sequence.request_id]
        follower = live.followers.get(sequence.index)
        if follower is None:
            follower = live.followers[sequence.index] = _Follower(live.start.matcher.deep_copy())
        known = sequence.token_ids[sequence.num_prompt_tokens + follower.seen :].tolist()
        if known:
            follower.matcher.consume_tokens(known)
            follower.seen += len(known)
        return live, follower

    def _note_seconds(self, request_id: int, seconds: float) -> None:
        """What takes long may do so again: the figure rises at once and falls slowly. Masks after drafts count."""
        known = self.seconds[request_id]
        self.seconds[request_id] = seconds if seconds > known else known + _FADING * (seconds - known)

    def _fill(self, words: Mask, jobs: list[tuple[LLMatcher, int]]) -> list[float]:
        """Returns seconds of each. A matcher that finds no way on would have the answer end where it may not: its row
        is left empty instead."""
        start, size = words.ctypes.data, words.shape[1] * 4
        times = [time.perf_counter()]
        if len(jobs) <= _ROWS_ALONE or self._threads == 1:
            for matcher, row in jobs:
                matcher.unsafe_compute_mask_ptr(start + row * size, size)
                times.append(time.perf_counter())
        else:
            from llguidance import LLExecutor

            self._executor = self._executor or LLExecutor(self._threads)
            self._executor.unsafe_compute_mask_ptr(jobs, start, size, len(words))
            each = (time.perf_counter() - times[0]) / len(jobs)
            times += [times[0] + each * count for count in range(1, len(jobs) + 1)]
        for matcher, row in jobs:
            if matcher.is_error():
                words[row] = 0
        return [after - before for before, after in pairwise(times)]

    def _hold_open(self, mask: Mask, sequence: LiveSequence, eos: tuple[int, ...], drafts: int = 0) -> None:
        """Takes back the ends where the request wants more (min_tokens, ignore_eos), unless nothing else is left.
        ``drafts``: before this place."""
        params = sequence.request.params
        if sequence.num_output_tokens + drafts < params.min_tokens:
            ends = tuple(sequence.stop_ids)
        elif params.ignore_eos:
            ends = eos
        else:
            return
        before = mask.copy()
        for token in ends:
            if token < 32 * len(mask):
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not mask.any():
            mask[:] = before


def _goes_on(walker: LLMatcher, drafts: Sequence[int], depth: int, mask: Mask, sequence: LiveSequence) -> bool:
    """Whether a draft may stand where ``mask`` is for and does not end the answer; then it has been followed."""
    if depth == len(drafts) or (token := drafts[depth]) in sequence.stop_ids or token >= 32 * len(mask):
        return False
    return bool(mask[token >> 5] >> (token & 31) & 1) and walker.consume_token(token)


def _probe(bridge: _Bridge, matcher: LLMatcher) -> float:
    """Any tokens that may come, every other one of them ending something; returns the CPU seconds of the longest mask.

    Raises GrammarError where finding them takes too much.
    """
    draw, closing = random.Random(0), np.array(bridge.closing, dtype=np.int64)
    longest = 0.0
    for step in range(_PROBED):
        begin = time.thread_time()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        longest = max(longest, time.thread_time() - begin)
        reason = why_stuck(matcher)
        if reason is not None:
            raise GrammarError(reason)
        ends = closing[bits[closing] > 0] if step % 2 else closing[:0]
        fine = ends if len(ends) else np.flatnonzero(bits)
        token = int(fine[draw.randrange(len(fine))]) if len(fine) else bridge.eos[0]
        if token in bridge.eos or not matcher.validate_tokens([token]) or not matcher.consume_token(token):
            break
    return longest


def _size(wanted: StructuredOutputs) -> int:
    """Bytes that a compiled grammar takes, about."""
    return _BYTES_EACH + _BYTES_A_CHARACTER * characters(wanted)
