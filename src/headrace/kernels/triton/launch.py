# mypy: disallow-subclassing-any=False
"""Launching again what was launched before: one look-up and one call of the driver, in place of Triton's binding of every argument.

A launch without a graph costs the host some 25 µs with Triton 3.6 (an H200's machine), about 20 of them before the driver hears of it, and
a step has ten launches a layer. What those 20 find out is which compiled kernel the arguments ask for, and that is known from few facts:

    layout    kinds of the arguments (tensor, int, float, None, descriptor), names and kinds of constants and options
    key       device; element types; pointers on 16 bytes or not; integers that are 1, multiples of 16 or neither; values of constants

A layout gets a function of its own, written out as Triton writes its binder, with a table from keys to compiled kernels. The key tells
apart whatever Triton tells apart, so no kernel is launched for arguments it was not compiled for. The first launch of a key takes Triton's
own way, and so does every launch that is unusual: integers that are negative or beyond 31 bits, grids that are functions, hooks of a
profiler, kernels with scratch memory, another version of Triton.

Arguments that are no constants are given by position. Two checks of Triton's are made at a key's first launch alone: that tensors are on
a GPU, and that globals have not changed.

What lives here: the decorator for kernels that are launched. What may not: kernels, judging errors (toolchain.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

Grid = tuple[int, ...]
Arguments = tuple[Any, ...]
Launch = Callable[[Grid, Arguments, Mapping[str, Any]], Any]

_KNOWN_VERSION = "3.6."  # whose driver is called directly
_TENSORS = (Tensor, nn.Parameter)
_KINDS = (*_TENSORS, int, float, type(None), TensorDescriptor)
_CONSTANTS = (int, bool, str, type(None))  # equal ones of one type are the same to the compiler (0.0 and -0.0 are not)
_MOST_KEYS = 1024  # of one layout; then it begins anew
_MOST_MAPS = 1024  # descriptors of one argument


def launchable(*, do_not_specialize: Iterable[str] = (), do_not_specialize_on_alignment: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for a kernel that is launched from the host: ``kernel[grid](…)`` as ever."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = triton.jit if knobs.runtime.interpret else Kernel
        return made(function, do_not_specialize=list(do_not_specialize), do_not_specialize_on_alignment=list(do_not_specialize_on_alignment))

    return decorate


def dependent(programmatic: bool) -> dict[str, Any]:
    """The option with which a kernel may begin while the one before still runs; it waits for it itself (programmatic dependent launch)."""
    return {"launch_pdl": True} if programmatic else {}


class Known(NamedTuple):
    """A compiled kernel as the driver wants it. ``maps``: how each descriptor becomes arguments."""

    run: Callable[..., None]
    function: int
    cooperative: bool
    dependent: bool  # programmatic dependent launch
    packed: tuple[int, ...]
    maps: tuple[Maps, ...]
    compiled: CompiledKernel


class Kernel(JITFunction):
    """A kernel of Triton's with a shorter way to the driver. Launching returns the compiled kernel, as Triton does."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._layouts: dict[tuple[Any, ...], Launch] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, /, *arguments: Any, **named: Any) -> Any:
        layout = (*map(type, arguments), *named, *map(type, named.values()))
        launch = self._layouts.get(layout)
        if launch is None:
            launch = self._layouts[layout] = create_launch(self, arguments, named) or self.launch_plainly
        return launch(grid, arguments, named)

    def launch_plainly(self, grid: Grid, arguments: Arguments, named: Mapping[str, Any]) -> Any:
        """Triton's own way."""
        return self.run(*arguments, grid=grid, warmup=False, **named)


def create_launch(kernel: Kernel, arguments: Arguments, named: Mapping[str, Any]) -> Launch | None:
    """The function for launches of this layout; None where each has to go Triton's own way."""
    source = _source(kernel, arguments, named) if triton.__version__.startswith(_KNOWN_VERSION) else None
    if source is None:
        return None
    runtime = knobs.runtime
    table: dict[Arguments, Known] = {}
    scope = {
        "kernel": kernel,
        "runtime": runtime,
        "enter": runtime.launch_enter_hook,
        "leave": runtime.launch_exit_hook,
        "table": table,
        "learn": partial(_learn, kernel, table),
        "current_device": driver.active.get_current_device,
        "current_stream": driver.active.get_current_stream,
    }
    exec(source, scope)
    launch: Launch = scope["launch"]
    return launch


def _source(kernel: Kernel, arguments: Arguments, named: Mapping[str, Any]) -> str | None:
    """That function, as text; None where an argument is of an unusual kind."""
    parts = _Parts()
    for index, param in enumerate(kernel.params):
        known = parts.add(param, f"a{index}", arguments[index]) if index < len(arguments) else param.is_constexpr
        if not known:
            return None
    plain = all(type(value) in _CONSTANTS for value in named.values()) and len(arguments) <= len(kernel.params)
    return parts.text(len(arguments), len(kernel.params)) if plain else None


