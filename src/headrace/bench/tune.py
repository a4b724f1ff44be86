"""``headrace bench kernels --tune``: measures and saves which form computes each GEMM best on this card.

What lives here: the kinds of GEMMs that have forms, timing them, the choice. What may not: forms and their tables
(kernels/linear/).

GEMMs with few rows are timed as replays, one launch after the other as in a decode step, over weights that exceed
every cache. A long step is limited by the card's power, so its forms are compared after the card has been busy for a
while, each for a tenth of a second, alternating, twice, so that earlier load affects all of them alike. A form is kept
if its result is correct and it is faster than what is used without it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, groupby, islice, pairwise
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels.candidate import CallSite, Card, Declined, EightBits, KernelContext, Shape, WeightFacts
from headrace.kernels.linear import flat_forms, gated_tiles, ring_forms
from headrace.kernels.linear import tuned as vendor
from headrace.kernels.linear.candidates import SMALL_WEIGHT
from headrace.kernels.linear.cublaslt import Operands, Products
from headrace.kernels.linear.epilogue import MOST_ROWS, Epilogue
from headrace.kernels.linear.forms import FLAT
from headrace.kernels.linear.gated_tiles import Tile
from headrace.kernels.linear.measured import Measured
from headrace.kernels.linear.packing import Coding
from headrace.kernels.linear.tuned import create_linear
from headrace.kernels.norm.reference import gated_activation
from headrace.layers.wide_copy import has_copy
from headrace.observe.report import table, write_json
from headrace.sites import Role, Weight, head, matrices
from headrace.spec import Activation, DecoderSpec
from headrace.worker.card import cuda_time
from headrace.worker.memory import buckets_up_to
from headrace.worker.profile import limits_now

FLAT_ROWS = (1, 16, 32, MOST_ROWS)  # the most rows of each class
MOST_FEW = 512  # rows of a decode step, as far as each number of rows is looked at
LONG = ((4096, 8192), (12288, 16384))  # cuBLASLt: from so many rows on; measured with so many
WIDEST = 65536  # columns: a wider weight is a head, of which long steps compute few rows
# Rows of prompts: each stands for those above the one before. Tiles in turns are counted in pairs of 128 rows: the
# fewer, the more it matters.
PROMPTS = (640, 768, 896, 1024, 1152, 1280, 1536, 2048, 3072, 4096, 8192, 16384)
LEAST_TALL = 1152  # rows: with fewer, tall tiles do not fill the device
SECONDS, TURNS = 0.01, 2  # of timing a form once; the lower of so many
HELD_SECONDS, WARM_SECONDS = 0.1, 0.3
TOLERANCE = 0.02  # of the result's norm
COLUMNS = ("product", "rows", "best form", "µs", "GB/s", "of the read limit", "TFLOP/s", "µs without")

Calls = list[Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One GEMM of ``rows`` rows, from ``least`` on. ``forms``: what makes the calls of each; None: of what is used
    without a form. ``gain``: how many times faster a form must be. ``held``: the card is kept busy, as in a long step.
    ``lead``: calls that go before each, as in a decode step, where what a form may ask for ahead of its turn counts.
    """

    shape: Shape
    rows: int
    forms: Mapping[Any, Callable[[], Calls]]
    gain: float = 1.0
    held: bool = False
    least: int = 0
    lead: Callable[[], Calls] | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """A trial's best form (None: none is worth keeping), its seconds, and the seconds without it."""

    shape: Shape
    rows: int
    form: Any
    seconds: float
    without: float
    least: int = 0

    def row(self, read_bandwidth: float) -> tuple[Any, ...]:
        moved = 2 * self.shape.outs * self.shape.ins * _halves(self.shape)
        flops = 2 * self.rows * self.shape.outs * self.shape.ins
        rate = moved / self.seconds
        teraflops = flops * _halves(self.shape) / self.seconds / 1e12
        return (
            self.shape.key,
            self.rows,
            _form(self.form),
            self.seconds * 1e6,
            rate / 1e9,
            rate / read_bandwidth,
            teraflops,
            self.without * 1e6,
        )


