"""What one rank of several holds of a model: a description of its own, and a cut out of every weight.

What lives here: that arithmetic, and what does not divide. What may not: torch, reading, processes.

    q        | heads of rank 0 | heads of rank 1 | …       a column split: rows of [outs, ins], of each merged part
    k, v     | rank 0 | rank 1 | …                         where there are more ranks than KV heads, neighbours hold the
    same one
    experts  | all of some         | all of others           with --enable-expert-parallel; else their inner values
    are split
    output,    rank 0 | rank 1 | …                         a row split: columns of [outs, ins]; a bias is the first
    rank's alone
    down
    tokens   | rank 0 | rank 1 | 0                         rows of the embedding and the head; the last are filled up
    with zeros
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.sites import Split, Weight, is_plain, weights
from headrace.spec import DecoderSpec, Held

if TYPE_CHECKING:
    from headrace.quant import Format


_WHOLE = (Split.NONE, Split.EXPERTS)  # what a rank has of these it has whole


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a weight [outs, ins]: ``rows`` one behind the other, of these ``columns``. ``whole``: the
    weight's shape. ``parts``: of the whole weight's rows. ``bias``: it holds a part of the bias, too, and not zeros."""

    rows: tuple[range, ...]
    columns: range
    whole: tuple[int, ...]
    parts: tuple[int, ...]
    bias: bool

    def rows_of(self, part: int | None) -> list[range]:
        """Those of one of the weight's parts, counted from its first (None: of all of it)."""
        first = sum(self.parts[:part]) if part is not None else 0
        held = self.rows if part is None else self.rows[part : part + 1]
        return [range(each.start - first, each.stop - first) for each in held]

    def of_stored(self, form: Format, name: str, part: int | None) -> Cut | None:
        """The same of one of the tensors that hold part ``part`` of the weight (None: all of it) in a format; None:
        every rank has it whole."""
        outs, rows = self.whole[0] if part is None else self.parts[part], self.rows_of(part)
        sizes = sum(map(len, rows)), len(self.columns)
        whole, mine = (_shape(form, name, *each) for each in ((outs, self.whole[1]), sizes))
        if whole == mine:
            return None
        held, of = ([self.columns], self.whole[1]) if sizes[1] < self.whole[1] else (rows, outs)
        ranges = [
            tuple(_scaled(each, size, of) for each in held) if size != own else (range(size),)
            for size, own in zip(whole, mine, strict=True)
        ]
        if any(len(each) != 1 for each in ranges[1:]):
            raise ValueError(f"{name} has several of its parts side by side")
        return Cut(ranges[0], ranges[1][0] if len(ranges) > 1 else range(1), whole, (whole[0],), bias=True)

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, slice]]:
        """Of rows ``first`` … ``first + count`` of the weight, which are stored as one tensor: (where they come to lie
        in the part, which of the tensor's rows)."""
        place = 0
        for rows in self.rows:
            begin, end = max(rows.start, first), min(rows.stop, first + count)
            if begin < end:
                yield place + begin - rows.start, slice(begin - first, end - first)
            place += len(rows)


def share(spec: DecoderSpec, ranks: int, experts: Sequence[tuple[Held, ...]] | None = None) -> DecoderSpec:
    """What each of so many ranks computes. ``experts``: those that one rank holds whole, by layer (placement.py); None:
    each has a part of every expert. Raises ConfigError where that cannot be."""
    if ranks == 1:
        return spec
    if problem := next(_problems(spec, ranks, whole_experts=experts is not None), None):
        raise ConfigError(f"--tensor-parallel-size is {ranks}, but {problem}. Choose another number of ranks.")
    layers = tuple(
        layer
        if layer.moe is None
        else replace(
            layer,
            moe=replace(layer.moe, intermediate_size=layer.moe.intermediate_size // ranks)
            if experts is None
            else replace(layer.moe, held=experts[index]),
        )
        for index, layer in enumerate(spec.layers)
    )
    heads, kv_heads = spec.num_heads // ranks, max(1, spec.num_kv_heads // ranks)
    inner = spec.intermediate_size // ranks
    mine = replace(spec, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner, layers=layers, ranks=ranks)
    if not is_plain(spec) and (refused := next(_unshared(spec, mine), None)):
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, but {refused}. Use fewer ranks, another checkpoint, or --quantization none."
        )
    return mine


