"""Where the factors of an adapter lie: rows of a, and columns of b, one after another in blocks of a pool (unified
paging: S-LoRA, Sheng et al. 2023, whose pages these are).

    block 7    q.a row 0 | q.a row 1 | … | k.b column 3 | v.b column 0 | …      those of all weights, the longest first
    address    of slot, part and rank: where that one lies in the pool, in units of 8 elements

An adapter takes as many as its ranks say. One that is longer than a chunk lies in several, each with an address. Of
the KV cache's blocks, a chunk is the largest power of two that one of the first group holds.

What lives here: which tables there are, what lies where in how many blocks. What may not: torch, which blocks these
are (cache/adapters.py), files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.config import AdapterConfig, CacheConfig
from headrace.models.weight_rules import adapted_modules
from headrace.sites import Role, Weight
from headrace.spec import ADDRESS_UNIT, AdapterSpace, DecoderSpec, KVSpec, attention_groups

LEAST_CHUNK = 256  # elements: as wide as a kernel's tiles, which lie in one chunk
_FLOAT_BYTES = 4  # of gains
_FEW = 8  # adapters of a step, where memory for each is set aside
_MOST_SLOTS, _TABLE_BYTES = 1024, 64 * 2**20  # of the device, where no flag says how many


@dataclass(frozen=True, slots=True)
class Site:
    """One weight that adapters may add to. Its columns in each slot's row of the table: ranks [parts] from ``ranks``
    on, addresses [parts, rank, chunks] of a from ``a`` on, and of b; of gains (DoRA) [parts, 2, chunks]."""

    weight: Weight
    parts: tuple[int, ...]  # outputs of those that have factors of their own
    ins: int
    ranks: int
    a: int
    b: int
    gains: int
    chunks: tuple[int, int, int]  # of a row of a, a column of b, gains

    @property
    def is_table(self) -> bool:
        return self.weight.role is Role.EMBEDDING


@dataclass(frozen=True, slots=True)
class Strip:
    """``rows`` of one factor of a module ("a", "b" or "gains" of the ``source``th), their elements from ``first`` on.
    Addresses go into every ``step``th column from ``column`` on."""

    source: int
    kind: str
    first: int
    length: int
    rows: int
    column: int
    step: int


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``first`` … ``first + count - 1`` of a strip, one after another from element ``at`` of a block on."""

    strip: Strip
    block: int
    at: int
    first: int
    count: int

    @property
    def width(self) -> int:
        """From one to the next."""
        return _rounded(self.strip.length)


@dataclass(frozen=True, slots=True)
class Layout:
    """``block``, ``chunk``: elements, of ``element_bytes`` each; ``rank``: the largest; ``columns``: of the table, in
    which ranks come first. ``space``: as the control plane sees it. ``stages``: of a pipeline, what each holds of an
    adapter, in blocks of its own size: all of them set aside as many as the one that needs most."""

    by_name: Mapping[str, Site]  # of the weight
    columns: int
    block: int
    chunk: int
    rank: int
    element_bytes: int
    space: AdapterSpace
    largest: int  # blocks that the largest adapter takes
    stages: tuple[Layout, ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self.by_name.values())

    @property
    def is_shared(self) -> bool:
        """With the first KV group."""
        return not self.space.blocks

    @property
    def num_bytes(self) -> int:
        """Of the table, and of blocks of their own."""
        return 4 * self.space.slots * self.columns + self.space.blocks * self.block * self.element_bytes

    @property
    def num_parts(self) -> int:
        """Of all weights: as many ranks a slot has."""
        return sum(len(site.parts) for site in self.sites)

    def count_blocks(self, modules: Collection[tuple[str, int, int, bool]]) -> int:
        """That an adapter takes, whatever this stage holds of it."""
        return max(pack(each.strips(modules), each.block)[1] for each in self.stages or (self,))

    def strips(self, modules: Iterable[tuple[str, int, int, bool]]) -> Iterator[Strip]:
        """``modules``: weight, part, rank, and whether it has gains, of each; those of other stages are left out."""
        for source, (name, part, rank, gained) in enumerate(modules):
            if (site := self.by_name.get(name)) is None:
                continue
            lengths = {"a": site.ins, "b": site.parts[part], "gains": _floats(site.parts[part], self.element_bytes)}
            for kind, column, chunks in zip(lengths, (site.a, site.b, site.gains), site.chunks, strict=True):
                rows, room = (2 * gained, 2) if kind == "gains" else (rank, self.rank)
                for chunk, first in enumerate(range(0, lengths[kind] if rows else 0, self.chunk)):
                    length = min(self.chunk, lengths[kind] - first)
                    yield Strip(source, kind, first, length, rows, column + part * room * chunks + chunk, chunks)


