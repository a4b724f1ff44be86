# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Keys and values of prompts, held in 8 or 4 bits, as bfloat16 for a kernel that reads nothing else.

What lives here: that copy, its memory, which prompts are worth it. What may not: attention.

Many queries read each key, so that to widen it once, in memory, costs a few percent of what their products take; with
few, Triton's kernel reads the codes as they are. What codes mean is rounded to bfloat16: exact where FP8 has scales of
powers of 2, and else by less than half a percent of what the codes themselves have lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.triton_codes import UINT4, Form, Held, kind_of, load_codes, of_head, scales_of
from headrace.kernels.build.launch import launchable
from headrace.kernels.inputs import AttentionInputs, Quantized

_BYTES = 256 * 2**20  # 65,536 keys and values of 8 heads of 128; what sees more is read as codes
LEAST_QUERIES = 256  # of the longest prompt: from about half of that on the copy gains more than it costs


@launchable(do_not_specialize=["table_ptr", "query_start_ptr", "context_ptr", "few", "table_row"])
def _widen_kernel(
    k_ptr, v_ptr, wide_ptr, table_ptr, query_start_ptr, context_ptr, k_shared, v_shared, few, half, table_row,
    k_block, k_head, v_block, v_head,
    KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    part, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_ptr + sequence)
    queries = tl.load(query_start_ptr + sequence + 1) - tl.load(query_start_ptr + sequence)
    if (queries > few) & (part * ROWS < context):
        key = part * ROWS + tl.arange(0, ROWS)
        FORM: tl.constexpr = Form(KV, BLOCK_SIZE, DIM, DIM, ROWS, False, False)
        table = sequence.to(tl.int64) * table_row
        parts: tl.constexpr = BLOCK_SIZE // ROWS  # of a block
        block = sequence.to(tl.int64) * (tl.num_programs(0) // parts) + part // parts
        to = (block * tl.num_programs(2) + head) * BLOCK_SIZE + part % parts * ROWS
        at = wide_ptr + (to + tl.arange(0, ROWS))[:, None] * DIM + tl.arange(0, DIM)[None, :]
        like = tl.zeros((1,), tl.bfloat16)
        for values in tl.static_range(2):
            held = Held(k_ptr, k_ptr, k_shared, table_ptr, k_block, k_head, DIM)
            if values:
                held = Held(v_ptr, v_ptr, v_shared, table_ptr, v_block, v_head, DIM)
            codes, scale, low = load_codes(of_head(held, table, head), part, key, key < context, context, like, FORM)
            wide = codes.to(tl.float32) * scale[:, None]
            if KV == UINT4:
                wide += low[:, None]
            tl.store(at + values * half, wide.to(tl.bfloat16))


@dataclass(slots=True, eq=False)
class WidePrompts:
    """Over codes what ``plain`` is over bfloat16, as Prompts.attend. Calls of one object must follow each other on the
    device."""

    plain: Callable[..., bool]
    kv_heads: int
    dim: int
    device: torch.device | str
    _wide: Tensor = field(init=False, repr=False)  # keys, then values
    _places: Tensor = field(init=False, repr=False)  # 0, 1, 2 …: of blocks
    _step: tuple[AttentionInputs, AttentionInputs, Tensor] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self._wide = torch.empty(_BYTES // 2, dtype=torch.bfloat16, device=self.device)
        self._places = torch.arange(self._room(16), dtype=torch.int32, device=self.device)

    def _room(self, block_size: int) -> int:
        """Blocks of keys that there is room for, with their values."""
        return _BYTES // (4 * self.kv_heads * block_size * self.dim)

    def attend(
        self, q: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs, scale: float, few: int,
        lse: Tensor | None = None, quantized: Quantized | None = None,
    ) -> bool:  # fmt: skip
        """As ``plain`` has it, but for ``leading`` sequences; ``quantized`` caches."""
        if inputs.max_query_len < LEAST_QUERIES or (found := self._narrowed(inputs)) is None:
            return False
        step, table = found
        (sequences, blocks), size = step.block_table.shape, step.block_size
        rows = min(64, size)
        half = self._room(size) * self.kv_heads * size * self.dim
        _widen_kernel[(blocks * size // rows, sequences, self.kv_heads)](
            k_cache, v_cache, self._wide, table, step.query_start, step.context_len, *scales_of(k_cache, v_cache, quantized),
            few, half, table.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2],
            KV=kind_of(quantized), BLOCK_SIZE=size, DIM=self.dim, ROWS=rows, num_warps=4,
        )  # fmt: skip
        wide = self._wide[: 2 * half].view(2, -1, self.kv_heads, size, self.dim)
        return self.plain(q, out, wide[0], wide[1], step, scale, few, lse)

    def _narrowed(self, inputs: AttentionInputs) -> tuple[AttentionInputs, Tensor] | None:
        """The step of all but the ``leading`` sequences, over the copy, and their table; None: there is no room. Made by
        the first layer; the others bring the same inputs."""
        if self._step is None or self._step[0] is not inputs:
            first, size = inputs.leading, inputs.block_size
            sequences, blocks = inputs.context_len.shape[0] - first, -(-inputs.max_context_len // size)
            if size < 16 or size & (size - 1) or sequences * blocks > self._room(size):
                return None
            places = self._places[: sequences * blocks].view(sequences, blocks)
            starts, contexts = inputs.query_start[first:], inputs.context_len[first:]
            step = replace(inputs, block_table=places, query_start=starts, context_len=contexts, leading=0)
            self._step = inputs, step, inputs.block_table[first:]
        return self._step[1:]