def share_experts(spec: DecoderSpec, experts: Sequence[tuple[Held, ...]]) -> DecoderSpec:
    """What a rank computes that has everything but others' experts."""
    layers = (
        layer if layer.moe is None else replace(layer, moe=replace(layer.moe, held=held))
        for layer, held in zip(spec.layers, experts, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _unshared(whole: DecoderSpec, mine: DecoderSpec) -> Iterator[str]:
    """Matrices in a format of which a part is no matrix in it."""
    for weight, own in zip(weights(whole), weights(mine), strict=True):
        if not weight.formats or own.split in _WHOLE:
            continue
        cut = _cut(weight, own, 0, mine.ranks)
        for index, (outs, form) in enumerate(own.pieces):
            problem = (
                form.problem(outs, own.ins)
                if form.shares(by_inputs=weight.split is Split.ROW)
                else "its parts are not stored apart"
            )
            if weight.split is Split.VOCABULARY and weight.outs % mine.ranks:
                problem = f"{weight.outs} tokens do not divide"
            try:
                for each in form.tensors(outs, own.ins) if problem is None else ():
                    cut.of_stored(form, each.name, index if len(own.formats) == len(own.parts) else None)
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                yield f"{weight.name} is held as {form.label}, and {problem}"


def _shape(form: Format, name: str, outs: int, ins: int) -> tuple[int, ...]:
    return next(each.shape for each in form.tensors(outs, ins) if each.name == name)


def _scaled(held: range, size: int, of: int) -> range:
    """Raises ValueError where the part has no whole rows, or columns."""
    if held.start * size % of or held.stop * size % of:
        raise ValueError(f"{len(held)} of {of} are no whole part of {size}")
    return range(held.start * size // of, held.stop * size // of)


def _problems(spec: DecoderSpec, ranks: int, *, whole_experts: bool) -> Iterator[str]:
    if spec.num_heads % ranks:
        yield f"{spec.num_heads} attention heads do not divide by {ranks}"
    if spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
        yield f"{spec.num_kv_heads} KV heads neither divide by {ranks} nor can be copied evenly to as many"
    if any(layer.moe is None for layer in spec.layers) and spec.intermediate_size % ranks:
        yield f"the feed-forward's {spec.intermediate_size} inner values do not divide by {ranks}"
    for moe in {layer.moe for layer in spec.layers if layer.moe is not None}:
        if moe.intermediate_size % ranks and not whole_experts:
            yield f"an expert's {moe.intermediate_size} inner values do not divide by {ranks}"
    if spec.vocab_size < ranks:
        yield f"there are no more than {spec.vocab_size} tokens"


def cuts(whole: DecoderSpec, mine: DecoderSpec, rank: int) -> dict[str, Cut]:
    """What rank ``rank`` holds of every weight that is not everybody's, by the weight's name. ``mine``: of
    ``share``."""
    pairs = zip(weights(whole), weights(mine), strict=True)
    return {all.name: _cut(all, own, rank, mine.ranks) for all, own in pairs if own.split not in _WHOLE}


def _cut(whole: Weight, mine: Weight, rank: int, ranks: int) -> Cut:
    shape = whole.outs, whole.ins
    if whole.split is Split.ROW:
        return Cut(
            (range(whole.outs),), range(rank * mine.ins, (rank + 1) * mine.ins), shape, whole.parts, bias=rank == 0
        )
    rows, first = [], 0
    for size, own in zip(whole.parts, mine.parts, strict=True):
        copies = max(1, own * ranks // size) if whole.split is Split.COLUMN else 1
        begin = rank // copies * own
        rows.append(range(first + min(begin, size), first + min(begin + own, size)))
        first += size
    return Cut(tuple(rows), range(whole.ins), shape, whole.parts, bias=True)
