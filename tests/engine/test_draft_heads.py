"""Draft heads: answers are what they are without, and drafts what the head would say if it computed all from scratch."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace import SamplingParams
from headrace.errors import ConfigError, ModelError
from headrace.models.heads import head_bytes
from headrace.request import StepPlan
from headrace.sites import count_bytes
from headrace.worker.draft_blocks import DraftBlocks
from headrace.worker.draft_model import HeadDrafter
from headrace.worker.draft_setup import MOST_PENDING
from headrace.worker.sampler import Sampler
from tests.engine.test_speculation import _answers, _engine, _scheduler
from tests.support import tiny, tiny_heads

LAYERS = 4
TAPS = (0, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("target"), tokenizer=False, num_hidden_layers=LAYERS)


def _tensors(method: str) -> dict[str, torch.Tensor]:
    return tiny_heads.tensors(method, 64, 320)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = json.loads((target / "config.json").read_text())
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    more = {
        "eagle": {},
        "eagle3": {"draft_vocab_size": tiny_heads.DRAWN, "eagle_aux_hidden_state_layer_ids": list(TAPS)},
    }
    return {  # one has a copy of the target's embedding, the other one of its own
        name: tiny_heads.save(
            tmp_path_factory.mktemp(name),
            tiny_heads.config(base, **fields),
            tiny_heads.published(name, {"embed_tokens.weight": embedding, **_tensors(name)}),
        )
        for name, fields in more.items()
    }


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Any]:
    return _answers(_engine(target, None))


def _drafts(heads: dict[str, Path], method: str, **more: Any) -> dict[str, Any]:
    return {"method": method, "model": str(heads[method]), "num_speculative_tokens": 3, **more}


@pytest.mark.parametrize(
    ("method", "overlap", "more"),
    [
        ("eagle", 0, {"num_blocks": 14}),
        ("eagle", 2, {"max_num_batched_tokens": 16}),
        ("eagle3", 1, {}),
        ("eagle3", 2, {"num_blocks": 14}),
    ],
)
def test_heads_change_no_bit(
    method: str, overlap: int, more: dict[str, Any], target: Path, heads: dict[str, Path], plain: list[Any]
) -> None:
    llm = _engine(target, _drafts(heads, method), overlap, **more)
    assert _answers(llm) == plain
    scheduler = _scheduler(llm)
    assert scheduler.speculation is not None and sum(scheduler.speculation.counts.drafted) > 200
    assert (scheduler.counters.preemptions > 0) == ("num_blocks" in more)


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], list[int]]]]:
    """(a sequence, what was drafted behind it) of all drafts of the test."""
    found: list[tuple[list[int], list[int]]] = []
    propose = HeadDrafter.propose

    def seen(self: HeadDrafter, rows: Any, lengths: Any, most: Any) -> Any:
        ids = [self._rows.token_ids[row, :length].tolist() for row, length in zip(rows, lengths, strict=True)]
        proposal = propose(self, rows, lengths, most)
        assert self._blocks or (proposal.counts == most).all(), "every row could draft"
        found.extend((mine, drafted) for mine, drafted in zip(ids, proposal.lists(), strict=True) if drafted)
        return proposal

    monkeypatch.setattr(HeadDrafter, "propose", seen)
    yield found


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 9, "num_blocks": 14}])
def test_drafts_are_what_the_head_says(
    method: str, more: dict[str, Any], target: Path, heads: dict[str, Path], proposed: list[Any]
) -> None:
    """Chunked prompts, prefix hits, forks, preemption: an entry of a wrong token, of hidden states of another place, or
    of a stale block would show."""
    llm = _engine(target, _drafts(heads, method), 1, **more)
    shared = list(range(10, 37))
    prompts = [[*shared, 40 + each] for each in range(3)] + [[7, 8, 9], [*shared[:16], 3], [*shared, 99]]
    params = [SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, n=1 + (each == 3)) for each in range(6)]
    for _ in range(2):
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    assert _scheduler(llm).counters.prefix_hits > 0
    _compare(
        proposed, tiny_heads.Oracle(tiny.create("llama", num_hidden_layers=LAYERS), method, _tensors(method), TAPS)
    )


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_siblings_whose_prompt_ends_on_a_block_have_an_entry_each(
    method: str, target: Path, heads: dict[str, Path], proposed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's last entry is made of the first token of the answer, which is another one for each of them."""
    monkeypatch.setattr(Sampler, "propose", lambda self, logits, batch: logits.argmax(-1))
    llm = _engine(target, _drafts(heads, method), 1)
    asked = SamplingParams(temperature=1.5, seed=2, n=4, max_tokens=60, ignore_eos=True)
    (made,) = llm.generate([{"prompt_token_ids": list(range(20, 36))}], asked)
    assert len({each.token_ids[0] for each in made.outputs}) > 2
    _compare(
        proposed, tiny_heads.Oracle(tiny.create("llama", num_hidden_layers=LAYERS), method, _tensors(method), TAPS)
    )


