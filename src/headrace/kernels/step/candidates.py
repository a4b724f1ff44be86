"""The candidates for all layers of a decode step at once, and for a run of drafts.

What lives here: what declines a call site before anything is compiled, what a start builds, and the C run of drafts
(draft.c: its structs) as a torch function. What may not: CUDA, compiling (build/), mathematics.
"""

from __future__ import annotations

from ctypes import c_int, c_void_p
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.gpu import DEVICES, load
from headrace.kernels.build.native import TYPES, function_of, native
from headrace.kernels.candidate import Calls, CallSite, Candidate, Declined, Sizes, StepFacts
from headrace.kernels.inputs import ForwardInputs
from headrace.kernels.step.reference import DraftRows, StepWeights
from headrace.kernels.step.shape import beyond_plain, why_not
from headrace.spec import DecoderSpec

MAX_HEAD_DIM = 512  # attention.c: MAX_DIM
_MODEL = Struct("@9q5P2d")
_DRAFTING = Struct("@5q10Pq")
_GIVEN = Struct("@4q9P")


@dataclass(frozen=True, slots=True, eq=False)
class NativeDrafts:
    """One decoder's."""

    functions: tuple[Any, Any]  # a run, one pass
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
        if self.functions[0](self._held[1], _DRAFTING.pack(*sizes, *places, torch.get_num_threads())):
            raise MemoryError(f"no memory for drafts of {rows.row.shape[0]} rows, or a position is beyond the model's")

    def hidden(self, inputs: ForwardInputs, cache: Tensor) -> Tensor:
        ids, seen, tree = inputs.token_ids, inputs.attention[0], inputs.attention[0].tree
        found = self.weights.embedding.new_empty(len(ids), self.spec.hidden_size)
        room = 0, seen.block_size, cache.shape[0], 0, seen.block_table.stride(0)
        sizes = len(ids), len(seen.context_len), seen.max_context_len, seen.max_query_len
        given = (ids, inputs.positions, seen.slots, seen.query_start, seen.context_len, seen.block_table)
        trees = (None, None) if tree is None else (tree.first, tree.ancestors)
        places = (0 if each is None else each.data_ptr() for each in (*given, *trees, found))
        drafting = _DRAFTING.pack(*room, *(0,) * 9, cache.data_ptr(), torch.get_num_threads())
        if self.functions[1](self._held[1], drafting, _GIVEN.pack(*sizes, *places)):
            raise MemoryError(f"no memory for {len(ids)} tokens of drafts, or a position is beyond the model's")
        return found


def create_drafts(native: Native, site: CallSite[StepFacts]) -> Any:
    facts = site.facts
    if facts.kv is not None:
        return Declined(f"keys and values are held as {facts.kv.name}")
    if (reason := next(beyond_plain(facts.spec), None)) is not None:
        return Declined(reason)
    if facts.spec.head_dim > MAX_HEAD_DIM:
        return Declined(f"head_dim {facts.spec.head_dim} is above {MAX_HEAD_DIM}")
    functions = (
        function_of(native, "headrace_draft", "ss", c_int),
        function_of(native, "headrace_draft_pass", "sss", c_int),
    )

    def make(weights: StepWeights) -> NativeDrafts:
        return NativeDrafts(functions, weights, facts.spec)

    return make


PERSISTENT, PERSISTENT_FP8 = "persistent", "persistent_fp8"
_CAPABILITY = (9, 0)  # bulk copies into shared memory, 227 KiB of it


def _decode_step(site: CallSite[StepFacts]) -> Any:
    fp8, kv = site.facts.eight is not None, site.facts.kv
    return load("step.persistent:DecodeSteps")(site.facts.spec, site.device, pdl=site.pdl, fp8=fp8, kv=kv)


def _no_step(site: CallSite[StepFacts], *, fp8: bool) -> str | None:
    """Whoever is declined loses nothing but speed: a decoder's own layers stand behind it."""
    if fp8 != (site.facts.eight is not None):
        return f"multiplies by weights in {'FP8, a scale a row' if fp8 else 'bfloat16'}"
    if site.facts.kv is not None and site.facts.kv.bits != 8:
        return f"keys and values are held as {site.facts.kv.name}, not in 16 or 8 bits"
    return why_not(site.facts.spec, site.card.processors)


def _warm_up(site: CallSite[StepFacts], made: Any, sizes: Sizes) -> Calls:
    return [(f"all layers, blocks of {sizes.block_size}", partial(made.prepare, sizes.block_size))]


DECODE_STEP = tuple(
    Candidate(
        name, _decode_step, DEVICES, (torch.bfloat16,), frozenset({"persistent_decode", *more}), _CAPABILITY, True,
        partial(_no_step, fp8=fp8), varies=True, optional=True, warm_up=_warm_up,
    )
    for name, fp8, more in ((PERSISTENT, False, ()), (PERSISTENT_FP8, True, ("persistent_fp8",)))
)  # fmt: skip

DRAFT_TOKENS = (native(create_drafts, optional=True),)
