"""What candidates on a GPU have in common.

What lives here: how a Triton kernel becomes a candidate, and what of its compiler a start prepares. What may not:
kernels, importing triton before a call site asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from headrace.kernels.candidate import Calls, CallSite, Candidate, Card, Declined, F, Sizes, plainly_empty
from headrace.processes.builders import Builders

TRITON = "triton"
DEVICES = ("cuda",)
LEAST = (8, 0)  # bf16 matrix instructions, asynchronous copies


@cache
def missing(device: torch.device) -> str | None:
    """Why no Triton kernel can run on ``device``; None if one can."""
    if find_spec("triton") is None:
        return "triton is not installed (it comes with torch for CUDA)"
    card = Card.of(device)
    if card is None:
        return "torch finds no CUDA device"
    return (
        None if card.capability >= LEAST else "compute capability {}.{} is below {}.{}".format(*card.capability, *LEAST)
    )


def load(path: str) -> Any:
    """``module:name`` below this package."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"headrace.kernels.{module}"), name)


def triton(
    path: str,
    warm_up: Callable[[CallSite[F], Any, Sizes], Calls] | None,
    refuses: Callable[[CallSite[F]], str | None] | None = None,
    *,
    name: str = TRITON,
    chained: int = 0,
    takes: bool = False,
    least: tuple[int, int] = LEAST,
    **declared: Any,
) -> Candidate[F]:
    """A Triton kernel, for call sites that it does not refuse. A name that starts with ``create_`` makes the callable
    from the site; of one with a dot, it is that method of what the class makes ``at`` the site; any other is the
    callable. ``chained``: for so many rows it can be launched while the kernel before still runs. ``takes``: it is told
    where results get their memory.
    """

    def create(site: CallSite[F]) -> Any:
        if (reason := missing(site.device)) is not None:
            return Declined(reason)
        module, _, kernel = path.partition(":")
        maker, _, method = kernel.partition(".")
        found = load(f"{module}:{maker}")
        if method:
            return getattr(found.at(site), method)
        if kernel.startswith("create_"):
            return found(site)
        if takes and site.empty is not plainly_empty:
            found = partial(found, empty=site.empty)
        if chained and site.pdl:
            return partial(_chained, found, chained)
        return found

    return Candidate(name, create, DEVICES, least=least, refuses=refuses, failure=failure, warm_up=warm_up, **declared)


def _chained(found: Callable[..., object], most: int, first: torch.Tensor, *rest: object) -> object:
    """Few rows are a chain of short kernels. Norms and rotations of more stand between products of torch's, beside
    which kernels let in early are in the way: 8 and 3 % of a step of 256 and 128 rows of an 8B model, on an H200. What
    stands before a step's layers and behind its head is short whatever the rows, so it has no such bound.
    """
    return found(first, *rest, pdl=len(first) <= most)


def failure(error: Exception) -> str | None:
    reason: str | None = load("build.toolchain:build_failure")(error)
    return reason


def prepare_compiler() -> tuple[str, str | None]:
    """What every compilation needs once, without looking at a device; importing the compiler is part of it.

    Returns the folder in which compiled kernels are kept, and if it is not the one Triton was told to use or nothing
    can be compiled, why.
    """
    from headrace.kernels.build import toolchain

    folder, problem = toolchain.cache_folder()
    return folder, toolchain.prepare_compiler() or problem


def prepare_kernels(device: torch.device) -> None:
    """What must be there before kernels are compiled in several threads: all of them are imported."""
    load("build.toolchain:prepare_kernels")(device)


@contextmanager
def built_by(builders: Builders | None) -> Iterator[None]:
    """What this thread compiles within, they compile for it."""
    from headrace.kernels.build.launch import BUILDERS

    before = BUILDERS.set(builders)
    try:
        yield
    finally:
        BUILDERS.reset(before)
