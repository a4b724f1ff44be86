"""Every error a user can meet, and the HTTP status each one becomes.

What lives here: the exception tree. What may not: catching, logging, wire formats (server/wire.py renders them).

A message states what was found with its numbers, what was expected, and ends with the remedy.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of all errors raised on purpose. ``status`` is the HTTP status, ``type`` the wire's error type."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(HeadraceError, ValueError):
    """A request that can never be served as it stands. ``param`` names the offending field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt (plus what was asked for) does not fit the model's context or the whole cache."""

    def __init__(
        self,
        num_tokens: int,
        limit: int,
        *,
        param: str = "messages",
        what: str = "the prompt has",
        remedy: str = "Shorten the prompt or ask for fewer tokens.",
    ) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but {what} {num_tokens} tokens. {remedy}",
            param=param,
            code="context_length_exceeded",
        )


class NotFound(HeadraceError):
    """An unknown model or route."""

    status = 404
    type = "not_found_error"


class Unauthorized(HeadraceError):
    """No key, or the wrong one."""

    status = 401
    type = "authentication_error"


class PayloadTooLarge(HeadraceError):
    """A body over the size limit."""

    status = 413
    type = "invalid_request_error"


class Overloaded(HeadraceError):
    """The queue is full, or a request would come too late. ``retry_after`` is in seconds, 1 to 30."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int = 1, code: str = "queue_full") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class Unavailable(HeadraceError):
    """Loading, draining or dead. ``retry_after`` is in seconds, 1 to 30."""

    status = 503
    type = "service_unavailable_error"

    def __init__(self, message: str, *, retry_after: int = 2) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConfigError(HeadraceError, ValueError):
    """A flag, a config file or a combination of switches that cannot be honoured."""


class ModelError(HeadraceError):
    """A checkpoint, config, tokenizer or template that is missing, damaged or not understood."""


class OutOfMemory(HeadraceError):
    """Memory that a start, or one that wakes, needs and the machine does not have."""

    status = 503
    type = "service_unavailable_error"


class StepFailed(HeadraceError):
    """A whole step failed in the executor; its requests end with this error, others go on."""


class StepLost(StepFailed):
    """A step that can be computed again: no request fails of it."""


class ModerationFailed(HeadraceError):
    """What judges answers could not judge this one, so it is not sent."""

    type = "moderation_error"


class EngineDead(HeadraceError):
    """The engine process is gone; nothing more will come from it."""

    status = 503
    type = "service_unavailable_error"


class BenchFailed(HeadraceError):
    """Nothing could be measured."""
