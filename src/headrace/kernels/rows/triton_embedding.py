# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Rows of a table by id.

What lives here: the lookup and its scale. What may not: positions (another table, added by the decoder).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import Empty, plainly_empty

_BLOCK = 2048


@launchable()
def _embedding_kernel(
    ids_ptr, table_ptr, y_ptr, table_row, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(table_ptr + row * table_row + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if HAS_SCALE:
        x *= scale
    tl.store(y_ptr + token * WIDTH + column, x.to(y_ptr.dtype.element_ty), mask=column < WIDTH)


def embedding(
    ids: Tensor, table: Tensor, scale: float | None, *, pdl: bool = False, empty: Empty = plainly_empty
) -> Tensor:
    """y[t] = table[ids[t]] · scale. ``ids`` [T] of any integer type, ``table`` [rows, H] → [T, H] in the table's type.
    Ids are not checked."""
    width = table.shape[1]
    y = empty((*ids.shape, width), table.dtype, table.device)
    if y.numel() == 0:
        return y
    block = min(_BLOCK, triton.next_power_of_2(width))
    _embedding_kernel[(ids.numel(), triton.cdiv(width, block))](
        ids.contiguous(), table, y, table.stride(0), 0.0 if scale is None else scale,
        WIDTH=width, BLOCK=block, HAS_SCALE=scale is not None, PDL=pdl, num_warps=max(1, min(8, block // 256)), **dependent(pdl),
    )  # fmt: skip
    return y
