"""Compiles the Triton kernels for an H200 on a machine without a GPU, and reads what came out. Run as a program, in a
process of its own.

What lives here: a driver that only compiles, and figures of each kernel's machine code. What may not: kernels,
judgement (the test).

``python triton_offline.py [CASE …]`` prints a JSON object: for each case registers, stack and spill bytes, shared
memory, instruction counts.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CODES = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
INSTRUCTIONS = ("HGMMA", "QGMMA", "IGMMA", "UTMALDG", "HMMA", "LDGSTS", "LDL", "STL", "FFMA")


class CompileOnly:
    """What the JIT asks of a driver before a launch; nothing is launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


class Recorder:
    """Stands for a kernel in its wrapper's module: launches become compilations."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.compiled.append(self.kernel.warmup(*arguments, grid=grid, **named))

        return launch


class Keys:
    """Stands for a kernel in its wrapper's module: launches are not compiled, only told apart as the compiler would."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.seen: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            *_, binder = self.kernel.device_caches[0]
            _, specialization, options = binder(*arguments, **named)
            self.seen.add(str((specialization, sorted(options.items()))))

        return launch


def record(module: Any, names: tuple[str, ...], call: Callable[[], object]) -> dict[str, dict[str, int]]:
    """The figures of each kernel of ``module`` that ``call`` would launch."""
    recorders = {name: Recorder(getattr(module, name)) for name in names}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    try:
        call()
    finally:
        for name, recorder in recorders.items():
            setattr(module, name, recorder.kernel)
    return {name: figures(recorder.compiled[-1]) for name, recorder in recorders.items() if recorder.compiled}


def figures(compiled: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        code = _output("nvdisasm", "-c", "-ndf", file.name)  # no data, no analysis of jumps: half the time
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS}
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "local": int(found[3]),
        "shared": compiled.metadata.shared,
        **counts,
    }


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _without(module: Any, call: Callable[[], object]) -> Callable[[], object]:
    """``call`` with one of attention's two kernels left out: the recorders stand in one module at a time."""

    def run() -> None:
        stock, module.attend = module.attend, lambda *arguments, **named: None
        try:
            call()
        finally:
            module.attend = stock

    return run


def attention(
    dtype: torch.dtype,
    heads: int,
    dim: int,
    *,
    bulk: bool = False,
    sequences: int = 4,
    unified: bool = False,
    kv: str | None = None,
) -> dict[str, dict[str, int]]:
    """``unified``: the decode kernel alone, the others know nothing of it. ``kv``: how keys and values are held; with
    the cache write."""
    from headrace.kernels.attention import triton_decode as decode
    from headrace.kernels.attention import triton_plan as plan
    from headrace.kernels.attention import triton_prefill as prefill
    from headrace.kernels.attention import triton_rotary as rotary
    from headrace.kernels.attention.paged import PagedAttention
    from headrace.kernels.inputs import AttentionInputs, Quantized
    from headrace.spec import KV_FORMATS

    size = 128 if bulk else 16
    q, cache = torch.empty(64, heads, dim, dtype=dtype), torch.empty(64, 2, 8, size, dim, dtype=dtype)
    starts = torch.zeros(sequences + 1, dtype=torch.int32)
    inputs = AttentionInputs(
        torch.zeros(sequences, 16, dtype=torch.int32), starts, starts[1:], torch.zeros(64), size, 40, 256
    )
    quantized = None
    if kv is not None:
        form, ones = KV_FORMATS[kv], torch.ones(8)
        quantized = Quantized(form) if form.scales else Quantized(form, ones, ones)
        cache = torch.empty(64, 2, 8, size, form.token_bytes(dim), dtype=torch.uint8)
    attend = PagedAttention(
        dim,
        heads // 8,
        132,
        False,
        bulk,
        dtype,
        cascade=not unified,
        unified=unified,
        kv=quantized and quantized.format,
    )

    def call() -> object:
        return attend(q, cache[:, 0], cache[:, 1], inputs, 0.1, None, None, quantized)

    def write() -> object:
        x, at = torch.empty(64, 8, dim, dtype=dtype), torch.zeros(64, dtype=torch.int64)
        return rotary.rotary_write(q, x, x, at, torch.empty(64, dim), cache[:, 0], cache[:, 1], at, quantized)

    planned: dict[str, dict[str, int]] = {}

    def decoded() -> None:
        planned.update(record(decode, ("_decode_kernel",), _without(prefill, call)))

    found = record(plan, ("_plan_kernel",), decoded)  # made once for these inputs: the second call finds it
    if unified:
        return planned
    written = {} if kv is None else record(rotary, ("_rotary_kernel",), write)
    return found | planned | written | record(prefill, ("_prefill_kernel",), _without(decode, call))


