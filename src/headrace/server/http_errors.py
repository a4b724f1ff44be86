"""Errors that only HTTP knows. The rest are in headrace/errors.py; all leave in one shape (wire.py).

What lives here: exception classes. What may not: rendering.
"""

from __future__ import annotations

from headrace.errors import HeadraceError


class HttpError(HeadraceError):
    """A request that HTTP's own rules turn away."""

    status = 400
    type = "invalid_request_error"


class Forbidden(HttpError):
    """A foreign Host or Origin: a browser was led here by another site's page."""

    status = 403
    type = "permission_error"


class MethodNotAllowed(HttpError):
    """The route exists, for other methods. ``allow`` is the header's value."""

    status = 405

    def __init__(self, method: str, allow: str) -> None:
        super().__init__(f"This route does not take {method[:20]}; use {allow}.", code="method_not_allowed")
        self.allow = allow


class RequestTimeout(HttpError):
    """The client did not finish sending its request in time."""

    status = 408


class UnsupportedMediaType(HttpError):
    """A body that is not plain application/json."""

    status = 415


class HeadersTooLarge(HttpError):
    """More header bytes or lines than any client needs."""

    status = 431


class ClientLeft(HttpError):
    """The client closed its connection and reads nothing more. The status is the access log's."""

    status = 499


class ClientTooSlow(ClientLeft):
    """The client stopped reading; its connection is cut."""
