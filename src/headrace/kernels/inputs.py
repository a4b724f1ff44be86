"""The tensors of one step, as layers and kernels see them.

What lives here: frozen bundles of tensors, and rows by adapter, made from a slot a row. What may not: building the others
(worker/inputs.py; for wanted tokens layers/basic.py) or reading them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.request import NO_SLOT
from headrace.spec import ADDRESS_UNIT, KVFormat

MOST_FEW = 16  # queries: rows of a matrix instruction


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """Tokens that stand behind one another as in a tree, not in a row (SpecInfer, Miao et al. 2024, §4.2).

    A sequence's tree begins at the place ``first`` with its root; bit i of ``ancestors`` says that a token sees the key
    at place ``first`` + i: its own and those of the tokens before it, parents before children. So it is the
    ``first`` + (number of bits)-th token of its text. It sees all keys before ``first``, too. 0: the token is in no
    tree, and nor are the others of its sequence.
    """

    first: Tensor  # [sequences], int32
    ancestors: Tensor  # [tokens], int64


@dataclass(frozen=True, slots=True)
class PassedKeys:
    """Of a step whose rows are spread over ranks, where keys and values come to the queries: which blocks each rank gives,
    and what this rank's queries see."""

    blocks: Tensor  # [b], int64: of this rank's cache, as all others give theirs
    own: AttentionInputs  # of its own cache
    others: AttentionInputs  # once for every other rank: of all that are given, those of a rank with values behind keys


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One KV group's view of a step: sequences are packed one after another, without padding between them.

    ``shared_tokens``: as StepPlan has it; too few, and nobody looks for keys that sequences share. ``leading``: so many
    sequences, which come first, have one query, and all behind them more than MOST_FEW; 0: who knows. ``chained``: some
    sequences are tokens of one and the same, each with one query, that see keys of those before them in this step: keys
    are all written before any is read. ``tree``: where tokens of some sequences are a tree's. ``spread``: of ranks that
    share the keys, each computes other rows, and the sequences are those of all ranks, one rank's behind another's. ``passed``:
    their keys go to the queries.

    Its tensors stay as they are while it is in use: what a kernel derives from them for the first layer holds for all.
    """

    block_table: Tensor  # [sequences, max_blocks], int32; entries beyond a sequence's length are never read
    query_start: Tensor  # [sequences + 1], int32: first packed token of each sequence
    context_len: Tensor  # [sequences], int32: keys a sequence's last query may see (this step's own included)
    # [tokens], int64: block_id * block_size + offset where each token's K and V go; -1 writes nothing (padding)
    slots: Tensor
    block_size: int
    max_query_len: int
    max_context_len: int
    shared_tokens: int | None = None
    leading: int = 0
    chained: bool = False
    tree: TreeInputs | None = None
    spread: bool = False
    passed: PassedKeys | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """How one layer's keys and values are held in fewer bits. Scales are those that all tokens share, in FP8; None:
    1."""

    format: KVFormat
    k_scales: Tensor | None = None  # [kv_heads], float32
    v_scales: Tensor | None = None  # [kv_heads], float32


@dataclass(frozen=True, slots=True)
class Queries:
    """The wanted tokens of a step, each as a sequence of its own with one query."""

    chunk: Tensor  # [n], int32: the step's sequence whose keys each sees
    context: Tensor  # [n], int32: and how many of them; 0: none, and its result is zero
    query_start: Tensor  # [n + 1], int32: 0, 1, 2 …


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the last block computes to the end. ``attention``: of these tokens alone; None: of all, and these are picked
    from it. ``order``: as ForwardInputs has it."""

    tokens: Tensor  # [n], int32: packed tokens
    attention: AttentionInputs | None
    order: Tensor | None = None


