"""A draft model with a device or a thread of its own: tokens are those without drafts, and drafts are the same whether
they are drawn ahead or not.

No second device is needed for that: the two sides share nothing but token ids, whatever they run on. Where one is said
to be elsewhere here, its memory is planned as another device's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.clock import VirtualClock
from headrace.config import SchedulerConfig
from headrace.errors import ConfigError, OutOfMemory
from headrace.models.source import _DEMO
from headrace.speculative.ahead import RUNS
from headrace.worker import drafting, worker
from headrace.worker.apart_drafts import ApartDrafts, DraftSide
from headrace.worker.settings import Setup
from tests.engine.test_speculation import GRAMMARS, MIXED, PROMPTS
from tests.support import tiny
from tests.support.hash_engine import FIXED, Answers, assert_at_rest, create_core, request
from tests.support.recorded_graphs import VOCAB, recorded_executor, without_a_gpu

Told = list[list[Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """gemma2 has two KV groups: full attention and a window of 12."""
    return {
        name: tiny.save(name, tmp_path_factory.mktemp(name), tokenizer=False) for name in ("llama", "gemma2", "qwen2")
    }


def _engine(folder: Path | str, drafts: dict[str, Any] | None, overlap: int = 0, **more: Any) -> LLM:
    sizes = {"max_num_seqs": 8, "max_model_len": 200, "num_blocks": 100, "block_size": 8, "threads": 1, "device": "cpu"}
    plain = {"dtype": "float32", "overlap": overlap, "batch_invariant": True}
    return LLM(str(folder), **{**plain, **sizes, "speculative_config": drafts, **more})


def _apart(model: Path | str, count: int = 3, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "num_speculative_tokens": count, "device": "cpu", **more}


def _answers(llm: LLM, params: list[SamplingParams] = MIXED) -> Told:
    """Twice: the second time prefixes are there."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    made = [*llm.generate(prompts, params, use_tqdm=False), *llm.generate(prompts, params, use_tqdm=False)]
    return [
        [(list(o.token_ids), o.finish_reason, o.stop_reason, o.logprobs) for o in answer.outputs] for answer in made
    ]


def _drafter(llm: LLM) -> ApartDrafts:
    return llm.engine.core.executor._runner._speculator._proposer  # type: ignore[attr-defined, no-any-return]


def _counts(llm: LLM) -> Any:
    counts = llm.engine.core.stats().drafts
    assert counts is not None
    return counts


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Callable[[str], Told]:
    return cache(lambda name: _answers(_engine(folders[name], None)))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts lie in memory that is not the target's."""
    place_draft = drafting.place_draft

    def placed(setup: Setup) -> Setup:
        found = place_draft(setup)
        if found.draft is None or found.draft.place is None:
            return found
        return replace(found, draft=replace(found.draft, place=replace(found.draft.place, elsewhere=True)))

    monkeypatch.setattr(worker, "place_draft", placed)


@pytest.mark.parametrize(
    ("name", "draft", "overlap", "more"),
    [
        ("llama", "llama", 0, {}),
        ("llama", "llama", 1, {"max_num_batched_tokens": 16}),  # prompts in chunks
        ("gemma2", "gemma2", 2, {}),
        ("llama", "llama", 2, {"num_blocks": 14}),  # too few for all: some are pushed out
        ("llama", "qwen2", 1, {"max_logits_rows": 3}),
        ("llama", "llama", 1, {"drafts_ahead": False}),
    ],
)
def test_drafts_of_another_device_change_no_bit(
    name: str,
    draft: str,
    overlap: int,
    more: dict[str, Any],
    folders: dict[str, Path],
    plain: Callable[[str], Told],
) -> None:
    """A token that the other side learns too late, or a key that it does not compute, or not anew, would make a model
    wrong that drafts for itself: what nobody has computed is no number."""
    llm = _engine(folders[name], _apart(folders[draft]), overlap, **more)
    assert isinstance(_drafter(llm), ApartDrafts)
    for keys in _drafter(llm).side.model._kv_caches:
        keys.fill_(torch.nan)
    assert _answers(llm) == plain(name)
    counts, pushed_out = _counts(llm), llm.engine.core.scheduler.counters.preemptions
    assert (pushed_out > 0) == bool(more.get("num_blocks"))
    if name == draft:
        assert sum(counts.accepted) >= (0.7 if pushed_out else 1.0) * sum(counts.drafted) > 100
    assert bool(counts.ahead) == more.get("drafts_ahead", True)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_what_is_drawn_ahead_is_what_would_be_drawn(overlap: int, folders: dict[str, Path]) -> None:
    """Right or wrong: a draft of other weights is mostly refuted, and then drafts anew."""
    drafted = []
    for ahead in (True, False):
        llm = _engine(folders["llama"], _apart(folders["qwen2"]), overlap, drafts_ahead=ahead)
        side, seen = _drafter(llm).side, []
        propose = side.propose

        def noted(*given: Any, propose: Any = propose, seen: list[Any] = seen) -> Any:
            made = propose(*given)
            seen.append((given[0].rows.tolist(), given[0].ends.tolist(), made.lists()))
            return made

        side.propose = noted  # type: ignore[method-assign]
        _answers(llm)
        drafted.append(seen)
    assert drafted[0] == drafted[1] and len(drafted[0]) >= 30


