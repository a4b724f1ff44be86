"""How a GPU's memory is divided and measured, and what running out of it becomes; the card's counters are played, no
GPU is needed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.executor import ExecutorInfo
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.errors import ConfigError, OutOfMemory, StepFailed
from headrace.models import families
from headrace.models.source import find_model
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.worker import device_memory
from headrace.worker.allocation import Allocation
from headrace.worker.device_memory import DeviceMeter
from headrace.worker.driver import CardFacts, DriverFacts
from headrace.worker.executor import DeviceExecutor
from headrace.worker.failure import failure_of
from headrace.worker.memory import GIB, buckets_to_try, gpu_share, graph_bytes, row_bytes
from headrace.worker.rows import Rows
from headrace.worker.settings import Setup
from headrace.worker.warm_up import Limits, chunks, decode_plan, largest_plan
from tests.support.hand_plans import worker_for

MIB = 2**20
META = torch.device("meta")  # tensors without memory: a stand-in for the card
LIMITS = Limits(max_num_seqs=16, tokens_a_step=300, max_logits_rows=40, longest=100)


@dataclass
class Card:
    """The counters of one card, in bytes."""

    total: int = 16 * GIB
    used: int = GIB  # by other processes
    held: int = 0
    peak_held: int = 0
    peak_live: int = 0
    emptied: int = 0
    driver: bool = True

    def take(self, size: int) -> None:
        self.used += size

    def empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    facts = DriverFacts("580.1", (13, 0), (CardFacts("H0", "GPU-7", 0, 0),))

    def ask() -> DriverFacts | None:
        return (
            replace(facts, cards=(CardFacts("H0", "GPU-7", card.total - card.used, card.total),))
            if card.driver
            else None
        )

    def zeros(*shape: int, **_: object) -> Tensor:
        if len(shape) == 1:  # the first tensor makes the context
            card.take(512 * MIB)
        return torch.ones(shape)

    played: dict[str, Callable[..., Any]] = {
        "synchronize": lambda *_: None,
        "mem_get_info": lambda *_: (card.total - card.used, card.total),
        "memory_reserved": lambda *_: card.held,
        "is_initialized": lambda: True,
        "memory_allocated": lambda *_: card.held,
        "max_memory_reserved": lambda *_: card.held + card.peak_held,
        "max_memory_allocated": lambda *_: card.held + card.peak_live,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": card.empty,
        "get_device_properties": lambda *_: SimpleNamespace(uuid="7", total_memory=card.total),
    }
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(device_memory, "ask_driver", ask)
    monkeypatch.setattr(
        device_memory,
        "torch",
        SimpleNamespace(
            cuda=torch.cuda,
            zeros=zeros,
            empty=torch.empty,
            mm=torch.mm,
            uint8=torch.uint8,
            float32=torch.float32,
            bfloat16=torch.bfloat16,
        ),
    )
    return card


class Runner:
    """Notes the plans it is given; ``act`` is what each does to the card."""

    def __init__(self, act: Callable[[StepPlan], None]) -> None:
        self._act = act
        self.plans: list[StepPlan] = []
        self.masked: list[int] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def run(self, plan: StepPlan, masks: TokenMasks | None = None) -> None:
        self.submit(plan)
        self.masked.append(len(masks.samples) if masks is not None else 0)
        assert plan.masked == (masks.samples if masks is not None else ())
        self._act(plan)

    def forget(self) -> None:
        pass


def _setup(
    *,
    rows: int = 64,
    tokens: int = 2048,
    logits_rows: int = 512,
    arena: bool = False,
    longest: int | None = None,
    **cache: Any,
) -> Setup:
    config = EngineConfig(
        model=ModelConfig(load_format="dummy", max_model_len=longest),
        cache=CacheConfig(**{"gpu_memory_utilization": 0.5, "block_size": 128, **cache}),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=tokens, max_logits_rows=logits_rows),
        device=DeviceConfig(activation_arena=arena),
    )
    return Setup(config, families.spec_from_config(find_model(config.model).config), META, torch.bfloat16)


class Graphs:
    """Each capture takes of the card what ``takes`` says; the driver keeps ``kept`` of it when they are gone."""

    def __init__(self, card: Card, takes: Sequence[int], kept: int, most: int = 8) -> None:
        self.most, self.samples = most, tuple(range(len(takes)))
        self.captured: list[int] = []
        self._card, self._takes, self._kept = card, takes, kept

    def capture(self, samples: Sequence[int]) -> None:
        for sample in samples:
            self._card.take(self._takes[sample])
            self.captured.append(sample)

    def __del__(self) -> None:
        self._card.used -= sum(self._takes[: len(self.captured)]) - self._kept


def _settled(
    card: Card,
    setup: Setup,
    act: Callable[[StepPlan], None],
    create_graphs: Callable[..., Sequence[Graphs]] = lambda *_: (),
) -> tuple[Allocation, int, Runner]:
    """The bytes of KV, with a model of one parameter of 100 MiB."""
    allocation, runner = Allocation(setup), Runner(act)
    longest = allocation.draft().max_model_len
    decoder = nn.Linear(1, 1)
    decoder.register_buffer("weight_of_all", torch.empty(100 * MIB, dtype=torch.uint8, device=META))

    def create_runner(rows: Rows, caches: Sequence[Tensor]) -> Any:
        assert [cache.shape[0] for cache in caches] == [1] * len(caches)
        return runner

    plan = allocation.plan(allocation.measure(decoder, longest, create_runner, create_graphs))
    return allocation, plan.num_bytes, runner


def test_kv_gets_what_is_left_beside_everything_that_was_measured(card: Card) -> None:
    def act(plan: StepPlan) -> None:
        card.peak_live, card.peak_held = (900 * MIB, 1000 * MIB) if plan.prompt_logprobs else (50 * MIB, 64 * MIB)
        card.take(10 * MIB)  # code of kernels

    setup = _setup(rows=2000)
    allocation, kv, runner = _settled(card, setup, act)
    taken = allocation.room.purposes
    assert taken["activations"] == 1000 * MIB + 32 * MIB
    assert taken["context"] == 512 * MIB and taken["kernels"] == 20 * MIB
    assert taken["graphs"] == 0 and 100 * MIB <= taken["weights"] < 101 * MIB
    share = card.total // 2 - GIB  # others count
    blocks = kv // (128 * 2 * 2 * setup.spec.num_kv_heads * setup.spec.head_dim * setup.spec.num_layers)
    assert kv <= share - sum(taken.values()) < kv // blocks * (blocks + 1)
    assert [plan.num_tokens for plan in runner.plans] == [2000, 2048] and runner.masked == [0, 2000]


@pytest.mark.parametrize(("tokens", "shown"), [(2048, 2048), (16384, 4096)])
def test_the_arena_is_shown_a_step_like_the_largest_before_that_is_measured(
    card: Card, tokens: int, shown: int
) -> None:
    _, _, runner = _settled(card, _setup(arena=True, tokens=tokens), lambda plan: None)
    assert [plan.num_tokens for plan in runner.plans] == [64, shown, tokens] and len(runner.masked) == 2
    assert all(plan.prompt_logprobs for plan in runner.plans[1:])


@pytest.mark.parametrize(
    ("prompts", "taken"), [((), 500 + 7 * 2 + 4 - 70), ((30 * MIB, 2 * MIB), 500 + 7 * 2 + 4 - 70 + 30 + 47 * 2 + 2)]
)
def test_graphs_get_what_some_of_them_were_seen_to_take(prompts: tuple[int, ...], taken: int, card: Card) -> None:
    """The first has the memory that all share; of the driver's pieces each other one gets its share, and one piece is
    on top. So each kind."""
    made: list[list[int]] = []

    def create_graphs(longest: int, rows: Rows, caches: Sequence[Tensor]) -> list[Graphs]:
        kinds = [Graphs(card, (500 * MIB, 0, 4 * MIB, 2 * MIB), kept=70 * MIB)]
        if prompts:
            kinds.append(Graphs(card, prompts, kept=0, most=48))
        made.extend(kind.captured for kind in kinds)
        return kinds

    allocation, _, _ = _settled(card, _setup(), lambda plan: None, create_graphs)
    assert made == [[0, 1, 2, 3], [0, 1]][: len(made)]
    assert allocation.room.purposes["graphs"] == taken * MIB
    assert allocation.room.purposes["kernels"] == 70 * MIB, "what the driver keeps is there already"


def test_few_graphs_are_all_tried() -> None:
    assert buckets_to_try((1,)) == (1,) and buckets_to_try((1, 2, 4)) == (4, 2, 1)
    assert graph_bytes(1, [5]) == 5 and graph_bytes(3, [5, 1, 2]) == 5 + 2 * 2 + 2


def test_a_largest_step_that_does_not_fit_names_its_shape_and_the_flags(card: Card) -> None:
    def act(plan: StepPlan) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    with pytest.raises(
        OutOfMemory,
        match=r"2048 tokens, 64 sequences, 512 rows of logits.*14\.50 GiB were left.*--max-num-batched-tokens.*--device cpu",
    ):
        _settled(card, _setup(), act)


def test_a_share_that_others_hold_already_is_refused_with_numbers() -> None:
    assert gpu_share(100 * GIB, 10 * GIB, 0.9) == 80 * GIB
    with pytest.raises(
        OutOfMemory,
        match=r"0\.3 is 30\.00 of this GPU's 100\.00 GiB, but others hold 40\.00 GiB.*more than 0\.40.*--device cpu",
    ):
        gpu_share(100 * GIB, 40 * GIB, 0.3)


def test_a_model_that_is_too_large_is_refused_before_it_is_loaded(card: Card) -> None:
    card.total = 2 * GIB
    with pytest.raises(
        OutOfMemory,
        match=r"does not fit.*0\.02 GiB of memory.*weights 0\.03 GiB.*--gpu-memory-utilization.*--device cpu",
    ):
        Allocation(_setup(gpu_memory_utilization=0.51)).draft()


def test_a_length_that_kv_cannot_hold_names_the_share(card: Card) -> None:
    setup = _setup(gpu_memory_utilization=0.065, longest=4096, logits_rows=1, tokens=64)
    with pytest.raises(ConfigError, match=r"4096 tokens needs .* raise --gpu-memory-utilization\."):
        Allocation(setup).draft()


def test_more_blocks_than_fit_are_refused(card: Card) -> None:
    with pytest.raises(OutOfMemory, match=r"--num-blocks 1000000 is .* GiB of KV, but .* left\. Lower --num-blocks"):
        Allocation(_setup(num_blocks=10**6)).draft()


def test_what_cannot_be_allocated_names_purpose_size_and_remedy(card: Card) -> None:
    allocation = Allocation(_setup())
    said = r"3\.00 GiB for KV blocks could not be allocated: 14\.50 GiB are free\. Lower --gpu-memory-utilization"
    with pytest.raises(OutOfMemory, match=said), allocation.explaining("KV blocks", 3 * GIB):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), allocation.explaining("weights"):
        raise RuntimeError("another mistake")


# --- measuring


def test_stages_of_a_start_are_told_apart(card: Card) -> None:
    meter = DeviceMeter(META)
    assert (meter.others, meter.context, meter.total) == (GIB, 512 * MIB, card.total)
    card.take(30 * MIB)  # code
    card.take(100 * MIB)  # tensors
    card.held += 100 * MIB
    assert meter.kept(68 * MIB) == 32 * MIB
    with meter.capturing():
        card.take(7 * MIB)  # the driver's part of graphs
        card.take(20 * MIB)
        card.held += 20 * MIB
    assert (meter.code(), meter.graphs) == (30 * MIB, 27 * MIB)


def test_without_the_driver_s_word_context_and_others_are_one(card: Card) -> None:
    card.driver = False
    meter = DeviceMeter(META)
    assert (meter.others, meter.context) == (0, GIB + 512 * MIB)


def test_rows_are_as_large_as_planned() -> None:
    rows = Rows(5, 100, 64, [16, 8], torch.device("cpu"))
    assert rows.num_bytes == row_bytes(5, 100, 64, [16, 8])


# --- the largest steps


def test_the_largest_step_fills_every_budget() -> None:
    counts = chunks(LIMITS)
    assert sum(counts) == 300 and len(counts) == 16
    assert counts[0] == 41  # a whole budget of logits rows is scored
    assert max(counts) - min(counts[1:]) <= 41
    assert chunks(replace(LIMITS, longest=10)) == [9] * 16
    assert chunks(replace(LIMITS, max_num_seqs=1)) == [99]
    plan = decode_plan(LIMITS)
    assert plan.num_tokens == 16 and all(new.params.top_k for new in plan.rows_added)


def test_the_largest_step_runs_over_one_block(tmp_path: Any) -> None:
    """On the CPU: every row lies in block 0, and every way of the sampler is taken."""
    from tests.support import tiny

    executor = worker_for(tiny.save("llama", tmp_path, tokenizer=False), cache={"num_blocks": 1}, max_model_len=64)
    limits = Limits(max_num_seqs=8, tokens_a_step=100, max_logits_rows=20, longest=64)
    for plan in (decode_plan(limits), largest_plan(limits)):
        result = executor.collect(executor.submit(plan))
        executor.recover()
        assert len(result.tokens) == 8
    assert len(result.prompt_logprobs[0]) == 20 and len(result.logprobs) == 8


# --- running out in the middle


def _plan() -> StepPlan:
    return decode_plan(replace(LIMITS, max_num_seqs=2))


def test_a_step_that_ran_out_names_numbers_and_flags() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3 GiB is free."
    )
    memory = {"weights": 2 * GIB, "kv_cache": 100 * GIB, "activations": 3 * GIB, "rows": 1}
    text = failure_of(error, _plan(), memory).message
    for words in (
        "2 tokens of 2 sequences",
        "asked for 20.00 GiB",
        "kv_cache 100.00 GiB",
        "activations 3.00 GiB",
        "--gpu-memory-utilization",
    ):
        assert words in text
    on_cpu = failure_of(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
        _plan(),
        {},
    ).message
    assert "asked for 64 bytes" in on_cpu and "--kv-cache-memory" in on_cpu


class Queue:
    """A runner of the card's kind; step 1 runs out of memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    queued = True

    def submit(self, plan: StepPlan) -> Any:
        self.calls.append(f"submit {plan.step_id}")
        if plan.step_id == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return plan

    def collect(self, step: Any) -> StepResult:
        return StepResult(step.step_id, [(7,)])

    def forget(self) -> None:
        self.calls.append("forget")


def _info() -> ExecutorInfo:
    return replace(keyed_hash_info(), memory={"weights": GIB})


def test_after_a_step_that_ran_out_the_next_ones_go_on() -> None:
    queue = Queue()
    executor = DeviceExecutor(cast(Any, queue), _info(), restore=lambda: queue.calls.append("restore"))
    tickets = [executor.submit(replace(_plan(), step_id=number)) for number in range(3)]
    assert executor.collect(tickets[0]).tokens == [(7,)]
    with pytest.raises(StepFailed, match=r"asked for 1\.00 GiB"):
        executor.collect(tickets[1])
    with pytest.raises(StepFailed, match="builds on one that failed"):
        executor.collect(tickets[2])
    executor.recover()
    assert queue.calls == ["submit 0", "submit 1", "restore", "forget"]
    assert executor.collect(executor.submit(replace(_plan(), step_id=3, rows=array("i", [0])))).step_id == 3
