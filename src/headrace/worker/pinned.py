"""Numbers between the host and graphs without a copy: pinned memory that kernels read and write where it is, a slot for each step in turn.

A graph cannot be told which slot is a step's, so the device counts the steps, and the host counts beside it.

    host        writes slot 0   writes slot 1   …            reads slot 0   …        Slots are used in turn: as many as steps can be in
    device                      reads, writes slot 0   …                             flight, and one more.
    turn        0               1               2

What lives here: such memory. What may not: what is in it, the kernels (kernels/rows.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.worker.rows import Ints

_SLOTS = 4  # one more than steps can be in flight, so that nobody waits


class Mailbox:
    """``inward`` [slots, …] and ``outward`` [slots, …], int32: the memory, for kernels. ``turn`` [1], int32, on the device: the slot of the
    next step there; the kernel that fetches a step adds one."""

    def __init__(
        self, inward: tuple[int, ...], outward: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream, slots: int = _SLOTS
    ) -> None:
        """``stream``: where steps are queued."""
        written, self.inward = shared_memory((slots, *inward), device)
        read, self.outward = shared_memory((slots, *outward), device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self.slots: list[Ints] = list(written.numpy())
        self._answers: list[Ints] = list(read.numpy())
        self._stream = stream
        self._fetched = [torch.cuda.Event() for _ in range(slots)]
        self._at = -1

    def next(self) -> Ints:
        """Where to write what the next step fetches, which must be queued before another is asked for."""
        self._at = (self._at + 1) % len(self.slots)
        self._fetched[self._at].synchronize()  # at once, as a rule: its step was collected long ago
        return self.slots[self._at]

    def queued(self) -> None:
        """What fetches the slot given out last is queued."""
        self._fetched[self._at].record(self._stream)

    @property
    def answer(self) -> Ints:
        """Where that step's results are once it has ended, until as many more are queued as there are slots."""
        return self._answers[self._at]

    def restart(self) -> None:
        """Both count from the beginning again. Nothing may be under way."""
        self.turn.zero_()
        self._at = -1


def shared_memory(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The same zeros, int32, as the host and as the device has them."""
    host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host, host if device.type == "cpu" else torch.as_tensor(_Pinned(host), device=device)


class _Pinned:
    """Pinned memory, told to torch as memory of the device: it has the same address there."""

    def __init__(self, host: Tensor) -> None:
        self._host = host  # lives as long as whoever looks at it
        self.__cuda_array_interface__ = {"shape": tuple(host.shape), "typestr": "<i4", "data": (host.data_ptr(), False), "version": 3}