def _waiting(llm: LLM) -> None:
    """Runs ahead are never cancelled: whoever would stop one waits until it has ended by itself."""
    drafter = _drafter(llm)

    class Patient(threading.Event):
        def set(self) -> None:
            for each, _ in list(drafter._begun):
                each.exception()

    side, run_ahead = drafter.side, drafter.side.run_ahead
    drafter._stop = Patient()
    side.run_ahead = lambda rows, ends, most, stop: run_ahead(rows, ends, most, stop)  # type: ignore[method-assign]
    propose = drafter.propose

    def patiently(*given: Any) -> Any:
        made = propose(*given)
        drafter._stop = Patient()
        return made

    drafter.propose = patiently  # type: ignore[method-assign]


def test_runs_that_are_right_are_used_and_others_are_dropped(folders: dict[str, Path]) -> None:
    asked = [SamplingParams(temperature=0.7, seed=4, max_tokens=60, ignore_eos=True)]
    prompt = [{"prompt_token_ids": [5, 6, 7]}]
    found = {}
    for draft in ("llama", "qwen2"):
        llm = _engine(folders["llama"], _apart(folders[draft]), block_size=64, num_blocks=20)
        _waiting(llm)
        llm.generate(prompt, asked, use_tqdm=False)
        found[draft] = _counts(llm)
    right, wrong = found["llama"], found["qwen2"]
    assert right.ahead["used"] >= 0.8 * sum(right.drafted) and not right.ahead["spared"]
    assert right.ahead["refuted"] <= RUNS * 4, "of the last step alone"
    assert wrong.ahead["used"] <= 0.2 * sum(wrong.drafted)
    assert RUNS * 4 <= wrong.ahead["refuted"] < 0.3 * RUNS * 4 * wrong.steps, "and ever more seldom begun"


def test_a_run_that_is_cancelled_ends_at_its_next_token(folders: dict[str, Path]) -> None:
    llm = _engine(folders["llama"], _apart(folders["llama"]), block_size=64, num_blocks=20)
    drafter = _drafter(llm)
    side, model = drafter.side, drafter.side.model
    go_on, calls = model.go_on, []

    def once(rows: Any, ends: Any) -> None:
        calls.append(len(rows))
        drafter._stop.set()
        go_on(rows, ends)

    model.go_on = once  # type: ignore[method-assign]
    llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}],
        [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)],
        use_tqdm=False,
    )
    counts = _counts(llm)
    assert len(calls) <= counts.steps and isinstance(side, DraftSide)
    assert counts.ahead["spared"] >= (RUNS * 4 - 1) * (len(calls) - 2) > 0


def test_trees_from_another_device_change_no_bit(folders: dict[str, Path], plain: Callable[[str], Told]) -> None:
    llm = _engine(folders["llama"], _apart(folders["llama"], 7, tree=3), 1)
    assert _answers(llm) == plain("llama")
    counts = _counts(llm)
    assert counts.steps > 50 and sum(counts.accepted) > 1.4 * counts.steps and not counts.ahead