def test_a_head_as_speculators_writes_it(target: Path, tmp_path: Path, proposed: list[Any]) -> None:
    """Nested config, another hidden size than the target's, the residual stream behind a norm, layers.0."""
    base = json.loads((target / "config.json").read_text())
    layer = tiny_heads.config({**base, "hidden_size": 48})
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.1",
        "transformer_layer_config": layer, "target_hidden_size": 64, "norm_before_residual": True,
        "draft_vocab_size": tiny_heads.DRAWN, "eagle_aux_hidden_state_layer_ids": list(TAPS), "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3"}, "has_no_defaults_at_init": False, "torch_dtype": "float32",
    }  # fmt: skip
    tensors = tiny_heads.tensors("eagle3", 48, 320, target=64)
    head = tiny_heads.save(tmp_path, config, tiny_heads.published("speculators", tensors))
    llm = _engine(target, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate([{"prompt_token_ids": list(range(each, each + 9))} for each in range(10)], params)
    model = tiny.create("llama", num_hidden_layers=LAYERS)
    _compare(proposed, tiny_heads.Oracle(model, "eagle3", tensors, TAPS, normed_residual=True))


def _compare(proposed: list[Any], oracle: tiny_heads.Oracle) -> None:
    assert len(proposed) > 100
    for ids, drafted in proposed[:: -(-len(proposed) // 60)]:
        assert drafted == oracle.propose(ids, len(drafted)), (len(ids), drafted)


PLACES = 40


def _states(drafter: Any) -> int:
    """Bytes of hidden states that are kept, or may be."""
    pending = MOST_PENDING * drafter._head.spec.carried * 4
    return int(drafter._held.nbytes + drafter._tap.out.nbytes + pending)


def _bound(target: Path, drafts: dict[str, Any]) -> int:
    """Bytes for so many blocks of the draft, and a bit of one more."""
    executor: Any = _engine(target, drafts).engine.core.executor
    drafter, (group,) = executor._runner._speculator._proposer, executor.info.kv_groups
    held = (
        head_bytes(drafter._head.spec, 4) + _states(drafter)
        if "method" in drafts
        else count_bytes(drafter._decoder.spec, 4)
    )
    return int(held + (PLACES + 0.5) * group.spec.beside)


@pytest.mark.parametrize(("method", "overlap"), [("draft_model", 1), ("eagle", 2), ("eagle3", 0)])
def test_bounded_memory_is_kept_and_drafts_in_it_are_no_worse(
    method: str, overlap: int, target: Path, heads: dict[str, Path], plain: list[Any], proposed: list[Any]
) -> None:
    """Sequences that find no place go without. A draft model that is the target would be wrong where a place is stale."""
    drafts = {"model": str(target), "num_speculative_tokens": 3} if method == "draft_model" else _drafts(heads, method)
    bound = _bound(target, drafts)
    llm = _engine(target, {**drafts, "draft_memory": bound}, overlap)
    assert _answers(llm) == plain
    drafter = llm.engine.core.executor._runner._speculator._proposer  # type: ignore[attr-defined]
    (blocks,) = drafter._blocks
    cache = drafter._kv_caches[0] if method == "draft_model" else drafter._kv_cache
    assert cache.shape[0] == PLACES
    assert sorted([*blocks._free, *blocks._place[list(blocks._taken)]]) == list(range(PLACES)), "each place once"
    (said,) = (each for each in llm.info.decisions if each.name == "draft memory")
    assert "as draft_memory bounds it" in said.reason and float(said.value.removesuffix(" MiB")) <= bound / 2**20 + 0.1
    counts = _scheduler(llm).speculation.counts  # type: ignore[union-attr]
    full, right = sum(counts.drafted), sum(counts.accepted)
    proposed.clear()
    assert full > 100 and _went_without(llm)
    if method == "draft_model":
        assert right >= 0.9 * full
    else:
        _compare(proposed, tiny_heads.Oracle(
            tiny.create("llama", num_hidden_layers=LAYERS), method, _tensors(method), TAPS))  # fmt: skip


def _went_without(llm: Any) -> bool:
    """Eight long sequences at once."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    counts = _scheduler(llm).speculation.counts  # type: ignore[union-attr]
    drafted: list[int] = []
    for rows in (1, 8):
        before = sum(counts.drafted)
        llm.generate([{"prompt_token_ids": [each] * 20} for each in range(rows)], params)
        drafted.append(sum(counts.drafted) - before)
    return 0 < drafted[1] < 7 * drafted[0]


def test_a_bound_that_is_of_no_use_is_refused(target: Path, heads: dict[str, Path]) -> None:
    for bound, said in ((1000, "draft_memory is 1000, but the draft's weights"), (0.001, "give at least")):
        with pytest.raises(ConfigError, match=said):
            _engine(target, _drafts(heads, "eagle", draft_memory=bound))
    llm = _engine(target, _drafts(heads, "eagle", draft_memory=0.9))
    assert not llm.engine.core.executor._runner._speculator._proposer._blocks, "all have a place"  # type: ignore[attr-defined]


def test_what_a_head_holds_is_said_to_the_byte(target: Path, heads: dict[str, Path]) -> None:
    for method in heads:
        llm = _engine(target, _drafts(heads, method))
        (said,) = (each for each in llm.info.decisions if each.name == "draft memory")
        drafter = llm.engine.core.executor._runner._speculator._proposer  # type: ignore[attr-defined]
        head = drafter._head
        stored = load_file(heads[method] / "model.safetensors")
        weights = sum(each.nbytes for name, each in stored.items() if name not in ("t2d", "embed_tokens.weight"))
        weights += stored["embed_tokens.weight"].nbytes if method == "eagle3" else 0
        assert (head.embedding is not None) == (method == "eagle3")
        held = weights + drafter._kv_cache.nbytes + _states(drafter)
        assert said.value == f"{held / 2**20:.1f} MiB"


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_that_foresees_is_always_right(method: str, tmp_path: Path) -> None:
    """Hidden states of another place, or another token's, would make it wrong. (Later entries of eagle3 go on from its
    own results, which its residual stream carries unchanged: they say the first one's token again.)"""
    target, head = tiny_heads.save_foreseeing(tmp_path, method)
    count = 3 if method == "eagle" else 1
    llm = _engine(target, {"method": method, "model": str(head), "num_speculative_tokens": count}, 1)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [3, 9, 27, each]} for each in (4, 5, 6)], params)
    counts = _scheduler(llm).speculation.counts  # type: ignore[union-attr]
    assert sum(counts.accepted) >= 0.9 * sum(counts.drafted) > 30


