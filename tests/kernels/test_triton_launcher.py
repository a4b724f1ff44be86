"""The launcher in C, over a driver that only tells what it was given."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

driver = pytest.importorskip("triton.backends.nvidia.driver", reason="Triton is not installed")

FAKE = """
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include "cuda.h"
#undef cuCtxGetCurrent
static CUcontext context = NULL;
CUresult cuCtxGetCurrent(CUcontext *found) { *found = context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext given) { context = given; printf("context\\n"); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) { *made = (CUcontext)9; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult status, const char **text) { *text = "out of resource"; return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **given, void **extra) {
  if (config->gridDimX == 666) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  printf("%p %u %u %u %u %u %p", (void *)function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
         config->sharedMemBytes, (void *)config->hStream);
  for (unsigned at = 0; at < config->numAttrs; at++) printf(" a%d=%d", config->attrs[at].id, *(int *)&config->attrs[at].value);
  for (int at = 0; at < atoi(getenv("COUNT")); at++) printf(" %016llx", *(unsigned long long *)given[at]);
  printf("\\n");
  fflush(stdout);
  return CUDA_SUCCESS;
}
"""

PROGRAM = """
import sys
from triton.runtime.build import compile_module_from_src
from triton.backends.nvidia import driver
module = compile_module_from_src(open(sys.argv[1]).read(), "headrace_launcher", include_dirs=driver.include_dirs)
class Map: pass
module.use_maps(Map)
described = module.describe(0xABC0, 4, 1000, False, True, b"8_4f81d8")
module.launch(described, 7, 2, 1, 0x55, 2**40 + 3, "left out", 2**31 - 1, 0.5, -2, 1, 0.25, 12)
module.launch(described, 7, 0, 1, 0x55, 1, None, 1, 0.5, 1, 1, 0.25, 12)
module.launch(described, 1, 1, 1, 0, 1, None, 1, 2, 1, 1, 1, 12, "more than it has")
def refused(*given):
    try:
        module.launch(*given)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
ordinary = (1, None, 1, 0.5, 1, 1, 0.25, 12)
refused(described, 666, 1, 1, 0, *ordinary)
refused(described, 1, 1, 1, 0, *ordinary[:-1])
refused(described, 1, 1, 1, 0, 1, None, "one", *ordinary[3:])
refused(described, 1, 1, 1, 0, 1.5, *ordinary[1:])
refused(module.describe(1, 4, 0, False, False, b"m"), 1, 1, 1, 0, 1)
refused("not described", 1, 1, 1, 0)
refused(described)
try:
    module.describe(1, 4, 0, False, False, b"4" * 200)
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "fake.c").write_text(FAKE)
    includes = [f"-I{each}" for each in driver.include_dirs]
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O0", "-o", folder / "libcuda.so.1", folder / "fake.c", *includes], check=True
    )
    source = Path(__file__).parents[2] / "src" / "headrace" / "kernels" / "build" / "launcher.c"
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "COUNT": "9", "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, source], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_driver_gets_every_argument_as_its_kind(said: list[str]) -> None:
    """Integers and floats in their own widths, two null pointers behind them; constants are passed over."""
    assert said[0] == "context"
    head, given = said[1].split(" a")[0], said[1].split()
    assert head == "0xabc0 7 2 1 128 1000 0x55"
    values = [int(each, 16) for each in given[-9:]]
    assert values[0] == 2**40 + 3 and values[1] & 0xFFFFFFFF == 2**31 - 1
    assert struct.pack("<I", values[2] & 0xFFFFFFFF) == struct.pack("<f", 0.5)
    assert values[3] == 2**64 - 2 and values[4] & 0xFF == 1
    assert struct.pack("<Q", values[5]) == struct.pack("<d", 0.25)
    assert values[6:] == [12, 0, 0]


def test_a_dependent_launch_says_so(said: list[str]) -> None:
    assert [each for each in said[1].split() if each.startswith("a")] == ["a6=1"]


def test_an_empty_grid_launches_nothing(said: list[str]) -> None:
    assert sum(line.startswith("0xabc0") for line in said) == 2


def test_what_cannot_be_launched_is_refused_with_a_reason(said: list[str]) -> None:
    assert said[3:] == [
        "RuntimeError Triton Error [CUDA]: out of resource",
        "TypeError 7 arguments for a kernel of 8",
        "TypeError 'str' object cannot be interpreted as an integer",
        "TypeError 'float' object cannot be interpreted as an integer",
        "TypeError a map of a tensor was expected, not int",
        "ValueError PyCapsule_GetPointer called with invalid PyCapsule object",
        "TypeError what is launched, its grid and its stream must be given",
        "a kernel of 200 arguments; 126 is the most",
    ]
