"""The site table: every weight of a decoder, written down once.

What lives here: names, shapes, and what is computed with each. What may not: torch, names on disk
(models/weight_rules.py), what formats mean (quant/). What one makes of a weight is told from its row here. Who wants a
width, or bytes, asks for them; no other module derives any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from headrace.spec import DecoderSpec, Formats, MoESpec, NormKind, PoolHead

if TYPE_CHECKING:
    from headrace.quant import Format, StoredTensor


class Role(str, Enum):
    EMBEDDING = "embedding"
    NORM = "norm"
    QKV = "qkv"
    OUTPUT = "output"
    ROUTER = "router"
    UP = "up"
    DOWN = "down"
    HEAD = "head"
    CLASSIFIER = "classifier"


class Split(Enum):
    """How ranks share a weight."""

    COLUMN = "each computes some outputs, of all inputs"
    ROW = "each computes from some inputs, and the results are summed onto the residual stream"
    VOCABULARY = (
        "each has some tokens: their rows of an embedding, which are summed, or their logits, which are gathered"
    )
    EXPERTS = "each holds some of its copies whole, and the results are summed onto the residual stream"
    NONE = "each holds it whole"


@dataclass(frozen=True, slots=True)
class Weight:
    """y [.., outs] = x [.., ins] · Wᵀ (+ bias). ``parts``: outputs of what is merged in it, in this order (q, k, v;
    gate, up).

    Of an embedding ``outs`` counts its rows. A norm's weight is a vector, [outs]. ``moe``: there is one for each
    expert, stacked. ``tied``: it is the embedding's. ``formats``: of the parts that are stored apart, or one for all;
    none: plain weights.
    """

    name: str  # in the decoder
    role: Role
    layer: int | None
    parts: tuple[int, ...]
    ins: int = 0
    split: Split = Split.NONE
    bias: bool = False
    moe: MoESpec | None = None
    tied: bool = False
    formats: tuple[Format, ...] = ()

    @property
    def outs(self) -> int:
        return sum(self.parts)

    @property
    def gated(self) -> bool:
        return self.role is Role.UP and len(self.parts) == 2

    @property
    def inner(self) -> int:
        """The width on the side away from the residual stream: what ranks share."""
        return self.ins if self.role in (Role.OUTPUT, Role.DOWN) else self.outs

    @property
    def used(self) -> int:
        """How many of its copies a token goes through, on all ranks and perhaps on this one."""
        return 1 if self.moe is None else self.moe.top_k

    @property
    def multiplications(self) -> int:
        """Of a token, in the mean where its experts are on several ranks."""
        return round(self.used * (1.0 if self.moe is None else self.moe.part) * self.outs * self.ins)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names in the decoder, and shapes."""
        found: dict[str, tuple[int, ...]] = {}
        if self.formats:
            found = {
                f"{self.name}.pieces.{index}.{each.name}": (*self.stacked, *each.shape) for index, each in self.stored
            }
        elif self.moe is not None:
            found = {self.name: (*self.stacked, self.outs, self.ins)}
        else:
            found = {f"{self.name}.weight": (self.outs, self.ins) if self.ins else (self.outs,)}
        if self.bias:
            found[f"{self.name}.bias"] = (self.outs,)
        return found

    @property
    def stacked(self) -> tuple[int, ...]:
        """How many copies of it there are, in front of each tensor's shape."""
        return () if self.moe is None else (len(self.moe.experts),)

    @property
    def pieces(self) -> tuple[tuple[int, Format], ...]:
        """Outputs and format of each part that is stored apart."""
        outs = self.parts if len(self.formats) == len(self.parts) else (self.outs,)
        return tuple(zip(outs, self.formats, strict=True)) if self.formats else ()

    @property
    def stored(self) -> Iterator[tuple[int, StoredTensor]]:
        """(index of the piece, tensor) of a weight with formats."""
        return (
            (index, each) for index, (outs, form) in enumerate(self.pieces) for each in form.tensors(outs, self.ins)
        )

    @property
    def num_elements(self) -> int:
        """Of the weight as it is multiplied by, whatever its format."""
        return math.prod(self.stacked) * self.outs * (self.ins or 1) + (self.outs if self.bias else 0)

    def num_bytes(self, element_bytes: float) -> float:
        """``element_bytes``: of the type the model computes in."""
        if not self.formats:
            return self.num_elements * element_bytes
        held = sum(form.num_bytes(outs, self.ins, element_bytes) for outs, form in self.pieces)
        return math.prod(self.stacked) * held + (self.outs * element_bytes if self.bias else 0)

    @property
    def label(self) -> str:
        """For people."""
        return {Role.UP: "gate and up" if self.gated else "up", Role.HEAD: "LM head"}.get(self.role, self.role.value)


