"""A kernel that does not build gives way once, loudly; every other error stays what it is."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace.kernels as registry
from headrace.errors import ConfigError
from headrace.kernels import Kernels, StrictKernelError, guarded
from headrace.kernels.build.ahead import CompileAhead
from headrace.kernels.candidate import CallSite, Candidate, Sizes
from headrace.kernels.norm import reference
from tests.support.kernel_cases import called, carried_out, using

CPU = torch.device("cpu")
SIZES = Sizes(None, torch.float32, 16, 64, 4, 64)  # type: ignore[arg-type]
X, WEIGHT = torch.arange(6.0).view(2, 3), torch.ones(3)


class DoesNotBuild(Exception):
    pass


class Planted:
    """A candidate whose callable raises ``error`` as long as there is one."""

    def __init__(self, name: str, error: Exception | None) -> None:
        self.name = name
        self.error = error
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.name

    def candidate(self, created: Callable[..., Any] | None = None) -> Candidate:
        def warm_up(
            site: CallSite[Any], run: Callable[..., Any], sizes: Sizes
        ) -> list[tuple[str, Callable[[], object]]]:
            return [(self.name, lambda: run(X, WEIGHT, 1e-5, None))]

        return Candidate(self.name, lambda site: created or self, failure=judge, warm_up=warm_up)


def judge(error: Exception) -> str | None:
    return str(error) if isinstance(error, DoesNotBuild) else None


def plant(monkeypatch: pytest.MonkeyPatch, op: str, *candidates: Candidate[Any]) -> None:
    monkeypatch.setattr(registry, "OPERATIONS", carried_out(op, *candidates))


def test_the_twin_takes_over_once_and_loudly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = Planted("broken", DoesNotBuild("error: no such instruction"))
    plant(monkeypatch, "rms_norm", broken.candidate())
    kernels = Kernels(CPU)
    norm, same = (
        kernels.choose(*called("rms_norm", dtype=torch.float32)),
        kernels.choose(*called("rms_norm", dtype=torch.float32)),
    )
    assert kernels.choices[0].chosen == "broken"
    with caplog.at_level(logging.WARNING):
        results = [call(X, WEIGHT, 1e-5, None)[0] for call in (norm, same, norm)]
    assert all(torch.equal(result, reference.rms_norm(X, WEIGHT, 1e-5, None)[0]) for result in results)
    assert broken.calls == 1
    assert [record.getMessage() for record in caplog.records] == [
        "kernel broken of rms_norm does not compile here: error: no such instruction; torch runs instead"
    ]
    assert kernels.choices[0].chosen == "torch"
    assert kernels.choices[0].declined == (("broken", "did not compile: error: no such instruction"),)
    assert kernels.choose(*called("rms_norm", dtype=torch.float32)) is reference.rms_norm


def test_a_specialisation_that_fails_later_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Planted("kernel", None)
    plant(monkeypatch, "rms_norm", kernel.candidate())
    norm = Kernels(CPU).choose(*called("rms_norm", dtype=torch.float32))
    assert norm(X, WEIGHT, 1e-5, None) == "kernel"
    kernel.error = DoesNotBuild("out of resource")
    assert torch.equal(norm(X, WEIGHT, 1e-5, None)[1], X)


def test_who_gave_way_stays_alive_for_graphs_that_hold_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Planted("kernel", None)
    plant(monkeypatch, "rms_norm", kernel.candidate())
    kernels = Kernels(CPU)
    norm, kernel.error = kernels.choose(*called("rms_norm", dtype=torch.float32)), DoesNotBuild("out of resource")
    norm(X, WEIGHT, 1e-5, None)
    monkeypatch.undo()
    alive = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert alive() is not None and kernels.choices[0].chosen == "torch"


def test_the_next_candidate_stands_before_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch, "rms_norm", Planted("first", DoesNotBuild("no")).candidate(), Planted("second", None).candidate()
    )
    kernels = Kernels(CPU, strict=True)
    assert kernels.choose(*called("rms_norm", dtype=torch.float32))(X, WEIGHT, 1e-5, None) == "second"
    assert kernels.choices[0].chosen == "second"


def test_strict_raises_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "rms_norm", Planted("broken", DoesNotBuild("no such instruction")).candidate())
    norm = Kernels(CPU, strict=True).choose(*called("rms_norm", dtype=torch.float32))
    for _ in range(2):
        with pytest.raises(
            StrictKernelError,
            match=r"rms_norm would fall back .*did not compile: no such instruction.*drop --strict-kernels",
        ):
            norm(X, WEIGHT, 1e-5, None)


def test_batch_invariance_is_not_given_up_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "moe", Planted("broken", DoesNotBuild("no")).candidate())
    with pytest.raises(ConfigError, match="No batch-invariant kernel for moe"):
        Kernels(CPU, techniques=using(batch_invariant=True)).choose(*called("moe", dtype=torch.float32))()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access was encountered"), torch.OutOfMemoryError("x"), KeyError("x")],
)
def test_other_errors_pass_through_and_change_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Planted("kernel", error)
    plant(monkeypatch, "rms_norm", kernel.candidate())
    kernels = Kernels(CPU)
    norm = kernels.choose(*called("rms_norm", dtype=torch.float32))
    with pytest.raises(type(error)) as raised:
        norm(X, WEIGHT, 1e-5, None)
    assert raised.value is error
    kernel.error = None
    assert norm(X, WEIGHT, 1e-5, None) == "kernel"
    assert kernels.choices[0].chosen == "kernel"


def test_what_a_candidate_makes_from_weights_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Planted("broken", DoesNotBuild("no"))
    plant(monkeypatch, "linear", broken.candidate(created=lambda weight, bias: broken))
    kernels = Kernels(CPU)
    layers = [
        kernels.choose(*called("linear", dtype=torch.float32))(WEIGHT.view(1, 3) * scale, None) for scale in (1.0, 2.0)
    ]
    assert [layer(X).flatten().tolist() for layer in layers] == [[3.0, 12.0], [6.0, 24.0]]
    assert broken.calls == 2  # one a layer; their weights differ


def test_who_is_called_now_answers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Planted("broken", DoesNotBuild("no"))
    broken.least_shared = 7  # type: ignore[attr-defined]
    plant(monkeypatch, "rms_norm", broken.candidate())
    norm = Kernels(CPU).choose(*called("rms_norm", dtype=torch.float32))
    assert getattr(norm, "least_shared", None) == 7
    norm(X, WEIGHT, 1e-5, None)  # it gives way
    assert getattr(norm, "least_shared", None) is None


def test_graphs_are_given_up_where_a_twin_looks_at_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "moe", Planted("broken", DoesNotBuild("no")).candidate())
    kernels = Kernels(CPU)
    moe = kernels.choose(*called("moe", dtype=torch.float32))
    assert kernels.graphable
    with pytest.raises(TypeError):  # the twin's, for want of arguments
        moe()
    assert not kernels.graphable


# --- ahead of their first use


def warmed_up(
    kernels: Kernels, *, strict: bool = False, prepared: Callable[[], object] = lambda: None
) -> dict[str, float]:
    ahead = CompileAhead(prepared, strict=strict, threads=2)
    try:
        ahead.start(kernels, SIZES, lambda: None)
        return ahead.finish()
    finally:
        ahead.close()


def test_a_warm_up_finds_out_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Planted("broken", DoesNotBuild("no"))
    plant(monkeypatch, "rms_norm", broken.candidate())
    kernels = Kernels(CPU)
    norm = kernels.choose(*called("rms_norm", dtype=torch.float32))
    assert list(warmed_up(kernels)) == ["rms_norm torch.float32: broken"]
    assert kernels.choices[0].chosen == "torch"
    assert torch.equal(norm(X, WEIGHT, 1e-5, None)[1], X)
    strict = Kernels(CPU, strict=True)
    strict.choose(*called("rms_norm", dtype=torch.float32))
    with pytest.raises(StrictKernelError, match="did not compile: no"):
        warmed_up(strict, strict=True)


def test_a_warm_up_that_fails_otherwise_is_logged_or_ends_a_strict_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, "rms_norm", Planted("kernel", KeyError("shape")).candidate())
    kernels = Kernels(CPU)
    kernels.choose(*called("rms_norm", dtype=torch.float32))
    warmed_up(kernels)
    assert "the warm-up of rms_norm torch.float32: kernel failed" in caplog.text
    with pytest.raises(KeyError):
        warmed_up(kernels, strict=True)


def test_kernels_are_tried_where_they_cannot_be_made_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No C compiler, say: every kernel gives way to its twin, and the start goes on."""

    def no_compiler() -> None:
        raise RuntimeError("Failed to find C compiler")

    plant(monkeypatch, "rms_norm", Planted("broken", DoesNotBuild("no")).candidate())
    for strict, ends in ((False, None), (True, RuntimeError)):
        kernels = Kernels(CPU)
        kernels.choose(*called("rms_norm", dtype=torch.float32))
        ahead = CompileAhead(lambda: None, strict=strict, threads=2)
        ahead.start(kernels, SIZES, no_compiler)
        with nullcontext() if ends is None else pytest.raises(ends, match="C compiler"):
            ahead.finish()
        ahead.close()
    assert "could not be made ready" in caplog.text and "broken of rms_norm does not compile here" in caplog.text


