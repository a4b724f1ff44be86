"""A front end's part where some replicas compute prompts and the others answer: both are told, and their notes to each
other passed on.

    front end   →  who answers           AwaitPrompt: the request
    front end   →  who computes          ComputePrompt: its prompt, for one token that nobody sees
    who answers →  who computes          Want, Taken
    who computes → who answers           Sent

Of one that dies while it computes a prompt, another takes over from the first node that was not sent; where there is
none, who answers computes the rest. Who answers has told its own cached tokens as everything that came to it; the
number that clients see is what either of them had found cached.

What lives here: that. What may not: who is chosen (routing.py, disagg/roles.py), notes' meaning (disagg/hand_over.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.disagg.hand_over import prompt_alone
from headrace.disagg.notes import Note, Sent, Want
from headrace.disagg.roles import Roles
from headrace.engine import connection as frames
from headrace.engine.connection import EngineSocket
from headrace.processes.messages import pack
from headrace.request import FinishReason, Request, SequenceOutput


@dataclass(slots=True)
class _Apart:
    request: Request
    answers: int
    computes: int | None  # None: nobody any more
    wanted: int | None = None  # the first node that has not been sent
    # tokens of the prompt that were found cached by who answers, and by who computes
    had: int | None = None
    found: int | None = None


class Relay:
    """``sockets``: of all replicas. ``roles`` is told how far requests are."""

    def __init__(self, sockets: Sequence[EngineSocket], roles: Roles) -> None:
        self._sockets, self._roles = sockets, roles
        self._open: dict[int, _Apart] = {}  # until there is a first token

    def begin(self, request: Request, answers: int, computes: int) -> None:
        self._open[request.request_id] = _Apart(request, answers, computes)
        self._sockets[answers].send(pack(frames.AwaitPrompt(request)))
        self._compute(request, computes)

    def _compute(self, request: Request, number: int) -> None:
        self._sockets[number].send(pack(frames.ComputePrompt(prompt_alone(request))))

    def abort(self, request_id: int) -> None:
        """Who answers is told by others."""
        apart = self._open.pop(request_id, None)
        if apart is not None and apart.computes is not None:
            self._sockets[apart.computes].abort(request_id)

    def lost(self, number: int) -> list[Request]:
        """Whose prompts that one still had to send."""
        return [each.request for each in self._open.values() if each.computes == number]

    def compute_again(self, request: Request, number: int | None) -> None:
        """By that one; None: by who answers."""
        apart = self._open[request.request_id]
        if number is None:
            self._go_on(apart)
            return
        apart.computes = number
        self._roles.moved(request.request_id, number)
        self._compute(request, number)
        if apart.wanted is not None:
            self._sockets[number].send(frames.pack_note(Want(request.request_id, apart.wanted, 0)))

    def _go_on(self, apart: _Apart) -> None:
        request_id = apart.request.request_id
        if apart.computes is not None:
            self._sockets[apart.computes].abort(request_id)
        apart.computes = None
        self._sockets[apart.answers].send(pack(frames.GoOn(request_id)))

    def pass_on(self, number: int, note: Note) -> None:
        apart = self._open.get(note.request_id)
        if apart is None:
            return
        if isinstance(note, Sent):
            if apart.computes == number:
                apart.wanted = note.first + len(note.slots)
                self._sockets[apart.answers].send(frames.pack_note(note))
            return
        if isinstance(note, Want):
            apart.wanted, apart.had = note.first, note.cached
            self._roles.has_room(note.request_id)
        if apart.computes is not None:
            self._sockets[apart.computes].send(frames.pack_note(note))

    def hear(self, number: int, frame: frames.Step, where: Callable[[int], int | None]) -> frames.Step:
        """What clients are to see of it. ``where``: who answers a request. (A prompt that is computed for another
        replica ends with its token, so none of these is in the columns.)"""
        for out in frame.rows:
            if (apart := self._open.get(out.request_id)) is not None and apart.computes == number:
                self._computed(apart, out)
        theirs = [self._begun(out) for out in frame.rows if where(out.request_id) in (number, None)]
        return frames.Step(frame.request_ids, frame.indexes, frame.token_ids, tuple(theirs))

    def _computed(self, apart: _Apart, out: SequenceOutput) -> None:
        self._roles.computed(out.request_id)
        if out.finished is not None and out.finished.reason is FinishReason.ERROR:
            self._go_on(apart)
        elif apart.found is None:  # later it finds what it has computed itself
            apart.found = out.num_cached_tokens

    def _begun(self, out: SequenceOutput) -> SequenceOutput:
        """Of who answers: with the first token, or the end, nothing more is to be passed on."""
        if out.num_cached_tokens is None and out.finished is None:
            return out
        apart = self._open.get(out.request_id)
        if apart is None:
            return out
        self.abort(out.request_id)
        if apart.had is None or out.num_cached_tokens is None:
            return out
        return out._replace(num_cached_tokens=max(apart.had, apart.found or 0))
