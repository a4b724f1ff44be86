"""Which dimensions of a model a device computes inefficiently, and what to measure to find out how much they cost.

After The Case for Co-Designing Model Architectures with Hardware (Anthony et al. 2024): a dimension that is not a
multiple of what memory and matrix instructions move at once leaves part of them idle, and so does a GEMM whose tiles do
not fill the last wave of processors.

What lives here: rules that suspect, each with a shape to compare. What may not: torch, measuring
(bench/shape_advice.py), printing.

    wave quantization: tiles of 128 × 256 are dealt to the processors;  | 132 | 132 | 60     | → 324 tiles take the time
    of 396
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.sites import Role, head, matrices
from headrace.spec import DecoderSpec

ALIGNED = 64  # elements: 128 bytes of bfloat16 on a GPU, one block of a packed product on a CPU
TILE_ROWS, TILE_COLUMNS = 128, 256  # of the vendor's products for many tokens
FULL_WAVES = 0.85  # of the processors' time; what is below is suspected
FEW_WAVES = 8  # beyond, what the last wave wastes is under an eighth
NEAR = 0.35  # how much wider or narrower a width may be that fills its waves
HEAD_DIMS = {"cuda": (64, 128, 256), "cpu": (32, 64, 96, 128, 160, 192, 224, 256)}  # what kernels hold without padding
SPLITS = (2, 4, 8)  # devices


@dataclass(frozen=True, slots=True)
class Product:
    """The GEMM y [tokens, outs] = x [tokens, ins] · Wᵀ in ``layers`` places of a step."""

    name: str
    ins: int
    outs: int
    layers: int

    @property
    def size(self) -> str:
        return f"{self.ins} → {self.outs}"


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of ``heads`` query heads over ``kv_heads``, each of ``dim`` elements, in ``layers`` places of a
    step."""

    heads: int
    kv_heads: int
    dim: int
    layers: int

    @property
    def size(self) -> str:
        return f"{self.heads} heads over {self.kv_heads}, each of {self.dim}"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A dimension, the work that it shapes, the same work in a better shape, and how much more of it (``ratio``) the
    better shape does.

    ``tokens``: the step size at which to measure it. ``better`` None: nothing can be measured on one device, and
    ``remedy`` says everything.
    """

    dimension: str
    why: str
    remedy: str
    tokens: tuple[int, ...] = ()
    work: Product | Heads | None = None
    better: Product | Heads | None = None
    ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """The properties of a device that matter for shapes. ``few`` and ``many``: tokens of a decode step and of a
    prompt's step."""

    kind: str  # "cuda" or "cpu"
    processors: int
    few: int
    many: int


def products(spec: DecoderSpec) -> tuple[Product, ...]:
    """The dense GEMMs of a step; sparse layers have none with a shape of their own."""
    found = Counter(
        (site.label, site.ins, site.outs)
        for site in matrices(spec)
        if site.moe is None and site.role is not Role.ROUTER
    )
    return tuple(Product(*each, layers) for each, layers in found.items())


def multiplications(spec: DecoderSpec) -> float:
    """Multiplications by weights per token, in the average layer."""
    return sum(site.multiplications for site in matrices(spec) if site.role is not Role.ROUTER) / spec.num_layers


def head_product(spec: DecoderSpec) -> Product:
    site = head(spec)
    return Product(site.label, site.ins, site.outs, 1)


def suspects(spec: DecoderSpec, target: Target) -> Iterator[Suspect]:
    """In no order of importance: measuring shows what each costs."""
    yield from _unaligned(spec, target)
    yield from _waves(spec, target)
    yield from _head_dim(spec, target)
    yield from _group(spec, target)
    yield from _splits(spec, target)


