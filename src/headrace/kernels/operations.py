"""The operations: what each means, what is true of its meaning, and who else carries it out.

What lives here: one row an operation. What may not: any kernel, choosing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from headrace.kernels.attention import candidates as attention
from headrace.kernels.attention.reference import (
    merge_parts,
    paged_attention,
    rope_attention,
    rotary_write,
    whole_attention,
)
from headrace.kernels.candidate import (
    Candidate,
    DeltaFacts,
    ExpertFacts,
    F,
    Facts,
    HeadFacts,
    NormFacts,
    RopeFacts,
    StepFacts,
    WeightFacts,
)
from headrace.kernels.linear import candidates as linear
from headrace.kernels.linear import reference as products
from headrace.kernels.linear.packed import (
    activated_linear,
    normed_linear,
    packed_fused_linear,
    packed_linear,
    packed_moe,
)
from headrace.kernels.linear.sparse import add_sparse
from headrace.kernels.lora import candidates as lora
from headrace.kernels.lora.reference import add_deltas, look_up_deltas
from headrace.kernels.moe import candidates as moe
from headrace.kernels.moe import reference as experts
from headrace.kernels.norm import candidates as norm
from headrace.kernels.norm.reference import activation, gated_activation, layer_norm, rms_norm
from headrace.kernels.rows import candidates as rows
from headrace.kernels.rows.reference import embedding, fetch_step, gather_inputs, store_tokens, write_rows
from headrace.kernels.sampling import candidates as sampling
from headrace.kernels.sampling.reference import greedy_tokens, gumbel_argmax, pick_tokens, score_tokens
from headrace.kernels.step import candidates as step
from headrace.kernels.step.reference import decode_step, draft_tokens

S = TypeVar("S")
TURNS = 8


@dataclass(frozen=True, slots=True)
class Operation(Generic[S, F]):
    """``twin``: plain torch, which says what the operation means and stands behind all ``candidates``, best first.
    ``facts``: what a call site states.

    ``makes``: it makes a layer's callable from weights. ``varies``: the twin's bits depend on what else is in the
    batch: on the order of a sum, or on how far an element is from the tensor's end. ``reads``: the twin looks at the
    device (how long is this sequence, which rows are left to sort), which no capture allows.

    ``turn``: when its kernels are built; those that take longest first (as measured for an 8B model: 2.0 s, 1.1, 1.1,
    1.1, 1.0, …, 0.3; others 0.1).
    """

    name: str
    twin: S
    facts: type[F]
    candidates: tuple[Candidate[F], ...]
    makes: bool = False
    varies: bool = False
    reads: bool = False
    turn: int = TURNS


def _product(
    name: str, twin: S, candidates: tuple[Candidate[WeightFacts], ...], turn: int = TURNS
) -> Operation[S, WeightFacts]:
    return Operation(name, twin, WeightFacts, candidates, makes=True, varies=True, turn=turn)


# A candidate is removed with its room and its entry in its operation's list (candidates.py beside it).
LINEAR = _product("linear", products.linear, linear.LINEAR, turn=7)
FUSED_LINEAR = _product("fused_linear", products.fused_linear, linear.FUSED_LINEAR, turn=6)
ADDED_LINEAR = _product("added_linear", products.added_linear, linear.ADDED_LINEAR)
GATED_LINEAR = _product("gated_linear", products.gated_linear, linear.GATED_LINEAR, turn=0)
PACKED_LINEAR = _product("packed_linear", packed_linear, linear.PACKED_LINEAR)
PACKED_FUSED = _product("packed_fused_linear", packed_fused_linear, linear.PACKED_FUSED)
NORMED_LINEAR = _product("normed_linear", normed_linear, linear.NORMED_LINEAR)
ACTIVATED_LINEAR = _product("activated_linear", activated_linear, linear.ACTIVATED_LINEAR)
ADD_SPARSE = Operation("add_sparse", add_sparse, Facts, linear.ADD_SPARSE, varies=True, reads=True)
PACKED_MOE = Operation("packed_moe", packed_moe, ExpertFacts, moe.PACKED_MOE, varies=True, reads=True)
ADD_DELTAS = Operation("add_deltas", add_deltas, DeltaFacts, lora.ADD_DELTAS, varies=True, reads=True)
LOOK_UP_DELTAS = Operation("look_up_deltas", look_up_deltas, DeltaFacts, lora.LOOK_UP_DELTAS, varies=True, reads=True)
EMBEDDING = Operation("embedding", embedding, Facts, rows.EMBEDDING)
RMS_NORM = Operation("rms_norm", rms_norm, NormFacts, norm.RMS_NORM, varies=True)
LAYER_NORM = Operation("layer_norm", layer_norm, NormFacts, norm.LAYER_NORM)
ROTARY_WRITE = Operation("rotary_write", rotary_write, HeadFacts, attention.ROTARY_WRITE, reads=True)
PAGED_ATTENTION = Operation(
    "paged_attention", paged_attention, HeadFacts, attention.PAGED_ATTENTION, varies=True, reads=True, turn=2
)
ROPE_ATTENTION = Operation(
    "rope_attention", rope_attention, RopeFacts, attention.ROPE_ATTENTION, varies=True, reads=True, turn=4
)
WHOLE_ATTENTION = Operation("whole_attention", whole_attention, HeadFacts, attention.WHOLE_ATTENTION, reads=True)
MERGE_PARTS = Operation("merge_parts", merge_parts, HeadFacts, attention.MERGE_PARTS)
ACTIVATION = Operation("activation", activation, Facts, norm.ACTIVATION, varies=True)
GATED_ACTIVATION = Operation("gated_activation", gated_activation, Facts, norm.GATED_ACTIVATION, varies=True)
MOE = Operation("moe", experts.moe, ExpertFacts, moe.MOE, varies=True, reads=True, turn=5)
FUSED_MOE = Operation("fused_moe", experts.fused_moe, ExpertFacts, moe.FUSED_MOE, varies=True, reads=True, turn=5)
GREEDY_TOKENS = Operation("greedy_tokens", greedy_tokens, Facts, sampling.GREEDY_TOKENS)
PICK_TOKENS = Operation(
    "pick_tokens", partial(pick_tokens, argmax=gumbel_argmax), Facts, sampling.PICK_TOKENS, reads=True, turn=1
)
GUMBEL_ARGMAX = Operation("gumbel_argmax", gumbel_argmax, Facts, sampling.GUMBEL_ARGMAX)
SCORE_TOKENS = Operation("score_tokens", score_tokens, Facts, sampling.SCORE_TOKENS)
WRITE_ROWS = Operation("write_rows", write_rows, Facts, rows.WRITE_ROWS)
GATHER_INPUTS = Operation("gather_inputs", gather_inputs, Facts, rows.GATHER_INPUTS)
STORE_TOKENS = Operation("store_tokens", store_tokens, Facts, rows.STORE_TOKENS)
DECODE_STEP = Operation("decode_step", decode_step, StepFacts, step.DECODE_STEP, makes=True, turn=3)
DRAFT_TOKENS = Operation("draft_tokens", draft_tokens, StepFacts, step.DRAFT_TOKENS, makes=True)
FETCH_STEP = Operation("fetch_step", fetch_step, Facts, rows.FETCH_STEP)

OPERATIONS: Mapping[str, Operation[Any, Any]] = MappingProxyType(
    {each.name: each for each in tuple(globals().values()) if isinstance(each, Operation)}
)