def fastest(trial: Trial) -> Tuned:
    """Forms with a wrong result, and those that do not build here, are not timed."""
    want = trial.forms[None]()[0]().float()
    right = {form: make for form, make in trial.forms.items() if form is None or _right(make, want)}
    seconds = _held(right) if trial.held else {form: _short(make, trial.lead) for form, make in right.items()}
    best = min((form for form in seconds if form is not None), key=lambda form: seconds[form], default=None)
    chosen = best if best is not None and seconds[best] * trial.gain < seconds[None] else None
    return Tuned(trial.shape, trial.rows, chosen, seconds[chosen], seconds[None], trial.least)


def _right(make: Callable[[], Calls], want: Tensor) -> bool:
    try:
        return bool((make()[0]().float() - want).norm() < TOLERANCE * want.norm())
    except Exception as failure:
        from headrace.kernels.build.toolchain import build_failure

        if build_failure(failure) is None:
            raise
        return False


def _short(make: Callable[[], Calls], lead: Callable[[], Calls] | None) -> float:
    """Seconds a call; what goes before each is taken off."""
    calls = make()
    if lead is None:
        return min(median(cuda_time(calls, SECONDS)) for _ in range(TURNS))
    before = list(islice(cycle(lead()), len(calls)))
    both = [each for pair in zip(before, calls, strict=True) for each in pair]
    alone, together = (min(median(cuda_time(each, SECONDS)) for _ in range(TURNS)) for each in (before, both))
    return 2 * together - alone


def _held(forms: Mapping[Any, Callable[[], Calls]]) -> dict[Any, float]:
    """Mean seconds per call of each form, over several turns, on a card that has been busy for a while."""
    cuda_time(forms[None](), WARM_SECONDS, rounds=1)
    turns = [{form: cuda_time(make(), HELD_SECONDS, rounds=1)[0] for form, make in forms.items()} for _ in range(TURNS)]
    return {form: sum(each[form] for each in turns) / TURNS for form in forms}


class Kind:
    """GEMMs that one kind of kernel computes. ``activation`` follows the gate."""

    name = ""
    measured: Measured[Any]

    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The model's GEMMs that this kind has forms for."""
        return tuple(shapes)

    def build(self, shapes: Sequence[Shape]) -> None:
        """Compiles the forms to be tried, in parallel."""

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        """Over ``weights``, enough of them to exceed every cache."""
        raise NotImplementedError

    def table(self, tuned: Sequence[Tuned]) -> dict[Any, Any]:
        """The table as it is saved."""
        return {
            shape: tuple((each.rows, each.form) for each in tuned if each.shape == shape) for shape in _shapes(tuned)
        }


class FlatProducts(Kind):
    """GEMMs of up to 64 rows, with the forms of kernels/linear/triton_flat.py, compared with the vendor's GEMM."""

    name, measured = "flat", flat_forms.MEASURED

    def build(self, shapes: Sequence[Shape]) -> None:
        """In one process per core: this process then finds the results in the compiler's cache."""
        forms = sorted(
            {
                (shape.gated, form)
                for shape in shapes
                for rows in FLAT_ROWS
                for form in flat_forms.candidate_forms(shape, rows)
            },
            key=str,
        )
        workers = max(1, min(len(forms), (os.cpu_count() or 2) - 1))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(_build_flat, self.activation), [forms[index::workers] for index in range(workers)]))

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        for rows in FLAT_ROWS:
            x = random_inputs(rows, shape.ins)
            forms = {
                form: partial(_flat_calls, shape, form, x, weights, self.activation)
                for form in flat_forms.candidate_forms(shape, rows)
            }
            vendor = partial(_over, weights, _vendor, x, self.activation if shape.gated else None)
            # the vendor's takes no norm and no gate in
            yield Trial(shape, rows, {None: vendor, **forms}, gain=0.0 if shape.gated else 1.0)


