"""bfloat16 without loss in about 11 bits: exponents in a Huffman code, sign and fraction as they are ("70% Size, 100%
Accuracy: Lossless LLM Compression via Dynamic-Length Float", Zhang et al. 2025).

What lives here: the code, the format and its twin. What may not: torch at import, kernels. Where DFloat11's own files
have the codes of many matrices in one stream, laid out for one kernel, here each matrix has a code of its own and each
row a beginning: single rows can be read.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, FormatError, StoredTensor, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LONGEST = 16  # bits of a code: what one look at the stream reads
_EXPONENT_BITS = 2.75  # on average, of usual weights


def code_lengths(counts: Sequence[int]) -> list[int]:
    """Huffman's, of each of 256 exponents; 0 where one does not occur. Rare ones count for more until none is longer
    than LONGEST."""
    floor = 1
    while True:
        heap: list[tuple[int, int, tuple[int, ...]]] = [
            (max(count, floor), index, (index,)) for index, count in enumerate(counts) if count
        ]
        lengths = [0] * len(counts)
        if len(heap) == 1:
            lengths[heap[0][1]] = 1
        heapq.heapify(heap)
        while len(heap) > 1:
            (low, _, left), (high, order, right) = heapq.heappop(heap), heapq.heappop(heap)
            for index in (both := left + right):
                lengths[index] += 1
            heapq.heappush(heap, (low + high, order, both))
        if max(lengths, default=0) <= LONGEST:
            return lengths
        floor *= 2


def canonical(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(exponent, code) by length, then exponent: each code is the one before plus one, moved to its own length."""
    code, before, found = 0, 0, []
    for length, exponent in sorted((length, exponent) for exponent, length in enumerate(lengths) if length):
        code <<= length - before
        found.append((exponent, code))
        code, before = code + 1, length
    return found


@dataclass(frozen=True, slots=True)
class DFloat11(Format):
    """``encoded_exponent``: the codes, highest bit first; ``row_starts``: bits before each row."""

    @property
    def label(self) -> str:
        return "DFloat11, lossless"

    def shares(self, *, by_inputs: bool) -> bool:
        return False

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor("sign_mantissa", (outs, ins), "uint8"),
            StoredTensor("encoded_exponent", (-1,), "uint8"),
            StoredTensor("row_starts", (outs,), "int64"),
            StoredTensor("code_lengths", (256,), "uint8"),
        )

    def num_bytes(self, outs: int, ins: int, element_bytes: float) -> float:
        return outs * ins * (8 + _EXPONENT_BITS) / 8 + 8 * outs + (4 << LONGEST)

    def prepare(self, tensors: Tensors) -> Tensors:
        stream, starts = tensors["encoded_exponent"], tensors["row_starts"]
        if bool(((starts < 0) | (starts > 8 * len(stream))).any()):
            raise FormatError(
                f"row_starts names bits from {int(starts.min())} to {int(starts.max())} of {8 * len(stream)}"
            )
        lengths = tensors["code_lengths"].tolist()
        if max(lengths) > LONGEST or sum(2 ** (LONGEST - each) for each in lengths if each) > 2**LONGEST:
            raise FormatError("code_lengths are no Huffman code")
        table = tensors["row_starts"].new_zeros(2**LONGEST)
        for exponent, code in canonical(lengths):
            shift = LONGEST - lengths[exponent]
            table[code << shift : (code + 1) << shift] = exponent << 8 | lengths[exponent]
        padded = stream.new_zeros(len(stream) + 4)
        padded[: len(stream)] = stream
        return tensors | {"encoded_exponent": padded, "table": table.int()}

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        """All rows at once, input by input."""
        import torch

        stream, table, at = tensors["encoded_exponent"], tensors["table"], tensors["row_starts"][rows].clone()
        rest = tensors["sign_mantissa"][rows].int()
        exponents = torch.empty_like(rest.t(), memory_format=torch.contiguous_format)
        for column in exponents:
            byte = (at >> 3).clamp_(max=len(stream) - 3)
            some = stream[byte].int() << 16 | stream[byte + 1].int() << 8 | stream[byte + 2].int()
            entry = table[some >> (8 - (at & 7)) & (2**LONGEST - 1)]
            column.copy_(entry >> 8)
            at += entry & 255
        bits = (rest & 128) << 8 | exponents.t() << 7 | rest & 127
        return bits.to(torch.int16).view(torch.bfloat16).to(dtype)

    def make_up(self, tensors: Tensors, seed: int) -> None:
        """All exponents are that of 2⁻⁶, of one bit."""
        Format.make_up(self, tensors, seed)
        tensors["code_lengths"].zero_()[121] = 1
        tensors["encoded_exponent"].zero_()
        tensors["row_starts"].zero_()
