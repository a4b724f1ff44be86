"""The tensors of one step, as layers and kernels see them.

What lives here: frozen bundles of tensors. What may not: building them (worker/inputs.py; for wanted tokens
layers/attention.py) or reading them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headrace.kernels.lora.inputs import AdapterRows
from headrace.spec import KVFormat

MOST_FEW = 16  # queries: rows of a matrix instruction


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One KV group's view of a step: sequences are packed one after another, without padding between them.

    ``shared_tokens``: as StepPlan has it; too few, and nobody looks for keys that sequences share. ``leading``: so many
    sequences, which come first, have one query, and all behind them more than MOST_FEW; 0: who knows. ``chained``: some
    sequences are tokens of one and the same, each with one query, that see keys of those before them in this step: keys
    are all written before any is read.

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


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """How one layer's keys and values are held in fewer bits. Scales are those that all tokens share, in FP8; None:
    1."""

    format: KVFormat
    k_scales: Tensor | None = None  # [kv_heads], float32
    v_scales: Tensor | None = None  # [kv_heads], float32


@dataclass(frozen=True, slots=True)
class Alone:
    """The wanted tokens of a step, each as a sequence of its own with one query."""

    chunk: Tensor  # [n], int32: the step's sequence whose keys each sees
    context: Tensor  # [n], int32: and how many of them; 0: none, and its result is zero
    query_start: Tensor  # [n + 1], int32: 0, 1, 2 …


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the last block computes to the end. ``attention``: of these tokens alone; None: of all, and these are picked
    from it."""

    tokens: Tensor  # [n], int32: packed tokens
    attention: AttentionInputs | None


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

    ``wanted``: the packed tokens whose hidden states somebody reads, ascending; None: all of them. ``alone``: where it
    is worth it, what the last block attends to: to no more than these, each by itself. ``adapters``: the tokens that
    adapters add to; None: no token of this step has one.
    """

    token_ids: Tensor  # [tokens], int64
    positions: Tensor  # [tokens], int64
    attention: tuple[AttentionInputs, ...]  # one per KV group
    wanted: Tensor | None = None  # [n], int32; at least one
    alone: Alone | None = None
    adapters: AdapterRows | None = None
