"""cuBLASLt as torch brings it, called with an algorithm of the caller's choice.

What lives here: the few calls of the library that a product needs. What may not: which algorithm is best
(measured.json), layers.

The library thinks in columns: y [tokens, outs] = x · Wᵀ (+ y) in rows is to it yᵀ = W · xᵀ. An algorithm is named by
its settings, which are compared with those that the library offers: none is made up, and where the one that was asked
for is not offered (another version, another card) the caller hears of it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache

import torch
from torch import Tensor

from headrace.kernels.build.nvrtc import beside_torch

Settings = tuple[int, ...]  # id, tile, parts of K, how they are summed, swizzle, custom, stages, inner shape, cluster

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_SETTING_BYTES = (4, 4, 4, 4, 4, 4, 4, 2, 2)  # of cublasLtMatmulAlgoConfigAttributes_t 0 to 8
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_TRANSPOSE_A, _YES = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_OFFERS = 16
# bytes that an algorithm may have beside the operands: for counting tiles; splitting K would take megabytes
_COUNTERS = 1024


class LtError(RuntimeError):
    """The library is missing or refused."""


class Algorithm(ctypes.Structure):
    """As the library has it: 64 bytes."""

    _fields_ = (("words", c_uint64 * 8),)


class _Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL:
    for path in (*beside_torch(_NAMES), *_NAMES):
        try:
            return _typed(ctypes.CDLL(str(path)))
        except OSError:
            continue
    raise LtError("cuBLASLt was not found; it comes with torch for CUDA (the package nvidia-cublas)")


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """What takes more than pointers and ints, and what is called for every product."""
    library.cublasLtGetVersion.restype = c_size_t
    library.cublasLtGetStatusString.restype = c_char_p
    library.cublasLtMatrixLayoutCreate.argtypes = (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64)
    pointer, size = c_void_p, c_size_t
    library.cublasLtMatmul.argtypes = (*[pointer] * 14, size, pointer)
    return library


def _check(status: int, doing: str) -> None:
    if status:
        said = _library().cublasLtGetStatusString(status)
        raise LtError(f"{doing}: {(said or b'an error without a name').decode()} (cuBLASLt status {status})")


@cache
def _handle(device: int) -> c_void_p:
    """One for each device and process, as torch holds one of its own."""
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)), "starting cuBLASLt")
    return handle


def version() -> int:
    return int(_library().cublasLtGetVersion())


class Operands:
    """What the library is told of x [tokens, ins] · W [outs, ins]ᵀ for one number of tokens; rows one behind the
    other."""

    def __init__(self, tokens: int, outs: int, ins: int, dtype: torch.dtype) -> None:
        kind = TYPES[dtype]
        self.weight, self.x, self.y = (_layout(kind, *shape) for shape in ((ins, outs), (ins, tokens), (outs, tokens)))

    def __del__(self) -> None:
        for each in (self.weight, self.x, self.y):
            _library().cublasLtMatrixLayoutDestroy(each)


def _layout(kind: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), kind, rows, columns, rows), "describing a matrix")
    return layout


class Products:
    """Products with weights [outs, ins] of one shape on one device; float32 sums, one rounding."""

    def __init__(self, outs: int, ins: int, dtype: torch.dtype, device: int) -> None:
        self.outs, self.ins, self.dtype = outs, ins, dtype
        self._run = _library().cublasLtMatmul
        self._handle = _handle(device)
        self._description = _description()
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._counters = torch.empty(_COUNTERS, dtype=torch.uint8, device=torch.device("cuda", device))

    def offers(self, tokens: int) -> list[tuple[Settings, Algorithm]]:
        """What the library proposes for so many rows, best first by its own reckoning; none that splits K."""
        library, operands, preference = _library(), Operands(tokens, self.outs, self.ins, self.dtype), c_void_p()
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)), "asking for algorithms")
        try:
            most = c_size_t(_COUNTERS)
            _check(
                library.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE, byref(most), c_size_t(8)),
                "asking for algorithms",
            )
            found, count = (_Offer * _OFFERS)(), c_int()
            layouts = (operands.weight, operands.x, operands.y, operands.y)
            status = library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._description, *layouts, preference, _OFFERS, found, byref(count)
            )  # fmt: skip
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status, f"algorithms for {tokens} x {self.outs} x {self.ins}")
        return [(settings_of(each.algorithm), each.algorithm) for each in found[: count.value] if each.state == 0]

    def takes(self, algorithm: Algorithm, operands: Operands) -> bool:
        """Whether the algorithm computes a product of this size, too, without splitting K."""
        result, layouts = _Offer(), (operands.weight, operands.x, operands.y, operands.y)
        refused = _library().cublasLtMatmulAlgoCheck(
            self._handle, self._description, *layouts, byref(algorithm), byref(result)
        )
        return bool(refused == 0 and result.state == 0 and result.workspace <= _COUNTERS)

    def multiply(
        self, algorithm: Algorithm, operands: Operands, x: Tensor, weight: Tensor, y: Tensor, *, add: bool
    ) -> None:
        """y = x · Wᵀ, or y += x · Wᵀ. Queued on torch's stream; the counters are one stream's."""
        status = self._run(
            self._handle, self._description, byref(self._one), weight.data_ptr(), operands.weight, x.data_ptr(), operands.x,
            byref(self._one if add else self._zero), y.data_ptr(), operands.y, y.data_ptr(), operands.y,
            byref(algorithm), self._counters.data_ptr(), _COUNTERS, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        _check(status, f"a product of {tuple(x.shape)} and {tuple(weight.shape)}")


def _description() -> c_void_p:
    library, description, transposed = _library(), c_void_p(), c_int(_YES)
    _check(library.cublasLtMatmulDescCreate(byref(description), _COMPUTE_FLOAT32, _FLOAT32), "describing a product")
    _check(
        library.cublasLtMatmulDescSetAttribute(description, _TRANSPOSE_A, byref(transposed), c_size_t(4)),
        "describing a product",
    )
    return description


def settings_of(algorithm: Algorithm) -> Settings:
    found = []
    for attribute, size in enumerate(_SETTING_BYTES):
        value, written = c_uint32(0), c_size_t()
        status = _library().cublasLtMatmulAlgoConfigGetAttribute(
            byref(algorithm), attribute, byref(value), c_size_t(size), byref(written)
        )
        found.append(-1 if status else value.value)
    return tuple(found)
