"""First uses, paid for before anybody waits: of a step's path, and of the library behind matrix products.

What lives here: small steps that go the way real ones do, products of every shape. What may not: compiling kernels (kernels/ahead.py),
the largest steps (rehearsal.py), captures.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from headrace.layers.linear import Linear
from headrace.request import NewRow, StepPlan, StepResult
from headrace.sampling_params import SamplingParams
from headrace.spec import KVGroup
from headrace.worker.graphs import buckets_up_to

_TOKENS = 16
# One way through the sampler each.
_ASKED = (
    SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.0),
)


class RunsPlans(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...


def warm_up(runner: RunsPlans, groups: Sequence[KVGroup], max_model_len: int, *, thorough: bool) -> None:
    """A short prompt and one decoded token in row 0, the way real ones go: kernels are compiled and first-use costs paid.

    ``thorough``: once for each way to sample, and a second token beside the prompt of another row (there are two rows then).
    """
    outputs = 3 if thorough else 2  # a sequence holds the last one too
    num_tokens = min([_TOKENS, max_model_len - outputs, *(group.num_blocks * group.spec.block_size - outputs + 1 for group in groups)])
    if num_tokens < 1:
        return
    for params in _ASKED if thorough else _ASKED[:1]:
        runner.run(_plan(added=(_row(0, num_tokens, params),), groups=groups, chunks=((0, 0, num_tokens),)))
        runner.run(_plan(chunks=((0, num_tokens, 1),)))
        if thorough:
            runner.run(_plan(added=(_row(1, num_tokens, params),), groups=groups, chunks=((0, num_tokens + 1, 1), (1, 0, num_tokens))))
        runner.run(_plan(dropped=(0, 1) if thorough else (0,)))


def _row(row: int, num_tokens: int, params: SamplingParams) -> NewRow:
    return NewRow(row, row, array("i", [0] * num_tokens), num_tokens, params, seed=0, stop_token_ids=())


def _plan(
    *,
    added: tuple[NewRow, ...] = (),
    dropped: tuple[int, ...] = (),
    groups: Sequence[KVGroup] = (),  # of rows added: their tables are the first blocks of each, shared by all rows
    chunks: tuple[tuple[int, int, int], ...] = (),  # (row, start, count)
) -> StepPlan:
    nothing = array("i")
    edits = [edit for new in added for edit in _edits(new, groups)]
    row, group, index = (array("i", column) for column in zip(*edits, strict=True)) if edits else (nothing, nothing, nothing)
    rows, starts, counts = (array("i", column) for column in zip(*chunks, strict=True)) if chunks else (nothing, nothing, nothing)
    every = array("i", range(len(chunks)))
    return StepPlan(
        step_id=-1,
        rows_dropped=array("i", dropped),
        rows_added=added,
        table_row=row,
        table_group=group,
        table_index=index,
        table_block=index,
        rows=rows,
        starts=starts,
        counts=counts,
        sample_work=every,
        sample_rows=rows,
    )


def _edits(new: NewRow, groups: Sequence[KVGroup]) -> Iterator[tuple[int, int, int]]:
    for group, each in enumerate(groups):
        for index in range(min(each.num_blocks, -(-(new.num_prompt_tokens + 2) // each.spec.block_size))):
            yield new.row, group, index


def product_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that matter: of batches that graphs are captured for (a capture must load nothing), of larger steps, of the largest."""
    many = [count for size in (512, 1024, 2048, 4096, 8192, 16384) for count in (size * 3 // 4, size)]
    few = buckets_up_to(max_num_seqs)
    return tuple(dict.fromkeys([*few, *(count for count in many if few[-1] < count < max_num_batched_tokens), max_num_batched_tokens]))


def warm_linears(decoder: nn.Module, device: torch.device, sizes: Sequence[int], *, max_num_seqs: int) -> None:
    """Every product's shape once for each of so many tokens: the library picks a kernel by it and loads it then.

    The widest layer, the head, computes no more rows than there are sequences.
    """
    layers = {(each.shape.in_features, each.shape.out_features): each for each in decoder.modules() if isinstance(each, Linear)}
    widest, most = max((out for _, out in layers), default=0), buckets_up_to(max_num_seqs)[-1]
    with torch.inference_mode():
        for (ins, outs), layer in layers.items():
            counts = [count for count in sizes if outs != widest or count <= most]
            x = torch.zeros(max(counts, default=0), ins, dtype=layer.shape.dtype, device=device)
            for count in counts:
                layer.forward(x[:count])
