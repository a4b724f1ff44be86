"""Where a draft model comes from, and in which format its weights are held.

A draft's every pass reads them, and whatever it proposes is verified: so where a device multiplies FP8, a large draft
is rounded while it is read, its head too, which only the target's verification sees.

What lives here: that choice. What may not: torch, whether a draft fits its target (worker/draft_setup.py).
"""

from __future__ import annotations

from dataclasses import replace

from headrace.config import Decision, ModelConfig
from headrace.cost.shapes import multiplications
from headrace.errors import ModelError
from headrace.models import families
from headrace.models.source import ModelSource, find_model, quantised_as_asked
from headrace.sites import is_plain

AUTO = "auto"
FAST_FP8 = (9, 0)  # Hopper, where drafts in FP8 were measured
# That a pass multiplies by: a smaller draft's time is launches, not reading. Measured with 973 million.
LEAST_WEIGHTS = 500_000_000


def find_draft(
    config: ModelConfig, model: str, quantization: str, capability: tuple[int, int] | None
) -> tuple[ModelSource, Decision | None]:
    """``quantization``: as speculative_config has it. ``capability``: of the GPU that drafts; None: a CPU does. Raises
    ModelError."""
    source = find_model(replace(config, model=model, quantization=None))
    if quantization != AUTO:
        made = quantised_as_asked(source, quantization, head=True)
        return made, Decision("draft weights", quantization, "as asked for") if made.makes is not None else None
    if capability is None or capability < FAST_FP8 or not _gains(source):
        return source, None
    try:
        made = quantised_as_asked(source, "fp8", head=True)
        families.spec_from_config(made.config)
    except ModelError as error:
        return source, Decision("draft weights", "as stored", error.message)
    reason = "a pass reads all of them, and whatever it drafts is verified: rounded while they are read"
    return made, Decision("draft weights", "fp8", f"{reason}, head and all; quantization none leaves them as they are")


def _gains(source: ModelSource) -> bool:
    """One that is no model is for others to refuse."""
    try:
        spec = families.spec_from_config(source.config)
    except ModelError:
        return False
    return is_plain(spec) and multiplications(spec) * spec.num_layers >= LEAST_WEIGHTS
