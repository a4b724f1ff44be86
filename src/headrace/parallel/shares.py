"""What one rank of several holds of a model: a description of its own, and a cut out of every weight.

What lives here: that arithmetic, and what does not divide. What may not: torch, reading, processes.

    q        | heads of rank 0 | heads of rank 1 | …       a column split: rows of [outs, ins], of each merged part
    k, v     | rank 0 | rank 1 | …                         where there are more ranks than KV heads, neighbours hold the same one
    output,    rank 0 | rank 1 | …                         a row split: columns of [outs, ins]; a bias is the first rank's alone
    down
    tokens   | rank 0 | rank 1 | 0                         rows of the embedding and the head; the last are filled up with zeros
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.sites import Split, Weight, is_plain, weights
from headrace.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a weight [outs, ins]: ``rows`` one behind the other, of these ``columns``. ``whole``: the weight's shape.
    ``bias``: it holds a part of the bias, too, and not zeros."""

    rows: tuple[range, ...]
    columns: range
    whole: tuple[int, int]
    bias: bool

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, slice]]:
        """Of rows ``first`` … ``first + count`` of the weight, which are stored as one tensor: (where they come to lie in the part, which
        of the tensor's rows)."""
        place = 0
        for rows in self.rows:
            begin, end = max(rows.start, first), min(rows.stop, first + count)
            if begin < end:
                yield place + begin - rows.start, slice(begin - first, end - first)
            place += len(rows)


def share(spec: DecoderSpec, ranks: int) -> DecoderSpec:
    """What each of so many ranks computes. Raises ConfigError where that cannot be."""
    if ranks == 1:
        return spec
    if problem := next(_problems(spec, ranks), None):
        raise ConfigError(f"--tensor-parallel-size is {ranks}, but {problem}. Choose another number of ranks.")
    if not is_plain(spec):
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, but this checkpoint's weights are quantised, and those are not shared out yet. "
            "Use an unquantised checkpoint, or --quantization none."
        )
    layers = tuple(
        layer if layer.moe is None else replace(layer, moe=replace(layer.moe, intermediate_size=layer.moe.intermediate_size // ranks))
        for layer in spec.layers
    )
    heads, kv_heads = spec.num_heads // ranks, max(1, spec.num_kv_heads // ranks)
    inner = spec.intermediate_size // ranks
    return replace(spec, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner, layers=layers, ranks=ranks)


def _problems(spec: DecoderSpec, ranks: int) -> Iterator[str]:
    if spec.num_heads % ranks:
        yield f"{spec.num_heads} attention heads do not divide by {ranks}"
    if spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
        yield f"{spec.num_kv_heads} KV heads neither divide by {ranks} nor can be copied evenly to as many"
    if any(layer.moe is None for layer in spec.layers) and spec.intermediate_size % ranks:
        yield f"the feed-forward's {spec.intermediate_size} inner values do not divide by {ranks}"
    for moe in {layer.moe for layer in spec.layers if layer.moe is not None}:
        if moe.intermediate_size % ranks:
            yield f"an expert's {moe.intermediate_size} inner values do not divide by {ranks}"
    if spec.vocab_size < ranks:
        yield f"there are no more than {spec.vocab_size} tokens"


def cuts(whole: DecoderSpec, mine: DecoderSpec, rank: int) -> dict[str, Cut]:
    """What rank ``rank`` holds of every weight that is not everybody's, by the weight's name. ``mine``: of ``share``."""
    pairs = zip(weights(whole), weights(mine), strict=True)
    return {all.name: _cut(all, own, rank, mine.ranks) for all, own in pairs if all.split is not Split.NONE}


def _cut(whole: Weight, mine: Weight, rank: int, ranks: int) -> Cut:
    shape = whole.outs, whole.ins
    if whole.split is Split.ROW:
        return Cut((range(whole.outs),), range(rank * mine.ins, (rank + 1) * mine.ins), shape, bias=rank == 0)
    rows, first = [], 0
    for size, own in zip(whole.parts, mine.parts, strict=True):
        copies = max(1, own * ranks // size) if whole.split is Split.COLUMN else 1
        begin = rank // copies * own
        rows.append(range(first + min(begin, size), first + min(begin + own, size)))
        first += size
    return Cut(tuple(rows), range(whole.ins), shape, bias=True)
