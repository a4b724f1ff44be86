# mypy: disallow-subclassing-any=False
"""Launching again what was launched before: one look-up and one call of the driver, in place of Triton's binding of
every argument.

A launch that is not replayed costs the host some 25 µs with Triton 3.6 (an H200's machine), about 20 of them before the
driver hears of it, and a step has up to ten launches a layer. What those 20 find out is which compiled kernel the
arguments ask for, and that is known from few facts:

    layout    kinds of the arguments (tensor, int, float, None, descriptor), names and kinds of constants and options
    key       device; element types; pointers on 16 bytes or not; integers that are 1, multiples of 16 or neither;
    values of constants

A layout knows where its pointers, integers, constants and descriptors are, and has a table from keys to compiled
kernels. The key tells apart whatever Triton tells apart, so no kernel is launched for arguments it was not compiled
for. Triton compiles at the first launch of a key; its own way to launch would also compile a function in C for each
signature, where ours serves all (launcher.c). It is taken by every launch that is unusual: integers that are negative
or beyond 31 bits, grids that are functions, hooks of a profiler, kernels with scratch memory or in clusters, another
version of Triton.

Arguments that are no constants are given by position. One check of Triton's is made at a key's first launch alone: that
globals have not changed. Tensors must be where the device can read them, which is not looked at.

A thread may ask for less than launches: that kernels are found and not compiled (``Aim.FIND``), or compiled and loaded
and not launched (``Aim.BUILD``); then tensors may be anywhere, as long as they are like those that will come.

What lives here: the decorator for kernels that are launched. What may not: kernels, judging errors (toolchain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import triton
from torch import Tensor, nn
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile
from triton.compiler.compiler import max_shared_mem
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernel_launcher import kernel_launcher
from headrace.kernels.build.builder import Order, write
from headrace.kernels.build.identities import identities
from headrace.kernels.build.later import Ended, Missing
from headrace.processes.builders import Builders


class Aim(Enum):
    """What calling a kernel is to bring about."""

    LAUNCH = 0
    FIND = 1  # a launch, if nothing has to be compiled for it
    BUILD = 2  # that it can be launched


# who compiles what is launched here for the first time
BUILDERS: ContextVar[Builders | None] = ContextVar("BUILDERS", default=None)
_AIM: ContextVar[Aim] = ContextVar("AIM", default=Aim.LAUNCH)
Grid = tuple[int, ...]
Arguments = tuple[Any, ...]
Launch = Callable[[Grid, Arguments, Mapping[str, Any]], Any]

_KNOWN_VERSION = "3.6."  # whose driver is called directly
_TENSORS = (Tensor, nn.Parameter)
_KINDS = (*_TENSORS, int, float, type(None), TensorDescriptor)
# Equal ones of one type are the same to the compiler (0.0 and -0.0 are not); a tuple has one type in each place.
_CONSTANTS = (int, bool, str, tuple, type(None))
# A signature's types as the launcher reads them.
_BYTES = {"constexpr": "_", "fp32": "f", "f32": "f", "fp64": "d"} | {
    f"{sign}{bits}": str(bits // 8) for sign in "iu" for bits in (8, 16, 32, 64)
}
_MOST_KEYS = 1024  # of one layout; then it begins anew
_MOST_MAPS = 1024  # descriptors of one argument


def launchable(
    *, do_not_specialize: Iterable[str] = (), do_not_specialize_on_alignment: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for a kernel that is launched from the host: ``kernel[grid](…)`` as ever."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = triton.jit if knobs.runtime.interpret else Kernel
        return made(
            function,
            do_not_specialize=list(do_not_specialize),
            do_not_specialize_on_alignment=list(do_not_specialize_on_alignment),
        )

    return decorate


@contextmanager
def aiming(aim: Aim) -> Iterator[None]:
    """What this thread calls within."""
    before = _AIM.set(aim)
    try:
        yield
    finally:
        _AIM.reset(before)


def dependent(pdl: bool) -> dict[str, Any]:
    """The option with which a kernel may begin while the one before still runs; it waits for it itself (programmatic
    dependent launch)."""
    return {"launch_pdl": True} if pdl else {}


def can_come_later() -> bool:
    """Whether ``aiming`` holds for what is launched here."""
    return not knobs.runtime.interpret and triton.__version__.startswith(_KNOWN_VERSION)


class Known(NamedTuple):
    """A compiled kernel as the launcher wants it. ``maps``: how each descriptor becomes arguments."""

    run: Callable[..., None]
    described: Any
    maps: tuple[Maps, ...]
    compiled: CompiledKernel


class Kernel(JITFunction):
    """A kernel of Triton's with a shorter way to the driver. Launching returns the compiled kernel, as Triton does."""

    hash: str | None

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._layouts: dict[tuple[Any, ...], Launch] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., Any]:
        return partial(self._launch, grid)

    @property
    def cache_key(self) -> str:
        """Its identity, as an earlier start found it, or found now."""
        if self.hash is None:
            self.hash = identities(knobs.cache.dir).get(self._fn_name)
        return str(super().cache_key)

    def _launch(self, grid: Grid, /, *arguments: Any, **named: Any) -> Any:
        layout = (*map(type, arguments), *named, *map(type, named.values()))
        launch = self._layouts.get(layout)
        if launch is None:
            launch = self._layouts[layout] = create_launch(self, arguments, named) or self.launch_plainly
        if _AIM.get() is Aim.BUILD:
            return launch.prepare(arguments, named) if isinstance(launch, Layout) else self.build(arguments, named)
        return launch(grid, arguments, named)

    def _do_compile(
        self, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *rest: Any
    ) -> Any:
        """In a process that compiles for this one, where there is one; then Triton finds it in its cache."""
        builders, target = BUILDERS.get(), self.device_caches[device][2]
        if _AIM.get() is Aim.FIND:
            _look_for(ASTSource(self, signature, constants, attributes), target, options)
        elif builders is not None and triton.__version__.startswith(_KNOWN_VERSION):
            named = (
                knobs.cache.dir,
                (target.backend, target.arch, target.warp_size),
                self.fn.__module__,
                self.fn.__name__,
            )
            order = write(Order(*named, signature, constants, attributes, options.__dict__))
            if order is not None and not builders.build(order) and builders.closed and _AIM.get() is Aim.BUILD:
                raise Ended
        return super()._do_compile(key, signature, device, constants, options, attributes, *rest)

    def build(self, arguments: Arguments, named: Mapping[str, Any]) -> Any:
        """Compiles, or finds, the kernel for these arguments."""
        with self._hash_lock:
            self.device_caches[driver.active.get_current_device()]  # made at first use, by one thread
        return self.run(*arguments, grid=None, warmup=True, **named)

    def launch_plainly(self, grid: Grid, arguments: Arguments, named: Mapping[str, Any]) -> Any:
        """Triton's own way."""
        return self.run(*arguments, grid=grid, warmup=False, **named)


