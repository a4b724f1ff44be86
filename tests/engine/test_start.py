"""A start: its stages, and what a kernel that does not build does to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import headrace.kernels as registry
from headrace import LLM, SamplingParams
from headrace.clock import VirtualClock
from headrace.errors import OutOfMemory
from headrace.kernels import Kernels, StrictKernelError
from headrace.kernels.build.ahead import CompileAhead
from headrace.kernels.candidate import FLOATS, Candidate
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.models import loader
from headrace.sites import Role, Weight
from headrace.worker import worker
from headrace.worker.head_start import Stages
from headrace.worker.memory import buckets_up_to
from headrace.worker.passes import ForwardPasses
from headrace.worker.warm_up import product_sizes, warm_linears, warm_samples
from tests.support import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPT = {"prompt_token_ids": [3, 1, 4, 1, 5]}


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tiny.save("llama", tmp_path))


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "threads": 1, "num_blocks": 8, "max_num_seqs": 2, **more}


def test_every_stage_of_a_start_is_timed(folder: str) -> None:
    with LLM(folder, **options()) as llm:
        seconds = llm.engine.core.executor.info.start_seconds
    assert list(seconds) == [
        "imports",
        "device",
        "decoder",
        "weights",
        "rows and KV",
        "first steps",
    ]  # a CPU's; a GPU's has more
    assert all(value >= 0 for value in seconds.values()) and seconds["first steps"] > 0


def test_a_start_that_finds_no_room_leaves_no_thread_behind(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OutOfMemory("the card is full")

    begun: list[CompileAhead[None]] = []
    monkeypatch.setattr(
        worker,
        "create_ahead",
        lambda *_, **__: begun.append(CompileAhead(lambda: None, strict=False, threads=2)) or begun[-1],
    )
    monkeypatch.setattr(worker, "Allocation", full)
    with pytest.raises(OutOfMemory, match="full"):
        LLM(folder, **options())
    assert len(begun) == 1 and not any(thread.is_alive() for thread in begun[0]._threads._threads)


def test_a_stage_named_twice_counts_once() -> None:
    clock = VirtualClock()
    stages = Stages(clock)
    for name, wait in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        clock.sleep_until(clock.now() + wait)
        stages.done(name)
    assert stages.seconds == {"a": 5.0, "b": 2.0}


SHORTCUTS = (
    "fused_linear",
    "added_linear",
    "gated_linear",
    "decode_step",
    "rope_attention",
)  # would leave no call to other operations


def test_a_kernel_that_does_not_build_is_a_decision_and_no_failure(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every operation at once: the first step finds out, the twins compute the same tokens, doctor says why."""
    with LLM(folder, **options(disabled_kernels=("native", "onednn"))) as llm:
        expected = tokens(llm)

    def broken(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError("error: no such instruction")

    makes = {"linear": lambda weight, bias: broken}
    planted = {
        op: (
            Candidate("planted", lambda site, op=op: makes.get(op, broken), dtypes=(*FLOATS, torch.int32), failure=str),
            *(replace(each, devices=()) for each in one.candidates),
        )
        for op, one in registry.OPERATIONS.items()
        if op not in SHORTCUTS
    }
    operations = {op: replace(one, candidates=planted.get(op, ())) for op, one in registry.OPERATIONS.items()}
    monkeypatch.setattr(registry, "OPERATIONS", operations)
    with LLM(folder, **options()) as llm:
        assert tokens(llm) == expected
        said = {decision.name: decision for decision in llm.info.decisions}
    for op in ("rms_norm", "rotary_write", "paged_attention", "gated_activation", "linear", "pick_tokens"):
        assert said[f"kernel {op}"].value == "torch"
        assert said[f"kernel {op}"].reason == "planted declined: did not compile: error: no such instruction"
    with pytest.raises(StrictKernelError, match="did not compile"):
        LLM(folder, **options(strict_kernels=True))


def test_weights_that_find_no_room_while_they_are_read_say_so(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(loader, "load_weights", full)
    with pytest.raises(OutOfMemory, match=r"GiB for weights could not be allocated.*Use a smaller model"):
        LLM(folder, **options())


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (256, 8192), (400, 400), (1000, 512)])
def test_products_are_tried_for_every_batch_a_graph_may_have(
    rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Linear, "forward", lambda self, x: counts.append(len(x)))
    cpu = torch.device("cpu")
    context = LayerContext(torch.float32, cpu, Kernels(cpu))
    layers = [Linear(Weight("layer", Role.UP, 0, (outs,), ins), context) for ins, outs in ((8, 16), (16, 8))]
    sums: list[int] = []
    layers[1]._added = lambda x, residual: sums.append(len(x)) or residual
    made = product_sizes(min(rows, tokens), tokens)
    assert made[: len(buckets_up_to(min(rows, tokens)))] == buckets_up_to(min(rows, tokens)) and made[-1] == tokens
    warm_linears(nn.ModuleList(layers), cpu, made, max_num_seqs=min(rows, tokens))
    assert set(buckets_up_to(min(rows, tokens))) <= set(counts) and sums == list(made)  # a step would wait for each
    assert [counts.count(count) for count in buckets_up_to(min(rows, tokens))][-1] >= 2  # for each shape
    del counts[:], sums[:]
    later = warm_samples(nn.ModuleList(layers), cpu, 3)
    passes: Any = SimpleNamespace(prompt_graphs=None, graphs=None, _later=later)
    turns = [(ForwardPasses.prepare(passes), list(sums)) for _ in range(4)]  # while the device is idle
    assert turns == [(True, [1]), (True, [1, 2]), (True, [1, 2, 3]), (False, [1, 2, 3])] and counts == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_a_start_counts_the_bytes_and_layers_that_it_loads(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []

    class Line:
        def __init__(self, total: int, layer_ends: list[int]) -> None:
            self.total, self.layer_ends, self.done, self.closed = total, layer_ends, 0, False
            lines.append(self)

        def add(self, num_bytes: int) -> None:
            self.done += num_bytes

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(loader, "LoadingLine", Line)
    with LLM(folder, **options()) as llm:
        layers = llm.engine.source.config["num_hidden_layers"]
    (line,) = lines
    assert line.done == line.total > 0 and line.closed
    assert (
        len(line.layer_ends) == layers
        and line.layer_ends == sorted(line.layer_ends)
        and line.layer_ends[-1] <= line.total
    )