class RingProducts(Kind):
    """GEMMs of 2 to 64 rows with the ring kernel, compared with the flat forms."""

    name, measured = "ring", ring_forms.MEASURED
    coding: Coding | None = None
    eight: EightBits | None = None

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Those inside layers: the head's weight is large enough for any form."""
        return tuple(
            shape
            for shape in shapes
            if shape.outs < flat_forms.LARGE and shape.ins % 64 == 0 and (shape.outs % 8 == 0 or not shape.gated)
        )

    def rows(self, shape: Shape) -> tuple[int, ...]:
        """The most of each class."""
        return ring_forms.ROWS

    def forms(self, shape: Shape, rows: int) -> tuple[ring_forms.RingForm, ...]:
        kind = "" if self.eight is None else self.eight.kind_of
        return ring_forms.candidate_forms(shape, rows, processors(), self.coding, kind)

    def build(self, shapes: Sequence[Shape]) -> None:
        from headrace.kernels.linear.cuda_ring import machine_code

        tried = ((shape, form) for shape in shapes for rows in self.rows(shape) for form in self.forms(shape, rows))
        needed = {(replace(form, late=False), self.activation if shape.gated else None) for shape, form in tried}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler lets threads work side by side
            list(pool.map(lambda each: machine_code(*each), sorted(needed, key=str)))

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        for rows in self.rows(shape):
            x, epilogue = random_inputs(rows, shape.ins), _around(shape, rows, self.activation)
            without = partial(_measured_flat_calls, shape, x, epilogue, weights)
            yield self.trial(shape, rows, without, (x, epilogue, weights), gain=1.02)

    def trial(
        self,
        shape: Shape,
        rows: int,
        without: Callable[[], Calls],
        inputs: tuple[Any, ...],
        gain: float = 1.0,
        **more: Any,
    ) -> Trial:
        """``inputs``: as ``ring_calls`` has them."""
        forms = {form: partial(ring_calls, shape, form, *inputs) for form in self.forms(shape, rows)}
        return Trial(shape, rows, {None: without, **forms}, gain, **more)

    def table(self, tuned: Sequence[Tuned]) -> dict[Any, Any]:
        """A single row is left to the other forms, which multiply it without matrix instructions."""
        return {shape: ((1, None), *rows) for shape, rows in super().table(tuned).items()}


class VendorProducts(Kind):
    """GEMMs of 65 rows or more, including the head's, with cuBLASLt's algorithms, compared with torch's own choice."""

    name, measured = "cuBLASLt", vendor.MEASURED

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys(Shape(shape.outs * _halves(shape), shape.ins) for shape in shapes))

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        """The numbers of rows that decode steps are padded to. Beyond the last, where steps are not long yet, torch's
        choice is used."""
        few = [(before + 1, rows, False) for before, rows in pairwise((MOST_ROWS, *_buckets()))]
        long = [(*each, True) for each in LONG] if shape.outs < WIDEST else []
        for least, rows, held in (*few, *long):
            x, used = random_inputs(rows, shape.ins), weights[:2] if held else weights
            yield Trial(shape, rows, _vendor_forms(shape, x, used), gain=1.01 if held else 1.03, held=held, least=least)
            if (least, rows, held) == few[-1]:
                yield Trial(
                    shape,
                    rows + 1,
                    {None: partial(_over, weights, _vendor, random_inputs(rows + 1, shape.ins), None)},
                    least=rows + 1,
                )

    def table(self, tuned: Sequence[Tuned]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for each in tuned:
            before = found.get(each.shape, ())
            if each.form or (before and before[-1].settings):  # neighbours that are all torch's are one row
                choice = vendor.Choice(each.least, each.rows, each.form or ())
                found[each.shape] = (*before, choice)
        return found


class GatedProducts(Kind):
    """Gate-up GEMMs of 65 rows or more with their activation, compared with the vendor's GEMM and a separate
    activation."""

    name, measured = "gated", gated_tiles.MEASURED

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys(shape for shape in shapes if shape.gated and shape.outs % 8 == 0))

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        """A prompt's GEMM need not be much faster: it takes less memory."""
        from headrace.kernels.linear.cuda_gated import GatedLinear, kernels_of

        kernels = kernels_of(weights[0].device)
        layers = [GatedLinear(each, kernels, (), {}) for each in weights]
        for rows in (*_buckets(), *PROMPTS):
            long = rows > MOST_FEW
            tiles, used = (tiles_for(rows, shape.ins), layers[:2]) if long else (gated_tiles.TOGETHER, layers)
            yield gate_trial(
                shape,
                random_inputs(rows, shape.ins),
                used,
                tiles,
                self.activation,
                gain=1.0 if long else 1.02,
                held=long,
            )

    def table(self, tuned: Sequence[Tuned]) -> dict[Any, Any]:
        """Neighboring entries with the same tile are merged, and the best tile for the most rows is used beyond them,
        too."""
        found: dict[Any, Any] = {}
        for shape in _shapes(tuned):
            own = (each for each in tuned if each.shape == shape)
            last = [(list(group)[-1].rows, tile) for tile, group in groupby(own, key=lambda each: each.form)]
            found[Shape(shape.outs, shape.ins)] = tuple(
                (gated_tiles.BEYOND if rows == PROMPTS[-1] else rows, tile) for rows, tile in last
            )
        return found


