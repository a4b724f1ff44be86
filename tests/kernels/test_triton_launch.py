"""The short way to launch a kernel: it never launches one that was compiled for other arguments, and passes what Triton
would pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tests.support.triton_interpreter  # before any kernel and before triton: it fixes the mode

# isort: split
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.build import launch
from headrace.kernels.build.launch import Kernel, Known, Maps, kinds_of

tl = tests.support.triton_interpreter.tl
DRIVER = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77))
SPECIAL = {"do_not_specialize": ["loose_ptr", "loose"], "do_not_specialize_on_alignment": ["near_ptr", "near"]}


def _all_kinds(x_ptr, near_ptr, loose_ptr, strict, near, loose, factor, WIDTH: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Told(Kernel):
    """A kernel that is never compiled: Triton's own way answers with what Triton would have compiled it for."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, **options)
        self._bind = create_function_from_signature(self.signature, self.params, BaseBackend)
        self.device_caches = defaultdict(tuple)  # there is no device
        self.plain = 0

    def asked(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> str:
        _, specialization, options = self._bind(*arguments, **named)
        return f"{specialization} {options}"

    def run(self, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> str:
        self.plain += 1
        return self.asked(arguments, named)


@pytest.fixture(autouse=True)
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What the driver was given: every compiled kernel is known at once."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "driver", DRIVER)
    maps = Maps({}), Maps({})
    monkeypatch.setattr(
        launch,
        "known_of",
        lambda compiled, unpassed: Known(lambda *given: seen.append(given), f"but {unpassed}", maps, compiled),
    )
    yield seen


def _tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    return torch.zeros(64, dtype=torch.float32).view(dtype)[offset:]


TENSORS = st.builds(_tensor, st.sampled_from([torch.float32, torch.bfloat16, torch.int32]), st.integers(0, 16))
INTEGERS = st.integers(0, 40) | st.sampled_from(
    [-16, -1, 0, 1, 2, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**63, True, False]
)
CONSTANTS = st.sampled_from([0, 1, 2, True, False, None, "ieee", 0.0, -0.0, 1.0])
CALLS = st.tuples(
    st.tuples(
        TENSORS, TENSORS | st.none(), TENSORS, INTEGERS, INTEGERS, INTEGERS, st.sampled_from([0.0, 1.0, -0.5, 1, None])
    ),
    st.fixed_dictionaries(
        {"WIDTH": CONSTANTS, "FLAG": CONSTANTS, "num_warps": st.sampled_from([1, 4]), "launch_pdl": st.booleans()}
    ),
)


def _neighbours(one: Any, other: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that differ from ``one`` in a single argument, as ``other`` has it: most share a layout with it, and should
    not share a kernel."""
    for at in range(len(one[0])):
        yield (*one[0][:at], other[0][at], *one[0][at + 1 :]), one[1]
    for name in one[1]:
        yield one[0], one[1] | {name: other[1][name]}


def test_no_two_arguments_that_the_compiler_tells_apart_share_a_kernel() -> None:
    """Each argument in turn through its pool, the others ordinary."""
    tensors = [
        _tensor(dtype, offset) for dtype in (torch.float32, torch.bfloat16, torch.int32) for offset in (0, 1, 4, 8)
    ]
    integers = [0, 1, 2, 15, 16, 17, 48, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, -1, -16, True]
    constants = [0, 1, 2, True, False, None, "ieee", 0.0, -0.0, 1.0]
    pools: list[Any] = [tensors, [*tensors, None], tensors, integers, integers, integers, [0.0, 1.0, 1, None]]
    ordinary, named = (tensors[0], tensors[0], tensors[0], 2, 2, 2, 0.5), {"WIDTH": 64, "FLAG": True, "num_warps": 4}
    kernel = Told(_all_kinds, **SPECIAL)
    for arguments in [(*ordinary[:at], value, *ordinary[at + 1 :]) for at, pool in enumerate(pools) for value in pool]:
        assert kernel[(3,)](*arguments, **named) == kernel.asked(arguments, named)
    for changed in [named | {name: value} for name in ("WIDTH", "FLAG", "num_warps") for value in constants]:
        assert kernel[(3,)](*ordinary, **changed) == kernel.asked(ordinary, changed)


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(CALLS, CALLS)
def test_whatever_is_launched_was_compiled_for_such_arguments(one: Any, other: Any) -> None:
    kernel, calls = Told(_all_kinds, **SPECIAL), [one, *_neighbours(one, other), other]
    for arguments, named in calls * 2:
        assert kernel[(3,)](*arguments, **named) == kernel.asked(arguments, named)
    ordinary = {kernel.asked(*call) + str(_layout(*call)) for call in calls if _is_ordinary(*call)}
    unusual = 2 * sum(not _is_ordinary(*call) for call in calls)
    assert kernel.plain == len(ordinary) + unusual, "the short way is taken wherever it can be"


def _layout(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """Types, and the order in which names are given: a place in the code has one."""
    return [*(type(each) for each in (*arguments, *named.values())), *named]


def _is_ordinary(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    integers = all(type(each) is not int or 0 <= each < 2**31 for each in arguments)
    return (
        integers
        and not any(type(each) is bool for each in arguments)
        and not any(type(each) is float for each in named.values())
    )


def test_the_driver_is_given_what_triton_would_give_it(passed: list[tuple[Any, ...]]) -> None:
    kernel = Told(_all_kinds, **SPECIAL)
    x, near, loose = _tensor(torch.bfloat16, 0), _tensor(torch.float32, 1), _tensor(torch.int32, 3)
    for factor in (0.5, 0.25):
        kernel[(7, 2)](x, near, loose, 16, 1, 9, factor, WIDTH=64, FLAG=True, num_warps=4)
    assert kernel.plain == 1
    pointers = (x.data_ptr(), near.data_ptr(), loose.data_ptr())
    assert passed == [("but 2", 7, 2, 1, 77, *pointers, 16, 1, 9, factor) for factor in (0.5, 0.25)]


def test_constants_may_be_given_by_position_or_left_out() -> None:
    def short(x_ptr, WIDTH: tl.constexpr, FLAG: tl.constexpr = False):  # type: ignore[no-untyped-def]
        pass

    kernel, x = Told(short), _tensor(torch.bfloat16, 0)
    for named in ({}, {"FLAG": True}, {"FLAG": False}):
        for width in (64, 128, True, 1, 0.0, -0.0):
            for _ in range(2):
                assert kernel[(1,)](x, width, **named) == kernel.asked((x, width), named)
    assert kernel.plain == 3 * (4 + 2 * 2)


def _taken_apart(x_map, y_map, strict):  # type: ignore[no-untyped-def]
    pass


def test_a_descriptor_is_made_once_for_each_place_in_memory(
    passed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def make(descriptor: TensorDescriptor, meta: object) -> list[Any]:
        made.append(descriptor.base.data_ptr())
        return [f"map {descriptor.base.data_ptr()}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", make)
    kernel, memory = Told(_taken_apart), torch.zeros(4, 64, 64, dtype=torch.bfloat16)
    for layer in (0, 1, 2, 1, 2, 2):
        x, y = (TensorDescriptor(memory[at], [64, 64], [64, 1], [16, 64]) for at in (layer, 3))
        assert kernel[(1,)](x, y, 3) == kernel.asked((x, y, 3), {})
    assert kernel.plain == 1
    assert made == [memory[at].data_ptr() for at in (0, 3, 1, 2)]
    assert passed[1][5:] == (
        f"map {memory[1].data_ptr()}",
        64,
        64,
        64,
        1,
        f"map {memory[3].data_ptr()}",
        64,
        64,
        64,
        1,
        3,
    )
    for block in ([32, 64], [16, 64]):
        x, y = (TensorDescriptor(memory[at], [64, 64], [64, 1], block) for at in (0, 3))
        assert kernel[(1,)](x, y, 3) == kernel.asked((x, y, 3), {})
    assert kernel.plain == 2, "another block is another kernel"


def test_profilers_and_odd_grids_take_tritons_own_way() -> None:
    kernel, x = Told(_taken_apart), _tensor(torch.bfloat16, 0)
    hook = knobs.runtime.launch_enter_hook
    for _ in range(2):
        kernel[(1,)](x, x, 2)
    assert kernel.plain == 1
    hook.add(print)
    try:
        kernel[(1,)](x, x, 2)
    finally:
        hook.remove(print)
    kernel[lambda given: (1,)](x, x, 2)  # type: ignore[index]
    kernel[(1,)](x, x, True)
    kernel[(1,)](x, x, strict=2)
    assert kernel.plain == 5


def test_another_version_of_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.9.0")
    kernel, x = Told(_taken_apart), _tensor(torch.bfloat16, 0)
    for _ in range(3):
        kernel[(1,)](x, x, 2)
    assert kernel.plain == 3


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_KEYS", 4)
    kernel, x = Told(_all_kinds, **SPECIAL), _tensor(torch.bfloat16, 0)
    for width in [*range(20), *range(20)]:
        assert kernel[(1,)](x, x, x, 2, 2, 2, 1.0, WIDTH=width, FLAG=True) == kernel.asked(
            (x, x, x, 2, 2, 2, 1.0), {"WIDTH": width, "FLAG": True}
        )
    (layout,) = kernel._layouts.values()
    assert len(layout._table) <= 4  # type: ignore[attr-defined]


def test_a_signature_says_what_the_launcher_reads() -> None:
    signature = ["*bf16", "i32", "constexpr", "fp32", "i64", "u8", "fp64"]
    assert kinds_of(signature, 0) == b"84_f81d"
    assert kinds_of(["tensordesc<bf16[64, 128]>", "*i32", "tensordesc<bf16[1, 16, 64]>"], 2) == b"m44888m444888"
    assert kinds_of(["tensordesc<bf16[64, 128]>"], 0) is None, "one that is no map"
    for unknown in ("bf16", "fp16", ("i32", "i32"), "nvTmaDesc"):
        assert kinds_of(["*bf16", unknown], 0) is None