class LayerStep(NamedTuple):
    """What one layer's attention computes with. ``wanted``: in the last block, the tokens whose results are read; None:
    all."""

    positions: Tensor  # [tokens], int64
    inputs: AttentionInputs
    k_cache: Tensor  # [blocks, kv_heads, block_size, head_dim], or in a format uint8, [.., token bytes]
    v_cache: Tensor  # as k_cache
    wanted: Wanted | None = None


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Inputs of one forward pass over packed tokens.

    ``wanted``: the packed tokens whose hidden states somebody reads, ascending; None: all of them. ``queries``: where it
    is worth it, what the last block attends to: to no more than these, each by itself. ``adapters``: the tokens that
    adapters add to; None: no token of this step has one. ``order``: where rows are spread over ranks, which of what
    all of them give as ``wanted``, as many each, are the step's wanted tokens, in their order.
    """

    token_ids: Tensor  # [tokens], int64
    positions: Tensor  # [tokens], int64
    attention: tuple[AttentionInputs, ...]  # one per KV group
    wanted: Tensor | None = None  # [n], int32; at least one
    queries: Queries | None = None
    adapters: AdapterRows | None = None
    order: Tensor | None = None  # [n], int64


# --- rows by adapter
#
#     slot of each row   -  2  2  0  -  2  0         all that a GPU needs
#     order              3  6 | 1  2  5              rows with an adapter, those of one slot side by side
#     spans              (0: 0 … 2) (2: 2 … 5)

BLOCK = 4  # rows that the C kernel takes at once


@dataclass(frozen=True, slots=True)
class SlotFactors:
    """The factors of one weight by slot. Rows of a and columns of b (and of gains) lie scattered over a pool, each from
    its address on; one that is longer than a chunk lies in several, each with an address.

    ``pool`` [elements], of the model's type. ``ranks`` [slots, parts]; addresses in ``unit`` elements: ``a``, ``b``
    [slots, parts, max_rank, chunks]; ``gains`` [slots, parts, 2, chunks], of float32 values (DoRA), or -1; all int32, a
    table's row apart. ``chunk``: elements, a power of two. ``gained``: some adapter so far has gains.
    """

    pool: Tensor
    ranks: Tensor
    a: Tensor
    b: Tensor
    gains: Tensor
    chunk: int
    gained: bool = False
    unit: int = ADDRESS_UNIT

    @property
    def floats(self) -> SlotFactors:
        """The same pool as float32."""
        size = self.pool.element_size()
        return replace(
            self, pool=self.pool.view(torch.float32), chunk=self.chunk * size // 4, unit=self.unit * size // 4
        )

    def places(self, addresses: Tensor, length: int) -> Tensor:
        """``addresses`` [..., chunks]: of every element of what is so long, [..., length], int64."""
        at = torch.arange(length, device=addresses.device)
        return addresses.long()[..., at // self.chunk] * self.unit + at % self.chunk

    def rows(self, addresses: Tensor, length: int) -> Tensor:
        """[..., length]."""
        return self.pool[self.places(addresses, length)]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows with an adapter by slot."""

    order: Tensor  # [n], int64: the rows; at least one
    slots: Tensor  # [n], int32: of each of them
    blocks: Tensor  # [blocks + 1], int32: where each begins in ``order``; of one slot and at most BLOCK rows
    spans: tuple[tuple[int, int, int], ...]  # slot, begin and end in ``order``


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """``wanted``: the same of the rows that the last block computes to the end, where these are fewer."""

    slots: Tensor  # [T], int32: of each row, or NO_SLOT
    grouped: Grouped | None = None  # on a CPU
    wanted: AdapterRows | None = None

    def by_slot(self) -> Grouped | None:
        """None where no row has one. On a GPU it looks at the device."""
        return self.grouped or group(self.slots.cpu().numpy(), self.slots.device)


def adapter_rows(slots: NDArray[np.int32], device: torch.device) -> AdapterRows | None:
    """``slots`` [rows]: of each row, or NO_SLOT. None where no row has one."""
    return slot_rows(slots, device) if (slots != NO_SLOT).any() else None


def slot_rows(slots: NDArray[np.int32], device: torch.device) -> AdapterRows:
    """The same, also where no row has one."""
    held = torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int32))
    if device.type == "cpu":
        return AdapterRows(held, group(slots, device))
    return AdapterRows(held.pin_memory().to(device, non_blocking=True))


def group(slots: NDArray[np.int32], device: torch.device) -> Grouped | None:
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] != NO_SLOT]
    if not len(order):
        return None
    sorted_slots = slots[order]
    begins = np.flatnonzero(np.r_[True, sorted_slots[1:] != sorted_slots[:-1]])
    ends = np.r_[begins[1:], len(order)]
    spans = tuple(zip(sorted_slots[begins].tolist(), begins.tolist(), ends.tolist(), strict=True))
    blocks = np.concatenate(
        [*(np.arange(begin, end, BLOCK, dtype=np.int32) for _, begin, end in spans), ends[-1:].astype(np.int32)]
    )
    places, held, begun = (
        torch.from_numpy(each).to(device) for each in (order.astype(np.int64), sorted_slots.astype(np.int32), blocks)
    )
    return Grouped(places, held, begun, spans)
