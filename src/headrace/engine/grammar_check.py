"""Whether a constraint can be followed: tried out in a process that can be killed (grammar_worker.py) before a request is submitted.

What lives here: asking, remembering verdicts, and sentences for what is wrong with grammars. What may not: llguidance, masks.

The engine compiles a grammar again, with the model's own vocabulary (grammar_masks.py); by then it is known to be harmless.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

from headrace.engine.lanes import Lane
from headrace.engine.sandbox import MAX_PROCESSES, Reply, SandboxPool
from headrace.engine.template_frames import encode_frame
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, InvalidRequest
from headrace.sampling_params import StructuredOutputs

COMPILE_SECONDS = 2.0  # of CPU time
QUICK_SECONDS = 0.25  # likewise: what takes longer goes on in a lane of its own, where it holds up nobody but its like
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
        raise HeadraceError("the process that tries grammars out cannot start; see whether `python -c 'import llguidance'` works.")


class GrammarCheck:
    """Verdicts on constraints. Thread-safe; ``special`` are the names of the model's special tokens, which grammars may use."""

    def __init__(self, special: Iterable[str], *, seconds: float = COMPILE_SECONDS) -> None:
        self._seconds = seconds
        self._pool = SandboxPool("headrace.engine.grammar_worker", {"special": sorted(special)}, _check_started)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # digest → why not; empty: it is fine
        self._lock = threading.Lock()
        self._quick = Lane(MAX_PROCESSES - 1, "headrace-grammar", most=_MOST_WAITING)
        self._slow = Lane(1, "headrace-long-grammar", most=_MOST_WAITING)

    def require(self, wanted: StructuredOutputs) -> None:
        """Raises InvalidRequest when ``wanted`` cannot be followed. The first time this may take seconds: not for an event loop."""
        reason = self._verdict(wanted)
        if reason is None:
            reason = self._try_out(wanted, self._seconds)
        if reason:
            raise InvalidRequest(f"the {_name(wanted)} cannot be followed: {reason}. Change or simplify it.", param=_PARAM)

    async def require_soon(self, wanted: StructuredOutputs, tenant: str = "") -> None:
        """``require`` beside the event loop; afterwards it answers at once. Raises Overloaded, too."""
        if self._verdict(wanted) is None:
            quick = partial(self._try_out, wanted, min(QUICK_SECONDS, self._seconds))
            if _characters(wanted) > _LARGE or await self._quick.run(quick, tenant) is None:
                await self._slow.run(partial(self._try_out, wanted, self._seconds), tenant)
        self.require(wanted)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
        self._pool.close()

    def _verdict(self, wanted: StructuredOutputs) -> str | None:
        """Why not; empty: it is fine; None: it is not known."""
        with self._lock:
            return self._verdicts.get(_digest(wanted))

    def _try_out(self, wanted: StructuredOutputs, seconds: float) -> str | None:
        """The verdict, which is remembered; None where it would have taken longer than ``seconds``, but perhaps not than it may."""
        reason = self._verdict(wanted)  # of the same one, which was tried out meanwhile
        if reason is None:
            reason = self._ask(encode_frame({"wanted": asdict(wanted), "seconds": seconds}), seconds)
            if reason is not None:
                self._remember(wanted, reason)
        return reason

    def _ask(self, frame: bytes, seconds: float) -> str | None:
        with self._pool.borrowed() as sandbox:
            reply = sandbox.request(frame)
            if reply is not None:
                return str(reply.get("error", ""))
            ended_by = sandbox.ended_by()
            sandbox.close()
            return None if ended_by == signal.SIGPROF and seconds < self._seconds else self._cause(ended_by)

    def _remember(self, wanted: StructuredOutputs, reason: str) -> None:
        with self._lock:
            self._verdicts[_digest(wanted)] = reason
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)

    def _cause(self, ended_by: int) -> str:
        if ended_by == signal.SIGPROF:
            return f"it takes more than {self._seconds:g} s of CPU time to compile"
        if ended_by == signal.SIGSEGV:
            return "it is nested too deeply to compile"
        return "it takes too much memory to compile"


def _characters(wanted: StructuredOutputs) -> int:
    return sum(len(text) for text in (wanted.json, wanted.regex, wanted.grammar, wanted.preface, *wanted.choice) if text is not None)


def _digest(wanted: StructuredOutputs) -> bytes:
    return hashlib.sha256(repr(wanted).encode()).digest()


def _name(wanted: StructuredOutputs) -> str:
    names = {"json": "JSON schema", "json_object": "JSON object", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}
    return next(name for field, name in names.items() if getattr(wanted, field) not in (None, False, ()))
