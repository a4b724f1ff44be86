"""The rows of a step by adapter, as layers and kernels see them.

What lives here: the bundle, and making it from a slot a row. What may not: which slot holds which adapter (lora/).

    slot of each row   -  2  2  0  -  2  0
    order              3  6 | 1  2  5              rows with an adapter, those of one slot side by side
    spans              (0: 0 … 2) (2: 2 … 5)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.request import NO_SLOT

TILE = 16  # rows: of a matrix instruction


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """``wanted``: the same of the rows that the last block computes to the end, where these are fewer."""

    order: Tensor  # [n], int64: rows with an adapter; at least one
    slots: Tensor  # [n], int32: of each of them
    tiles: Tensor  # [tiles, 3], int32: slot, begin and end in ``order``, of one slot each and at most TILE rows
    spans: tuple[tuple[int, int, int], ...]  # the same by slot, for the host
    wanted: AdapterRows | None = None


def adapter_rows(slots: NDArray[np.int32], device: torch.device) -> AdapterRows | None:
    """``slots`` [rows]: of each row, or NO_SLOT. None where no row has one."""
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] != NO_SLOT]
    if not len(order):
        return None
    sorted_slots = slots[order]
    begins = np.flatnonzero(np.r_[True, sorted_slots[1:] != sorted_slots[:-1]])
    ends = np.r_[begins[1:], len(order)]
    spans = tuple(zip(sorted_slots[begins].tolist(), begins.tolist(), ends.tolist(), strict=True))
    tiles = [(slot, at, min(at + TILE, end)) for slot, begin, end in spans for at in range(begin, end, TILE)]
    packed = np.concatenate([order.astype(np.int64), sorted_slots, np.array(tiles, dtype=np.int64).ravel()])
    shipped = torch.from_numpy(packed) if device.type == "cpu" else torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    count, small = len(order), shipped[len(order) :].int()
    return AdapterRows(shipped[:count], small[:count], small[count:].view(-1, 3), spans)