def _up(size: int, step: int = ALIGNED) -> int:
    return -(-size // step) * step


def _unaligned(spec: DecoderSpec, target: Target) -> Iterator[Suspect]:
    both = (target.few, target.many)
    if spec.vocab_size % ALIGNED:
        head, padded = head_product(spec), _up(spec.vocab_size)
        why = f"not a multiple of {ALIGNED}: rows of logits are unaligned, and the last tile is mostly empty"
        remedy = f"pad embedding and head to {padded} rows"
        yield _product(f"vocabulary {spec.vocab_size}", why, remedy, head, replace(head, outs=padded), (target.few,))
    for name, size in (("hidden size", spec.hidden_size), ("feed-forward width", spec.intermediate_size)):
        if size % ALIGNED:
            why = f"not a multiple of {ALIGNED}: loads of a row are split, the last tile is partly empty"
            wider = _widened(spec, name, _up(size))
            for work, wide in zip(products(spec), products(wider), strict=True):
                if work != wide:
                    yield _product(
                        f"{name} {size}", why, f"train with {_up(size)}, or pad with zeros at load", work, wide, both
                    )


def _widened(spec: DecoderSpec, name: str, size: int) -> DecoderSpec:
    return replace(spec, hidden_size=size) if name == "hidden size" else replace(spec, intermediate_size=size)


def _product(dimension: str, why: str, remedy: str, work: Product, better: Product, tokens: tuple[int, ...]) -> Suspect:
    ratio = better.ins * better.outs / (work.ins * work.outs)
    return Suspect(f"{dimension} ({work.name} {work.size})", why, remedy, tokens, work, better, ratio)


def wave_use(tokens: int, outs: int, processors: int) -> tuple[float, float]:
    """(waves, share of them that computes) of a GEMM's tiles."""
    waves = -(-tokens // TILE_ROWS) * -(-outs // TILE_COLUMNS) / processors
    return waves, waves / -(-waves // 1)


def _waves(spec: DecoderSpec, target: Target) -> Iterator[Suspect]:
    if target.kind != "cuda":
        return
    for work in products(spec):
        waves, use = wave_use(target.many, work.outs, target.processors)
        if waves > FEW_WAVES or use >= FULL_WAVES or (full := _full_width(work.outs, target)) is None:
            continue
        why = f"{waves:.2f} waves of tiles at {target.many} tokens: {use:.0%} of {target.processors} processors' time"
        remedy = f"a width of {full}, or steps of another size (--max-num-batched-tokens)"
        yield _product(f"{work.name} width {work.outs}", why, remedy, work, replace(work, outs=full), (target.many,))


def _full_width(outs: int, target: Target) -> int | None:
    """The nearest width that fills its waves."""
    near = range(int(outs * (1 - NEAR)) // TILE_COLUMNS, int(outs * (1 + NEAR)) // TILE_COLUMNS + 1)
    widths = [
        each * TILE_COLUMNS
        for each in near
        if each and wave_use(target.many, each * TILE_COLUMNS, target.processors)[1] >= 0.95
    ]
    return min(widths, key=lambda width: abs(width - outs), default=None)


def _head_dim(spec: DecoderSpec, target: Target) -> Iterator[Suspect]:
    whole = HEAD_DIMS[target.kind]
    if spec.head_dim in whole or not (above := [each for each in whole if each > spec.head_dim]):
        return
    work = _heads(spec)
    group, width = spec.num_heads // spec.num_kv_heads, spec.num_heads * spec.head_dim
    kv_heads = max(1, round(width / above[0] / group))
    better = replace(work, heads=group * kv_heads, kv_heads=kv_heads, dim=above[0])
    ratio = better.heads * better.dim / width
    why = f"kernels hold a head of {spec.head_dim} in {above[0]} places, the rest of them empty"
    remedy = f"heads of {above[0]} in a model of this width"
    yield Suspect(f"head dim {spec.head_dim}", why, remedy, (target.few, target.many), work, better, ratio)


def _heads(spec: DecoderSpec) -> Heads:
    return Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers)


def _group(spec: DecoderSpec, target: Target) -> Iterator[Suspect]:
    """Query heads that share keys: they fill one matrix instruction, and keys are read once for all of them."""
    group, work = spec.num_heads // spec.num_kv_heads, _heads(spec)
    if group == 1 and spec.num_heads % 4 == 0:
        why = "every query head has its own keys and values"
        better = replace(work, kv_heads=spec.num_heads // 4)
        yield Suspect(
            "GQA group 1",
            why,
            "fewer KV heads (a group of 4 to 8), with a quarter of the KV cache",
            (target.few,),
            work,
            better,
        )
    elif group & (group - 1):
        whole = 1 << group.bit_length()
        better = replace(work, heads=whole * spec.num_kv_heads)
        why = f"{group} query heads share a KV head: tiles hold {whole}"
        yield Suspect(
            f"GQA group {group}", why, f"groups of {whole}", (target.few, target.many), work, better, whole / group
        )


def _splits(spec: DecoderSpec, target: Target) -> Iterator[Suspect]:
    """What tensor parallelism would run into."""
    if target.kind != "cuda":
        return
    uneven = [n for n in SPLITS if spec.num_heads % n or (spec.num_kv_heads % n and n % spec.num_kv_heads)]
    if uneven:
        remedy = f"heads that {uneven[0]} divides; this model cannot be split like that"
        yield Suspect(
            f"{spec.num_heads} heads over {spec.num_kv_heads}",
            f"cannot be distributed over {_listed(uneven)} devices",
            remedy,
        )
    copied = [n for n in SPLITS if n > spec.num_kv_heads and n not in uneven]
    if copied:
        times = ", ".join(f"{n // spec.num_kv_heads}× on {n}" for n in copied)
        why = f"fewer than {_listed(copied)} devices: each holds a copy ({times} the KV bytes of an even split)"
        yield Suspect(f"{spec.num_kv_heads} KV heads", why, f"split over at most {spec.num_kv_heads} devices")
    gate = next((each for each in products(spec) if each.name in ("gate and up", "up")), None)
    uneven = [n for n in SPLITS if spec.intermediate_size % (n * ALIGNED) and not spec.intermediate_size % ALIGNED]
    if gate is not None and uneven:
        parts = uneven[0]
        work = replace(gate, outs=gate.outs // parts)
        better = replace(work, outs=gate.outs // spec.intermediate_size * _up(-(-spec.intermediate_size // parts)))
        why = f"split over {_listed(uneven)} devices, its parts are not multiples of {ALIGNED}"
        remedy = f"a multiple of {parts * ALIGNED}"
        yield _product(
            f"feed-forward width {spec.intermediate_size}", why, remedy, work, better, (target.few, target.many)
        )


def _listed(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