KINDS = (FlatProducts, RingProducts, VendorProducts, GatedProducts)


def shapes_of(spec: DecoderSpec, wanted: Callable[[Weight], bool] = lambda site: True) -> tuple[Shape, ...]:
    """The GEMM shapes of a decoder of this shape, without duplicates."""
    dense = [site for site in matrices(spec) if site.moe is None and site.role is not Role.ROUTER]
    found = dict.fromkeys(
        Shape(site.parts[0] if site.gated else site.outs, site.ins, site.gated)
        for site in (*dense, head(spec))
        if wanted(site)
    )
    return tuple(shape for shape in found if shape.outs * shape.ins >= SMALL_WEIGHT and shape.ins % 64 == 0)


def tiles_for(rows: int, ins: int) -> tuple[Tile, ...]:
    """Tiles worth trying for a prompt's rows."""
    return (*gated_tiles.IN_TURNS, *(tile for tile in gated_tiles.TALL if rows >= LEAST_TALL and tile.takes(ins)))


def tune(kind: Kind, shapes: Sequence[Shape], working_set: int) -> list[Tuned]:
    """Every trial of a kind on the current card; weights rotate through ``working_set`` bytes."""
    wanted = kind.shapes(shapes)
    kind.build(wanted)
    return [fastest(trial) for shape in wanted for trial in kind.trials(shape, _weights(shape, working_set))]


def planned(spec: DecoderSpec) -> list[tuple[Kind, tuple[Shape, ...]]]:
    """Kinds, and the GEMMs that each may compute: weights in few bits are multiplied by their own, and by those for many
    rows where they have a widened copy."""
    from headrace.bench.tune_coded import coded_kinds

    plain = shapes_of(spec, lambda site: not site.formats)
    wide = shapes_of(spec, lambda site: not site.formats or has_copy(site))
    packed = shapes_of(spec, lambda site: bool(site.formats))
    few = [(kind(spec.activation), plain) for kind in KINDS[:2]]
    many = [(kind(spec.activation), wide) for kind in KINDS[2:]]
    return [*few, *many, *((kind, packed) for kind in coded_kinds(spec))]