def test_equal_warm_ups_are_held_once_and_only_new_sites_later(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Planted("kernel", None)
    plant(monkeypatch, "rms_norm", kernel.candidate())
    kernels, order = Kernels(CPU), []
    kernels.choose(*called("rms_norm", dtype=torch.float32))
    kernels.choose(*called("rms_norm", dtype=torch.float32, weight_dtype=torch.bfloat16))
    ahead = CompileAhead(lambda: order.append("prepared"), strict=True, threads=3)
    for dtype in (torch.float32, torch.bfloat16):
        kernels.choose(*called("rms_norm", dtype=dtype))
        ahead.start(kernels, SIZES, lambda: order.append(f"calls {kernel.calls}"))
    ahead.finish()
    ahead.close()
    assert kernel.calls == 2
    assert order[:2] == ["prepared", "calls 0"]


def test_the_device_is_looked_at_once_when_no_more_than_one_kernel_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, last = list[str](), threading.Event()

    def warm_up(site: CallSite[Any], run: Any, sizes: Sizes) -> list[tuple[str, Callable[[], object]]]:
        return [
            ("one", lambda: order.append("one")),
            ("last", lambda: last.wait(5)),
            ("two", lambda: order.append("two")),
        ]

    plant(monkeypatch, "rms_norm", replace(Planted("kernel", None).candidate(), warm_up=warm_up))
    kernels = Kernels(CPU)
    kernels.choose(*called("rms_norm", dtype=torch.float32))
    ahead = CompileAhead(lambda: None, strict=True, threads=3)
    ahead.start(kernels, SIZES, lambda: None)
    took = ahead.finish(lambda: (order.append("looked"), last.set()))
    ahead.close()
    assert (sorted(order[:2]), order[2:], len(took)) == (["one", "two"], ["looked"], 3)
    assert (
        CompileAhead(lambda: None, strict=True, threads=1).finish(lambda: order.append("again")) == {}
        and order[-1] == "again"
    )


def test_closing_minds_no_thread_that_takes_the_last_work_meanwhile() -> None:
    ahead = CompileAhead(lambda: None, strict=True, threads=1)
    assert ahead.prepared is None
    queue = ahead._threads._queue
    ahead._threads._queue = SimpleNamespace(empty=lambda: False, get_nowait=queue.get_nowait, put=queue.put)  # type: ignore[assignment]
    ahead.close()
    assert not any(thread.is_alive() for thread in ahead._threads._threads)


def test_a_compiler_that_hangs_ends_the_start_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    plant(monkeypatch, "rms_norm", Planted("kernel", None).candidate())
    kernels = Kernels(CPU)
    kernels.choose(*called("rms_norm", dtype=torch.float32))
    ahead = CompileAhead(stuck.wait, strict=False, threads=1, patience=0.1)
    ahead.start(kernels, SIZES, lambda: None)
    begin = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"hangs: of 1 kernels 1 are not built.*rms_norm torch.float32: kernel.*--disabled-kernels"
    ):
        ahead.finish()
    ahead.close()
    assert time.monotonic() - begin < 5
    stuck.set()