def attention_variants(
    soft_cap: float | None, windows: tuple[int | None, ...], *, batch_invariant: bool, cascade: bool = True
) -> dict[str, dict[str, int]]:
    """How many variants of each kernel random steps of a model need, and how many of those a warm-up has not made."""
    from headrace.kernels.attention import triton_decode as decode
    from headrace.kernels.attention import triton_plan as plan
    from headrace.kernels.attention import triton_prefill as prefill
    from headrace.kernels.attention.paged import PagedAttention

    attend = PagedAttention(64, 4, 132, batch_invariant, True, cascade=cascade)
    kernels = {decode: "_decode_kernel", prefill: "_prefill_kernel", plan: "_plan_kernel"}
    keys = {name: Keys(getattr(module, name)) for module, name in kernels.items()}
    for module, name in kernels.items():
        setattr(module, name, keys[name])
    try:
        for call in attend.warm_up(8, 128, windows, soft_cap):
            call()
        warmed_up = {name: set(each.seen) for name, each in keys.items()}
        for seed in range(60):
            _random_step(attend, random.Random(seed), windows, soft_cap)
    finally:
        for module, name in kernels.items():
            setattr(module, name, keys[name].kernel)
    return {name: {"variants": len(each.seen), "new": len(each.seen - warmed_up[name])} for name, each in keys.items()}


def _random_step(attend: Any, draw: random.Random, windows: tuple[int | None, ...], soft_cap: float | None) -> None:
    """A step as the worker makes it: index tensors are slices of one copy, at any offset; tables as wide as the longest
    context."""
    from headrace.kernels.inputs import AttentionInputs

    count = draw.choice((1, 1, 2, 3, 16, 17, 256, 300))
    longest = draw.choice((1, 1, 2, 4, 5, 16, 700))
    lengths = [longest] + [draw.choice((1, longest, draw.randint(1, longest))) for _ in range(count - 1)]
    tokens, at = sum(lengths), draw.randint(0, 7)
    shipped = torch.zeros(at + 2 * count + 1, dtype=torch.int32)
    table = torch.zeros(count, draw.choice((1, 2, 7, 16, 48)), dtype=torch.int32)
    q, cache = (
        torch.empty(tokens, 12, 64, dtype=torch.bfloat16)[:, :8],
        torch.empty(3, 5, 2, 2, 128, 64, dtype=torch.bfloat16),
    )
    lengths_of = table, shipped[at : at + count + 1], shipped[at + count + 1 :], torch.zeros(tokens)
    inputs = AttentionInputs(*lengths_of, 128, longest, 100_000, draw.choice((None, 0)))
    for window, layer in product(windows, range(2)):
        attend(q, cache[:, layer, 0], cache[:, layer, 1], inputs, 0.125, window, soft_cap)


def attention_later() -> dict[str, dict[str, int]]:
    """Of the kernels that may come later: how many variants, how many others have the same, how many are built for
    other arguments than a warm-up launches them with; none of the device's memory is taken, which is ``meta``
    here."""
    from headrace.kernels.attention import triton_decode as decode
    from headrace.kernels.attention import triton_plan as plan
    from headrace.kernels.attention import triton_prefill as prefill
    from headrace.kernels.attention.paged import PagedAttention
    from headrace.kernels.build.later import Later

    kernels = {decode: "_decode_kernel", plan: "_plan_kernel", prefill: "_prefill_kernel"}
    keys = {module: Keys(getattr(module, name)) for module, name in kernels.items()}
    for module, name in kernels.items():
        setattr(module, name, keys[module])

    def asked(calls: list[Callable[[], object]]) -> list[set[str]]:
        for each in keys.values():
            each.seen.clear()
        for call in calls:
            call()
        return [set(each.seen) for each in keys.values()]

    here, there = (PagedAttention(128, 4, 132, False, True, device=device, cascade=True) for device in ("cpu", "meta"))
    calls = here.warm_up(8, 128, (None, 512), None)
    whole = asked([call for call in calls if isinstance(call, Later)])
    others = asked([call for call in calls if not isinstance(call, Later)])
    built = asked([call.build for call in there.warm_up(8, 128, (None, 512), None) if isinstance(call, Later)])
    for module, name in kernels.items():
        setattr(module, name, keys[module].kernel)
    rows = zip(kernels.values(), whole, others, built, strict=True)
    return {
        name: {"later": len(mine), "of others": len(mine & rest), "otherwise": len(mine ^ made)}
        for name, mine, rest, made in rows
    }