def run_tune(args: argparse.Namespace, spec: DecoderSpec) -> int:
    """Raises ConfigError without a card that forms exist for."""
    if args.device != "cuda":
        raise ConfigError("--tune measures a GPU; add --device cuda.")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise ConfigError("--tune needs a GPU of compute capability 9, for which the forms are made; run it there.")
    begun = time.monotonic()
    found = dict[str, list[Tuned]]()
    device = torch.cuda.get_device_name()
    limit = limits_now("cuda").read_bandwidth
    working_set = 4 * torch.cuda.get_device_properties("cuda").L2_cache_size
    for kind, shapes in planned(spec):
        since = time.monotonic()
        tuned = found[kind.name] = tune(kind, shapes, working_set)
        if tuned:
            print(f"{kind.name}:\n{table(COLUMNS, [each.row(limit) for each in tuned])}")
            saved = kind.measured.keep(device, kind.table(tuned))
            print(f"saved in {saved}, {time.monotonic() - since:.0f} s\n", flush=True)
    print(f"{time.monotonic() - begun:.0f} s in total; the next start uses the saved results")
    if args.output_json:
        write_json(args.output_json, {name: [asdict(each) for each in part] for name, part in found.items()})
    return 0


def _form(form: Any) -> str:
    if isinstance(form, tuple):  # cuBLASLt's settings
        return " ".join(map(str, form))
    if form is None or isinstance(form, Tile | str):
        return "none" if form is None else str(form)
    said = {name: value for name, value in asdict(form).items() if name != "coding" and value not in (None, "")}
    return ", ".join(f"{name} {value}" for name, value in said.items())


def _halves(shape: Shape) -> int:
    return 2 if shape.gated else 1


def _shapes(tuned: Sequence[Tuned]) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(each.shape for each in tuned))


def _buckets() -> list[int]:
    return [count for count in buckets_up_to(MOST_FEW) if count > MOST_ROWS]


def processors() -> int:
    return int(torch.cuda.get_device_properties("cuda").multi_processor_count)