def weights(spec: DecoderSpec) -> Iterator[Weight]:
    """All of them, in the order in which they are used."""
    if spec.embeds or (spec.answers and spec.tied_head):
        yield embedding(spec)
    if spec.rope is None and spec.embeds:
        rows = spec.position_rows or spec.max_positions
        yield _formatted(Weight("positions", Role.EMBEDDING, None, (rows,), spec.hidden_size), spec.formats)
    if spec.token_types:
        yield Weight("token_types", Role.EMBEDDING, None, (spec.token_types,), spec.hidden_size)
    for index in spec.held_layers:
        yield from layer_weights(spec, index)
    yield _norm(spec, "norm", None)
    if spec.answers:
        yield head(spec)
    yield from classifier(spec)


def classifier(spec: DecoderSpec) -> Iterator[Weight]:
    """What makes a score of a pooled hidden state."""
    kind = PoolHead.NONE if spec.pooling is None else spec.pooling.head
    if kind is PoolHead.DENSE:
        yield Weight("pooler.dense", Role.CLASSIFIER, None, (spec.hidden_size,), spec.hidden_size, bias=True)
    if kind in (PoolHead.DENSE, PoolHead.LINEAR):
        bias = kind is PoolHead.DENSE
        yield Weight("pooler.output", Role.CLASSIFIER, None, (1,), spec.hidden_size, bias=bias)


def embedding(spec: DecoderSpec) -> Weight:
    site = Weight("embedding", Role.EMBEDDING, None, (spec.vocab_rows,), spec.hidden_size, Split.VOCABULARY)
    return _formatted(site, spec.formats)


def layer_weights(spec: DecoderSpec, index: int) -> Iterator[Weight]:
    formats = spec.layers[index].formats
    return (
        (_formatted(each, formats) for each in _layer_weights(spec, index)) if formats else _layer_weights(spec, index)
    )


def _formatted(weight: Weight, formats: Formats) -> Weight:
    own = weight.name.removeprefix(f"layers.{weight.layer}.")
    found = next((each for name, each in formats if name == own), ())
    return replace(weight, formats=found) if found else weight


def _layer_weights(spec: DecoderSpec, index: int) -> Iterator[Weight]:
    at, hidden, moe = f"layers.{index}.", spec.hidden_size, spec.layers[index].moe
    widths = tuple(heads * spec.head_dim for heads in spec.qkv_heads)
    yield _norm(spec, at + "attention_norm", index)
    yield Weight(at + "attention.qkv", Role.QKV, index, widths, hidden, Split.COLUMN, spec.qkv_bias)
    for name in ("q_norm", "k_norm") if spec.qk_norm else ():
        yield Weight(f"{at}attention.{name}", Role.NORM, index, (spec.head_dim,))
    yield Weight(at + "attention.output", Role.OUTPUT, index, (hidden,), widths[0], Split.ROW, spec.output_bias)
    if spec.sandwich_norm:
        yield _norm(spec, at + "post_attention_norm", index)
    yield _norm(spec, at + "feed_forward_norm", index)
    if moe is not None:
        yield Weight(at + "feed_forward.router", Role.ROUTER, index, (moe.num_experts,), hidden)
    inner, bias = (spec.intermediate_size, spec.mlp_bias) if moe is None else (moe.intermediate_size, False)
    up = (inner, inner) if spec.gated_mlp or moe is not None else (inner,)
    wide, narrow = (Split.COLUMN, Split.ROW) if moe is None or moe.held is None else (Split.EXPERTS, Split.EXPERTS)
    yield Weight(at + "feed_forward.up", Role.UP, index, up, hidden, wide, bias, moe)
    yield Weight(at + "feed_forward.down", Role.DOWN, index, (hidden,), inner, narrow, bias, moe)
    if spec.sandwich_norm:
        yield _norm(spec, at + "post_feed_forward_norm", index)


def head(spec: DecoderSpec) -> Weight:
    site = Weight("head", Role.HEAD, None, (spec.vocab_rows,), spec.hidden_size, Split.VOCABULARY, tied=spec.tied_head)
    return replace(site, formats=embedding(spec).formats) if spec.tied_head else _formatted(site, spec.formats)


def matrices(spec: DecoderSpec, index: int | None = None) -> list[Weight]:
    """What tokens are multiplied by, of one layer or of all; the head is another matter: few tokens reach it."""
    found = layer_weights(spec, index) if index is not None else weights(spec)
    return [each for each in found if each.role not in (Role.EMBEDDING, Role.NORM, Role.HEAD, Role.CLASSIFIER)]


def layer_matrices(spec: DecoderSpec, index: int) -> dict[Role, Weight]:
    return {each.role: each for each in matrices(spec, index)}


def count_bytes(spec: DecoderSpec, element_bytes: float) -> int:
    """Of all tensors as they are held, a tied head's once. ``element_bytes``: of the type the model computes in."""
    return int(sum(each.num_bytes(element_bytes) for each in weights(spec) if not each.tied))


def is_plain(spec: DecoderSpec) -> bool:
    """Whether every weight is in the type the model computes in."""
    return not spec.formats and not any(layer.formats for layer in spec.layers)


def _norm(spec: DecoderSpec, name: str, layer: int | None) -> Weight:
    return Weight(name, Role.NORM, layer, (spec.hidden_size,), bias=spec.norm is NormKind.LAYER)