def pack(strips: Iterable[Strip], block: int) -> tuple[list[Run], int]:
    """Into how many blocks of so many elements."""
    runs: list[Run] = []
    blocks, left = 0, 0
    for strip in sorted(strips, key=lambda strip: -strip.length):
        width, first = _rounded(strip.length), 0
        while first < strip.rows:
            if left < width:
                blocks, left = blocks + 1, block
            count = min(left // width, strip.rows - first)
            runs.append(Run(strip, blocks - 1, block - left, first, count))
            first, left = first + count, left - count * width
    return runs, blocks


def create_layout(
    spec: DecoderSpec,
    config: AdapterConfig,
    cache: CacheConfig,
    kv: Sequence[KVSpec],
    element_bytes: int,
    stages: Sequence[tuple[int, int]] = (),
    rows: int = _FEW,
) -> Layout | None:
    """None where no adapters are served. In blocks of the KV cache, unless these are too small (on one stage), or that
    is off. ``stages``: layers of each, where ``spec`` is one of a pipeline's. ``rows``: sequences of a step: each may
    have an adapter of its own, which costs a step the reading of its factors, but a wait costs more."""
    if not config.enable_lora:
        return None
    specs = [replace(spec, held=held) for held in stages] or [spec]
    found = [0] * len(specs)
    if kv and cache.unified_paging:
        firsts = [attention_groups(each)[0][1] for each in specs]
        found = [_block_elements(replace(kv[0], layers=layers), element_bytes) for layers in firsts]
    blocks = found if all(found) else [_own_block(each, element_bytes) for each in specs]
    parts = [_lay_out(*each, config.max_lora_rank, element_bytes) for each in zip(specs, blocks, strict=True)]
    largest, size = max(each.largest for each in parts), max(blocks) * element_bytes
    own, shared = parts[specs.index(spec)], all(found)
    slots = max(1, min(_MOST_SLOTS, _TABLE_BYTES // max(4 * each.columns for each in parts))) if shared else 4 * _FEW
    space = config.space(rows if shared else _FEW, slots)
    space = replace(space, blocks=0 if shared else space.most * largest, block_bytes=size)
    return replace(own, largest=largest, space=space, stages=tuple(parts) if stages else ())


def _lay_out(spec: DecoderSpec, block: int, rank: int, element_bytes: int) -> Layout:
    chunk = 1 << (block.bit_length() - 1)
    sites, columns = _place(spec, rank, chunk, element_bytes)
    layout = Layout(sites, columns, block, chunk, rank, element_bytes, AdapterSpace(0, 0), 0)
    whole = [(name, part, rank, True) for name, site in sites.items() for part in range(len(site.parts))]
    return replace(layout, largest=layout.count_blocks(whole))


def _own_block(spec: DecoderSpec, element_bytes: int) -> int:
    """As long as the longest that lies in it."""
    sizes = [
        size for _, parts, ins in _shapes(spec) for size in (ins, *(_floats(part, element_bytes) for part in parts))
    ]
    return max(LEAST_CHUNK, 1 << (max(sizes) - 1).bit_length())


def _block_elements(kv: KVSpec, element_bytes: int) -> int:
    """0: its blocks do not hold a chunk, or do not begin at an address."""
    size = kv.token_bytes * kv.held_tokens
    return 0 if size % (ADDRESS_UNIT * element_bytes) or size < LEAST_CHUNK * element_bytes else size // element_bytes


def _shapes(spec: DecoderSpec) -> Iterator[tuple[Weight, tuple[int, ...], int]]:
    """(weight, outputs of its parts that have factors of their own, inputs) of all that adapters may add to."""
    seen = set()
    for module in adapted_modules(spec):
        weight = module.weight
        if weight.role is Role.EMBEDDING:
            if spec.embeds:  # else it is a tied head's
                yield weight, (weight.ins,), weight.outs
        elif weight.name not in seen:
            seen.add(weight.name)
            yield weight, weight.parts if module.part is not None else (weight.outs,), weight.ins


def _place(spec: DecoderSpec, rank: int, chunk: int, element_bytes: int) -> tuple[dict[str, Site], int]:
    shapes, sites, number = list(_shapes(spec)), dict[str, Site](), 0
    column = sum(len(parts) for _, parts, _ in shapes)
    for weight, parts, ins in shapes:
        widest = max(parts)
        a, b, gains = (-(-size // chunk) for size in (ins, widest, _floats(widest, element_bytes)))
        at_b = column + len(parts) * rank * a
        at_gains = at_b + len(parts) * rank * b
        sites[weight.name] = Site(weight, parts, ins, number, column, at_b, at_gains, (a, b, gains))
        column, number = at_gains + len(parts) * 2 * gains, number + len(parts)
    return sites, column


def _floats(count: int, element_bytes: int) -> int:
    """Elements that so many float32 take."""
    return count * _FLOAT_BYTES // element_bytes


def _rounded(length: int) -> int:
    return -(-length // ADDRESS_UNIT) * ADDRESS_UNIT
