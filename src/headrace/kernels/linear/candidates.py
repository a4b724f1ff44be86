"""The candidates for matrix products, best first.

What lives here: the ordered lists, what declines a call site before anything is compiled or looked for, small calls
that build what a model will launch. What may not: kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from headrace.kernels.build import gpu
from headrace.kernels.build.native import native
from headrace.kernels.build.warm_ups import TOKENS, corner
from headrace.kernels.candidate import Calls, CallSite, Candidate, Facts, Shape, Sizes, WeightFacts
from headrace.kernels.linear import compressed, panels, sparse
from headrace.kernels.linear.epilogue import MOST_ROWS, Epilogue
from headrace.kernels.linear.gated_tiles import EIGHT_TILES, measured_tiles
from headrace.kernels.linear.native import create_linear, create_onednn
from headrace.kernels.linear.packing import empty
from headrace.kernels.linear.ring_forms import MEASURED as RINGS
from headrace.kernels.linear.ring_forms import RingForm, RingForms
from headrace.sites import Split, matrices

FLAT, FUSED = "flat", "fused"  # for few rows
CODED, EIGHT = "codes", "w8a8"  # quantised weights
RING, GATED, TUNED = "ring", "gated", "tuned"
CODED_RING, EIGHT_RING = "codes_ring", "w8a8_ring"  # quantised weights, as ring has those in bfloat16
INTEGER = "integer"  # who computes in float32 wants no input rounded
INTEGERS = frozenset({"integer_products"})
SMALL_WEIGHT = 2**20  # elements; launching takes longer than reading fewer
_LARGEST = 2048  # what a program of the kernels for few rows reads at once of a row, at most: one vector form does


# ---- few rows, in Triton ----


def _few_rows(site: CallSite[WeightFacts]) -> str | None:
    """What the kernels for few rows do not serve."""
    outs, ins = site.facts.out_features, site.facts.in_features
    if site.facts.fused:
        return "few rows of this layer go through fused_linear"
    if ins % 64 or (outs * ins < SMALL_WEIGHT and not site.facts.routes):
        return f"{ins} to {outs} is no large weight with rows that the copy engine can read"
    return None


Place = tuple[str, Callable[[int], Epilogue], bool]
Places = Callable[[CallSite[WeightFacts], Sizes], Iterator[Place]]


def _alone(site: CallSite[WeightFacts], sizes: Sizes) -> Iterator[Place]:
    """Nothing around the product."""
    for biased in {False, _biased(sizes)}:
        yield "alone", lambda outs: Epilogue(), biased


def _places(site: CallSite[WeightFacts], sizes: Sizes) -> Iterator[Place]:
    """Before attention, behind it, or in the feed-forward: what stands around a product of so many outputs there, and
    whether it has a bias."""
    spec, facts, norm = sizes.spec, site.facts, partial(site.zeros, 1, 1, dtype=torch.float32)
    weight = torch.float32 if spec.norm_offset else facts.dtype
    if facts.gated:
        yield "normed, gated", lambda outs: Epilogue(norm(), 1.0, spec.activation), spec.mlp_bias
        if spec.ranks > 1 and not facts.formats:  # whose sums leave norms half done for few rows, or for none
            yield "gated", lambda outs: Epilogue(gate=spec.activation), spec.mlp_bias
        return
    if facts.routes:
        yield "normed", lambda outs: Epilogue(norm(), 1.0), False
        return
    same = [each for each in matrices(spec) if (each.outs, each.ins) == (facts.out_features, facts.in_features)]
    for split, biased in dict.fromkeys((each.split, each.bias) for each in same):
        if split is Split.COLUMN:
            yield "normed", lambda outs: Epilogue(norm(), 1.0), biased
        else:
            behind = lambda outs: Epilogue(residual=site.zeros(1, outs), scale=site.zeros(outs, dtype=weight))  # noqa: E731
            yield "added", behind, biased


def _flat_calls(site: CallSite[WeightFacts], run: Any, sizes: Sizes, places: Places = _alone) -> Calls:
    """Every form of the layer. Of a corner of the weight: what is compiled does not depend on its size."""
    whole = site.facts.shape
    shape = Shape(corner(whole.outs, _LARGEST), corner(whole.ins, _LARGEST), whole.gated)
    rows = shape.outs * (2 if shape.gated else 1)

    def launch(form: Any, epilogue: Callable[[int], Epilogue], biased: bool) -> object:
        product = run(site.zeros(rows, shape.ins), site.zeros(rows) if biased else None).product
        return replace(product, shape=shape).launch(form, site.zeros(1, shape.ins), epilogue(shape.outs))

    forms = [form for _, form in run(site.zeros(0, shape.ins), None).product.forms if form is not None]
    for (place, epilogue, biased), form in product(places(site, sizes), dict.fromkeys(forms)):
        yield f"{place}{', bias' * biased}, {shape.outs % 16}, {form}", partial(launch, form, epilogue, biased)


_fused_calls = partial(_flat_calls, places=_places)


def _biased(sizes: Sizes) -> bool:
    return sizes.spec.qkv_bias or sizes.spec.output_bias or sizes.spec.mlp_bias


# ---- one order of sums, in Triton ----


def _varies(site: CallSite[WeightFacts]) -> str | None:
    return None if site.invariant else "torch's own product (cuBLAS) is quicker where bits may depend on the batch"


def invariant_calls(site: CallSite[WeightFacts], run: Any, sizes: Sizes) -> Calls:
    """A kernel of our own (torch's products need none): every tile the layer will choose, over a corner of the
    weight."""
    ins, outs = corner(site.facts.in_features, 512), corner(site.facts.out_features, 512)

    def multiply(tile: Any, *, bias: bool) -> object:
        layer = run(site.zeros(outs, ins), site.zeros(outs) if bias else None)
        return layer.compute(site.zeros(TOKENS, ins), tile)

    tile_of = run(site.zeros(0, ins), None).tile
    tiles = dict.fromkeys(
        tile_of(tokens, site.facts.out_features) for tokens in range(1, sizes.max_num_batched_tokens + 1, 16)
    )
    for bias in {False, _biased(sizes)}:
        for tile in tiles:
            yield f"{ins} to {outs}{' with bias' if bias else ''}, {tile}", partial(multiply, tile, bias=bias)


# ---- CUDA C++ for shapes that were measured ----


def _not_gated(site: CallSite[WeightFacts]) -> str | None:
    """A product and an activation stand behind it."""
    outs, ins = site.facts.out_features, site.facts.in_features
    if outs % 16 or ins % 8:
        return f"{ins} to {outs} is no weight with rows that the copy engine can read"
    if not any(tile for _, tile in measured_tiles(site.card.name).get(Shape(outs // 2, ins), ())):
        return "nothing was measured to be better than product and activation for this weight"
    return None


def _gated_calls(site: CallSite[WeightFacts], make: Any, sizes: Sizes) -> Calls:
    layer = make(torch.empty(0, 0), None)
    # those for many rows compile longest
    for tile in dict.fromkeys(tile for _, tile in reversed(layer.tiles) if tile is not None):
        yield (
            f"{tile}",
            partial(layer.kernels.function, (tile, sizes.spec.activation, tile.thin(site.facts.out_features // 2))),
        )


def _no_ring(site: CallSite[WeightFacts]) -> str | None:
    """The forms of triton_flat.py stand behind it."""
    if not any(form for _, form in RINGS.table(site.card.name).get(site.facts.shape, ())):
        return "nothing was measured to be better than the other forms for this weight"
    return None


def _no_ring_alone(site: CallSite[WeightFacts]) -> str | None:
    return _few_rows(site) if site.facts.fused else _no_ring(site)


def _no_coded_ring(site: CallSite[WeightFacts]) -> str | None:
    """The forms of triton_codes.py stand behind it."""
    if (reason := _uncoded(site)) is not None:
        return reason
    if any(site.facts.eights):
        return "multiplies bfloat16; rounded inputs are multiplied by Triton's kernel"
    if not all(coding is not None and coding.ring for coding in site.facts.codings) or site.facts.in_features % 8:
        return "multiplies by integers and floats alone, not by entries of a table or rotated inputs"
    return None


def _ring_alone_calls(site: CallSite[WeightFacts], make: Any, sizes: Sizes) -> Calls:
    ring = make(torch.empty(0, 0), None).ring
    for form in dict.fromkeys(replace(form, late=False) for _, form in ring.forms if form is not None):
        yield f"{form}, alone", partial(ring.kernels.function, (form, None, False))


def unserved(forms: RingForms, others: tuple[tuple[int, Any], ...]) -> tuple[tuple[int, Any], ...]:
    """Of ``others``, up to so many rows this form, those that some number of rows is left to."""
    kept, before = [], 0
    for most, form in others:
        if any(
            next((ring for up_to, ring in forms if rows <= up_to), None) is None for rows in range(before + 1, most + 1)
        ):
            kept.append((most, form))
        before = most
    return tuple(kept)


def _ring_calls(site: CallSite[WeightFacts], make: Any, sizes: Sizes) -> Calls:
    """Every form of its own, and those of the others that are left to them."""
    layer = make(torch.empty(0, 0), None)
    gate = sizes.spec.activation if layer.shape.gated else None
    for form in dict.fromkeys(replace(form, late=False) for _, form in layer.forms if form is not None):
        yield f"{form}, {gate}", partial(layer.kernels.function, (form, gate, False))

    def left(weight: Any, bias: Any) -> Any:
        layer = make(weight, bias)
        product = layer.others.product
        return replace(layer.others, product=replace(product, forms=unserved(layer.forms, product.forms)))

    yield from _fused_calls(site, left, sizes)


def _quantised_ring_calls(site: CallSite[WeightFacts], run: Any, sizes: Sizes) -> Calls:
    """Every form of its own, those of the others that are left to them, and what rounds inputs."""
    maker = run.__self__
    gate = sizes.spec.activation if site.facts.gated else None
    for form in _ring_forms(site, maker, 1, MOST_ROWS):
        yield f"{form}, {gate}, {False}", partial(maker.kernels.function, (form, gate, False))
    if site.facts.eights[0] is not None:
        others = replace(maker.maker, forms=unserved(maker.forms, maker.maker.forms))
        yield from _eight_fused_calls(site, others.fused, sizes)
        return
    # such weights may be left to them altogether
    ordered = any(each is not None and each.ordered for each in site.facts.codings)
    served = {coding: forms for (coding, _), forms in maker.forms.items()}
    forms = {each: forms if ordered else unserved(served[each], forms) for each, forms in maker.coded.forms.items()}
    yield from coded_fused_calls(site, replace(maker.coded, forms=forms).fused, sizes)


def _ring_forms(site: CallSite[WeightFacts], maker: Any, least: int, most: int) -> dict[RingForm, None]:
    """Those for ``least`` to ``most`` rows."""
    tables = maker.forms.values() if any(site.facts.codings) else (maker.forms,)
    found = ((last, form) for forms in tables for last, form in forms)
    return dict.fromkeys(
        replace(form, late=False) for last, form in found if form is not None and least <= last <= most
    )


def _cut_ring_calls(site: CallSite[WeightFacts], run: Any, sizes: Sizes) -> Calls:
    """The forms for rows that no fused product has, and all of who stands behind."""
    maker = run.__self__
    least = 1 if any(site.facts.codings) and not site.facts.fused else MOST_ROWS + 1
    for form in _ring_forms(site, maker, least, sys.maxsize):
        turned = site.facts.gated and form.coding is not None
        yield f"{form}, {None}, {turned}", partial(maker.kernels.function, (form, None, turned))
        if turned and form.many and form.ways == 1:
            gate = sizes.spec.activation
            yield f"{form}, {gate}, {False}", partial(maker.kernels.function, (form, gate, False))
    eight = site.facts.eights[0] is not None
    if eight and maker.maker.eight.kind == "int8":
        for tile in EIGHT_TILES:
            yield f"int8, {tile}", partial(maker.gemms.function, (tile, "int8", 0))
    yield from _eight_calls(site, maker.maker.linear, sizes) if eight else coded_calls(site, maker.coded.linear, sizes)


# ---- 8-bit inputs and weights, in Triton ----


def _not_eight(site: CallSite[WeightFacts]) -> str | None:
    facts = site.facts
    if facts.shared:
        return "an embedding reads single rows of the same weight"
    if len(set(facts.eights)) != 1 or None in facts.eights or any(facts.codings):
        return "computes with inputs and weights of one 8-bit type alone, with a scale a row or blocks of 128"
    if facts.in_features % 16 or facts.out_features % 16:
        return f"{facts.in_features} to {facts.out_features} is no weight that the vendor's product takes"
    if facts.eights[0] is not None and facts.eights[0].kind == "fp8" and site.card.capability < (8, 9):
        return "multiplies FP8 from compute capability 8.9 on"
    return None


def _eight_calls(site: CallSite[WeightFacts], run: Any, sizes: Sizes, places: Places = _alone) -> Calls:
    """Rounding a row of the layer's width, and the product in every form, of a corner of the weight."""
    facts, maker, device = site.facts, run.__self__, site.device
    outs, ins = (corner(size, 512) for size in (facts.out_features, facts.in_features))

    def layer(ins: int, *, bias: bool) -> Any:
        weight = torch.zeros(outs, ins, dtype=torch.uint8, device=device).view(maker.eight.dtype)
        scale = (
            torch.zeros(-(-outs // 128), -(-ins // 128), device=device)
            if maker.eight.group
            else torch.zeros(outs, device=device)
        )
        static = torch.ones((), device=device) if maker.eight.static else None
        return maker.product(weight, scale, static, site.zeros(outs) if bias else None)

    def rounded(given: Epilogue) -> object:
        return layer(facts.in_features, bias=False).rounded(site.zeros(1, facts.in_features), given)

    def multiply(form: Any, place: str, epilogue: Callable[[int], Epilogue], bias: bool) -> object:
        made, width = layer(ins, bias=bias), outs // (1 + (place == "gated"))
        codes, scale = made.weight[:1], torch.zeros(1, -(-ins // 128) if maker.eight.group else 1, device=device)
        return made.launch(form, codes, scale, epilogue(width), facts.dtype)

    for place, epilogue, biased in places(site, sizes):
        yield f"{place}, rounded, {facts.in_features}", partial(rounded, epilogue(outs))
        for form in dict.fromkeys(form for _, form in maker.all_forms):
            call = partial(multiply, form, place, epilogue, biased)
            yield f"{place}{', bias' * biased}, {maker.eight}, {outs % 16}, {form}", call


_eight_fused_calls = partial(_eight_calls, places=_places)


def _composed_calls(site: CallSite[WeightFacts], run: Any, sizes: Sizes) -> Calls:
    """What rounds the inputs that it computes, for rows of the layer's width; products are those of PACKED_LINEAR."""
    facts, spec, eight = site.facts, sizes.spec, site.facts.eights[0]
    static = torch.ones((), device=site.device) if eight is not None and eight.static else None
    dealt = any(facts.codings)
    rounding = gpu.load("norm.triton_rounded:Rounding")(eight, static, dealt=dealt)
    width, name = facts.in_features, f"{eight}, {facts.in_features}{', dealt' * dealt}"
    if site.op == "activated_linear":
        yield f"gate, {name}", lambda: rounding.activated(site.zeros(1, 2 * width), spec.activation)
        return
    weight = site.zeros(width, dtype=torch.float32 if spec.norm_offset else facts.dtype)
    for residual in (None, site.zeros(1, width)):
        call = partial(rounding.normed, site.zeros(1, width), weight, spec.norm_eps, residual)
        yield f"norm{'' if residual is None else ' and sum'}, {name}", call


# ---- codes of few bits, in Triton ----


def _uncoded(site: CallSite[WeightFacts]) -> str | None:
    """What the kernels for codes in groups do not serve."""
    facts = site.facts
    if facts.shared:
        return "an embedding reads single rows of the same weight"
    if not facts.codings or None in facts.codings:
        odd = [label for label, coding in zip(facts.formats, facts.codings, strict=True) if coding is None]
        return f"computes with codes in groups of 16, 32, 64, or multiples of 128 inputs, not with {', '.join(dict.fromkeys(odd)) or 'this'}"
    if any(each is not None and each.rotation > 256 for each in facts.codings):
        return "rotates up to 256 inputs together"
    return _unrounded(facts) if any(facts.eights) else None


def _unrounded(facts: WeightFacts) -> str | None:
    """What is not served of codes whose inputs are rounded."""
    first = facts.eights[0]
    if first is None or first.static or set(facts.eights) != {first}:
        return "rounds inputs by scales of their rows alone, and alike for all parts"
    if facts.in_features % 16 or not all(each is not None and each.whole for each in facts.codings):
        return "multiplies int8 inputs by integers in their own order with a scale for 128 and more, or all, alone"
    return None


def coded_calls(site: CallSite[WeightFacts], run: Any, sizes: Sizes, places: Places = _alone) -> Calls:
    """In every form; of the product alone, the kernel that widens, too."""
    yield from _coded_roundings(site, run, normed=places is _places)
    for place, epilogue, biased in places(site, sizes):
        for coding, found in _coded_corners(site, run, biased=biased):
            if place == "alone" and not biased and found.rounding is None:
                name = f"{coding}, widened{', gate' * found.packed.gated}"
                yield name, partial(found.widen, 0, 64, site.facts.dtype)
            yield from _coded_form_calls(site, coding, found, place, epilogue)


coded_fused_calls = partial(coded_calls, places=_places)


def _coded_roundings(site: CallSite[WeightFacts], run: Any, *, normed: bool) -> Calls:
    """Of rows of the layer's width, where inputs are rounded, or rotated."""
    width = site.facts.in_features
    for size in {each.rotation for each in site.facts.codings if each is not None and each.rotation}:
        turn, x = gpu.load("norm.triton_rounded:rotate"), site.zeros(1, width)
        yield f"rotated by {size}, {width}", partial(turn, x, size, site.empty, pdl=site.pdl)
    if not any(site.facts.eights):
        return
    squares = site.zeros(1, 1, dtype=torch.float32) if normed else None
    rounding = gpu.load("norm.triton_rounded:Rounding")(site.facts.eights[0], dealt=True)
    call = partial(rounding.rows, site.zeros(1, width), squares, pdl=site.pdl)
    yield f"rounded, dealt, {width}, {normed}", call


def _coded_corners(site: CallSite[WeightFacts], run: Any, *, biased: bool) -> Iterator[tuple[str, Any]]:
    """A small weight of each coding, which kernels cannot tell from the layer's."""
    facts, maker = site.facts, run.__self__
    outs, ins = (corner(size, 512) for size in (facts.out_features, facts.in_features))
    for coding in dict.fromkeys(each for each in facts.codings if each is not None):
        for ordered in (False, True) if coding.ordered else (False,):
            packed = empty(coding, outs, ins, site.device, gated=facts.gated, ordered=ordered)
            yield f"{coding}{', in order' * ordered}", maker.product(packed, site.zeros(outs) if biased else None)


def _coded_form_calls(
    site: CallSite[WeightFacts], name: str, product: Any, place: str, epilogue: Callable[[int], Epilogue]
) -> Calls:
    packed, biased = product.packed, product.bias is not None
    for most, form in product.forms:
        if form is not None and (place == "alone" or most <= MOST_ROWS):
            behind = partial(epilogue, packed.outs // (1 + (place == "gated")))
            call = lambda form=form, behind=behind: product.launch(form, site.zeros(1, packed.ins), behind())  # noqa: E731
            yield (
                f"{place}{', bias' * biased}, {name}, {packed.outs % 16}, {packed.ins % 16}, {packed.gated}, {form}",
                call,
            )


_HALVES = (torch.bfloat16, torch.float16)
_BFLOAT16 = _HALVES[:1]  # what is not yet normed may overflow float16


def _guest(
    name: str,
    path: str,
    refuses: Any,
    *techniques: str,
    dtypes: tuple[torch.dtype, ...] = _BFLOAT16,
    warm_up: Any = None,
    **declared: Any,
) -> Candidate[WeightFacts]:
    """A kernel for part of what comes: the twin, or others behind it, lose nothing but speed."""
    return gpu.triton(
        f"linear.{path}", warm_up, refuses,
        name=name, dtypes=dtypes, techniques=frozenset(techniques), varies=True, optional=True, **declared,
    )  # fmt: skip


def _tuned(create: str, refuses: Any = None) -> Candidate[WeightFacts]:
    return Candidate(
        TUNED, lambda site: gpu.load(f"linear.tuned:{create}")(site), gpu.DEVICES, _HALVES, frozenset({"tuned_products"}), _ANY_CARD,
        refuses=refuses, varies=True, optional=True,
    )  # fmt: skip


_ANY_CARD = (1, 0)
_HOPPER: dict[str, Any] = {
    "least": (9, 0),
    "alone": True,
}  # its matrix and copy instructions, or forms that were measured on it
_DEEP = ("quantized_gemm", "deep_fusion")


def _rings(method: str, warm_up: Any, *techniques: str) -> tuple[Candidate[WeightFacts], Candidate[WeightFacts]]:
    """Of weights of 8 bits as their inputs, and in codes of few bits."""
    how: dict[str, Any] = {"warm_up": warm_up, **_HOPPER}
    eight = _guest(EIGHT_RING, f"rings:EightBitRings.{method}", _not_eight, *techniques, "early_weights", **how)
    return eight, _guest(CODED_RING, f"rings:CodedRings.{method}", _no_coded_ring, *techniques, "early_weights", **how)


def _unrounding(site: CallSite[WeightFacts]) -> str | None:
    return _uncoded(site) if any(site.facts.eights) else "inputs are not rounded"


LINEAR = (
    Candidate("onednn", create_onednn, varies=True),
    native(create_linear),
    _guest(RING, "rings:create_ring_linear", _no_ring_alone, "flat_gemm", "early_weights", warm_up=_ring_alone_calls, **_HOPPER),
    _guest(FLAT, "flat_linear:create_linear", _few_rows, "flat_gemm", dtypes=_HALVES, warm_up=_flat_calls, **_HOPPER),
    _tuned("create_linear", lambda site: gpu.load("linear.tuned:unmeasured")(site)),
    gpu.triton("linear.triton_linear:create_linear", invariant_calls, _varies, optional=True),
)  # fmt: skip
FUSED_LINEAR = (
    _guest(RING, "rings:create_ring", _no_ring, "flat_gemm", "deep_fusion", "early_weights", warm_up=_ring_calls, **_HOPPER),
    _guest(
        FUSED, "flat_linear:create_fused", _few_rows, "flat_gemm", "deep_fusion", warm_up=_fused_calls, **_HOPPER
    ),
)  # fmt: skip


def _sparse_calls(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    """Of every width of inputs; of one row, of few, and of many."""
    ends = torch.zeros(2, dtype=torch.int32, device=site.device)
    columns, values = ends[:0], torch.zeros(0, device=site.device)
    for width in {each.ins for each in matrices(sizes.spec) if each.layer is not None}:
        for rows in (1, 2, 4, 8):
            y, x = site.zeros(rows, 1), site.zeros(rows, width)
            yield f"{rows} rows of {width}", partial(run, y, x, ends, columns, values)


ADD_SPARSE = (native(sparse.create_native), gpu.triton("linear.triton_sparse:add_sparse", _sparse_calls))
PACKED_LINEAR = (
    *_rings("linear", _cut_ring_calls, "quantized_gemm"),
    _guest(EIGHT, "eight_bits:Maker.linear", _not_eight, "quantized_gemm", dtypes=_HALVES, warm_up=_eight_calls),
    _guest(CODED, "coded:Coded.linear", _uncoded, "quantized_gemm", dtypes=_HALVES, warm_up=coded_calls),
    native(compressed.create_linear, name="lossless", dtypes=_BFLOAT16, optional=True),
    native(
        partial(panels.create_linear, rounds=True), name=INTEGER, dtypes=_HALVES, techniques=INTEGERS, optional=True
    ),
    native(partial(panels.create_linear, rounds=False), optional=True),
)
PACKED_FUSED = (
    *_rings("fused", _quantised_ring_calls, *_DEEP),
    _guest(EIGHT, "eight_bits:Maker.fused", _not_eight, *_DEEP, warm_up=_eight_fused_calls),
    _guest(CODED, "coded:Coded.fused", _uncoded, *_DEEP, warm_up=coded_fused_calls),
)
NORMED_LINEAR, ACTIVATED_LINEAR = (
    (
        _rings(place, _composed_calls, *_DEEP)[0],
        _guest(EIGHT, f"eight_bits:Maker.{place}", _not_eight, *_DEEP, dtypes=_HALVES, warm_up=_composed_calls),
        _guest(CODED, f"coded:Coded.{place}", _unrounding, *_DEEP, dtypes=_HALVES, warm_up=_composed_calls),
    )
    for place in ("normed", "activated")
)
ADDED_LINEAR = (_tuned("create_sum"),)
GATED_LINEAR = (
    _guest(GATED, "cuda_gated:create_gated", _not_gated, "gated_products", warm_up=_gated_calls, **_HOPPER),
)