def test_drafts_of_another_device_follow_grammars() -> None:
    sizes = {"max_num_seqs": 6, "num_blocks": 60, "block_size": 16}
    params = [
        SamplingParams(temperature=temperature, max_tokens=24, seed=1, structured_outputs=each, logprobs=1)
        for each in GRAMMARS for temperature in (0.0, 0.6)
    ]  # fmt: skip
    told = []
    for drafts, overlap in ((None, 0), (_apart(_DEMO), 0), (_apart(_DEMO), 2)):
        with _engine(_DEMO, drafts, overlap, **sizes) as llm:
            made = llm.generate(["one two one two one two one"] * len(params), params, use_tqdm=False)
            told.append([(list(o.token_ids), o.finish_reason, o.logprobs) for each in made for o in each.outputs])
            if drafts is not None:
                counts = _counts(llm)
                assert sum(counts.accepted) >= 0.9 * sum(counts.drafted) > 25
    assert told[0] == told[1] == told[2]


def test_the_other_device_has_a_plan_of_its_own(
    folders: dict[str, Path], plain: Callable[[str], Told], elsewhere: None
) -> None:
    """The target's blocks have nothing beside them; fewer places than blocks bound the drafts, not the target."""
    target = _engine(folders["llama"], None).engine.core.executor.info
    llm = _engine(folders["llama"], _apart(folders["llama"]), 1)
    info = llm.engine.core.executor.info
    assert info.kv_groups == target.kv_groups and "draft model" not in info.memory
    assert _answers(llm) == plain("llama")
    (said,) = (each for each in llm.info.decisions if each.name == "draft memory")
    assert said.reason.endswith("; on cpu")


def test_an_other_device_with_little_room_drafts_for_some(
    folders: dict[str, Path], plain: Callable[[str], Told], elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "places_elsewhere", lambda setup, longest: 12)
    llm = _engine(folders["llama"], _apart(folders["llama"]), 1)
    assert _drafter(llm).side.model._kv_caches[0].shape[0] == 12
    assert _answers(llm) == plain("llama")
    assert _counts(llm).steps > 0
    (said,) = (each for each in llm.info.decisions if each.name == "draft memory")
    assert "of 96 tokens, as there is room: longer or more sequences go without" in said.reason


def test_a_draft_that_does_not_fit_there_is_refused_with_the_numbers(
    folders: dict[str, Path], elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "available_memory", lambda: 100_000)
    with pytest.raises(OutOfMemory, match=r"does not fit where speculative_config\.device puts it \(cpu\)"):
        _engine(folders["llama"], _apart(folders["llama"]))


def test_a_device_that_is_not_there_or_not_its_own_is_refused(folders: dict[str, Path]) -> None:
    own = _apart(folders["llama"])
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"speculative_config\.device is cuda: found no NVIDIA GPU"):
            _engine(folders["llama"], {**own, "device": "cuda"})
    for given, said in (
        ({**own, "device": "tpu"}, "give one of cpu, cuda"),
        ({**own, "device": 0}, "give one of cpu, cuda"),
        ({"method": "ngram", "device": "cpu"}, "method is 'ngram'; leave it out"),
        ({"method": "eagle", "model": str(folders["llama"]), "device": "cpu"}, "method is 'eagle'; leave it out"),
    ):
        with pytest.raises(ConfigError, match=said):
            _engine(folders["llama"], given)
    with pytest.raises(ConfigError, match="on one device, but this one has 2 ranks"):
        _engine(folders["llama"], own, tensor_parallel_size=2)


