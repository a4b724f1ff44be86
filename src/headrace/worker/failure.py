"""What a failed step becomes: one line for the clients whose requests end with it; the log has the rest.

What lives here: that line. What may not: recovering (the executors).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from headrace.errors import StepFailed
from headrace.request import StepPlan

GIB = 2**30
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMG]?i?B|\d+ bytes)")
_ON_CPU = "--max-num-batched-tokens, --max-num-seqs, --max-logits-rows or --kv-cache-memory"
_ON_GPU = "--gpu-memory-utilization, --max-num-batched-tokens, --max-num-seqs or --max-logits-rows"


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in str(error).lower() for words in _OUT_OF_MEMORY
    )


def failure_of(error: Exception, plan: StepPlan, memory: Mapping[str, int]) -> StepFailed:
    """Says no more than a client may read. ``memory``: ExecutorInfo.memory, bytes by purpose."""
    shape = f"{plan.num_tokens} tokens of {len(plan.rows)} sequences"
    if not out_of_memory(error):
        return StepFailed(
            f"A step of {shape} failed ({type(error).__name__}). The engine's log has the details; other requests go on."
        )
    wanted = _WANTED.search(str(error))
    asked = f"It asked for {wanted.group(1)}" if wanted else "It asked for memory"
    planned = ", ".join(
        f"{name} {memory[name] / GIB:.2f} GiB" for name in ("weights", "kv_cache", "activations") if name in memory
    )
    flags = _ON_GPU if isinstance(error, torch.OutOfMemoryError) else _ON_CPU
    beside = f" beside {planned}" if planned else ""
    return StepFailed(
        f"A step of {shape} ran out of memory. {asked}, more than is left{_free(error)}{beside}. Lower {flags}."
    )


def _free(error: Exception) -> str:
    """What the GPU has left, where it is the GPU's memory that ran out."""
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_initialized():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f" ({free / GIB:.2f} of {total / GIB:.2f} GiB are free)"
