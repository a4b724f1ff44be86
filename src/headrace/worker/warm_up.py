"""Steps that a start takes before the first request, and GEMMs of every shape: first uses are paid for, and what steps
hold at once is seen.

The largest steps are taken over a throw-away cache of one block a group: every position of every row lies in block 0,
for a row's table is zeros until it is edited. What is computed is nonsense; what is allocated on the way is what a real
step of that shape allocates.

What lives here: those steps, which go the way real ones do. What may not: compiling kernels (kernels/build/ahead.py),
sizing (memory.py), measuring (device_memory.py), captures.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from headrace.layers.linear import Linear
from headrace.request import NewRow, SamplingParams, StepPlan, StructuredOutputs, TokenMasks
from headrace.spec import KVGroup
from headrace.worker.memory import buckets_up_to
from headrace.worker.model_runner import ModelRunner

_TOKENS = 16
# the most demanding draw that is captured
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, detokenize=False)
# Everything that makes a sampler keep something for a row.
DEMANDING = replace(
    DRAWN,
    min_p=0.0,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=20,
    structured_outputs=StructuredOutputs(json_object=True),
)
SCORED = replace(DEMANDING, prompt_logprobs=20)
# One way through the sampler each.
_ASKED = (
    DRAWN,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.0),
)


def warm_up(runner: ModelRunner, groups: Sequence[KVGroup], max_model_len: int, *, thorough: bool) -> None:
    """A short prompt and one decoded token in row 0, the way real ones go: kernels are compiled and first-use costs
    paid.

    ``thorough``: once for each way to sample, and a second token beside the prompt of another row (there are two rows
    then).
    """
    outputs = 3 if thorough else 2  # a sequence holds the last one too
    num_tokens = min(
        [
            _TOKENS,
            max_model_len - outputs,
            *(group.num_blocks * group.spec.block_size - outputs + 1 for group in groups),
        ]
    )
    if num_tokens < 1:
        return
    for params in _ASKED if thorough else _ASKED[:1]:
        runner.run(_plan([(0, 0, num_tokens)], [_row(0, num_tokens, params)], groups))
        runner.run(_plan([(0, num_tokens, 1)]))
        if thorough:
            runner.run(_plan([(0, num_tokens + 1, 1), (1, 0, num_tokens)], [_row(1, num_tokens, params)], groups))
        runner.run(StepPlan(-1, rows_dropped=array("i", (0, 1) if thorough else (0,))))
    runner.forget()


# --- the largest steps there can be


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step. ``longest``: tokens one sequence may have, the sampled one included."""

    max_num_seqs: int
    tokens_a_step: int
    max_logits_rows: int
    longest: int


def decode_plan(limits: Limits) -> StepPlan:
    """One token of every row, drawn with every filter: the largest step that is captured."""
    return _first_step([1] * min(limits.max_num_seqs, limits.tokens_a_step), [DRAWN])


def largest_plan(limits: Limits) -> StepPlan:
    """As many tokens as a step may have, in as many rows; every row asks the sampler for all it has, the first one for
    its prompt's scores."""
    return replace(_first_step(chunks(limits), [SCORED, DEMANDING]), prompt_logprobs=(0,))


def chunks(limits: Limits) -> list[int]:
    """Tokens of each row of the largest step: enough in the first that a whole budget of logits rows is scored, the
    rest dealt out."""
    fitting = max(1, limits.longest - 1)  # every row samples a token
    count = min(limits.max_num_seqs, limits.tokens_a_step)
    first = min(fitting, limits.tokens_a_step - (count - 1), limits.max_logits_rows + 1)
    if count == 1:
        return [min(fitting, limits.tokens_a_step)]
    share, over = divmod(limits.tokens_a_step - first, count - 1)
    return [first, *(min(fitting, share + (index < over)) for index in range(count - 1))]


