"""Whether a constraint can be followed: tried out in a process that can be killed (grammar_worker.py) before a request
is submitted.

What lives here: asking, remembering verdicts, and sentences for what is wrong with grammars. What may not: llguidance,
masks.

The engine compiles a grammar again, with the model's own vocabulary (grammar_masks.py); by then it is known to be
harmless.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial

from headrace.engine.fair_threads import FairThreads
from headrace.engine.grammar import characters
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, InvalidRequest
from headrace.processes.sandbox import MAX_PROCESSES, Reply, SandboxPool, json_line
from headrace.request import StructuredOutputs

COMPILE_SECONDS = 2.0  # of CPU time
QUICK_SECONDS = 0.25  # likewise: what takes longer goes on in threads of its own, where it holds up only its like
_LARGE = 32 * 1024  # characters, that are never quick
_MOST_WAITING = 64  # trials of one tenant
MAX_VERDICTS = 16384  # remembered, some hundred bytes each
_PARAM = "structured_outputs"


def create_grammar_check(tokenizer: Tokenizer | None) -> GrammarCheck | None:
    """None: no grammar can be followed with this tokenizer."""
    if tokenizer is None or not tokenizer.composes:
        return None
    return GrammarCheck(tokenizer.token_text(token) for token in tokenizer.special_token_ids)


def _check_started(reply: Reply | None) -> None:
    if reply is None:
        raise HeadraceError(
            "the process that tries grammars out cannot start; see whether `python -c 'import llguidance'` works."
        )


@dataclass(frozen=True, slots=True)
class _Verdict:
    """``reason``: why not; empty: it is fine, and takes about so many seconds of CPU time to compile."""

    reason: str
    seconds: float = 0.0


class GrammarCheck:
    """Verdicts on constraints. Thread-safe; ``special`` are the names of the model's special tokens, which grammars may
    use."""

    def __init__(self, special: Iterable[str], *, seconds: float = COMPILE_SECONDS) -> None:
        self._seconds = seconds
        opening = {"special": sorted(special)}
        # Long trials have a process of their own: a short one never has to start another.
        self._pool, self._long_pool = (
            SandboxPool("headrace.engine.grammar_worker", opening, _check_started) for _ in range(2)
        )
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # by digest
        self._lock = threading.Lock()
        self._quick = FairThreads(MAX_PROCESSES - 1, "headrace-grammar", most=_MOST_WAITING)
        self._slow = FairThreads(1, "headrace-long-grammar", most=_MOST_WAITING)

    def require(self, wanted: StructuredOutputs) -> float:
        """Seconds that compiling takes. Raises InvalidRequest when ``wanted`` cannot be followed. Not for an event loop
        the first time: it may take seconds."""
        verdict = self._verdict(wanted) or self._try_out(wanted, self._seconds)
        assert verdict is not None
        if verdict.reason:
            raise InvalidRequest(
                f"the {_name(wanted)} cannot be followed: {verdict.reason}. Change or simplify it.", param=_PARAM
            )
        return verdict.seconds

    async def require_soon(self, wanted: StructuredOutputs, tenant: str = "") -> None:
        """``require`` beside the event loop; afterwards it answers at once. Raises Overloaded, too."""
        if self._verdict(wanted) is None:
            quick = partial(self._try_out, wanted, min(QUICK_SECONDS, self._seconds))
            if characters(wanted) > _LARGE or await self._quick.run(quick, tenant) is None:
                await self._slow.run(partial(self._try_out, wanted, self._seconds), tenant)
        self.require(wanted)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
        self._pool.close()
        self._long_pool.close()

    def _verdict(self, wanted: StructuredOutputs) -> _Verdict | None:
        with self._lock:
            return self._verdicts.get(_digest(wanted))

    def _try_out(self, wanted: StructuredOutputs, seconds: float) -> _Verdict | None:
        """The verdict, which is remembered; None where it would have taken longer than ``seconds``, but perhaps not
        than it may."""
        verdict = self._verdict(wanted)  # of the same one, which was tried out meanwhile
        if verdict is None:
            given = {each.name: getattr(wanted, each.name) for each in fields(wanted)}
            verdict = self._ask(json_line({"wanted": given, "seconds": seconds}), seconds)
            if verdict is not None:
                self._remember(wanted, verdict)
        return verdict

    def _ask(self, line: bytes, seconds: float) -> _Verdict | None:
        may_go_on = seconds < self._seconds
        with (self._pool if may_go_on else self._long_pool).borrowed() as sandbox:
            reply = sandbox.request(line)
            if reply is not None:
                return _Verdict(str(reply.get("error", "")), float(reply.get("seconds", 0.0)))
            ended_by = sandbox.ended_by()
            sandbox.close()
            return None if ended_by == signal.SIGPROF and may_go_on else _Verdict(self._cause(ended_by))

    def _remember(self, wanted: StructuredOutputs, verdict: _Verdict) -> None:
        with self._lock:
            self._verdicts[_digest(wanted)] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)

    def _cause(self, ended_by: int) -> str:
        if ended_by == signal.SIGPROF:
            return f"it takes more than {self._seconds:g} s of CPU time to compile"
        if ended_by == signal.SIGSEGV:
            return "it is nested too deeply to compile"
        return "it takes too much memory to compile"


def _digest(wanted: StructuredOutputs) -> bytes:
    return hashlib.sha256(repr(wanted).encode()).digest()


def _name(wanted: StructuredOutputs) -> str:
    names = dict(
        json="JSON schema", json_object="JSON object", regex="regular expression", choice="choice", grammar="grammar"
    )
    return next(name for field, name in names.items() if getattr(wanted, field) not in (None, False, ()))
