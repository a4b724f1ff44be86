"""The C run of drafts (draft.c) as a torch function.

What lives here: the structs of draft.c, pointers, and which decoders are accepted. What may not: compiling (build/),
mathematics.
"""

from __future__ import annotations

from ctypes import c_int, c_void_p
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of
from headrace.kernels.candidate import CallSite, Declined, StepFacts
from headrace.kernels.step.reference import DraftRows, StepWeights
from headrace.kernels.step.shape import beyond_plain
from headrace.spec import DecoderSpec

MAX_HEAD_DIM = 512  # attention.c: MAX_DIM
_MODEL = Struct("@9q5P2d")
_DRAFTING = Struct("@5q10Pq")


@dataclass(frozen=True, slots=True, eq=False)
class NativeDrafts:
    """One decoder's."""

    function: Any
    weights: StepWeights
    spec: DecoderSpec
    _held: tuple[Any, bytes] = field(init=False)

    def __post_init__(self) -> None:
        weights, spec = self.weights, self.spec
        flat = [each.data_ptr() for layer in weights.layers for each in layer]
        pointers = (c_void_p * len(flat))(*flat)
        first = weights.layers[0]
        sizes = (
            TYPES[weights.embedding.dtype], len(weights.layers), spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            first[3].shape[1], weights.head.shape[0], weights.cos_sin.shape[0],
        )  # fmt: skip
        places = (each.data_ptr() for each in (weights.embedding, weights.norm, weights.head, weights.cos_sin))
        address = torch.frombuffer(pointers, dtype=torch.int64).data_ptr()
        object.__setattr__(self, "_held", (pointers, _MODEL.pack(*sizes, address, *places, weights.eps, weights.scale)))

    def __call__(self, token_ids: Tensor, table: Tensor, rows: DraftRows, cache: Tensor) -> None:
        assert cache.is_contiguous() and token_ids.stride(1) == table.stride(1) == 1
        places = (each.data_ptr() for each in (token_ids, table, *rows, cache))
        sizes = rows.row.shape[0], cache.shape[4], cache.shape[0], token_ids.stride(0), table.stride(0)
        if self.function(self._held[1], _DRAFTING.pack(*sizes, *places, torch.get_num_threads())):
            raise MemoryError(f"no memory for drafts of {rows.row.shape[0]} rows, or a position is beyond the model's")


def create_drafts(native: Native, site: CallSite[StepFacts]) -> Any:
    facts = site.facts
    if facts.kv is not None:
        return Declined(f"keys and values are held as {facts.kv.name}")
    if (reason := next(beyond_plain(facts.spec), None)) is not None:
        return Declined(reason)
    if facts.spec.head_dim > MAX_HEAD_DIM:
        return Declined(f"head_dim {facts.spec.head_dim} is above {MAX_HEAD_DIM}")
    function = function_of(native, "headrace_draft", "ss", c_int)

    def make(weights: StepWeights) -> NativeDrafts:
        return NativeDrafts(function, weights, facts.spec)

    return make
