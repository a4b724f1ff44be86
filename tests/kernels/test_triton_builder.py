"""Kernels compiled by another process are found as if this one had compiled them; what it cannot compile is compiled
here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import __file__ as support

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

PROGRAM = """
import json, sys
from importlib import import_module
import torch
from triton import knobs
from triton.runtime import driver
from headrace.processes.builders import Builders
from headrace.kernels.build import gpu
from headrace.kernels.rows import triton_embedding as embedding
from headrace.kernels.build import toolchain
from tests.support.triton_offline import CompileOnly

launch = import_module("headrace.kernels.build.launch")
driver.set_active(CompileOnly())
launch.known_of = lambda compiled, unpassed: None  # there is no device to load it on
launch.Kernel.launch_plainly = lambda self, grid, arguments, named: None
from headrace.kernels.build.identities import identities, remember
assert not identities(knobs.cache.dir)
kernels = [each for each in toolchain.prepare_identities() if type(each) is launch.Kernel]
remember(knobs.cache.dir, {each._fn_name: each.cache_key for each in kernels})
identities.cache_clear()
again = [launch.Kernel(each.fn) for each in kernels]
for each in again:
    each.parse = None  # what a start that finds them does without
assert [each.cache_key for each in again] == [each.cache_key for each in kernels]
found = []
knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: found.append(cache_hit)
table, ids, own = torch.zeros(3, 64), torch.zeros(2, dtype=torch.int64), embedding._embedding_kernel
builders = Builders(1)
with gpu.built_by(builders):
    embedding.embedding(ids, table, None)
    embedding._embedding_kernel = launch.Kernel(own.fn)
    embedding._embedding_kernel.fn.__name__ = "not_there"
    embedding.embedding(ids, table, 2.0)
embedding._embedding_kernel.fn.__name__ = "_embedding_kernel"
builders.close()
embedding.embedding(ids, table.half(), 2.0)
json.dump(found, sys.stdout)
"""


LATER = """
import json, sys
from importlib import import_module
from pathlib import Path
import torch
from triton import knobs
from triton.runtime import driver
from headrace.processes.builders import Builders
from headrace.kernels.build.later import Ended, Missing
from headrace.kernels.build import gpu
from headrace.kernels.rows import triton_embedding as embedding
from headrace.kernels.build import toolchain
from tests.support.triton_offline import CompileOnly

launch = import_module("headrace.kernels.build.launch")
driver.set_active(CompileOnly())
said = []
launch.known_of = lambda compiled, unpassed: launch.Known(lambda *given: said.append("launched"), None, (), compiled)  # there is no device
toolchain.prepare_identities()
knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: said.append("kept" if cache_hit else "compiled here")
ids = torch.zeros(2, dtype=torch.int64)

def look_up(aim, table):
    before = len(said)
    try:
        with launch.aiming(aim):
            embedding.embedding(ids, table, None)
    except (Missing, Ended) as raised:
        said.append(type(raised).__name__)
    return said[before:]

