"""Loading and launching machine code through the CUDA driver.

What lives here: the few calls of libcuda that a kernel of ours needs. What may not: compiling (nvrtc.py), what a kernel
is given.

torch has made the context and knows the stream; a launch may be captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from torch import Tensor

_BFLOAT16, _SWIZZLE_128, _PROMOTE_256 = 9, 3, 3  # CUtensorMapDataType, …Swizzle, …L2promotion
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(RuntimeError):
    """The driver refused: its words and its number."""


class NotLoadable(DriverError):
    """Code that cannot be loaded or launched on this device, whatever its data."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, doing: str, kind: type[DriverError] = DriverError) -> None:
    if result == 0:
        return
    said = ctypes.c_char_p()
    _driver().cuGetErrorString(result, byref(said))
    raise kind(f"{doing}: {(said.value or b'an error without a name').decode()} (CUDA error {result})")


def _enter_context(device: int) -> None:
    """The context that torch uses, in this thread, too: one that has just begun has none."""
    handle, context = c_int(), c_void_p()
    _check(_driver().cuDeviceGet(byref(handle), c_int(device)), "finding the device")
    _check(_driver().cuDevicePrimaryCtxRetain(byref(context), handle), "using the device's context")
    _check(_driver().cuCtxSetCurrent(context), "using the device's context")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("kind", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


_EARLY = _Attribute(_PROGRAMMATIC, 0, 1)


class Function:
    """A kernel of a loaded module."""

    def __init__(self, handle: c_void_p, name: str, shared_bytes: int, number: Callable[[str], int]) -> None:
        self.number = number  # a constant of its source
        self._handle = handle
        self._shared = shared_bytes
        _check(
            _driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, c_int(shared_bytes)),
            f"shared memory of {name}",
            NotLoadable,
        )

    def launch_together(self, programs: int, threads: int, stream: int, parameters: ctypes.Structure) -> None:
        """All programs at once on the device, so that they may wait for each other. ``parameters`` are copied."""
        arguments = (c_void_p * 1)(ctypes.addressof(parameters))
        sizes = (c_uint(programs), c_uint(1), c_uint(1), c_uint(threads), c_uint(1), c_uint(1), c_uint(self._shared))
        _check(
            _driver().cuLaunchCooperativeKernel(self._handle, *sizes, c_void_p(stream), arguments), "launching together"
        )

    def launch(
        self,
        programs: int,
        threads: int,
        stream: int,
        *parameters: ctypes.Structure | ctypes._SimpleCData[Any],
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        """``parameters`` are copied. ``pdl``: it may begin while the kernel before still runs, and waits for
        it itself. ``cluster``: so many programs that follow each other are on the device together, and reach each
        other's shared memory.
        """
        arguments = (c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        if pdl or cluster > 1:
            asked = [_EARLY] * pdl + [_Attribute(_CLUSTER, 0, cluster, (c_int * 15)(1, 1))] * (cluster > 1)
            attributes = (_Attribute * len(asked))(*asked)
            grid, block = (c_uint * 3)(programs, 1, 1), (c_uint * 3)(threads, 1, 1)
            config = _Config(grid, block, self._shared, stream, ctypes.addressof(attributes), len(asked))
            _check(
                _driver().cuLaunchKernelEx(byref(config), self._handle, arguments, None), "launching with attributes"
            )
            return
        sizes = (c_uint(programs), c_uint(1), c_uint(1), c_uint(threads), c_uint(1), c_uint(1), c_uint(self._shared))
        _check(_driver().cuLaunchKernel(self._handle, *sizes, c_void_p(stream), arguments, None), "launching")


class GraphChain:
    """Captured graphs, one after another, as one: each is a node of it. ``graphs``: their handles; the memory they name is
    the caller's to keep."""

    def __init__(self, graphs: Sequence[int]) -> None:
        driver, whole, before, self._chain = _driver(), c_void_p(), list[c_void_p](), c_void_p()
        _check(driver.cuGraphCreate(byref(whole), c_uint(0)), "joining graphs")
        try:
            for graph in graphs:
                node, order = c_void_p(), (c_void_p * len(before))(*before)
                given = byref(node), whole, order, c_size_t(len(before)), c_void_p(graph)
                _check(driver.cuGraphAddChildGraphNode(*given), "joining graphs")
                before = [node]
            made = driver.cuGraphInstantiateWithFlags(byref(self._chain), whole, c_uint64(0))
            _check(made, "joining graphs")
        finally:
            driver.cuGraphDestroy(whole)

    def launch(self, stream: int) -> None:
        _check(_driver().cuGraphLaunch(self._chain, c_void_p(stream)), "launching joined graphs")

    def __del__(self) -> None:
        """One under way goes when it has ended."""
        if self._chain:
            _driver().cuGraphExecDestroy(self._chain)


class TensorMap(ctypes.Structure):
    """A matrix as the copy engine wants it described: 128 bytes."""

    _fields_ = (("words", c_uint64 * 16),)


def tensor_map(tensor: Tensor, *box: int) -> TensorMap:
    """Boxes (rows, columns, or one number more) of a bfloat16 tensor of as many dimensions. What comes last lies side
    by side, 128 bytes of it in a box, swizzled; the other strides are multiples of 16 bytes.
    """
    held = (c_uint64 * 24)()  # the driver wants 64 bytes of alignment
    at = (ctypes.addressof(held) + 63) // 64 * 64
    rank = len(box)
    sizes = (c_uint64 * rank)(*tensor.shape[::-1])
    strides = (c_uint64 * (rank - 1))(*(stride * 2 for stride in tensor.stride()[-2::-1]))
    boxes, steps = (c_uint * rank)(*box[::-1]), (c_uint * rank)(*(1 for _ in box))
    result = _driver().cuTensorMapEncodeTiled(
        c_void_p(at),
        _BFLOAT16,
        rank,
        c_void_p(tensor.data_ptr()),
        sizes,
        strides,
        boxes,
        steps,
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
        0,
    )
    _check(result, f"describing a tensor of {tuple(tensor.shape)}")
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))


class Module:
    """Machine code, loaded into torch's context of a device. It stays as long as the process does: captured steps may
    hold its kernels."""

    def __init__(self, code: bytes, device: int) -> None:
        _enter_context(device)
        self._module = c_void_p()
        self._functions: dict[str, Function] = {}
        self._numbers: dict[str, int] = {}
        _check(_driver().cuModuleLoadData(byref(self._module), code), "loading machine code", NotLoadable)

    def function(self, name: str, shared_bytes: int) -> Function:
        """``shared_bytes`` of dynamic shared memory a program gets."""
        if name not in self._functions:
            handle = c_void_p()
            _check(
                _driver().cuModuleGetFunction(byref(handle), self._module, name.encode()),
                f"finding {name}",
                NotLoadable,
            )
            self._functions[name] = Function(handle, name, shared_bytes, self.number)
        return self._functions[name]

    def number(self, name: str) -> int:
        """A constant of the source, extern "C" int. Read from the device once."""
        if name not in self._numbers:
            at, size, value = c_void_p(), c_size_t(), c_int()
            _check(
                _driver().cuModuleGetGlobal_v2(byref(at), byref(size), self._module, name.encode()),
                f"finding {name}",
                NotLoadable,
            )
            _check(_driver().cuMemcpyDtoH_v2(byref(value), at, c_size_t(4)), f"reading {name}")
            self._numbers[name] = value.value
        return self._numbers[name]