def elementwise(dtype: torch.dtype) -> dict[str, dict[str, int]]:
    from headrace.kernels.attention import triton_merge as merge
    from headrace.kernels.attention import triton_rotary as rotary
    from headrace.kernels.norm import triton_activation as activation
    from headrace.kernels.norm import triton_norm as norm
    from headrace.kernels.rows import triton_embedding as embedding
    from headrace.spec import Activation

    x, weight, tokens = (
        torch.empty(64, 4096, dtype=dtype),
        torch.empty(4096, dtype=dtype),
        torch.zeros(64, dtype=torch.int64),
    )
    q, cache = torch.empty(64, 48, 128, dtype=dtype), torch.empty(64, 2, 8, 16, 128, dtype=dtype)
    parts = q.split((32, 8, 8), dim=1)
    pieces = [(torch.empty(count, 64, 32, 128, dtype=dtype), torch.empty(count, 64, 32)) for count in (1, 3)]
    return {
        **record(merge, ("_merge_kernel",), lambda: merge.merge_parts(*pieces)),
        **record(norm, ("_norm_kernel",), lambda: norm.rms_norm(x, weight, 1e-5, x)),
        **record(activation, ("_activation_kernel",), lambda: activation.gated_activation(x, Activation.SILU)),
        **record(embedding, ("_embedding_kernel",), lambda: embedding.embedding(tokens, x, None)),
        **record(
            rotary,
            ("_rotary_kernel",),
            lambda: rotary.rotary_write(*parts, tokens, torch.empty(64, 128), cache[:, 0], cache[:, 1], tokens),
        ),
    }


def sampling() -> dict[str, dict[str, int]]:
    from headrace.kernels.sampling import triton_pick as sampling
    from headrace.kernels.sampling import triton_thresholds as thresholds

    logits, row, ids = torch.empty(8, 128256), torch.empty(8), torch.zeros(8, dtype=torch.int64)
    return {
        **record(sampling, ("_largest_kernel", "_best_kernel"), lambda: sampling.greedy_tokens(logits.bfloat16())),
        **record(sampling, ("_pick_kernel", "_best_kernel"), lambda: sampling.gumbel_argmax(logits, row, ids, ids)),
        **record(sampling, ("_score_kernel",), lambda: sampling.score_tokens(logits, ids, 0)),
        **record(
            thresholds,
            ("_threshold_kernel",),
            lambda: thresholds.keep_thresholds(logits, ids, row, row, scale=(row, row)),
        ),
    }


def rows() -> dict[str, dict[str, int]]:
    from headrace.kernels.rows import triton_rows as rows

    token_ids, table, ints = (
        torch.zeros(8, 512, dtype=torch.int32),
        torch.zeros(8, 4, dtype=torch.int32),
        torch.zeros(8, dtype=torch.int32),
    )
    peak = torch.zeros(8, dtype=torch.float32)
    return {
        **record(
            rows,
            ("_write_kernel",),
            lambda: rows.write_rows(token_ids, ints, ints.long(), torch.zeros(9, dtype=torch.int32), 300),
        ),
        **record(
            rows, ("_gather_kernel",), lambda: rows.gather_inputs(token_ids, table, ints, ints, ints, ints, 128, 4)
        ),
        **record(rows, ("_store_kernel",), lambda: rows.store_tokens(token_ids, ints, ints, ints.long(), peak)),
    }


def linear(tokens: int) -> dict[str, dict[str, int]]:
    from headrace.kernels.linear import triton_linear as linear

    x, weight = torch.empty(tokens, 4096, dtype=torch.bfloat16), torch.empty(6144, 4096, dtype=torch.bfloat16)
    product = linear.InvariantLinear(weight, None, processors=132, one_order=True, bulk=True)
    return record(linear, ("_linear_kernel",), lambda: product(x))


def moe(tokens: int, *, held: int = 128) -> dict[str, dict[str, int]]:
    from headrace.kernels.linear.epilogue import Epilogue
    from headrace.kernels.moe import triton_few as moe_few
    from headrace.kernels.moe import triton_moe as moe
    from headrace.spec import Activation

    x, router = torch.empty(tokens, 2048, dtype=torch.bfloat16), torch.empty(tokens, 128, dtype=torch.bfloat16)
    gate_up, down = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((held, 1536, 2048), (held, 2048, 768)))
    places = None if held == 128 else torch.zeros(2, 128, dtype=torch.int32)
    run = moe.Moe(False, True, pdl=True)
    module, kernels = moe, ("_route_kernel", "_expand_kernel", "_contract_kernel", "_combine_kernel")
    if tokens == 1:
        module, kernels = moe_few, ("_expand_few_kernel", "_contract_few_kernel")
        if places is None:
            epilogue = Epilogue(torch.empty(512, 1), 1e-6, None, x, x[0])
            return record(
                module, kernels, lambda: run.fused(x, router, gate_up, down, 8, True, Activation.SILU, epilogue)
            )
    return record(module, kernels, lambda: run(x, router, gate_up, down, 8, True, Activation.SILU, places))


