"""The candidates for sparse feed-forward networks, best first.

What lives here: the ordered list, small calls that build each kernel a model will launch, and the C kernel (moe.c) as a
torch function. What may not: Triton, compiling (build/), mathematics.
"""

from __future__ import annotations

from ctypes import c_int
from functools import partial
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import gpu
from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import ACTIVATIONS, TYPES, function_of, native
from headrace.kernels.build.warm_ups import TOKENS
from headrace.kernels.candidate import Calls, CallSite, ExpertFacts, Sizes, rows_of
from headrace.kernels.linear import panels
from headrace.kernels.linear.candidates import INTEGER, INTEGERS
from headrace.kernels.linear.epilogue import MOST_ROWS, Epilogue
from headrace.kernels.linear.native import FEW_ROWS, linear_of_many_rows
from headrace.kernels.linear.packing import empty
from headrace.kernels.moe import reference
from headrace.sites import Role, matrices
from headrace.spec import Activation, MoESpec

_SPARSE = Struct("@2i5q5P2q2iP2q")  # the argument struct of the C file, field for field: i int, q int64, P pointer


def create_moe(native: Native, site: CallSite[ExpertFacts]) -> Any:
    num_experts, top_k = site.facts.num_experts, site.facts.top_k
    function = function_of(native, "headrace_moe", "si", c_int)
    invariant, empty = site.invariant, site.empty
    many_rows = linear_of_many_rows(site.facts.dtype)

    def few(
        x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, renormalize: bool, kind: Activation,
        places: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x, router_logits, gate_up, down = rows_of(x), rows_of(router_logits), gate_up.contiguous(), down.contiguous()
        out = empty(x.shape, x.dtype, x.device)
        failed = function(
            _SPARSE.pack(
                TYPES[x.dtype], ACTIVATIONS[kind], x.shape[0], x.shape[1], down.shape[2], num_experts, top_k,
                x.data_ptr(), router_logits.data_ptr(), gate_up.data_ptr(), down.data_ptr(), out.data_ptr(),
                x.stride(0), router_logits.stride(0), renormalize, invariant,
                0 if places is None else places.data_ptr(), 1 if places is None else len(places), gate_up.shape[0],
            ),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {x.shape[0]} tokens of a sparse feed-forward with {top_k} experts each")
        return out

    def moe(
        x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation,
        places: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if invariant or x.shape[0] * top_k <= FEW_ROWS * num_experts:
            return few(x, router_logits, gate_up, down, renormalize, kind, places)
        return reference.moe(x, router_logits, gate_up, down, top_k, renormalize, kind, places, many_rows)

    return moe


def _refuses(site: CallSite[ExpertFacts]) -> str | None:
    facts = site.facts
    if facts.num_experts > 1024 or facts.top_k > 64:
        return f"{facts.top_k} of {facts.num_experts} experts are more than 64 of 1024"
    return None


def _places(site: CallSite[ExpertFacts]) -> Tensor | None:
    """Where ranks have whole experts: all of them are the first that is here."""
    return None if site.facts.held is None else site.zeros(1, site.facts.num_experts, dtype=torch.int32)


def _around(site: CallSite[ExpertFacts], sizes: Sizes, tokens: int) -> Epilogue:
    hidden, scale = sizes.spec.hidden_size, torch.float32 if sizes.spec.norm_offset else None
    squares = site.zeros(1, tokens, dtype=torch.float32)
    return Epilogue(squares, 1.0, None, site.zeros(tokens, hidden), site.zeros(hidden, dtype=scale))


def _counts(moe: MoESpec, pairs: tuple[int, ...], *, fused: bool) -> tuple[int, ...]:
    """A few tokens, and what makes so many ``pairs`` an expert; with what stands around them, no more than take it in."""
    if fused:
        return TOKENS, reference.FEW + 1, MOST_ROWS
    return (TOKENS, *(each * moe.num_experts // moe.top_k for each in pairs))


def experts(site: CallSite[ExpertFacts], run: Any, sizes: Sizes, *, fused: bool = False) -> Calls:
    """A few tokens, then 4, 16 and 64 pairs an expert: what tiles are chosen by. Routing all to the same experts
    changes no launch."""
    spec = sizes.spec
    up, down = [each for each in matrices(spec) if each.moe is not None][:2]
    moe = up.moe
    assert moe is not None
    shapes = (each.tensors[each.name] for each in (up, down))
    places = _places(site)
    # for all calls: the largest layer
    gate_up, narrow = (torch.empty(shape, dtype=site.facts.dtype, device=site.device) for shape in shapes)

    def compute(tokens: int) -> object:
        x, router = site.zeros(tokens, spec.hidden_size), site.zeros(tokens, moe.num_experts)
        last = _around(site, sizes, tokens) if fused else places
        return run(x, router, gate_up, narrow, moe.top_k, moe.renormalize, spec.activation, last)

    for tokens in _counts(moe, (4, 16, 64), fused=fused):
        yield f"{tokens} tokens", partial(compute, min(tokens, sizes.max_num_batched_tokens))


def _uncoded(site: CallSite[ExpertFacts]) -> str | None:
    """What the grouped products over codes do not serve."""
    facts = site.facts
    half = len(facts.rounded) - 1
    if not facts.rounded or None in facts.rounded or len(set(facts.rounded[:half])) != 1:
        return "computes with codes in groups of 16, 32, 64, or multiples of 128 inputs, of gate and up the same"
    if any(each is not None and (each.ordered or each.table or each.rotation) for each in facts.rounded):
        return "computes with inputs in their own order, and codes that are numbers"
    rounds = [label for label in facts.formats if "inputs" in label]
    if any(each is not None and each.static for each in facts.eights) or (rounds and None in facts.eights):
        return f"rounds inputs by scales of their rows alone, not as {', '.join(dict.fromkeys(facts.formats))}"
    return _refuses(site)


def coded_experts(site: CallSite[ExpertFacts], run: Any, sizes: Sizes, *, fused: bool = False) -> Calls:
    """The same, over experts that all are the first one."""
    spec = sizes.spec
    up, down = [each for each in matrices(spec) if each.moe is not None][:2]
    moe, codings = up.moe, site.facts.rounded
    assert moe is not None and codings[0] is not None and codings[-1] is not None

    def compute(tokens: int) -> object:
        wide = (
            (empty(codings[0], up.outs, up.ins, site.device, gated=True, ordered=False, copies=len(moe.experts)))
            if codings[0]
            else None
        )
        narrow = (
            (empty(codings[-1], down.outs, down.ins, site.device, gated=False, ordered=False, copies=len(moe.experts)))
            if codings[-1]
            else None
        )
        x, router = site.zeros(tokens, spec.hidden_size), site.zeros(tokens, moe.num_experts)
        given = x, router, wide, narrow, moe.top_k, moe.renormalize, spec.activation, _places(site)
        return run.__self__.computed_around(*given, _around(site, sizes, tokens)) if fused else run.computed(*given)

    for tokens in _counts(moe, (4, 8, 32), fused=fused):
        yield (
            f"{codings[0]}, {codings[-1]}, {tokens} tokens",
            partial(compute, min(tokens, sizes.max_num_batched_tokens)),
        )


def _few(site: CallSite[ExpertFacts], *, coded: bool, alone: bool = False) -> str | None:
    """What is not served of few tokens with all that stands around their experts; ``alone``: in one launch."""
    if coded != bool(site.facts.formats):
        return f"multiplies by experts {'in a format' if coded else 'as they are computed with'}"
    return (_uncoded(site) if coded else _refuses(site)) or (_not_few(site, coded=coded) if alone else None)


def _not_few(site: CallSite[ExpertFacts], *, coded: bool) -> str | None:
    """What one launch does not serve, whatever the shape."""
    facts = site.facts
    if facts.held is not None:
        return "multiplies by all experts"
    if coded and (facts.rounded[0] != facts.rounded[-1] or facts.eights[0] != facts.eights[-1]):
        return "computes with codes of one kind, up and down"
    if coded and (first := facts.rounded[0]) is not None and not first.plain:
        return "widens codes of 4 and 8 bits with scales of groups of 32, 64 or multiples of 128 inputs"
    return None


def _builds_few(site: CallSite[ExpertFacts], made: Any, sizes: Sizes) -> Calls:
    """Nothing runs: programs of two threads' launches would wait for each other."""
    spec = sizes.spec
    up, down = [each for each in matrices(spec) if each.moe is not None][:2]
    assert up.moe is not None
    shape = spec.hidden_size, down.ins, up.moe.renormalize, spec.activation
    for tokens in dict.fromkeys((TOKENS, reference.MOST_CODED, made.most)):
        yield f"{tokens} tokens", partial(made.function, tokens, *shape)
    attended = next(each for each in matrices(spec) if each.role is Role.OUTPUT).ins
    for tokens in dict.fromkeys((TOKENS, made.few)) if made.few else ():
        yield f"{tokens} tokens behind attention", partial(made.function, tokens, *shape, attended)


def _builds_grouped(site: CallSite[ExpertFacts], made: Any, sizes: Sizes) -> Calls:
    up, down = [each for each in matrices(sizes.spec) if each.moe is not None][:2]
    held, kind = site.facts.held or site.facts.num_experts, sizes.spec.activation
    for variant in made.variants(up.ins, down.ins, held, kind):
        yield f"{variant.columns} columns", partial(made.builds.function, variant)


MOE = (
    native(create_moe),
    gpu.triton(
        "moe.cuda_grouped:create_grouped", _builds_grouped, _refuses, name="grouped", least=(9, 0), alone=True,
        dtypes=(torch.bfloat16,), techniques=frozenset({"gated_products"}), varies=True, optional=True,
    ),
    gpu.triton("moe.triton_moe:create_moe", experts, _refuses),
)  # fmt: skip
PACKED_MOE = (
    native(
        partial(panels.create_moe, rounds=True), name=INTEGER, dtypes=(torch.bfloat16, torch.float16),
        techniques=INTEGERS, varies=True, optional=True,
    ),
    native(partial(panels.create_moe, rounds=False), varies=True, optional=True),
    gpu.triton(
        "moe.triton_coded:create_moe", coded_experts, _uncoded,
        name="codes", dtypes=(torch.bfloat16, torch.float16), techniques=frozenset({"quantized_gemm"}), varies=True, optional=True,
    ),
)  # fmt: skip
_ONE, _IN_ONE = "moe.cuda_experts:create_few", "one_launch_experts"
FUSED_MOE = tuple(
    gpu.triton(
        path, warm_up, refuses, name=name, least=least, alone=least > gpu.LEAST, dtypes=(torch.bfloat16,),
        techniques=frozenset({"deep_fusion", *more}), varies=True, optional=True,
    )
    for name, path, warm_up, refuses, least, more in (
        ("experts", _ONE, _builds_few, partial(_few, coded=False, alone=True), (9, 0), (_IN_ONE,)),
        ("coded_experts", _ONE, _builds_few, partial(_few, coded=True, alone=True), (9, 0), (_IN_ONE, "quantized_gemm")),
        ("fused", "moe.triton_moe:Moe.fused", partial(experts, fused=True), partial(_few, coded=False), gpu.LEAST, ()),
        ("codes", "moe.triton_coded:CodedMoe.fused", partial(coded_experts, fused=True), partial(_few, coded=True), gpu.LEAST, ("quantized_gemm",)),
    )
)  # fmt: skip
