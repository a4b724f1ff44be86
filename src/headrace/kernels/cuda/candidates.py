"""The candidates in CUDA C++, for the registry.

What lives here: what declines a call site before anything is compiled, and what a start builds. What may not: kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from headrace.kernels.candidate import Candidate, Declined, Site, Sizes
from headrace.kernels.cuda.step_shape import why_not

PERSISTENT = "persistent"
_CAPABILITY = (9, 0)  # bulk copies into shared memory, 227 KiB of it


def _decode_step(site: Site) -> Callable[..., Any] | Declined:
    """Whoever is declined loses nothing but speed: a decoder's own layers stand behind it."""
    spec, dtype = site.facts.get("spec"), site.facts.get("dtype")
    if spec is None:
        return Declined("the call site does not state the decoder's spec", by_choice=True)
    if dtype is not torch.bfloat16:
        return Declined(f"element type {str(dtype).removeprefix('torch.')} is not bfloat16", by_choice=True)
    if (capability := torch.cuda.get_device_capability(site.device)) != _CAPABILITY:
        return Declined("compute capability {}.{} is not {}.{}".format(*capability, *_CAPABILITY), by_choice=True)
    programs = torch.cuda.get_device_properties(site.device).multi_processor_count
    if (reason := why_not(spec, programs)) is not None:
        return Declined(reason, by_choice=True)
    from headrace.kernels.cuda.decode_step import DecodeSteps

    return DecodeSteps(spec, site.device, programmatic=site.programmatic)


def _rehearse(site: Site, made: Callable[..., Any], sizes: Sizes) -> Iterable[tuple[str, Callable[[], object]]]:
    from headrace.kernels.cuda.decode_step import DecodeSteps

    assert isinstance(made, DecodeSteps)
    return [(f"all layers, blocks of {sizes.block_size}", partial(made.prepare, sizes.block_size))]


DECODE_STEP = (Candidate(PERSISTENT, _decode_step, ("cuda",), batch_invariant=False, rehearse=_rehearse),)