class _Parts:
    """What a launch looks at, collected argument by argument, as Python expressions."""

    def __init__(self) -> None:
        self._key = ["device", "*named.values()"]
        self._passed: list[str] = []
        self._pointers: list[str] = []
        self._aligned: list[str] = []  # those whose alignment counts
        self._integers: list[str] = []
        self._maps = 0

    def add(self, param: Any, value: str, example: object) -> bool:
        """Whether an argument of its kind is understood. ``value`` is the expression of it."""
        kind = type(example)
        if param.is_constexpr:
            self._key.append(value)
            self._passed.append("None")
            return kind in _CONSTANTS
        if kind in _TENSORS:
            self._add_pointer(param, value)
        elif kind is int:
            self._add_integer(param, value)
        elif kind is TensorDescriptor:
            self._key += [f"{value}.base.dtype", f"(*{value}.block_shape,)"]
            self._passed.append(f"*maps[{self._maps}]({value})")
            self._maps += 1
        else:
            self._passed.append(value)
        return not (param.annotation_type or param.is_const) and kind in _KINDS

    def _add_pointer(self, param: Any, value: str) -> None:
        self._pointers.append(value)
        self._key.append(f"{value}.dtype")
        self._passed.append(f"p{value}")
        if not (param.do_not_specialize or param.do_not_specialize_on_alignment):
            self._aligned.append(f"p{value}")

    def _add_integer(self, param: Any, value: str) -> None:
        self._integers.append(value)
        self._passed.append(value)
        if not param.do_not_specialize:
            self._key.append(f"{value} == 1" if param.do_not_specialize_on_alignment else f"2 if {value} == 1 else not {value} & 15")

    def text(self, given: int, all_there_are: int) -> str:
        """``given`` arguments by position; what is left are constants."""
        unusual = ["type(grid) is not tuple", "enter.calls", "leave.calls", "runtime.launch_enter_hook is not enter"]
        unusual += ["runtime.launch_exit_hook is not leave", "kernel.pre_run_hooks"]
        unusual += [f"({' | '.join(self._integers)}) >> 31"] if self._integers else []
        each = ", ".join(f"{pointer} & 15 == 0" for pointer in self._aligned)
        aligned = [f"not ({' | '.join(self._aligned)}) & 15 or ({each},)"] if self._aligned else []
        passed = ", ".join([*self._passed, *["None"] * (all_there_are - given)])
        return "\n    ".join(
            [
                "def launch(grid, arguments, named):",
                "".join(f"a{index}, " for index in range(given)) + "= arguments" if given else "pass",
                f"if {' or '.join(unusual)}:",
                "    return kernel.launch_plainly(grid, arguments, named)",
                *(f"p{value} = {value}.data_ptr()" for value in self._pointers),
                "device = current_device()",
                f"key = ({', '.join([*self._key, *aligned])},)",
                "known = table.get(key)",
                "if known is None:",
                "    return learn(key, grid, arguments, named)",
                "run, function, cooperative, dependent, packed, maps, compiled = known",
                "x, y, z = (*grid, 1, 1)[:3]",
                "run(x, y, z, current_stream(device), function, cooperative, dependent, None, None, packed, None, None, None,",
                f"    {passed})",
                "return compiled",
            ]
        )


def _learn(kernel: Kernel, table: dict[Arguments, Known], key: Arguments, grid: Grid, arguments: Arguments, named: Mapping[str, Any]) -> Any:
    """The first launch of a key."""
    compiled = kernel.launch_plainly(grid, arguments, named)
    known = known_of(compiled)
    if known is not None:
        if len(table) >= _MOST_KEYS:
            table.clear()
        table[key] = known
    return compiled


def known_of(compiled: Any) -> Known | None:
    """None for a kernel that wants more than its arguments, or was not built for this driver."""
    from triton.backends.nvidia.driver import CudaLauncher

    launcher: Any = compiled.run if type(compiled) is CompiledKernel else None
    if launcher is None or type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    run, metas = _bare(launcher.launch)
    if None in metas:  # a descriptor that the kernel takes apart itself
        return None
    options = (bool(launcher.launch_cooperative_grid), bool(launcher.launch_pdl))
    return Known(run, compiled.function, *options, compiled.packed_metadata, tuple(map(Maps, metas)), compiled)


def _bare(launch: Callable[..., None]) -> tuple[Callable[..., None], list[dict[str, Any] | None]]:
    """The driver's function without what expands descriptors in front of it, and what that needs to know of each."""
    if not inspect.isfunction(launch):
        return launch, []
    inner = inspect.getclosurevars(launch).nonlocals
    return inner["launcher"], list(inner["tensordesc_meta"])


class Maps:
    """Descriptors of one argument as the driver wants them: made once for each place and shape of memory."""

    __slots__ = ("_made", "_meta")

    def __init__(self, meta: dict[str, Any] | None) -> None:
        self._meta = meta
        self._made: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, descriptor: TensorDescriptor) -> tuple[Any, ...]:
        place = (descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides, descriptor.padding)
        made = self._made.get(place)
        if made is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            if len(self._made) >= _MOST_MAPS:
                self._made.clear()
            made = self._made[place] = tuple(make_tensordesc_arg(descriptor, self._meta))
        return made
