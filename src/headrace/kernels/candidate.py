"""What a kernel candidate is: a name, where it runs, and how it accepts or declines a call site.

What lives here: the nouns the registry and the candidates share. What may not: kernels, choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.spec import DecoderSpec

Empty = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]  # memory for a result; its first dimension counts rows of the step


def plainly_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Declined:
    """A candidate does not serve a call site; ``reason`` is printed by ``headrace doctor``.

    ``by_choice``: it could, but what stands behind it is better there. That is no fallback: ``--strict-kernels`` does not mind.
    """

    reason: str
    by_choice: bool = False


def _unknown() -> Callable[..., Any]:
    raise LookupError("this call site was not made by the registry, which alone knows who stands behind a candidate")


@dataclass(frozen=True, slots=True)
class Site:
    """A call site as the registry describes it to candidates. ``facts`` are static: they hold for every call from there.

    ``programmatic``: kernels may be launched while the one before still runs, and wait for it themselves. ``unified_maximum``: a softmax
    need not look for its maximum where a guard finds out whether that was needed. ``cuda_prefill``: prompts are attended to in CUDA C++
    where there is a kernel for it; ``cuda_decode``: so are single queries before them. ``behind``: what the candidates after this one, or
    the twin, make of the same call site, for one that serves a part of what comes from there; who asks has accepted. ``empty``: where
    results of many rows get their memory.
    """

    op: str
    device: torch.device
    facts: Mapping[str, Any]
    batch_invariant: bool
    programmatic: bool = False
    unified_maximum: bool = False
    cuda_prefill: bool = False
    cuda_decode: bool = False
    behind: Callable[[], Callable[..., Any]] = _unknown
    empty: Empty = plainly_empty


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the call sites of one model will be given, as far as kernels are compiled for it. Sizes in tokens."""

    spec: DecoderSpec
    dtype: torch.dtype
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


Rehearse = Callable[[Site, Callable[..., Any], Sizes], Iterable[tuple[str, Callable[[], object]]]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to carry out an operation, with the twin's signature. ``create`` returns the callable or why not.

    ``failure``: the reason, if an exception out of a call means that its kernel cannot be built or loaded on this device (and nothing was
    computed); None for every other exception. Without it every exception is the caller's.
    ``rehearse``: calls over small inputs, independent of each other, that together build every kernel the site will need. Their names
    say which: of one name for one operation and element type, one is enough, whichever site it is from.
    """

    name: str
    create: Callable[[Site], Callable[..., Any] | Declined]
    devices: tuple[str, ...] = ("cpu",)  # torch device types
    batch_invariant: bool = True  # the bits of a row do not depend on the other rows
    asked: bool = False  # chosen only where it was asked for by name
    failure: Callable[[Exception], str | None] | None = None
    rehearse: Rehearse | None = None
