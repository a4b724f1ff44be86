"""How ranks meet on GPUs: NCCL, called directly, on whatever stream is current, so that it is captured like any kernel.

What lives here: the few functions of NCCL's C interface that are needed (its user guide, 2.x). What may not: processes,
choosing devices.

The ranks' bootstrap connects over loopback alone, or over the interface that joins their hosts, to whom this group's id
is known; the id travels over the ranks' own sockets.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, EngineDead
from headrace.kernels.build.driver import DriverError
from headrace.kernels.build.nvrtc import CompileError
from headrace.kernels.sums.reference import Normed, Onto, best_of, onto
from headrace.parallel.group import GlooGroup
from headrace.parallel.one_device import OneDevice
from headrace.parallel.one_shot import OneShot, most_rows

_log = logging.getLogger(__name__)

_ID_BYTES = 128
_TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SUM, _MIN = 0, 3
_CALL_SECONDS = 0.5  # for a call to return, unless the device's queue is full
_SIOCGIFADDR = 0x8915  # of netdevice(7): an interface's IPv4 address


class _Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * _ID_BYTES)]


def _library() -> Any:
    """The one that torch has loaded."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # read when the first group is made
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast asks more of a host than peers do
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # a capture needs no other rank
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise ConfigError(
            f"Several GPUs need NCCL, which cannot be loaded ({error}). Install a CUDA build of torch."
        ) from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, _Id, ctypes.c_int]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclReduceScatter.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclAllGather.argtypes = [pointer, pointer, size, ctypes.c_int, pointer, pointer]
    for passing in (library.ncclSend, library.ncclRecv):
        passing.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def use_interface(address: str) -> None:
    """Groups that this process makes from now on connect over the interface with this address, and no other."""
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(address)}"  # =: this very name, no prefix


