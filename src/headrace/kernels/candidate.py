"""What a kernel candidate is: a name, where it runs, and how it accepts or declines a call site.

What lives here: the nouns the registry and the candidates share. What may not: kernels, choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Declined:
    """A candidate cannot serve a call site; ``reason`` is printed by ``headrace doctor``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Site:
    """A call site as the registry describes it to candidates. ``facts`` are static: they hold for every call from there."""

    op: str
    device: torch.device
    facts: Mapping[str, Any]
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to carry out an operation, with the twin's signature. ``create`` returns the callable or why not."""

    name: str
    create: Callable[[Site], Callable[..., Any] | Declined]
    devices: tuple[str, ...] = ("cpu",)  # torch device types
    batch_invariant: bool = True  # the bits of a row do not depend on the other rows