def _predicting(layout: str, folder: Path) -> tuple[Path, Any]:
    """A checkpoint with a layer for multi-token prediction, and its model alone, as transformers has it."""
    name = "qwen2" if layout == "mimo" else "llama"
    fields = {"intermediate_size": 80, "num_hidden_layers": LAYERS, "rms_norm_eps": tiny_heads.EPS}
    target = tiny.save(name, folder, tokenizer=False, **fields)
    base = json.loads((target / "config.json").read_text())
    base |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]} if layout == "mimo" else {}
    base |= {} if layout == "qwen" else {"num_nextn_predict_layers": 1}
    stored = load_file(target / "model.safetensors") | tiny_heads.published(layout, _tensors(layout))
    if layout == "deepseek":
        stored |= {
            f"model.layers.4.{each}.weight": stored["lm_head.weight"] for each in ("embed_tokens", "shared_head.head")
        }
    return tiny_heads.save(target, base, stored), tiny.create(name, **fields)


@pytest.mark.parametrize("layout", ["mimo", "qwen", "deepseek"])
def test_layers_of_the_target_predict_several_tokens(layout: str, tmp_path: Path, proposed: list[Any]) -> None:
    target, model = _predicting(layout, tmp_path)
    asked = [{"prompt_token_ids": ids} for ids in ([5, 6, 7] * 4, list(range(30, 57)), [9, 8])] * 2
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for drafts in (None, {"method": "mtp", "num_speculative_tokens": 2}):
        llm = _engine(target, drafts, 1, max_num_batched_tokens=16)
        answers.append([list(each.outputs[0].token_ids) for each in llm.generate(asked, params)])
    assert answers[0] == answers[1]
    _compare(proposed, tiny_heads.Oracle(model, layout, _tensors(layout)))