# --- the compiler's own errors

BROKEN = """
import json, sys, torch, triton, triton.language as tl
from triton.runtime import driver
from triton.runtime.errors import InterpreterError, OutOfResources
from headrace.kernels.build.toolchain import build_failure
from tests.support.triton_offline import CompileOnly

driver.set_active(CompileOnly())

@triton.jit
def unknown_name(x_ptr, N: tl.constexpr):
    tl.store(x_ptr, tl.no_such_function(N))

@triton.jit
def odd_block(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 1.0)

def said(call):
    try:
        call()
    except Exception as error:
        return build_failure(error)
    return "nothing"

def fails(error):
    raise error

x = torch.zeros(8)
print(json.dumps({
    "a name that is not there": said(lambda: unknown_name.warmup(x, N=8, grid=(1,))),
    "a block that is no power of 2": said(lambda: odd_block.warmup(x, N=7, grid=(1,))),
    "shared memory": said(lambda: fails(OutOfResources(300000, 232448, "shared memory"))),
    "registers": said(lambda: fails(RuntimeError("Triton Error [CUDA]: too many resources requested for launch"))),
    "an illegal access": said(lambda: fails(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))),
    "the device's memory": said(lambda: fails(torch.OutOfMemoryError("CUDA out of memory"))),
    "an index, interpreted": said(lambda: fails(InterpreterError("IndexError"))),
    "a wrong argument": said(lambda: odd_block.warmup(x, M=8, grid=(1,))),
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_compilers_errors_are_told_from_the_devices(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert "no_such_function" in said["a name that is not there"]
    assert "power of 2" in said["a block that is no power of 2"]
    assert "shared memory" in said["shared memory"] and "too many resources" in said["registers"]
    for name in ("an illegal access", "the device's memory", "an index, interpreted", "a wrong argument"):
        assert said[name] is None, name


NO_COMPILER = """
from triton.runtime import build
from headrace.kernels.build import toolchain
from headrace.kernels.build.gpu import prepare_compiler

