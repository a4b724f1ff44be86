"""The vendor's candidates, for the registry.

What lives here: the lists, and what declines a call site before the library is looked for. What may not: the library's calls.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from headrace.kernels.candidate import Candidate, Declined, Site

TUNED = "tuned"


def _create(name: str) -> Callable[[Site], Callable[..., Any] | Declined]:
    def create(site: Site) -> Callable[..., Any] | Declined:
        made: Callable[..., Any] | Declined = getattr(import_module("headrace.kernels.vendor.tuned"), name)(site)
        return made

    return create


LINEAR = (Candidate(TUNED, _create("create_linear"), ("cuda",), batch_invariant=False),)
ADDED_LINEAR = (Candidate(TUNED, _create("create_sum"), ("cuda",), batch_invariant=False),)