def random_inputs(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _weights(shape: Shape, working_set: int) -> list[Tensor]:
    rows = shape.outs * _halves(shape)
    count = max(2, min(24, -(-working_set // (2 * rows * shape.ins))))
    return [random_inputs(rows, shape.ins).mul_(shape.ins**-0.5) for _ in range(count)]


def _around(shape: Shape, rows: int, activation: Activation) -> Epilogue:
    return (
        Epilogue(torch.full((1, rows), float(shape.ins), device="cuda"), 0.0, activation) if shape.gated else Epilogue()
    )


def _over(weights: Sequence[Any], product: Callable[..., Any], *arguments: Any) -> Calls:
    return [partial(product, each, *arguments) for each in weights]


def first(compute: Callable[..., Any], *arguments: Any) -> Tensor:
    y: Tensor = compute(*arguments)[0]
    return y


def _vendor(weight: Tensor, x: Tensor, activation: Activation | None) -> Tensor:
    y = F.linear(x, weight)
    return y if activation is None else gated_activation(y, activation)


def _flat_calls(shape: Shape, form: Any, x: Tensor, weights: Sequence[Tensor], activation: Activation) -> Calls:
    from headrace.kernels.linear.flat_linear import Product
    from headrace.kernels.linear.triton_ends import make_scratch

    forms = ((MOST_ROWS, form),)
    products = [Product(weight, None, shape, forms, make_scratch(shape, forms, x.device), True) for weight in weights]
    return [partial(first, product.launch, form, x, _around(shape, len(x), activation)) for product in products]


def _build_flat(activation: Activation, forms: Sequence[tuple[bool, Any]]) -> None:
    for gated, form in forms:
        shape = Shape(1024, 8192 if form.kind == FLAT else 2 * form.depth, gated)
        weight = torch.zeros(shape.outs * _halves(shape), shape.ins, device="cuda", dtype=torch.bfloat16)
        with suppress(Exception):  # the one that times it says so
            _flat_calls(shape, form, weight[:1], [weight], activation)[0]()


def _measured_flat_calls(shape: Shape, x: Tensor, epilogue: Epilogue, weights: Sequence[Tensor]) -> Calls:
    """The flat forms in use without a ring."""
    from headrace.kernels.linear.flat_linear import Product
    from headrace.kernels.linear.triton_ends import make_scratch

    measured = flat_forms.MEASURED.table(torch.cuda.get_device_name(x.device))
    forms = flat_forms.without_vendor(flat_forms.forms_for(shape, processors(), measured), shape, processors())
    scratch = make_scratch(shape, forms, x.device)
    products = [Product(weight, None, shape, forms, scratch, True) for weight in weights]
    form: Any = products[0].form(len(x))
    return [partial(first, product.launch, form, x, epilogue) for product in products]


def ring_calls(
    shape: Shape, form: Any, x: Tensor, epilogue: Epilogue, weights: Sequence[Any], units: Tensor | None = None
) -> Calls:
    from headrace.kernels.linear.cuda_ring import RingLinear, kernels_of

    none: Any = None  # what no form serves is not asked for here
    kernels = kernels_of(torch.cuda.current_device())
    layers = [RingLinear(weight, None, shape, (), kernels, True, none, {}, units=units) for weight in weights]
    return [partial(first, layer.compute, x, epilogue, form) for layer in layers]


def _vendor_forms(shape: Shape, x: Tensor, weights: Sequence[Tensor]) -> dict[Any, Callable[[], Calls]]:
    products = Products(shape.outs, shape.ins, torch.bfloat16, torch.cuda.current_device())
    operands = Operands(len(x), shape.outs, shape.ins, torch.bfloat16)

    def calls(algorithm: Any) -> Calls:
        y = torch.full((len(x), shape.outs), float("nan"), device=x.device, dtype=x.dtype)
        return [partial(_multiplied, products, algorithm, operands, x, each, y) for each in weights]

    offered = {
        settings: partial(calls, each) for settings, each in products.offers(len(x)) if products.takes(each, operands)
    }
    return {None: partial(_over, weights, _vendor, x, None), **offered}


def _multiplied(products: Products, algorithm: Any, operands: Operands, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    products.multiply(algorithm, operands, x, weight, y, add=False)
    return y


def wide_calls(shape: Shape, x: Tensor, weights: Sequence[Tensor], activation: Activation | None) -> Calls:
    """By the vendor, or a gate by the tile that was measured, as an engine would compute them now."""
    from headrace.kernels.linear.cuda_gated import GatedLinear, kernels_of

    multiply = _tuned_product(weights[0])
    if activation is None:
        return [partial(multiply, x, each) for each in weights]
    tiles = gated_tiles.measured_tiles(torch.cuda.get_device_name()).get(Shape(shape.outs, shape.ins), ())
    kernels = kernels_of(weights[0].device)
    layers = [GatedLinear(each, kernels, tiles, {}) for each in weights]
    tile = layers[0].tile(len(x))
    if tile is None:
        return _over(weights, _apart, multiply, x, activation)
    return [partial(each.compute, x, activation, tile) for each in layers]


def gate_trial(
    shape: Shape,
    x: Tensor,
    layers: Sequence[Any],
    tiles: Sequence[Tile],
    activation: Activation,
    *,
    gain: float,
    held: bool = False,
) -> Trial:
    def calls(tile: Tile) -> Calls:
        return [partial(each.compute, x, activation, tile) for each in layers]

    apart = partial(_over, [each.weight for each in layers], _apart, _tuned_product(layers[0].weight), x, activation)
    return Trial(shape, len(x), {None: apart, **{tile: partial(calls, tile) for tile in tiles}}, gain, held)


def _apart(weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, activation: Activation) -> Tensor:
    from headrace.kernels.norm.triton_activation import gated_activation

    return gated_activation(multiply(x, weight), activation)


def _tuned_product(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The vendor's GEMM, as an engine would compute it now."""
    facts = WeightFacts(weight.dtype, weight.shape[1], weight.shape[0])
    make = create_linear(CallSite("linear", weight.device, facts, KernelContext(Card.of(weight.device))))
    if isinstance(make, Declined):
        return F.linear
    return lambda x, weight: make(weight, None)(x)