class Driver:
    @property
    def active(self):  # the driver's helper library is compiled at first use
        return build.compile_module_from_src("int x;", "headrace_unique")

toolchain.driver = Driver()
print(prepare_compiler()[1])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_machine_without_a_c_compiler_says_so(tmp_path: Path) -> None:
    script = tmp_path / "no_compiler.py"
    script.write_text(NO_COMPILER)
    environment = {key: value for key, value in os.environ.items() if key != "CC"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert "no kernel can be built: RuntimeError: Failed to find C compiler" in done.stdout, done.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_cache_folder_that_cannot_be_written_is_said_and_replaced(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    code = "import json; from headrace.kernels.build.toolchain import cache_folder; print(json.dumps([cache_folder(), cache_folder()]))"
    results = []
    for folder in (tmp_path / "cache", blocked / "cache"):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(folder)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        results.append((json.loads(done.stdout), done.stderr))
    assert results[0] == ([[str(tmp_path / "cache"), None]] * 2, "")
    (replaced, _), said = results[1]
    assert "headrace-triton-" in replaced[0] and "cannot be written" in replaced[1] and "Not a directory" in said


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_cache_folder_without_room_is_said_and_replaced(tmp_path: Path) -> None:
    """Files of at most 1 MiB stand for a full disk: what cannot be kept is no reason to build nothing."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); "
    code += "from headrace.kernels.build.toolchain import cache_folder; print(cache_folder()[1])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "cannot be written (File too large)" in done.stdout


def test_a_layer_for_which_a_candidate_makes_nothing_has_nothing() -> None:
    """Not a guard around None, which whoever asks would take for a kernel."""
    make = guarded(lambda weight: None, lambda error: lambda weight: None, makes=True)
    assert make("weights of several kinds") is None
