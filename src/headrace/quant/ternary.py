"""Experts of three values, most of them zero, in less than a bit each: words of 16 bits that stand for the likeliest
sequences ("QMoE: Practical Sub-1-Bit Compression of Trillion-Parameter Models", Frantar & Alistarh 2023).

What lives here: the code book, the format and its twin. What may not: torch at import, choosing values, kernels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError
from headrace.quant import Format, FormatError, StoredTensor, Tensors, check_scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WORDS, LONGEST = 2**16, 14  # of the book; pairs of values that one stands for, at most
ZEROS = 0.885  # of all values: what the book was made for
_BITS = 0.9  # a value, about


@dataclass(frozen=True, slots=True)
class Book:
    """``values`` [words, 2 · LONGEST] of -1, 0, 1; ``pairs`` [words]: how many of them are one's; ``following`` [words
    + 1, 9]: the word with one pair more, -1 where there is none; that of no pair is the last row.
    """

    values: Tensor
    pairs: Tensor
    following: Tensor


def _sequences(length: int, others: int) -> Iterator[tuple[int, ...]]:
    """Of ``length`` values those with so many that are not zero."""
    for places in itertools.combinations(range(length), others):
        for signs in itertools.product((-1, 1), repeat=others):
            values = [0] * length
            for place, sign in zip(places, signs, strict=True):
                values[place] = sign
            yield tuple(values)


@functools.cache
def book() -> Book:
    """The WORDS likeliest sequences, as if each value stood for itself; equally likely ones by their places, then
    signs.

    With each there is what it begins with, which is likelier.
    """
    import torch

    kinds = [(pairs, others) for pairs in range(1, LONGEST + 1) for others in range(2 * pairs + 1)]
    kinds.sort(
        key=lambda kind: (-(2 * kind[0] - kind[1]) * math.log(ZEROS) - kind[1] * math.log((1 - ZEROS) / 2), kind)
    )
    every = (sequence for pairs, others in kinds for sequence in _sequences(2 * pairs, others))
    pairs_first = itertools.product((0, -1, 1), repeat=2)  # with all of them any row can be written
    words: dict[tuple[int, ...], int] = {each: number for number, each in enumerate(pairs_first)}
    for sequence in every:
        if len(words) == WORDS:
            break
        if sequence[:-2] in words or len(sequence) == 2:
            words.setdefault(sequence, len(words))
    values, pairs = torch.zeros(WORDS, 2 * LONGEST, dtype=torch.int8), torch.zeros(WORDS, dtype=torch.int64)
    following = torch.full((WORDS + 1, 9), -1, dtype=torch.int64)
    rows = [[*sequence, *(0,) * (2 * LONGEST - len(sequence))] for sequence in words]
    values[: len(rows)] = torch.tensor(rows, dtype=torch.int8)
    for sequence, word in words.items():
        pairs[word] = len(sequence) // 2
        following[words.get(sequence[:-2], WORDS), 3 * sequence[-2] + sequence[-1] + 4] = word
    return Book(values, pairs, following)


@dataclass(frozen=True, slots=True)
class Ternary(Format):
    """w = levels[row, 0] at -1, levels[row, 1] at 1. ``words``: of 16 bits, the lower byte first, row behind row;
    ``row_words``: before each."""

    @property
    def label(self) -> str:
        return "QMoE, three values"

    @property
    def by_row(self) -> bool:
        return False

    def problem(self, outs: int, ins: int) -> str | None:
        return f"{ins} inputs are no whole pairs" if ins % 2 else None

    def shares(self, *, by_inputs: bool) -> bool:
        return False

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor("words", (-1,), "uint8"),
            StoredTensor("row_words", (outs + 1,), "int32"),
            StoredTensor("levels", (outs, 2), "float32"),
            StoredTensor("shape", (2,), "int64"),
        )

    def num_bytes(self, outs: int, ins: int, element_bytes: float) -> float:
        return outs * ins * _BITS / 8 + 12 * outs

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "levels", zeros=True)
        ends, (outs, ins) = tensors["row_words"], tensors["shape"].tolist()
        if (
            len(ends) != outs + 1
            or int(ends[0]) != 0
            or bool((ends.diff() < 0).any())
            or 2 * int(ends[-1]) > len(tensors["words"])
        ):
            raise FormatError(f"row_words ends at {int(ends[-1])}, and there are {len(tensors['words']) // 2} words")
        pairs = book().pairs[self._words(tensors, 0, int(ends[-1])).cpu()]
        held = pairs.new_zeros(len(pairs) + 1)
        held[1:] = pairs.cumsum(0)
        if bool((held[ends.cpu().long()].diff() * 2 != ins).any()):
            raise FormatError(f"a row's words stand for other than its {ins} inputs")
        return tensors

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        import torch

        levels, ends = tensors["levels"], tensors["row_words"]
        first, last, _ = rows.indices(len(levels))
        words = self._words(tensors, int(ends[first]), int(ends[last]))
        values, pairs = book().values.to(words.device), book().pairs.to(words.device)
        mine = torch.arange(2 * LONGEST, device=words.device) < 2 * pairs[words][:, None]
        signs = values[words][mine].view(last - first, -1)
        return torch.where(signs > 0, levels[rows, 1:], torch.where(signs < 0, levels[rows, :1], 0.0)).to(dtype)

    @staticmethod
    def _words(tensors: Tensors, first: int, last: int) -> Tensor:
        low, high = tensors["words"][2 * first : 2 * last].view(-1, 2).long().unbind(1)
        return low | high << 8

    def make_up(self, tensors: Tensors, seed: int) -> None:
        raise ModelError("Random weights are not made in three values (QMoE); load the checkpoint's own.")