def test_an_answer_that_is_aborted_leaves_nothing_behind(folders: dict[str, Path]) -> None:
    """Rows and blocks go to others while a run ahead may still lie in them."""
    core = _engine(folders["llama"], _apart(folders["llama"]), 2, max_num_seqs=3, num_blocks=30).engine.core
    outputs: dict[int, list[int]] = {}
    for n in range(14):
        core.add(request(n, [n % 3, 2, 3, 5 + n % 3], max_tokens=40, temperature=0))
    for turn in range(4000):
        if not core.has_work:
            break
        if turn % 7 == 3 and core.request_ids and core.request_ids[0] % 2:
            core.abort(core.request_ids[0])
        for output in core.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
    assert not core.has_work
    assert_at_rest(core)
    whole = {n: outputs[n] for n in range(0, 14, 2)}
    assert all(len(tokens) == 40 for tokens in whole.values())
    assert all(whole[n] == whole[n % 6] for n in whole)
    assert any(len(outputs.get(n, ())) < 40 for n in range(1, 14, 2))


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_lives_of_rows_that_are_drafted_elsewhere(seed: int, graphed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder whose tokens hang on every slot that they see drafts for itself, so a stale key, table or token of the
    other side's is a wrong draft; runs are cancelled after as many tokens as the draw says. ``graphed``: the target is a
    device with a queue."""
    without_a_gpu(monkeypatch)
    draw = random.Random(seed)
    depth, blocks = draw.choice((0, 1, 2)), draw.choice((140, 30))
    asked = [
        request(
            n,
            draw.choices(range(VOCAB), k=draw.choice((3, 9, 17)))
            if draw.random() < 0.7
            else [1, 2, 3, 4, 5, 6, 7, 8, 9],
            max_tokens=draw.randint(1, 40),
            seed=n,
            temperature=draw.choice((0.0, 0.9)),
            n=draw.choice((1, 1, 2)),
            presence_penalty=draw.choice((0.0, 0.0, 0.7)),
        )
        for n in range(24)
    ]

    def told(drafts: int, ahead: bool | None, chance: float) -> tuple[dict[Any, list[int]], Any]:
        sizes = {"num_blocks": blocks, "overlap": depth, "max_model_len": 64}
        with recorded_executor(graphed=graphed and drafts > 0, drafts=drafts, ahead=ahead, **sizes) as (
            device,
            runner,
            _,
        ):
            config = SchedulerConfig(
                max_num_seqs=6, max_num_batched_tokens=64, speculative_config=FIXED % drafts if drafts else None
            )
            core = create_core(device, config, VirtualClock(), depth=depth)
            if ahead is not None:
                _stopped_at_random(runner._speculator._proposer.side, random.Random(seed), chance)  # type: ignore[union-attr]
            found, waiting, arrive = Answers(), list(asked), random.Random(seed)
            while waiting or core.has_work:
                for _ in range(arrive.randint(0, 3)):
                    if waiting:
                        core.add(waiting.pop(0))
                found.take(core.step())
            assert_at_rest(core)
            return found.tokens, core.stats().drafts

    plain, _ = told(0, None, 1.0)
    _, beside = told(3, None, 1.0)
    right = sum(beside.accepted) / sum(beside.drafted)
    for ahead, chance in ((False, 1.0), (True, 1.0), (True, 0.6)):
        found, counts = told(3, ahead, chance)
        assert found == plain
        assert sum(counts.drafted) > 100
        # blocks that others find later may hold keys of drafts that are right, and have been drawn ahead, or are not
        allowed = 0.02 if ahead else 0.0
        assert abs(sum(counts.accepted) / sum(counts.drafted) - right) <= allowed
        assert bool(counts.ahead) == ahead and (not ahead or counts.ahead["used"] > 8)


def _stopped_at_random(side: DraftSide, draw: random.Random, chance: float) -> None:
    """Each run goes on, token by token, with this chance, and is not told to stop otherwise."""
    run_ahead = side.run_ahead

    class Coin(threading.Event):
        def is_set(self) -> bool:
            return draw.random() >= chance

    side.run_ahead = lambda rows, ends, most, stop: run_ahead(rows, ends, most, Coin())  # type: ignore[method-assign]


def test_a_failure_on_the_other_device_is_the_steps_and_the_next_ones_go_on(
    folders: dict[str, Path], plain: Callable[[str], Told]
) -> None:
    llm = _engine(folders["llama"], _apart(folders["llama"]), 1)
    model = _drafter(llm).side.model
    propose = model.propose

    def broken(*given: Any) -> Any:
        model.propose = propose  # type: ignore[method-assign]
        raise RuntimeError("the other device has gone for a moment")

    model.propose = broken  # type: ignore[method-assign]
    asked = [SamplingParams(temperature=0, max_tokens=20)]
    (failed,) = llm.generate([{"prompt_token_ids": [1, 2]}], asked, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert _answers(llm) == plain("llama")
    assert np.all(_drafter(llm).side._drawn >= 0)