def run_masked(runner: ModelRunner, plan: StepPlan, vocab_size: int) -> None:
    """Takes the step with a mask for every sample, each of which allows every token."""
    samples, words = tuple(range(len(plan.sample_rows))), -(-vocab_size // 32)
    runner.run(replace(plan, masked=samples), TokenMasks(samples, words, b"\xff" * (4 * words * len(samples))))


def _first_step(counts: list[int], params: list[SamplingParams]) -> StepPlan:
    """New rows of ``counts`` tokens each; the i-th params are for row i, the last for all that follow."""
    added = [_row(row, count, params[min(row, len(params) - 1)]) for row, count in enumerate(counts)]
    # Not shared: the kernels for that may still be missing; what it keeps beside what is there anyway are some KiB.
    return replace(_plan([(row, 0, count) for row, count in enumerate(counts)], added), shared_tokens=0)


def _row(row: int, num_tokens: int, params: SamplingParams) -> NewRow:
    return NewRow(row, row, array("i", [0]) * num_tokens, num_tokens, params, seed=row, stop_token_ids=())


def _plan(
    chunks: Sequence[tuple[int, int, int]], added: Sequence[NewRow] = (), groups: Sequence[KVGroup] = ()
) -> StepPlan:
    """``chunks``: (row, start, count). ``groups``: rows that are added have the first blocks of each, shared by all
    rows."""
    rows, starts, counts = (array("i", column) for column in zip(*chunks, strict=True))
    edits = [edit for new in added for edit in _edits(new, groups)]
    row, group, index = (array("i", column) for column in zip(*edits, strict=True)) if edits else (array("i"),) * 3
    return StepPlan(
        step_id=-1,
        rows_added=tuple(added),
        table_row=row,
        table_group=group,
        table_index=index,
        table_block=index,
        rows=rows,
        starts=starts,
        counts=counts,
        sample_work=array("i", range(len(rows))),
        sample_rows=rows,
    )


def _edits(new: NewRow, groups: Sequence[KVGroup]) -> Iterator[tuple[int, int, int]]:
    for group, each in enumerate(groups):
        for index in range(min(each.num_blocks, -(-(new.num_prompt_tokens + 2) // each.spec.block_size))):
            yield new.row, group, index


# --- GEMMs


def product_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that matter: of batches whose steps are captured (a capture must load nothing), of larger
    steps, of the largest."""
    many = [count for size in (512, 1024, 2048, 4096, 8192, 16384) for count in (size * 3 // 4, size)]
    few = buckets_up_to(max_num_seqs)
    return tuple(
        dict.fromkeys(
            [*few, *(count for count in many if few[-1] < count < max_num_batched_tokens), max_num_batched_tokens]
        )
    )


def warm_linears(decoder: nn.Module, device: torch.device, sizes: Sequence[int], *, max_num_seqs: int) -> None:
    """Every GEMM's shape once for each of so many tokens: the library picks a kernel by it and loads it then.

    The widest layer, the head, computes no more rows than there are sequences.
    """
    layers = _shapes_of(decoder)
    widest, most = max((outs for _, outs, _ in layers), default=0), buckets_up_to(max_num_seqs)[-1]
    with torch.inference_mode():
        for (ins, outs, _), layer in layers.items():
            counts = [count for count in sizes if outs != widest or count <= most]
            x = torch.zeros(max(counts, default=0), ins, dtype=layer.dtype, device=device)
            for count in counts:
                layer.warm(x[:count])


def warm_samples(decoder: nn.Module, device: torch.device, most: int) -> Iterator[int]:
    """The same of every number of tokens, up to ``most``, that a step may sample from, one at each turn, and which: in a
    step that is launched, the last layer and the head compute so many rows, behind all that keeps the device busy."""
    layers = _shapes_of(decoder)
    for count in range(1, most + 1):
        with torch.inference_mode():
            for (ins, _, _), layer in layers.items():
                layer.warm(torch.zeros(count, ins, dtype=layer.dtype, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a request that comes meanwhile waits for one turn, not for all
        yield count


def _shapes_of(decoder: nn.Module) -> dict[tuple[int, int, bool], Linear]:
    return {
        (each.site.ins, each.site.outs, each.takes_sums): each for each in decoder.modules() if isinstance(each, Linear)
    }
