"""Kernels compiled by another process are found as if this one had compiled them; what it cannot compile is compiled here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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
from headrace.builders import Builders
from headrace.kernels.triton import candidates, embedding, toolchain
from tests.support.triton_offline import CompileOnly

launch = import_module("headrace.kernels.triton.launch")
driver.set_active(CompileOnly())
launch.known_of = lambda compiled, unpassed: None  # there is no device to load it on
launch.Kernel.launch_plainly = lambda self, grid, arguments, named: None
toolchain.prepare_identities()
found = []
knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: found.append(cache_hit)
table, ids, own = torch.zeros(3, 64), torch.zeros(2, dtype=torch.int64), embedding._embedding_kernel
builders = Builders(1)
with candidates.built_by(builders):
    embedding.embedding(ids, table, None)
    embedding._embedding_kernel = launch.Kernel(own.fn)
    embedding._embedding_kernel.fn.__name__ = "not_there"
    embedding.embedding(ids, table, 2.0)
embedding._embedding_kernel.fn.__name__ = "_embedding_kernel"
builders.close()
embedding.embedding(ids, table.half(), 2.0)
json.dump(found, sys.stdout)
"""


@pytest.mark.timeout(120)
def test_what_a_builder_compiled_is_found_in_the_cache(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(Path(support).parents[1]), *sys.path]), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [True, False, False], "by a builder; unknown to it; after it was closed"


def test_an_order_is_one_line_that_says_the_same_when_read() -> None:
    import tests.support.triton_interpreter  # noqa: F401  before triton: it fixes the mode
    from headrace.kernels.triton.builder import Order, write

    order = Order("/a folder", ("cuda", 90, 32), "a.module", "kernel", {"x": "*bf16"}, {(1,): None, (2,): 0.5}, {(0,): [["tt.divisibility", 16]]}, {})
    text = write(order)
    assert text is not None and "\n" not in text
    assert write(order._replace(constants={(1,): object()})) is None
    assert write(order._replace(constants={(1,): float("nan")})) is None
    assert write(order._replace(folder="two\nlines")) == repr(tuple(order._replace(folder="two\nlines")))