def test_a_target_without_such_layers_says_so(target: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"method mtp: this checkpoint has no multi-token prediction layer \(model.mtp_"
    ):
        _engine(target, {"method": "mimo_mtp"})
    broken, _ = _predicting("mimo", tmp_path)
    stored = load_file(broken / "model.safetensors")
    del stored["model.mtp_layers.0.input_proj.weight"]
    tiny_heads.save(broken, json.loads((broken / "config.json").read_text()), stored)
    with pytest.raises(ModelError, match=r"method mtp: the checkpoint lacks 1 of the tensors"):
        _engine(broken, {"method": "mtp"})


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ({"hidden_size": 32}, {}, "is for a target of hidden size 32, but this one has 64"),
        ({"vocab_size": 300}, {}, "has a vocabulary of 300 tokens and draws from 200, but the target has 320"),
        ({"num_hidden_layers": 2}, {}, "has 2 decoder layers"),
        ({"draft_vocab_size": 400}, {}, "draws from 400, but"),
        ({"draft_vocab_size": "many"}, {}, "draft_vocab_size 'many', which is no size"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "inputs of layers 1, 2, 9, but the target has 4 layers"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, {}, "no list of layers"),
        ({"rope_theta": -1.0}, {}, "rope_theta"),
        ({"surprise": 1}, {}, "surprise"),
        ({}, {"fc.weight": torch.zeros(64, 64)}, "fc.weight has shape"),
        ({}, {"midlayer.self_attn.q_proj.weight": None}, "lacks 1 of the tensors"),
        ({}, {"midlayer.self_attn.q_proj.weight": torch.full((64, 128), torch.nan)}, "holds NaN or infinity"),
        ({}, {"more.weight": torch.zeros(2)}, "no place for (first: more.weight)"),
        ({}, {"d2t": torch.full((tiny_heads.DRAWN,), 319)}, "does not name 200 of the target's 320 tokens"),
        ({}, {"d2t": torch.arange(3)}, r"d2t of this draft head is torch.int64 [3]"),
        ({}, {"d2t": None}, "has no d2t"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused_at_start(
    config: dict[str, Any], change: dict[str, Any], said: str, target: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    stored = {**load_file(heads["eagle3"] / "model.safetensors"), **change}
    base = json.loads((heads["eagle3"] / "config.json").read_text())
    head = tiny_heads.save(
        tmp_path, {**base, **config}, {name: each for name, each in stored.items() if each is not None}
    )
    with pytest.raises((ConfigError, ModelError)) as error:
        _engine(target, {"method": "eagle3", "model": str(head)})
    assert said in error.value.message and "\n" not in error.value.message
    assert error.value.message.startswith("speculative_config.model: ")


def test_a_head_is_asked_for_by_its_own_method(target: Path, heads: dict[str, Path]) -> None:
    for method, other in (("eagle", "eagle3"), ("eagle3", "eagle")):
        with pytest.raises(ModelError, match=f"give method {other}"):
            _engine(target, {"method": method, "model": str(heads[other])})
        with pytest.raises(ModelError, match=f"is a draft head, no model of its own; give method {method} beside"):
            _engine(target, {"model": str(heads[method])})


def _plan(rows: dict[int, tuple[int, list[tuple[int, int]]]], dropped: tuple[int, ...] = ()) -> StepPlan:
    """Of each row: where its chunk starts, and its table edits (index, block)."""
    edits = [(row, index, block) for row, (_, each) in rows.items() for index, block in each]
    columns = [array("i", column) for column in zip(*edits, strict=True)] or [array("i")] * 3
    return StepPlan(0, rows_dropped=array("i", dropped), rows=array("i", rows), starts=array("i", [s for s, _ in rows.values()]),
                    counts=array("i", [1] * len(rows)), table_row=columns[0], table_group=array("i", [0] * len(edits)),
                    table_index=columns[1], table_block=columns[2])  # fmt: skip


def test_places_go_to_those_who_draft() -> None:
    blocks = DraftBlocks(0, num_blocks=32, places=4, table=torch.zeros(4, 8, dtype=torch.int32), block_size=8)
    blocks.apply(_plan({0: (0, [(0, 7), (1, 9)]), 1: (0, [(0, 20), (1, 21)])}))
    assert not blocks.bare.any() and len({*blocks.view[0, :2].tolist(), *blocks.view[1, :2].tolist()}) == 4
    blocks.apply(_plan({2: (8, [(0, 7), (1, 3)])}))  # it found block 7, and has no place for 3
    assert blocks.bare.tolist() == [False, False, True, False]
    blocks.apply(_plan({0: (16, [(2, 4)])}))  # a draft that grows out of them gives back what is new alone
    assert blocks.bare[0] and blocks._place[7] >= 0 > blocks._place[4]
    blocks.apply(_plan({3: (0, [(0, 5)])}, dropped=(0,)))  # idle blocks' places go to who comes next
    assert not blocks.bare[3] and blocks._place[7] < 0 <= blocks._place[9]
    blocks.apply(_plan({0: (8, [(0, 7), (1, 8)]), 2: (8, [(0, 9), (1, 11)])}, dropped=(2, 3)))
    assert blocks.bare[0], "what it found has no place any more, so nobody knows what it holds"
    assert blocks._place[8] < 0 <= blocks._place[11] and not blocks.bare[2]