def _look_for(source: ASTSource, target: GPUTarget, options: Any) -> None:
    """Raises Missing where the compiler does not find it in its cache."""

    def refuse(*_: Any) -> None:
        raise Missing

    source.make_ir = refuse  # what compiling begins with
    compile(source, target=target, options=options.__dict__)


def create_launch(kernel: Kernel, arguments: Arguments, named: Mapping[str, Any]) -> Launch | None:
    """The launch of this layout; None where each has to go Triton's own way."""
    given = kernel.params[: len(arguments)]
    if not triton.__version__.startswith(_KNOWN_VERSION) or len(arguments) > len(kernel.params):
        return None
    if not all(param.is_constexpr for param in kernel.params[len(arguments) :]) or not all(
        map(_is_understood, given, arguments)
    ):
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
            index
            for index, at in enumerate(self._pointers)
            if not (params[at].do_not_specialize or params[at].do_not_specialize_on_alignment)
        ]  # of the pointers, those whose alignment counts
        self._integers = [at for at, _ in integers]
        self._ones = [at for at, param in integers if not param.do_not_specialize]  # being 1 counts
        self._sixteenths = [
            at for at, param in integers if not (param.do_not_specialize or param.do_not_specialize_on_alignment)
        ]
        self._maps = [at for at, _ in plain if type(arguments[at]) is TensorDescriptor]
        self._enter, self._leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

    def __call__(self, grid: Grid, arguments: Arguments, named: Mapping[str, Any]) -> Any:
        if type(grid) is not tuple or self._is_unusual(arguments):
            return self._kernel.launch_plainly(grid, arguments, named)
        pointers = [arguments[at].data_ptr() for at in self._pointers]
        device = driver.active.get_current_device()
        key = (device, *named.values(), *self._constants(arguments), *self._facts(arguments, pointers))
        known = self._table.get(key) or self._learn(key, arguments, named)
        if known is None:
            return self._kernel.launch_plainly(grid, arguments, named)
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        known.run(known.described, x, y, z, stream, *self._passed(arguments, pointers, known.maps))
        return known.compiled

    def prepare(self, arguments: Arguments, named: Mapping[str, Any]) -> None:
        """What a launch of arguments like these would do first."""
        pointers = [arguments[at].data_ptr() for at in self._pointers]
        key = (
            driver.active.get_current_device(),
            *named.values(),
            *self._constants(arguments),
            *self._facts(arguments, pointers),
        )
        if key not in self._table:
            self._learn(key, arguments, named)

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

    def _learn(self, key: Arguments, arguments: Arguments, named: Mapping[str, Any]) -> Known | None:
        """The first launch of a key. None: it has to go Triton's own way."""
        known = known_of(self._kernel.build(arguments, named), len(self._kernel.params) - len(arguments))
        if known is not None:
            if len(self._table) >= _MOST_KEYS:
                self._table.clear()
            self._table[key] = known
        return known


