# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The sparse feed-forward over experts in codes of few bits: the grouped products of triton_moe.py, whose weights are
read by triton_codes.py. A few tokens take the two launches of triton_coded_few.py instead.

What lives here: those two kernels, laying experts out, the callable and its launches. What may not: routing, the
weighted sum (triton_moe.py), what formats mean (quant/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.build.launch import launchable
from headrace.kernels.candidate import CallSite, EightBits, Empty, ExpertFacts, plainly_empty
from headrace.kernels.linear.coded import constants, reader, views
from headrace.kernels.linear.epilogue import PLAIN, Epilogue, Fused
from headrace.kernels.linear.packed import PackedMatrix
from headrace.kernels.linear.packing import ROWS, Codes, Coding, Packed, joined, pack
from headrace.kernels.linear.triton_codes import BLOCK_BYTES, Blocks, _product, _split
from headrace.kernels.moe.reference import FEW
from headrace.kernels.moe.triton_coded_few import coded_few, table_of
from headrace.kernels.moe.triton_moe import _combined, _grid, _routed, _unit
from headrace.kernels.norm.triton_activation import KINDS, act
from headrace.kernels.norm.triton_rounded import Rounding
from headrace.spec import Activation


@launchable(do_not_specialize=["room", "steps", "tiles"])
def _expand_coded_kernel(
    x_ptr, words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, inner_ptr, counts_ptr, listed_ptr, rstd_ptr, x_row, room, steps, tiles,
    NORMED: tl.constexpr, CODING: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Gate and up take turns, ``tiles`` blocks of 64 rows of them an expert."""
    across: tl.constexpr = (INNER + BLOCKS * 32 - 1) // (BLOCKS * 32)
    expert, count, before, tile, strip = _unit(counts_ptr, tl.program_id(0), across, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        there = place < count
        pair = tl.load(listed_ptr + expert.to(tl.int64) * room + place, mask=there, other=0)
        block = expert.to(tl.int64) * tiles + strip * BLOCKS
        factor = tl.load(factor_ptr + block * 64 + tl.arange(0, BLOCKS * 64))
        total = _product(
            x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_row, there, x_ptr, Blocks(words_ptr, shorts_ptr, bytes_ptr, table_ptr),
            factor, block * steps * CODING[BLOCK_BYTES], 0, steps, steps, HIDDEN, CODING, False, BLOCKS, BLOCK_M,
        )  # fmt: skip
        gate, up = _split(total, BLOCKS, BLOCK_M)
        if NORMED:
            rstd = tl.load(rstd_ptr + pair // TOP_K, mask=there, other=0.0)[None, :]
            gate, up = gate * rstd, up * rstd
        kind = inner_ptr.dtype.element_ty
        y = (act(gate.to(kind).to(tl.float32), KIND) * up.to(kind).to(tl.float32)).to(kind)
        column = strip * (BLOCKS * 32) + tl.arange(0, BLOCKS * 32)
        at = inner_ptr + (before + place)[None, :] * INNER + column[:, None]
        tl.store(at, y, mask=there[None, :] & (column < INNER)[:, None])


@launchable(do_not_specialize=["room", "steps", "tiles"])
def _contract_coded_kernel(
    inner_ptr, words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, out_ptr, counts_ptr, listed_ptr, room, steps, tiles,
    CODING: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (HIDDEN + BLOCKS * 64 - 1) // (BLOCKS * 64)
    expert, count, before, tile, strip = _unit(counts_ptr, tl.program_id(0), across, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        there = place < count
        block = expert.to(tl.int64) * tiles + strip * BLOCKS
        factor = tl.load(factor_ptr + block * 64 + tl.arange(0, BLOCKS * 64))
        total = _product(
            inner_ptr + (before + place)[:, None] * INNER, there, inner_ptr, Blocks(words_ptr, shorts_ptr, bytes_ptr, table_ptr),
            factor, block * steps * CODING[BLOCK_BYTES], 0, steps, steps, INNER, CODING, False, BLOCKS, BLOCK_M,
        )  # fmt: skip
        pair = tl.load(listed_ptr + expert.to(tl.int64) * room + place, mask=there, other=0).to(tl.int64)
        column = strip * (BLOCKS * 64) + tl.arange(0, BLOCKS * 64)
        at = out_ptr + pair[None, :] * HIDDEN + column[:, None]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=there[None, :] & (column < HIDDEN)[:, None])


_BLOCKS = 2  # of 64 rows, a tile
_TILES = (
    (4.0, 16),
    (16.0, 32),
    (float("inf"), 64),
)  # up to so many pairs an expert in the mean: pairs of a tile. A rule, not measured


def lay(pieces: Sequence[PackedMatrix], coding: Coding, *, gated: bool) -> Packed:
    """All experts, one below another in memory; the first of them, where every piece is found again. Once."""
    first = pieces[0]
    if not first.laid:
        outs, count = sum(piece.outs for piece in pieces), first.num_copies
        whole = coding.blocks(outs, first.ins)[0] * ROWS == outs and len(pieces) <= 1 + gated
        own = _packed_together(pieces, coding, gated=gated) if whole else _packed_singly(pieces, coding, gated=gated)
        blocks, factor = own.blocks.view(count, -1, *own.blocks.shape[1:]), own.factor.view(count, -1)
        for copy in range(count):
            at = 0
            for piece in pieces:
                piece.lay(replace(own, blocks=blocks[copy], factor=factor[copy], outs=outs), at)
                at += piece.outs
    return first.laid[0]


def _packed_together(pieces: Sequence[PackedMatrix], coding: Coding, *, gated: bool) -> Packed:
    """Whole blocks of rows: as one matrix of all experts, since single ones take as many launches each."""
    first, count = pieces[0], pieces[0].num_copies
    halves = 1 + (gated and len(pieces) == 1)
    sides = [(piece, half * (piece.outs // halves)) for piece in pieces for half in range(halves)]
    height = first.outs // halves

    def read(rows: slice) -> Codes:
        (piece, above), parts = sides[rows.start // (count * height)], []
        at, end = rows.start % (count * height), rows.start % (count * height) + rows.stop - rows.start
        while at < end:
            copy, row = divmod(at, height)
            until = min(height, row + end - at)
            parts.append(piece.in_codes(slice(above + row, above + until), copy))
            at += until - row
        return joined(parts)

    return pack(read, len(sides) * count * height, coding, gated=gated)


def _packed_singly(pieces: Sequence[PackedMatrix], coding: Coding, *, gated: bool) -> Packed:
    outs = sum(piece.outs for piece in pieces)
    laid = [pack(reader(pieces, copy), outs, coding, gated=gated) for copy in range(pieces[0].num_copies)]
    return replace(
        laid[0], blocks=torch.cat([each.blocks for each in laid]), factor=torch.cat([each.factor for each in laid])
    )


def rounded_again(x: Tensor, eight: EightBits | None, epilogue: Epilogue = PLAIN) -> Tensor:
    """Rows as the format computes with them: in 8 bits, and back. Of a norm half done (``epilogue``): behind it."""
    if eight is None:
        return x
    codes, scale = Rounding(eight).rows(x, epilogue.squares, epilogue.eps)
    return (codes.to(torch.float32).view(*scale.shape, -1) * scale.unsqueeze(-1)).view(x.shape).to(x.dtype)


@dataclass(frozen=True, slots=True)
class CodedMoe:
    """As ``packed_moe``: ``x`` [T, H], bfloat16 or float16. Experts are laid out at the first call, which a start
    makes."""

    facts: ExpertFacts
    empty: Empty = plainly_empty
    pdl: bool = False

    @classmethod
    def at(cls, site: CallSite[ExpertFacts]) -> CodedMoe:
        return cls(site.facts, site.empty, site.pdl)

    def __call__(
        self, x: Tensor, router_logits: Tensor, gate_up: Iterable[PackedMatrix], down: Iterable[PackedMatrix], top_k: int, renormalize: bool,
        kind: Activation, places: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        laid = self.laid(gate_up, down)
        return self.computed(x, router_logits, *laid, top_k, renormalize, kind, places)

    def fused(
        self, x: Tensor, router_logits: Tensor, gate_up: Iterable[PackedMatrix], down: Iterable[PackedMatrix], top_k: int, renormalize: bool,
        kind: Activation, epilogue: Epilogue,
    ) -> Fused:  # fmt: skip
        """As its twin; rows one behind the other."""
        return self.computed_around(
            x, router_logits, *self.laid(gate_up, down), top_k, renormalize, kind, None, epilogue
        )

    def laid(self, gate_up: Iterable[PackedMatrix], down: Iterable[PackedMatrix]) -> tuple[Packed, Packed]:
        first, last = self.facts.rounded[0], self.facts.rounded[-1]
        assert first is not None and last is not None, "asked only where there are some"
        return lay(list(gate_up), first, gated=True), lay(list(down), last, gated=False)

    def computed(
        self, x: Tensor, logits: Tensor, up: Packed, down: Packed, top_k: int, renormalize: bool, kind: Activation,
        places: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``up``, ``down``: the first expert's, behind which the others lie."""
        if not len(x):
            return torch.empty_like(x)
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        return self.computed_around(x, logits, up, down, top_k, renormalize, kind, places)[0]

    def computed_around(
        self, x: Tensor, logits: Tensor, up: Packed, down: Packed, top_k: int, renormalize: bool, kind: Activation,
        places: Tensor | None = None, epilogue: Epilogue = PLAIN,
    ) -> Fused:  # fmt: skip
        (tokens, hidden), inner, device = x.shape, down.ins, x.device
        experts = self.facts.num_experts if self.facts.held is None else self.facts.held
        up, down = _all(up, experts), _all(down, experts)
        first, second = eights = self.facts.eights[0], self.facts.eights[-1]
        if tokens <= FEW:
            return coded_few(
                x, logits, up, down, top_k, renormalize, kind, places, eights, experts, self.empty, epilogue, pdl=self.pdl
            )  # fmt: skip
        pdl = self.pdl and epilogue.squares is not None  # of few rows
        expanded = self.empty((tokens, top_k, inner), x.dtype, device)
        contracted = self.empty((tokens, top_k, hidden), x.dtype, device)
        weights, counts, listed, rstd = _routed(logits, top_k, renormalize, places, experts, epilogue, hidden, pdl=pdl)
        pairs = tokens * top_k
        rows = next(rows for mean, rows in _TILES if pairs <= mean * self.facts.num_experts)
        named: dict[str, Any] = {
            "EXPERTS": experts,
            "BLOCK_E": triton.next_power_of_2(experts),
            "HIDDEN": hidden,
            "INNER": inner,
        }
        named |= {"BLOCK_M": rows, "BLOCKS": _BLOCKS, "num_warps": 4, "num_stages": 3}
        normed = epilogue.squares is not None and first is None  # else by who rounds
        x = rounded_again(x.contiguous(), first, epilogue)
        _expand_coded_kernel[_grid(pairs, experts, rows, triton.cdiv(inner, _BLOCKS * ROWS // 2))](
            x, *views(up), table_of(up), expanded, counts, listed, rstd, x.stride(0), tokens, up.blocks.shape[1], len(up.blocks) // experts,
            NORMED=normed, **constants(up.coding), TOP_K=top_k, KIND=KINDS[kind], **named,
        )  # fmt: skip
        expanded = rounded_again(expanded.view(pairs, inner), second)
        _contract_coded_kernel[_grid(pairs, experts, rows, triton.cdiv(hidden, _BLOCKS * ROWS))](
            expanded, *views(down), table_of(down), contracted, counts, listed, tokens, down.blocks.shape[1], len(down.blocks) // experts,
            **constants(down.coding), **named,
        )  # fmt: skip
        return _combined(contracted, weights, self.empty, epilogue, pdl=pdl)


def _all(packed: Packed, experts: int) -> Packed:
    """Of the first expert: the others, too."""
    blocks = packed.blocks.as_strided((experts * len(packed.blocks), *packed.blocks.shape[1:]), packed.blocks.stride())
    return replace(packed, blocks=blocks, factor=packed.factor.as_strided((experts * len(packed.factor),), (1,)))


create_moe = CodedMoe.at