def interface_of(address: str) -> str:
    """Raises ConfigError for an address that no interface of this host has."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                facts = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(facts[20:24]) == address:
                    return name
    raise ConfigError(
        f"No network interface of this host has the address {address}. Give an IPv4 address that one has."
    )


def create_id() -> bytes:
    """Of a group that is to be; one rank makes it and tells the others."""
    library, found = _library(), _Id()
    _check(library, library.ncclGetUniqueId(ctypes.byref(found)))
    return bytes(found)


def _check(library: Any, status: int) -> None:
    if status:
        raise RuntimeError(f"NCCL: {library.ncclGetErrorString(status).decode()}")


class Communicator:
    """NCCL's, of this process's current device: what is called is queued on the current stream."""

    def __init__(self, id: bytes, rank: int, size: int) -> None:
        """All ranks at once."""
        self.rank, self.size = rank, size
        self._library = library = _library()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._comm: ctypes.c_void_p | None = None
        self._calls = threading.RLock()
        made = ctypes.c_void_p()
        _check(library, library.ncclCommInitRank(ctypes.byref(made), size, _Id.from_buffer_copy(id), rank))
        self._comm = made
        # connections are made, and their memory is taken, before anybody counts it
        self.all_reduce(torch.zeros(2**20, device=self._device))
        self.all_gather_stacked(torch.zeros(1, 2**10, device=self._device))
        torch.cuda.current_stream(self._device).synchronize()

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def all_reduce(self, x: Tensor, how: int = _SUM) -> Tensor:
        assert x.is_contiguous()
        self._call(self._library.ncclAllReduce, x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], how)
        return x

    def _call(self, function: Any, *what: int) -> None:
        with self._calls:
            _check(self._library, function(*what, self._comm, self.stream))

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        x, parts = x.contiguous(), x.new_empty((self.size, *x.shape))
        return self.gather(x, parts)

    def gather(self, x: Tensor, parts: Tensor) -> Tensor:
        self._call(self._library.ncclAllGather, x.data_ptr(), parts.data_ptr(), x.numel(), _TYPES[x.dtype])
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        part = x.new_empty((len(x) // self.size, *x.shape[1:]))
        how = part.numel(), _TYPES[x.dtype], _SUM
        self._call(self._library.ncclReduceScatter, x.data_ptr(), part.data_ptr(), *how)
        return part

    def all_to_all(self, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
        library, x = self._library, x.contiguous()
        found = x.new_empty((sum(receives) if receives else len(x), *x.shape[1:]))
        parts = x.split(list(sends) or 1), found.split(list(receives) or 1)
        with self.together():  # sends and receives wait for each other
            for peer, (to, source) in enumerate(zip(*parts, strict=True)):
                self._call(library.ncclSend, to.data_ptr(), to.numel(), _TYPES[x.dtype], peer)
                self._call(library.ncclRecv, source.data_ptr(), source.numel(), _TYPES[x.dtype], peer)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._calls:
            _check(self._library, self._library.ncclGroupStart())
            yield
            _check(self._library, self._library.ncclGroupEnd())

    def all_reduce_min(self, value: int) -> int:
        return int(self.all_reduce(torch.tensor([value], device=self._device), _MIN))

    def abort(self) -> None:
        """What waits goes on with nonsense; what is called from now on is an error. Returns once no capture holds on to
        it."""
        free = self._calls.acquire(timeout=_CALL_SECONDS)
        comm, self._comm = self._comm, None
        if free:
            self._calls.release()
        if comm is not None:
            self._library.ncclCommAbort(comm)


class NCCLGroup:
    """Of this process's current device. Its members connect in a thread, from ``connect`` on: reading weights and building
    kernels need nobody else. ``one_shot``: small sums go through a kernel of our own, where it can run; ``onto``: so
    does what stands between two products beside the sum."""

    def __init__(
        self,
        id: bytes,
        rank: int,
        size: int,
        *,
        one_shot: bool,
        onto: bool = True,
        agree: Callable[[int], int] | None = None,
        host: GlooGroup | None = None,
    ) -> None:
        """``agree``: on the least of what all give, without a device and before they are connected. ``host``: the same
        ranks there, where they share one GPU; NCCL is not used then."""
        self.rank, self.size, self.comm_ops = rank, size, 0
        self._id, self._agree, self._host = id, agree, host
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._side: torch.cuda.Stream | None = None  # of what is sent while something else is computed
        able = torch.cuda.get_device_capability(self._device)[0] == 9  # all of them, for they are equal
        self._tries, self._takes_onto = one_shot and able, one_shot and able and onto
        self._over = "NCCL" if host is None else "gloo"
        self.backend = f"{self._over}{'' if able or not one_shot else '; sums in one shot need compute capability 9'}"
        self._one_shot: OneShot | None = None
        self._comm: Communicator | OneDevice | None = None  # once all are connected
        self._settled, self._problem = threading.Event(), "they are to end"

    def connect(self, check: Callable[[Communicator | OneDevice], None] = lambda comm: None) -> None:
        """All ranks at once, from any thread. ``check``: of those who have come."""
        begun = time.monotonic()
        try:
            torch.cuda.set_device(self._device)
            comm = self._create()
            met = time.monotonic() - begun
            check(comm)
            if self._tries:
                self._try_one_shot(comm)
            if self._one_shot is None and self._host is not None:
                raise RuntimeError(f"ranks on one GPU sum in one shot, but {self.backend}")
            took = time.monotonic() - begun
            _log.debug("start of process %d: connected in %.2f s, tried out in %.2f", os.getpid(), met, took)
            if not self._settled.is_set():
                self._comm = comm
        except Exception as error:  # whoever needs the group says so
            self._problem = str(error)
            _log.debug("ranks did not connect", exc_info=True)
        self._settled.set()

    def _create(self) -> Communicator | OneDevice:
        if self._host is None:
            return Communicator(self._id, self.rank, self.size)
        return OneDevice(self._host, lambda: self._one_shot)

    def connected(self) -> Communicator | OneDevice:
        """Once it is. Raises EngineDead."""
        self._settled.wait()
        if self._comm is None:
            raise EngineDead(f"ranks have not connected: {self._problem}. See `headrace doctor`.")
        return self._comm

    def _meet(self) -> Communicator | OneDevice:
        self.comm_ops += 1
        return self._comm or self.connected()

    def all_reduce(self, x: Tensor) -> Tensor:
        comm = self._meet()
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._one_shot.add(x, comm.stream)
        return comm.all_reduce(x)

    def _beside(self) -> torch.cuda.Stream:
        self._side = self._side or torch.cuda.Stream(self._device, priority=-1)
        return self._side

    def all_reduce_best(self, peaks: Tensor, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        comm = self._meet()
        if self._one_shot is not None:
            return self._one_shot.best(peaks, places, first, comm.stream)
        return best_of(comm.all_gather_stacked(peaks), comm.all_gather_stacked(places + first))

    def max_onto_rows(self, width: int, dtype: torch.dtype) -> int:
        """Before it is known whether they come in one shot: they would be these."""
        return most_rows(self.size, width, dtype) if self._takes_onto else 0

    def all_reduce_onto(self, x: Tensor, residual: Tensor, scale: Tensor) -> Onto:
        comm = self._meet()
        if self._one_shot is None:
            return onto(comm.all_reduce(x), residual, scale)
        return self._one_shot.add_onto(x, residual, scale, comm.stream)

    def all_reduce_normed(
        self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> Normed | None:
        if self._comm is None:
            self.connected()
        if not self._takes_onto or self._one_shot is None or not self._one_shot.takes_normed(x, *residual.shape):
            return None
        self._meet()
        return self._one_shot.add_normed(product, x, residual, scale, eps)

    def _try_one_shot(self, comm: Communicator | OneDevice) -> None:
        """All ranks have it, or none: each says whether it got so far, before anybody goes on."""
        made, problem = None, "another rank cannot, or they differ from NCCL's"
        try:
            made = OneShot(self.rank, self.size, lambda x, _: comm.all_gather_stacked(x))
        except (DriverError, CompileError) as error:
            problem = str(error)
        if (
            comm.all_reduce_min(int(made is not None))
            and made is not None
            and comm.all_reduce_min(int(made.agrees(comm.all_reduce, comm.all_gather_stacked, comm.stream)))
        ):
            self._one_shot, self.backend = (
                made,
                f"{self._over}, and sums of up to {16 * made.lines / 2**20:g} MiB in one shot",
            )
        else:
            self.backend = f"{self._over}; no sums in one shot: {problem}"
            _log.warning("ranks sum through %s", self.backend)

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        return self._meet().all_gather_stacked(x)

    def all_gather_async(self, x: Tensor) -> Callable[[], Tensor]:
        """All memory is the current stream's, which waits for the other one before it goes on: what a layer leaves serves
        the next. (Memory that another stream is recorded for stays taken until the device has come so far, and a host
        that is many layers ahead runs out of it.)"""
        comm = self._meet()
        side = self._beside()
        x, parts = x.contiguous(), x.new_empty((self.size, *x.shape))
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            comm.gather(x, parts)

        def taken(_held: Tensor = x) -> Tensor:
            torch.cuda.current_stream(self._device).wait_stream(side)
            return parts

        return taken

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._meet().reduce_scatter(x)

    def all_to_all(self, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
        return self._meet().all_to_all(x, sends, receives)

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        with (self._comm or self.connected()).together():
            yield

    def all_reduce_min(self, value: int) -> int:
        return self._meet().all_reduce_min(value) if self._agree is None else self._agree(value)

    def abort(self) -> None:
        self._settled.set()
        if self._one_shot is not None:
            self._one_shot.stop()
        if self._comm is not None:
            self._comm.abort()


class NCCLLink:
    """One way from one rank to another, with a communicator and a stream of its own: what is sent waits for nobody's
    computing, and a receiver that is late holds up no kernel of the sender."""

    def __init__(self, id: bytes, rank: int) -> None:
        """``rank``: 0 sends, 1 receives."""
        self._library = library = _library()
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        _check(library, library.ncclCommInitRank(ctypes.byref(self._comm), 2, _Id.from_buffer_copy(id), rank))
        self._side = torch.cuda.Stream() if rank == 0 else None
        first = torch.zeros(2**20, device="cuda")  # connections are made before anybody counts their memory
        self.send(first) if rank == 0 else self.receive(first)
        torch.cuda.synchronize()

    def send(self, x: Tensor) -> None:
        assert self._side is not None and x.is_contiguous()
        self._side.wait_stream(torch.cuda.current_stream())
        x.record_stream(self._side)
        how = x.data_ptr(), x.numel(), _TYPES[x.dtype], 1, self._comm, self._side.cuda_stream
        _check(self._library, self._library.ncclSend(*how))

    def receive(self, x: Tensor) -> Tensor:
        how = x.data_ptr(), x.numel(), _TYPES[x.dtype], 0, self._comm, torch.cuda.current_stream().cuda_stream
        _check(self._library, self._library.ncclRecv(*how))
        return x

    def abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._library.ncclCommAbort(comm)


class NCCLPipe:
    """Between the stages of a pipeline on GPUs. ``ids``: of the links, those of a place in the stages together, from
    each stage to the next and from the last to the first, where drafts are verified also to those between; then of all
    ranks, who are to ``connect`` next."""

    backend = "NCCL"

    def __init__(self, ids: Sequence[bytes], rank: int, size: int, stages: int) -> None:
        self.stage, place = divmod(rank, size // stages)
        self.stages = stages
        self._out: dict[str, list[NCCLLink]] = {"hidden": [], "tokens": []}
        self._in: dict[str, NCCLLink] = {}
        count = (len(ids) - 1) * stages // size
        for at, id in enumerate(ids[place * count : (place + 1) * count]):  # in one order on all ranks
            name = "hidden" if at < stages - 1 else "tokens"
            if self.stage == min(at, stages - 1):
                self._out[name].append(NCCLLink(id, 0))
            elif self.stage == (at + 1) % stages:
                self._in[name] = NCCLLink(id, 1)
        self.all = NCCLGroup(ids[-1], rank, size, one_shot=False)
        self.comm_ops = 0

    def send(self, hidden: Tensor) -> None:
        self.comm_ops += 1
        self._out["hidden"][0].send(hidden.contiguous())

    def receive(self, hidden: Tensor) -> Tensor:
        self.comm_ops += 1
        return self._in["hidden"].receive(hidden)

    def send_tokens(self, picked: Tensor, *, to_all: bool = False) -> None:
        for link in self._out["tokens"][: None if to_all else 1]:
            link.send(picked.contiguous())

    def receive_tokens(self, picked: Tensor) -> Tensor:
        return self._in["tokens"].receive(picked)

    def abort(self) -> None:
        for link in (*chain(*self._out.values()), *self._in.values()):
            link.abort()
        self.all.abort()