def _getter(places: Sequence[int]) -> Callable[[Arguments], Arguments]:
    """The values at these places, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda arguments: tuple(arguments[at] for at in places)


def known_of(compiled: Any, unpassed: int) -> Known | None:
    """``unpassed``: constants at the end of its arguments that are not passed. None for a kernel that wants more than
    its arguments, has one of a kind that the launcher does not know, or was not built for this driver."""
    if type(compiled) is not CompiledKernel:
        return None
    meta, metas = compiled.metadata, tuple(compiled.metadata.tensordesc_meta or ())
    if meta.target.backend != "cuda" or meta.num_ctas != 1 or meta.global_scratch_size or meta.profile_scratch_size:
        return None
    kinds = kinds_of(list(compiled.src.signature.values())[: -unpassed or None], len(metas))
    if kinds is None or None in metas:  # None: a descriptor that the kernel takes apart itself
        return None
    function = _load(compiled)
    if function is None:
        return None
    launcher = kernel_launcher()
    options = (bool(meta.launch_cooperative_grid), bool(meta.launch_pdl))
    described = launcher.describe(function, meta.num_warps, meta.shared, *options, kinds)
    return Known(launcher.launch, described, tuple(map(Maps, metas)), compiled)


def kinds_of(signature: Sequence[object], maps: int) -> bytes | None:
    """One byte an argument, as the launcher reads them; None where it knows no byte for one. Of ``maps`` descriptors
    each is its map, its shape and its strides."""
    kinds = []
    for each in signature:
        if not isinstance(each, str):
            return None
        if each.startswith("tensordesc"):
            dimensions = each.count(",") + 1
            kinds.append("m" + "4" * dimensions + "8" * dimensions)
        else:
            kinds.append("8" if each.startswith("*") else _BYTES.get(each, ""))
    found = "".join(kinds).encode()
    return found if "" not in kinds and found.count(b"m") == maps else None


def _load(compiled: Any) -> int | None:
    """The function on the current device; None where it does not fit there: Triton's own way says why."""
    meta, device = compiled.metadata, driver.active.get_current_device()
    if meta.shared > max_shared_mem(device):
        return None
    _, function, _, _, threads = driver.active.utils.load_binary(compiled.name, compiled.kernel, meta.shared, device)
    return int(function) if 32 * meta.num_warps <= threads else None


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