assert launch.can_come_later()
table, half, other = (torch.zeros(3, 64, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
builders = Builders(1)
found = {"nothing is compiled where it may only be found": look_up(launch.Aim.FIND, table)}
with gpu.built_by(builders):
    found["built elsewhere, loaded, not launched"] = look_up(launch.Aim.BUILD, table)
    found["nor built again"] = look_up(launch.Aim.BUILD, table)
    found["launched at once"] = look_up(launch.Aim.LAUNCH, table)
    found["found where a launch knows it"] = look_up(launch.Aim.FIND, table)
    builders.build("what it does not understand")
    builders.close()
    found["nobody builds"] = look_up(launch.Aim.BUILD, half)
    found["but who launches compiles"] = look_up(launch.Aim.LAUNCH, half)
embedding._embedding_kernel.device_caches.clear()
embedding._embedding_kernel._layouts.clear()
found["found in the cache of a start before"] = look_up(launch.Aim.FIND, half)
found["and what is not is not made"] = look_up(launch.Aim.FIND, other)
json.dump(found, sys.stdout)
"""
FOUND = {
    "nothing is compiled where it may only be found": ["Missing"],
    "built elsewhere, loaded, not launched": ["kept"],
    "nor built again": [],
    "launched at once": ["launched"],
    "found where a launch knows it": ["launched"],
    "nobody builds": ["Ended"],
    "but who launches compiles": ["compiled here", "launched"],
    "found in the cache of a start before": ["kept", "kept", "launched"],  # looked for, then taken
    "and what is not is not made": ["Missing"],
}


def said_by(program: str, folder: Path, *arguments: str) -> Any:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(Path(support).parents[1]), *sys.path]),
        "TRITON_CACHE_DIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(120)
def test_what_a_builder_compiled_is_found_in_the_cache(tmp_path: Path) -> None:
    assert said_by(PROGRAM, tmp_path) == [True, False, False], "by a builder; unknown to it; after it was closed"


@pytest.mark.timeout(120)
def test_a_kernel_may_be_looked_for_or_built_without_being_launched(tmp_path: Path) -> None:
    assert said_by(LATER, tmp_path) == FOUND


IDENTITIES = """
import json, sys
from importlib import import_module
from headrace.processes.builder_program import do_without_torch
if "without" in sys.argv:
    do_without_torch()
kernels = import_module("headrace.kernels.build.toolchain").prepare_identities()
real = hasattr(sys.modules["torch"], "__version__")
json.dump([real, sorted((each.fn.__module__, each.fn.__name__, each.cache_key) for each in kernels)], sys.stdout)
"""


@pytest.mark.timeout(120)
def test_a_builder_has_no_torch_and_knows_every_kernel_by_the_same_identity(tmp_path: Path) -> None:
    """Else what it compiles is not found by who ordered it."""
    (real, kernels), (stands_in, known) = said_by(IDENTITIES, tmp_path), said_by(IDENTITIES, tmp_path, "without")
    assert (real, stands_in) == (True, False)
    assert kernels == known and len(kernels) > 50


def test_modules_that_mind_the_absence_of_torch_are_imported_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.processes import builder_program

    class Started(BaseException):
        pass

    def imported(name: str) -> object:
        raise TypeError("no class of numbers")

    def become(*words: object) -> None:
        raise Started(*words)

    monkeypatch.setattr(builder_program, "do_without_torch", lambda: None)
    monkeypatch.setattr(builder_program, "import_module", imported)
    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(Started) as started:
        builder_program.main(["3", "5"])
    assert started.value.args == (
        sys.executable,
        [sys.executable, "-P", "-m", "headrace.kernels.build.builder", "3", "5"],
    )


def processes_of(session: int) -> set[str]:
    """By number; those that nobody has waited for among them."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                found.add(entry.name)
    return found


@pytest.mark.timeout(60)
def test_builders_that_are_ended_in_the_middle_leave_nothing_in_the_table_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even what they had started themselves (ptxas, say), whose parents are gone before it."""
    from headrace.processes.builders import Builders

    monkeypatch.setenv("PYTHONPATH", str(Path(support).parents[2]))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    made, done = Builders(2), list[bool]()
    assert not made.build("what it does not understand"), "it is there"
    order = ("/tmp", ("cuda", 90, 32), "tests.support.slow_module", "kernel", {}, {}, {}, {})
    waiting = threading.Thread(target=lambda: done.append(made.build(repr(order))))
    waiting.start()
    deadline = time.monotonic() + 30
    while len(processes_of(made._process.pid)) < 4:  # it, two builders, what one of them has started
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begin = time.monotonic()
    made.close()
    assert time.monotonic() - begin < 0.9, "nothing had to be killed"
    assert processes_of(made._process.pid) == set()
    waiting.join(5)
    assert done == [False]


def test_an_order_is_one_line_that_says_the_same_when_read() -> None:
    import tests.support.triton_interpreter  # noqa: F401  before triton: it fixes the mode
    from headrace.kernels.build.builder import Order, write

    order = Order(
        "/a folder",
        ("cuda", 90, 32),
        "a.module",
        "kernel",
        {"x": "*bf16"},
        {(1,): None, (2,): 0.5},
        {(0,): [["tt.divisibility", 16]]},
        {},
    )
    text = write(order)
    assert text is not None and "\n" not in text
    assert write(order._replace(constants={(1,): object()})) is None
    assert write(order._replace(constants={(1,): float("nan")})) is None
    assert write(order._replace(folder="two\nlines")) == repr(tuple(order._replace(folder="two\nlines")))
