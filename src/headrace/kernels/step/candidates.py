"""The candidates for all layers of a decode step at once, and for a run of drafts.

What lives here: what declines a call site before anything is compiled, and what a start builds. What may not: kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from headrace.kernels.build.gpu import DEVICES, load
from headrace.kernels.build.native import native
from headrace.kernels.candidate import Calls, CallSite, Candidate, Declined, Sizes, StepFacts
from headrace.kernels.step.native import create_drafts
from headrace.kernels.step.shape import why_not

PERSISTENT = "persistent"
_CAPABILITY = (9, 0)  # bulk copies into shared memory, 227 KiB of it


def _decode_step(site: CallSite[StepFacts]) -> Any:
    """Whoever is declined loses nothing but speed: a decoder's own layers stand behind it."""
    if (capability := torch.cuda.get_device_capability(site.device)) != _CAPABILITY:
        return Declined("compute capability {}.{} is not {}.{}".format(*capability, *_CAPABILITY))
    if site.facts.kv is not None:
        return Declined(f"keys and values are held as {site.facts.kv.name}")
    programs = torch.cuda.get_device_properties(site.device).multi_processor_count
    if (reason := why_not(site.facts.spec, programs)) is not None:
        return Declined(reason)
    return load("step.persistent:DecodeSteps")(site.facts.spec, site.device, programmatic=site.programmatic)


def _rehearse(site: CallSite[StepFacts], made: Any, sizes: Sizes) -> Calls:
    return [(f"all layers, blocks of {sizes.block_size}", partial(made.prepare, sizes.block_size))]


DECODE_STEP = (
    Candidate(
        PERSISTENT, _decode_step, DEVICES, (torch.bfloat16,), frozenset({"persistent_decode"}), batch_invariant=False, optional=True,
        rehearse=_rehearse,
    ),
)  # fmt: skip

DRAFT_TOKENS = (native(create_drafts, optional=True),)