def lora(tokens: int, rank: int, dtype: torch.dtype, *, joint: bool = False) -> dict[str, dict[str, int]]:
    from headrace.kernels.inputs import AdapterRows, SlotFactors
    from headrace.kernels.lora import triton_joint, triton_lora

    parts, ints = (4096, 1024, 1024), partial(torch.zeros, dtype=torch.int32)
    x, y = torch.empty(tokens, 4096, dtype=dtype), torch.empty(tokens, sum(parts), dtype=dtype)
    table = ints(4, 3 + 6 * rank + 12)  # ranks, addresses of a, of b, of gains
    held, gains = table[:, 3 : 3 + 6 * rank].unflatten(1, (2, 3, rank, 1)), table[:, -12:-6].unflatten(1, (3, 2, 1))
    factors = SlotFactors(torch.empty(4096, dtype=dtype), table[:, :3], held[:, 0], held[:, 1], gains, 2**20, True)
    add = triton_lora._adder(pdl=dtype != torch.float32, invariant=False)
    rest = torch.zeros(48, tokens), 1e-5
    module, kernels = triton_lora, ("_shrink_kernel", "_expand_kernel")
    if joint:
        module, kernels, add = triton_joint, ("_joint_kernel",), triton_joint._joint(ints(1536), add, pdl=True)
    return record(module, kernels, lambda: add(y, x, factors, parts, AdapterRows(ints(tokens)), *rest))


CASES: dict[str, Callable[[], dict[str, dict[str, int]]]] = {
    "attention bfloat16 128": lambda: attention(torch.bfloat16, 32, 128),
    "attention bfloat16 128 bulk": lambda: attention(torch.bfloat16, 32, 128, bulk=True),
    "attention bfloat16 128 cascade": lambda: attention(torch.bfloat16, 32, 128, bulk=True, sequences=20),
    "attention bfloat16 64 cascade": lambda: attention(torch.bfloat16, 32, 64, bulk=True, sequences=20),
    "attention bfloat16 64": lambda: attention(torch.bfloat16, 32, 64),
    "attention bfloat16 256": lambda: attention(torch.bfloat16, 16, 256),
    "attention float32 128": lambda: attention(torch.float32, 32, 128),
    "attention bfloat16 128 unified": lambda: attention(torch.bfloat16, 32, 128, bulk=True, sequences=20, unified=True),
    **{
        f"attention bfloat16 128 {kv}": partial(attention, torch.bfloat16, 32, 128, bulk=True, sequences=20, kv=kv)
        for kv in CODES
    },
    "attention, variants": lambda: attention_variants(None, (None,), batch_invariant=False),
    "attention, variants with windows": lambda: attention_variants(30.0, (512, None, 64, None), batch_invariant=False),
    "attention, variants without a cascade": lambda: attention_variants(
        None, (None,), batch_invariant=False, cascade=False
    ),
    "attention, later": attention_later,
    "attention, variants to the bit": lambda: attention_variants(None, (None,), batch_invariant=True),
    "elementwise": lambda: elementwise(torch.bfloat16),
    "sampling": sampling,
    "rows": rows,
    "linear, few": lambda: linear(8),
    "linear, many": lambda: linear(4096),
    "lora, few": lambda: lora(64, 16, torch.bfloat16),
    "lora, few of rank 256": lambda: lora(64, 256, torch.bfloat16),
    "lora, joint": lambda: lora(64, 16, torch.bfloat16, joint=True),
    "lora, many": lambda: lora(2048, 64, torch.bfloat16),
    "lora, float32": lambda: lora(2048, 64, torch.float32),
    "moe, one": lambda: moe(1),
    "moe, few": lambda: moe(8),
    "moe, more": lambda: moe(256),
    "moe, many": lambda: moe(4096),
    "moe, one, of a rank": lambda: moe(1, held=32),
    "moe, few, of a rank": lambda: moe(8, held=32),
}


def main(names: list[str]) -> None:
    driver.set_active(CompileOnly())
    json.dump(
        {f"{name}: {kernel}": row for name in names or CASES for kernel, row in CASES[name]().items()}, sys.stdout
    )


if __name__ == "__main__":
    main(sys.argv[1:])
