"""Triton's NumPy interpreter, mended, so that kernels can be tested where there is no GPU.

What lives here: the mode, the corrections to the interpreter of Triton 3.6, and its bounds checks. What may not:
kernels, tests.

The stock interpreter is silently wrong for bfloat16 (a dot reads the bits as integers, a conversion truncates), reads
out of bounds in silence, and fails with NumPy 2.4. The corrections compute narrow floats in float32 and round once, to
nearest even. Import this module before any kernel module: the mode is fixed when a kernel is decorated.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("there is a GPU: the kernels are checked on it, compiled", allow_module_level=True)
if any(name.startswith("headrace.kernels.") and ".triton_" in name for name in sys.modules):
    raise RuntimeError(
        "a kernel module was imported before the interpreter was chosen; import tests.support.triton_interpreter first"
    )
os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: F401  (tests take it from here, after the mode is set)
import triton.language as tl
import triton.language.extra.cuda as extra_cuda
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle

# ---- bfloat16 ----


def _is_narrow(handle: Any) -> bool:
    return bool(handle.dtype.scalar.name == "bf16")


def _widen(data: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 as float32."""
    return (np.asarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrow(data: np.ndarray) -> np.ndarray:
    """float32 as bits of bfloat16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _eighth(data: np.ndarray) -> np.ndarray:
    """The bits of float8_e4m3fn as float32."""
    found: np.ndarray = (
        torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    )
    return found


def _values(handle: Any) -> np.ndarray:
    data: np.ndarray = handle.data
    if handle.dtype.scalar.name == "fp8e4nv":
        return _eighth(data)
    return _widen(np.ascontiguousarray(data)) if _is_narrow(handle) else data


def _handle(data: np.ndarray, dtype: Any) -> Any:
    return Handle(_narrow(data) if dtype.name == "bf16" else data, dtype)


def _mend_casts() -> None:
    stock = Builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if not _is_narrow(source) and target.scalar.name != "bf16":
            return stock(self, source, target)
        wide = np.asarray(_values(source), dtype=np.float32)
        if target.scalar.name == "bf16":
            return _handle(wide, target.scalar)
        return stock(self, Handle(wide, tl.float32), target)

    stock_narrow = Builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar.name != "fp8e4nv":
            return stock_narrow(self, source, target, rounding)
        wide = torch.from_numpy(np.asarray(_values(source), dtype=np.float32))
        return Handle(
            wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), target.scalar
        )  # to the nearest, as the device rounds

    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    Builder.get_bf16 = lambda self, value: Handle(_narrow(np.array([value], np.float32)), tl.bfloat16)


_COMPARES = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def _mend_operator(name: str, operands: int) -> None:
    stock = getattr(Builder, name)

    def operator(self: Any, *arguments: Any) -> Any:
        handles, function = arguments[:operands], arguments[operands]
        if function is np.where or not any(_is_narrow(handle) for handle in handles):
            return stock(self, *arguments)
        result = function(*(_values(handle) for handle in handles))
        return Handle(result, tl.int1) if function in _COMPARES else _handle(result, tl.bfloat16)

    setattr(Builder, name, operator)


def _mend_dot() -> None:
    def create_dot(self: Any, a: Any, b: Any, add: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """Exact products, float32 sums: what the matrix units give, but for the order of summation."""
        wide = np.int32 if add.dtype.scalar.is_int() else np.float32
        left, right = (np.asarray(_values(x), dtype=wide) for x in (a, b))
        return Handle(np.matmul(left, right) + add.data, add.dtype.scalar)

    Builder.create_dot = create_dot


# ---- order of programs ----


def shuffle_programs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The programs of a launch come in an order of ``seed``'s: on a card it is anybody's guess."""
    stock = Builder.set_grid_idx

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        size = self.grid_dim
        order = np.random.default_rng((seed, *size)).permutation(size[0] * size[1] * size[2])
        program = int(order[(x * size[1] + y) * size[2] + z])
        stock(self, program // (size[1] * size[2]), program // size[2] % size[1], program % size[2])

    monkeypatch.setattr(Builder, "set_grid_idx", set_grid_idx)


# ---- what NumPy 2.4 refuses, what has no meaning here ----


def _mend_scalars() -> None:
    """``range`` over a loaded scalar: NumPy 2.4 no longer turns an array of one element into an int."""
    stock = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        stock(tensor, *scope)

        def index(self: Any) -> int:
            return int(np.asarray(self.handle.data).reshape(-1)[0])

        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patch


def _drop_dependent_launch() -> None:
    """Programmatic dependent launch orders kernels; it changes no value."""

    def nothing(*arguments: Any, **named: Any) -> None:
        return None

    # what an import statement finds is another module object than the package's attribute
    for module in (
        extra_cuda,
        sys.modules.get("triton.language.extra.cuda"),
        sys.modules.get("triton.language.extra.cuda.gdc"),
    ):
        if module is not None:
            module.gdc_wait = nothing  # type: ignore[attr-defined]
            module.gdc_launch_dependents = nothing  # type: ignore[attr-defined]


# ---- time ----


_PATCHED: set[int] = set()  # namespaces whose language is patched for the launch that runs


def _patch_once_a_launch() -> None:
    """The stock interpreter goes over the whole language at every call of a kernel's functions; once for each of their
    modules does."""
    stock = interpreter._patch_lang

    def patch(function: Any) -> Any:
        _PATCHED.clear()
        return stock(function)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if id(self.fn.__globals__) not in _PATCHED:
            stock(self.fn)
            _PATCHED.add(id(self.fn.__globals__))
        try:
            return self.rewrite()(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = patch, call


def _find_types_once() -> None:
    """The stock interpreter makes a table of all types for every one that it looks up."""
    stock, known = interpreter._get_np_dtype, {}

    def find(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = stock(kind.scalar)
        return known[name]

    interpreter._get_np_dtype = find


# ---- bounds ----

_EXTENTS: list[tuple[int, int]] = []  # addresses of the tensor arguments of the launch that runs


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, tuple):
        for part in argument:
            yield from _tensors(part)
    elif isinstance(argument, torch.Tensor):
        yield argument
    elif hasattr(argument, "block_shape"):  # a descriptor of one
        yield argument.base


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The tensor's own elements, not its whole storage."""
    elements = (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _note_arguments() -> None:
    stock = interpreter.GridExecutor._init_args_hst

    def init_args_hst(self: Any, arguments: Any, named: Any) -> Any:
        found = stock(self, arguments, named)
        _EXTENTS[:] = [_extent(tensor) for argument in (*found[0], *found[1].values()) for tensor in _tensors(argument)]
        return found

    interpreter.GridExecutor._init_args_hst = init_args_hst


def _check(pointers: Any, mask: Any, what: str) -> None:
    """Every unmasked address must lie in a tensor argument."""
    size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
    lanes = np.asarray(mask.data if isinstance(mask, Handle) else mask).astype(bool)  # descriptors bring a bare array
    used = pointers.data[np.broadcast_to(lanes, pointers.data.shape)].astype(np.uint64).reshape(-1)
    if used.size == 0:
        return
    inside = np.zeros(used.shape, bool)
    for low, high in _EXTENTS:
        inside |= (used >= low) & (used + np.uint64(size) <= high)
    if not inside.all():
        raise IndexError(f"out-of-bounds {what}: {int((~inside).sum())} of {used.size} lanes")


def _check_accesses() -> None:
    load, store, atomic = Builder.create_masked_load, Builder.create_masked_store, Builder.create_atomic_rmw
    generator = np.random.default_rng(0)

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *more: Any, **named: Any) -> Any:
        _check(pointers, mask, "load")
        if other is None and not np.all(mask.data):  # undefined on a GPU: any bits
            kind = interpreter._get_np_dtype(pointers.get_element_ty())
            bits = np.frombuffer(generator.bytes(pointers.data.size * kind.itemsize), dtype=kind).reshape(
                pointers.data.shape
            )
            other = Handle(np.ascontiguousarray(bits), pointers.get_element_ty())
        return load(self, pointers, mask, other, *more, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        _check(pointers, mask, "store")
        return store(self, pointers, value, mask, *more, **named)

    def atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        _check(pointers, mask, "atomic")
        return atomic(self, operation, pointers, value, mask, *more)

    Builder.create_masked_load, Builder.create_masked_store, Builder.create_atomic_rmw = (
        masked_load,
        masked_store,
        atomic_rmw,
    )


def _mend() -> None:
    _mend_casts()
    for name, operands in (("binary_op", 2), ("ternary_op", 3), ("unary_op", 1)):
        _mend_operator(name, operands)
    _mend_dot()
    _mend_scalars()
    _drop_dependent_launch()
    _patch_once_a_launch()
    _find_types_once()
    _note_arguments()
    _check_accesses()


_mend()

PROGRAMS: list[int] = []  # programs of each launch since the list was last cleared


def _count_programs() -> None:
    stock: Callable[..., Any] = interpreter.GridExecutor.__call__

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        grid = self.grid if isinstance(self.grid, tuple) else ()
        PROGRAMS.append(int(np.prod(grid)) if grid else 0)
        return stock(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = call


_count_programs()
