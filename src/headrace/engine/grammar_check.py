"""Whether a constraint can be followed: tried out in a process that can be killed (grammar_worker.py) before a request is submitted.

What lives here: asking, remembering verdicts, and sentences for what is wrong with grammars. What may not: llguidance, masks.

The engine compiles a grammar again, with the model's own vocabulary (grammar_masks.py); by then it is known to be harmless.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from headrace.engine.sandbox import MAX_PROCESSES, Reply, Sandbox, SandboxPool
from headrace.engine.template_frames import encode_frame
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, InvalidRequest
from headrace.sampling_params import StructuredOutputs

COMPILE_SECONDS = 2.0  # of CPU time
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
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, "headrace-grammar")  # its own: two seconds here hold up nothing else

    def require(self, wanted: StructuredOutputs) -> None:
        """Raises InvalidRequest when ``wanted`` cannot be followed. The first time this may take seconds: not for an event loop."""
        digest = _digest(wanted)
        with self._lock:
            reason = self._verdicts.get(digest)
        if reason is None:
            reason = self._try_out(wanted)
            with self._lock:
                self._verdicts[digest] = reason
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if reason:
            raise InvalidRequest(f"the {_name(wanted)} cannot be followed: {reason}. Change or simplify it.", param=_PARAM)

    async def require_soon(self, wanted: StructuredOutputs) -> None:
        """``require`` beside the event loop; afterwards it answers at once."""
        with self._lock:
            known = _digest(wanted) in self._verdicts
        if known:
            self.require(wanted)
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, self.require, wanted)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def _try_out(self, wanted: StructuredOutputs) -> str:
        frame = encode_frame({"wanted": asdict(wanted), "seconds": self._seconds})
        with self._pool.borrowed() as sandbox:
            reply = sandbox.request(frame)
            if reply is None:
                reason = self._cause(sandbox)
                sandbox.close()
                return reason
        return str(reply.get("error", ""))

    def _cause(self, sandbox: Sandbox) -> str:
        ended_by = sandbox.ended_by()
        if ended_by == signal.SIGPROF:
            return f"it takes more than {self._seconds:g} s of CPU time to compile"
        if ended_by == signal.SIGSEGV:
            return "it is nested too deeply to compile"
        return "it takes too much memory to compile"


def _digest(wanted: StructuredOutputs) -> bytes:
    return hashlib.sha256(repr(wanted).encode()).digest()


def _name(wanted: StructuredOutputs) -> str:
    names = {"json": "JSON schema", "json_object": "JSON object", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}
    return next(name for field, name in names.items() if getattr(wanted, field) not in (None, False, ()))
