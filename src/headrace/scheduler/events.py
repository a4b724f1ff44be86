"""What may happen between two steps, as data: the scheduler's only inputs besides results.

What lives here: the events. What may not: handling them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.request import Request


@dataclass(frozen=True, slots=True)
class AddRequest:
    """``adapter_blocks``: that its adapter takes on the device."""

    request: Request
    adapter_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """It cannot be served after all: it ends with an error that says why.

    ``param``: its field that asks for what cannot be; None: it is not to blame.
    """

    request: Request
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The client left. Unknown ids (ended meanwhile) are no error."""

    request_id: int


@dataclass(frozen=True, slots=True)
class FinishSequence:
    """A stop string was found in the text: the answer ends after ``num_tokens`` output tokens; later ones are
    surplus."""

    request_id: int
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ForgetPrefixes:
    """Nothing that was computed so far is reused by requests that begin later."""


Event = AddRequest | RefuseRequest | AbortRequest | FinishSequence | ForgetPrefixes
