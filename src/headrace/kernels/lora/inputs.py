"""The rows of a step by adapter, as layers and kernels see them.

What lives here: the bundle, and making it from a slot a row. What may not: which slot holds which adapter (lora/).

    slot of each row   -  2  2  0  -  2  0         all that a GPU needs
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

BLOCK = 4  # rows that the C kernel takes at once


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
    if device.type != "cpu":
        held = np.ascontiguousarray(slots, dtype=np.int32)
        return (
            AdapterRows(torch.from_numpy(held).pin_memory().to(device, non_blocking=True))
            if (slots != NO_SLOT).any()
            else None
        )
    grouped = group(slots, device)
    return (
        None if grouped is None else AdapterRows(torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int32)), grouped)
    )


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
