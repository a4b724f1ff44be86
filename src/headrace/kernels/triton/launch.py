# mypy: disallow-subclassing-any=False
"""Launching again what was launched before: one look-up and one call of the driver, in place of Triton's binding of every argument.

A launch without a graph costs the host some 25 µs with Triton 3.6 (an H200's machine), about 20 of them before the driver hears of it, and
a step has ten launches a layer. What those 20 find out is which compiled kernel the arguments ask for, and that is known from few facts:

    layout    kinds of the arguments (tensor, int, float, None, descriptor), names and kinds of constants and options
    key       device; element types; pointers on 16 bytes or not; integers that are 1, multiples of 16 or neither; values of constants

A layout knows where its pointers, integers, constants and descriptors are, and has a table from keys to compiled kernels. The key tells
apart whatever Triton tells apart, so no kernel is launched for arguments it was not compiled for. The first launch of a key takes Triton's
own way, and so does every launch that is unusual: integers that are negative or beyond 31 bits, grids that are functions, hooks of a
profiler, kernels with scratch memory, another version of Triton.

Arguments that are no constants are given by position. Two checks of Triton's are made at a key's first launch alone: that tensors are on
a GPU, and that globals have not changed.

What lives here: the decorator for kernels that are launched. What may not: kernels, judging errors (toolchain.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
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
    """The launch of this layout; None where each has to go Triton's own way."""
    given = kernel.params[: len(arguments)]
    if not triton.__version__.startswith(_KNOWN_VERSION) or len(arguments) > len(kernel.params):
        return None
    if not all(param.is_constexpr for param in kernel.params[len(arguments) :]) or not all(map(_is_understood, given, arguments)):
        return None
    return Layout(kernel, arguments) if all(type(value) in _CONSTANTS for value in named.values()) else None


def _is_understood(param: Any, example: object) -> bool:
    if param.is_constexpr:
        return type(example) in _CONSTANTS
    return type(example) in _KINDS and not (param.annotation_type or param.is_const)


class Layout:
    """The launch for arguments of the kinds of ``arguments``: what it looks at is known by place."""

    __slots__ = (
        "_aligned",
        "_constants",
        "_enter",
        "_integers",
        "_kernel",
        "_leave",
        "_maps",
        "_ones",
        "_pointers",
        "_rest",
        "_sixteenths",
        "_table",
    )

    def __init__(self, kernel: Kernel, arguments: Arguments) -> None:
        params = kernel.params[: len(arguments)]
        plain = [(at, param) for at, param in enumerate(params) if not param.is_constexpr]
        integers = [(at, param) for at, param in plain if type(arguments[at]) is int]
        self._kernel = kernel
        self._table: dict[Arguments, Known] = {}
        self._constants = _getter([at for at, param in enumerate(params) if param.is_constexpr])
        self._pointers = [at for at, _ in plain if type(arguments[at]) in _TENSORS]
        self._aligned = [
            index for index, at in enumerate(self._pointers) if not (params[at].do_not_specialize or params[at].do_not_specialize_on_alignment)
        ]  # of the pointers, those whose alignment counts
        self._integers = [at for at, _ in integers]
        self._ones = [at for at, param in integers if not param.do_not_specialize]  # being 1 counts
        self._sixteenths = [at for at, param in integers if not (param.do_not_specialize or param.do_not_specialize_on_alignment)]
        self._maps = [at for at, _ in plain if type(arguments[at]) is TensorDescriptor]
        self._rest = (None,) * (len(kernel.params) - len(arguments))  # constants given by name: places that the driver passes over
        self._enter, self._leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

    def __call__(self, grid: Grid, arguments: Arguments, named: Mapping[str, Any]) -> Any:
        if type(grid) is not tuple or self._is_unusual(arguments):
            return self._kernel.launch_plainly(grid, arguments, named)
        pointers = [arguments[at].data_ptr() for at in self._pointers]
        device = driver.active.get_current_device()
        key = (device, *named.values(), *self._constants(arguments), *self._facts(arguments, pointers))
        known = self._table.get(key)
        if known is None:
            return self._learn(key, grid, arguments, named)
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        passed = self._passed(arguments, pointers, known.maps)
        known.run(
            x, y, z, stream, known.function, known.cooperative, known.dependent, None, None, known.packed, None, None, None, *passed, *self._rest
        )
        return known.compiled

    def _is_unusual(self, arguments: Arguments) -> bool:
        """Integers of other widths; somebody who wants to hear of launches."""
        if any([arguments[at] >> 31 for at in self._integers]):
            return True
        runtime, enter, leave = knobs.runtime, self._enter, self._leave
        watched = enter.calls or leave.calls or self._kernel.pre_run_hooks
        return bool(watched) or runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave

    def _facts(self, arguments: Arguments, pointers: Sequence[int]) -> list[object]:
        """What Triton specialises on besides constants."""
        facts: list[object] = [arguments[at].dtype for at in self._pointers]
        facts += [not pointers[index] & 15 for index in self._aligned]
        facts += [arguments[at] == 1 for at in self._ones]
        facts += [not arguments[at] & 15 for at in self._sixteenths]
        for at in self._maps:
            facts += [arguments[at].base.dtype, *arguments[at].block_shape]
        return facts

    def _passed(self, arguments: Arguments, pointers: Sequence[int], maps: Sequence[Maps]) -> list[Any]:
        """The arguments as the driver wants them."""
        passed = list(arguments)
        for at, pointer in zip(self._pointers, pointers, strict=True):
            passed[at] = pointer
        if self._maps:
            expanded = [expand(arguments[at]) for at, expand in zip(self._maps, maps, strict=False)]
            for at, parts in zip(reversed(self._maps), reversed(expanded), strict=True):
                passed[at : at + 1] = parts
        return passed

    def _learn(self, key: Arguments, grid: Grid, arguments: Arguments, named: Mapping[str, Any]) -> Any:
        """The first launch of a key."""
        compiled = self._kernel.launch_plainly(grid, arguments, named)
        known = known_of(compiled)
        if known is not None:
            if len(self._table) >= _MOST_KEYS:
                self._table.clear()
            self._table[key] = known
        return compiled


def _getter(places: Sequence[int]) -> Callable[[Arguments], Arguments]:
    """The values at these places, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda arguments: tuple(arguments[at] for at in places)


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
