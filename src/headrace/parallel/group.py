"""The ranks of one model as layers see them, and how they meet on CPUs.

What lives here: the protocol, its implementation over torch's gloo, how members find each other and are checked. What
may not: who holds what (shares.py), processes, a GPU's (nccl.py).

Every rank calls the same operations in the same order: they follow from the step's plan and the model alone.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from headrace.errors import EngineDead
from headrace.kernels.sums.reference import Normed, Onto, best_of, onto

_dist: Any = torch.distributed  # its types leave out most of what is used here

_PATIENCE = timedelta(seconds=600)  # whoever watches the ranks ends a wait that is in vain much sooner

_PROOF_BYTES = 16


class Group(Protocol):
    rank: int
    size: int
    comm_ops: int  # collectives so far: ranks that have had as many are at the same place
    backend: str  # for people

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place of ``x``, contiguous; to the bit the same on every rank."""
        ...

    def all_reduce_best(self, peaks: Tensor, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """``best_of`` what all ranks have: ``peaks`` [rows], float32, and ``places`` [rows], int64, which may be
        overwritten; a rank's count from its ``first``. One collective."""
        ...

    def max_onto_rows(self, width: int, dtype: torch.dtype) -> int:
        """The most rows of so many values that ``all_reduce_onto`` takes; 0: none."""
        ...

    def all_reduce_onto(self, x: Tensor, residual: Tensor, scale: Tensor) -> Onto:
        """``onto`` (kernels/sums/reference.py) behind the sum of ``x``, in whose place it may be; one collective."""
        ...

    def all_reduce_normed(
        self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> Normed | None:
        """The sum of ``product(x)`` onto ``residual``, and the RMS norm of that, which are computed in any chunks of rows;
        one collective. None: not of so many rows, and nothing has been done."""
        ...

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        """All-gather of tensors alike in shape: [ranks, *x.shape]."""
        ...

    def all_gather_async(self, x: Tensor) -> Callable[[], Tensor]:
        """The same, overlapped with what is computed meanwhile; the result is taken before the next collective."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of the sum over all ranks, [ranks · n, width], contiguous, this rank's part, [n, width]."""
        ...

    def all_to_all(self, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
        """All-to-all: part i of ``x`` goes to rank i → the parts for this rank. ``sends``, ``receives``: rows of each;
        none: ``x`` is [ranks, …], and so is what comes."""
        ...

    def coalesced(self) -> AbstractContextManager[None]:
        """Collectives within are one, finished when it is left; their tensors are dense, and held until then."""
        ...

    def all_reduce_min(self, value: int) -> int:
        """All-reduce (minimum) of one number."""
        ...

    def abort(self) -> None:
        """From any thread: whoever waits for others here need not any more, and gets an error or nonsense."""
        ...


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom a rank meets: ``group``, those with which it shares layers; ``keys``, those with which it shares the keys;
    ``pipe`` (a Pipe), the other stages; ``experts`` (Survivors), those that hold others. None: nobody. ``near``: all are
    on one host. ``memory`` (PeerMemory): another stage's. ``await_all`` returns once they are connected."""

    group: Group | None = None
    keys: Group | None = None
    pipe: Any = None
    near: bool = True
    experts: Any = None
    memory: Any = None
    await_all: Callable[[], object] = lambda: None

    @property
    def groups(self) -> list[Any]:
        """Of its stage."""
        return [each for each in (self.group, self.keys, self.experts) if each is not None]

    @property
    def all(self) -> list[Any]:
        return [*self.groups, *([] if self.pipe is None else [self.pipe])]

    @property
    def share(self) -> tuple[int, int]:
        """Its place among those of one host that compute the same layers, and how many they are."""
        return next(((each.rank, each.size) for each in self.groups if self.near), (0, 1))

    @property
    def comm_ops(self) -> int:
        return sum(each.comm_ops for each in self.all)

    @property
    def stage_comm_ops(self) -> int:
        """The same within its stage, where all ranks have had as many after a step."""
        return sum(each.comm_ops for each in self.groups)

    def all_reduce_min(self, value: int) -> int:
        """The smallest of what all ranks give: whoever shares the layers has it from his own, then all from each."""
        for each in self.groups if self.pipe is None else [self.pipe.all]:
            value = each.all_reduce_min(value)
        return value

    def abort(self) -> None:
        for each in self.all:
            each.abort()


def side_by_side(group: Group, x: Tensor, width: int) -> Tensor:  # [n, part] → [n, width]
    """All-gather in the order of ranks, less what goes beyond ``width``."""
    parts = group.all_gather_stacked(x).unbind(0)
    return torch.cat([part[:, : max(0, width - rank * x.shape[1])] for rank, part in enumerate(parts)], dim=1)


def check_members(group: Any, name: str, key: bytes, device: str) -> None:
    """Of a Group, or as much of one as gathers. Raises EngineDead unless all members have this key. Whoever else reaches
    a port of gloo's or NCCL's while ranks connect may have taken the place of one."""
    proofs = [
        blake2b(f"{name} {rank}".encode(), key=key, digest_size=_PROOF_BYTES).digest() for rank in range(group.size)
    ]
    mine = torch.frombuffer(bytearray(proofs[group.rank]), dtype=torch.uint8).to(device)
    found = group.all_gather_stacked(mine)
    if bytes(found.flatten().tolist()) != b"".join(proofs):
        raise EngineDead(f"ranks of {name} met somebody who is no rank of theirs; see who reaches their network.")


class Store(_dist.Store):  # type: ignore[misc]
    """What gloo finds members by: each says its address under a name of its own, and waits for the others'."""

    def __init__(
        self,
        put: Callable[[str, bytes], None],
        get: Callable[[str], bytes],
        expect: Callable[[str], bytes] | None = None,
    ) -> None:
        """``get`` waits; ``expect`` also for somebody who has much to do before. None: so does ``get``."""
        super().__init__()
        self._put, self._get, self.expect = put, get, expect or get

    def set(self, key: str, value: bytes) -> None:
        self._put(key, value)

    def get(self, key: str) -> bytes:
        return self._get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._get(key)


class Agreement:
    """What members settle through the ``store``, by a name that no other has."""

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size, self._count = store, name, rank, size, 0

    def all_reduce_min(self, value: int) -> int:
        """The smallest of what they give."""
        self._count += 1
        name = f"{self._name}, least {self._count} of"
        self._store.set(f"{name} {self._rank}", b"%d" % value)
        return min(int(self._store.expect(f"{name} {each}")) for each in range(self._size))


class GlooGroup:
    """``address``: of the interface that it uses. ``store``: as torch has them."""

    backend = "gloo"

    def __init__(self, store: Any, address: str, rank: int, size: int, name: str = "meeting") -> None:
        self.rank, self.size, self.comm_ops = rank, size, 0
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = _PATIENCE
        before = _connections()
        self._group = _dist.ProcessGroupGloo(_dist.PrefixStore(name, store), rank, size, options)
        self._connected = _connections() - before

    @property
    def exchange(self) -> Any:
        """What sends from rank to rank."""
        return self._group

    def all_reduce(self, x: Tensor) -> Tensor:
        self.comm_ops += 1
        self._group.allreduce([x]).wait()
        return x

    def all_reduce_best(self, peaks: Tensor, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return best_of(self.all_gather_stacked(peaks), self.all_gather_stacked(places + first))

    def max_onto_rows(self, width: int, dtype: torch.dtype) -> int:
        return sys.maxsize

    def all_reduce_onto(self, x: Tensor, residual: Tensor, scale: Tensor) -> Onto:
        return onto(self.all_reduce(x), residual, scale)

    def all_reduce_normed(self, *_: Any) -> None:
        """Nothing is gained: a norm adds the residual."""

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        return self.all_gather_async(x)()

    def all_gather_async(self, x: Tensor) -> Callable[[], Tensor]:
        self.comm_ops += 1
        parts, given = x.new_empty((self.size, *x.shape)), x.contiguous()
        work = self._group.allgather([list(parts.unbind(0))], [given])

        def taken() -> Tensor:
            work.wait()
            return parts

        return taken

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Added up in the order of ranks."""
        return self.all_to_all(x.view(self.size, -1, *x.shape[1:])).sum(0)

    def all_to_all(self, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
        self.comm_ops += 1
        found, x = x.new_empty((sum(receives) if receives else len(x), *x.shape[1:])), x.contiguous()
        self._group.alltoall_base(found, x, list(receives), list(sends)).wait()
        return found

    def coalesced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce_min(self, value: int) -> int:
        held = torch.tensor([-value])
        options = _dist.AllreduceOptions()
        options.reduceOp = _dist.ReduceOp.MAX
        self._group.allreduce([held], options).wait()
        return -int(held)

    def abort(self) -> None:
        """Where a rank's process has ended, the others' waits end with its connections. A host that is gone ends none,
        and gloo's own abort leaves who waits waiting."""
        for number in self._connected:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
                sock.shutdown(socket.SHUT_RDWR)


def _connections() -> set[int]:
    """This process's connected TCP sockets; none on systems without /proc."""
    try:
        return {number for number in map(int, os.listdir("/proc/self/fd")) if _is_connected(number)}
    except OSError:
        return set()


def _is_connected(number: int) -> bool:
    with suppress(OSError):  # it is closed by now, or not connected
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as sock:
                return sock.family in (socket.AF_INET, socket.AF_INET6) and bool(sock.getpeername())
    return False
