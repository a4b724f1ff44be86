"""Speculation over tiny models: whatever drafts, tokens and logprobs are what they are without, bit for bit where steps
are batch-invariant."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, ModelError
from headrace.models.source import _DEMO
from headrace.request import StructuredOutputs
from headrace.scheduler.scheduler import Scheduler
from headrace.sites import count_bytes, matrices
from headrace.worker.rows import Ints
from headrace.worker.speculator import LookupProposer, Proposal
from tests.support import tiny

PROMPTS = [[1, 2, 3, 4], [5, 6, 7] * 4, [9] * 12, [20, 21, 22, 20, 21, 22, 20], [30, 31], [40, 41, 42]]
MIXED = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.1, seed=3, max_tokens=24),
    SamplingParams(
        temperature=0.1, seed=5, frequency_penalty=0.5, presence_penalty=0.3, max_tokens=24, ignore_eos=True
    ),
    SamplingParams(temperature=0.1, top_k=5, seed=9, n=2, max_tokens=22, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, min_tokens=12, max_tokens=22, prompt_logprobs=1),
    SamplingParams(
        temperature=0.01, seed=11, max_tokens=30, ignore_eos=True, stop_token_ids=(17,), logit_bias={3: 2.0}
    ),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """gemma2 has two KV groups: full attention and a window of 12."""
    return {
        name: tiny.save(name, tmp_path_factory.mktemp(name), tokenizer=False) for name in ("llama", "gemma2", "qwen2")
    }


def _engine(folder: Path, drafts: dict[str, Any] | None, overlap: int = 0, **more: Any) -> LLM:
    sizes = {"max_num_seqs": 8, "max_model_len": 200, "num_blocks": 100, "block_size": 8, "threads": 1, "device": "cpu"}
    return LLM(
        str(folder),
        dtype="float32",
        overlap=overlap,
        batch_invariant=True,
        **{**sizes, "speculative_config": drafts, **more},
    )


def _answers(llm: LLM, params: list[SamplingParams] = MIXED) -> list[Any]:
    """Twice: the second time prefixes and earlier answers are there."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    made = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
    return [
        [(list(o.token_ids), o.finish_reason, o.stop_reason, o.logprobs) for o in answer.outputs] for answer in made
    ]


def _scheduler(llm: LLM) -> Scheduler:
    return llm._engine.core.scheduler


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Callable[[str], list[Any]]:
    return cache(lambda name: _answers(_engine(folders[name], None)))


@pytest.mark.parametrize(
    ("name", "drafts", "overlap", "more"),
    [
        ("llama", NGRAM, 0, {}),
        ("llama", SUFFIX, 2, {"max_logits_rows": 3}),
        ("gemma2", NGRAM, 2, {}),
        ("llama", SUFFIX, 0, {"num_blocks": 14}),  # too few for all: some are pushed out
        ("llama", {"method": "ngram"}, 1, {}),
    ],
)
def test_drafts_change_no_bit(
    name: str,
    drafts: dict[str, Any],
    overlap: int,
    more: dict[str, Any],
    folders: dict[str, Path],
    plain: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = LookupProposer.propose

    def propose(proposer: LookupProposer, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        found = real(proposer, rows, lengths, most)
        for row, length in zip(rows, lengths, strict=True):
            assert np.array_equal(proposer._ids[row, :length], proposer._rows.token_ids[row, :length].numpy())
        return found

    monkeypatch.setattr(LookupProposer, "propose", propose)
    llm = _engine(folders[name], drafts, overlap, **more)
    assert _answers(llm) == plain(name)
    scheduler = _scheduler(llm)
    assert scheduler.speculation is not None and (
        sum(scheduler.speculation.counts.drafted) > 10 or "num_speculative_tokens" not in drafts
    )
    assert (scheduler.counters.preemptions > 0) == bool(more.get("num_blocks"))


@pytest.mark.parametrize(
    ("name", "overlap", "more"), [("llama", 0, {}), ("gemma2", 1, {}), ("llama", 2, {"num_blocks": 14})]
)
def test_a_model_that_drafts_for_itself_is_always_right(
    name: str, overlap: int, more: dict[str, Any], folders: dict[str, Path], plain: Callable[[str], list[Any]]
) -> None:
    """A key or value of the draft's that is missing, stale or in the wrong block would make it wrong."""
    llm = _engine(folders[name], {"model": str(folders[name]), "num_speculative_tokens": 3}, overlap, **more)
    assert _answers(llm) == plain(name)
    speculation = _scheduler(llm).speculation
    assert speculation is not None
    counts = speculation.counts
    # What is drafted beyond an end is right and not taken; a resumed sequence's first tokens may have come from blocks
    # that nobody drafted in.
    assert sum(counts.accepted) >= (0.9 if not more else 0.7) * sum(counts.drafted) > 100


def test_what_a_draft_holds_is_said_to_the_byte(folders: dict[str, Path]) -> None:
    llm = _engine(folders["llama"], {"model": str(folders["qwen2"])})
    (said,) = (each for each in llm.info.decisions if each.name == "draft memory")
    drafting = llm.engine.core.executor._runner._speculator._proposer  # type: ignore[attr-defined]
    caches, weights = drafting._kv_caches, count_bytes(drafting._decoder.spec, 4)
    held = sum(cache.nbytes for cache in caches)
    assert all(cache.shape[0] == 100 for cache in caches)
    assert said.value == f"{(held + weights) / 2**20:.1f} MiB"
    groups = llm.engine.core.executor.info.kv_groups
    assert held == sum(group.spec.beside * group.num_blocks for group in groups), "the plan counts it, block by block"


def test_another_model_drafts_and_changes_nothing(folders: dict[str, Path], plain: Callable[[str], list[Any]]) -> None:
    llm = _engine(folders["llama"], {"model": str(folders["qwen2"]), "num_speculative_tokens": 2})
    assert _answers(llm) == plain("llama")


@pytest.mark.parametrize(("quantization", "label"), [("fp8", "FP8, scales by channel"), ("none", "")])
def test_a_draft_that_is_rounded_while_it_is_read_changes_no_bit(
    quantization: str, label: str, folders: dict[str, Path], plain: Callable[[str], list[Any]]
) -> None:
    """Its head, too, which it has in common with its embedding; what it holds is counted in its format."""
    drafts = {"model": str(folders["llama"]), "num_speculative_tokens": 3, "quantization": quantization}
    llm = _engine(folders["llama"], drafts, 1)
    assert _answers(llm) == plain("llama")
    said = {each.name: each for each in llm.info.decisions}
    spec = llm.engine.core.executor._runner._speculator._proposer._decoder.spec  # type: ignore[attr-defined]
    forms = {form.label for site in matrices(spec) for form in site.formats}
    assert ("draft weights" in said) == bool(label) == bool(forms)
    assert all(each.startswith(label) for each in forms) and (not label or spec.formats)
    assert f"{count_bytes(spec, 4) / 2**20:.1f} MiB of weights" in said["draft memory"].reason
    counts = _scheduler(llm).speculation.counts  # type: ignore[union-attr]
    assert sum(counts.accepted) >= 0.4 * sum(counts.drafted) > 50


@pytest.mark.parametrize(
    ("name", "draft", "overlap", "more"),
    [
        ("llama", "llama", 0, {}),
        ("llama", "qwen2", 1, {"max_logits_rows": 3}),
        ("gemma2", "gemma2", 2, {}),
        ("llama", "llama", 1, {"num_blocks": 20, "enable_prefix_caching": False}),
        ("llama", "llama", 1, {"kv_cache_dtype": "int4"}),
    ],
)
def test_trees_change_no_bit(
    name: str,
    draft: str,
    overlap: int,
    more: dict[str, Any],
    folders: dict[str, Path],
    plain: Callable[[str], list[Any]],
) -> None:
    """A key of an accepted branch that is not moved, or moved to another place, would show in all that follows."""
    llm = _engine(
        folders[name], {"model": str(folders[draft]), "num_speculative_tokens": 7, "tree": 3}, overlap, **more
    )
    held = more.get("kv_cache_dtype")
    assert _answers(llm) == (plain(name) if held is None else _answers(_engine(folders[name], None, overlap, **more)))
    scheduler = _scheduler(llm)
    counts = scheduler.speculation.counts  # type: ignore[union-attr]
    assert counts.steps > 50 and sum(counts.accepted) > (1.4 * counts.steps if name == draft else 0)
    assert (scheduler.counters.preemptions > 0) == bool(more.get("num_blocks"))


GRAMMARS = (
    None,
    StructuredOutputs(regex="[a-z]{3,9} [0-9]{1,4}"),
    StructuredOutputs(choice=("yes, surely", "no, never", "perhaps")),
    StructuredOutputs(json={"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}),  # type: ignore[arg-type]
    StructuredOutputs(regex="(.|\n)+"),
)  # fmt: skip


def _told(drafts: dict[str, Any] | None, overlap: int) -> tuple[list[Any], Any]:
    """The bundled model, which has a tokenizer; and the drafts that were counted."""
    sizes: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 200, "num_blocks": 60, "threads": 1, "device": "cpu"}
    text = "one two one two one two one"
    params = [
        SamplingParams(temperature=temperature, max_tokens=24, seed=1, structured_outputs=each, logprobs=scores, min_tokens=least)
        for each in GRAMMARS for temperature, scores, least in ((0.0, None, 0), (0.6, 1, 6))
    ]  # fmt: skip
    with LLM(dtype="float32", overlap=overlap, batch_invariant=True, speculative_config=drafts, **sizes) as llm:
        made = llm.generate([text] * len(params), params, use_tqdm=False)
        told = [(list(o.token_ids), o.finish_reason, o.logprobs) for each in made for o in each.outputs]
        return told, llm.engine.core.stats().drafts


def test_drafts_along_grammars_change_no_bit() -> None:
    """Before, behind and beside rows without one; in the target's own drafts nothing is wrong but what a grammar
    forbids, and that is not verified."""
    plain, _ = _told(None, 0)
    assert "error" not in {reason for _, reason, _ in plain}
    own = {"model": str(_DEMO), "num_speculative_tokens": 3}
    for drafts, overlap in ((NGRAM, 1), (own, 0), (own, 2)):
        told, counts = _told(drafts, overlap)
        assert told == plain, (drafts, overlap)
        if drafts is own:
            assert sum(counts.accepted) >= 0.9 * sum(counts.drafted) > 50


def test_a_draft_that_does_not_fit_is_refused_at_start(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"speculative_config\.model: "):
        _engine(folders["llama"], {"model": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="layers that see 12 tokens back"):
        _engine(folders["llama"], {"model": str(folders["gemma2"])})
    config = json.loads((folders["llama"] / "config.json").read_text())
    for change, said in (
        ({"vocab_size": 300}, "has a vocabulary of 300 tokens, but"),
        ({"max_position_embeddings": 64}, "positions for 64 tokens"),
    ):
        other = tmp_path / said[:8].replace(" ", "")
        other.mkdir()
        (other / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=said):
            _engine(folders["llama"], {"model": str(other)}, load_format="dummy")


def test_equal_ids_must_be_equal_texts(tmp_path: Path) -> None:
    target, renamed, retold = (tiny.save("llama", tmp_path / name) for name in ("target", "renamed", "retold"))
    content = json.loads((renamed / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (renamed / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="another vocabulary"):
        _engine(target, {"model": str(renamed)})
    _give_template(target, "{{ messages[0].content }}")
    _give_template(retold, "<{{ messages[0].content }}>")
    with pytest.raises(ConfigError, match="another chat template"):
        _engine(target, {"model": str(retold)})


def test_templates_are_alike_that_make_the_same_texts(tmp_path: Path) -> None:
    target, draft = (tiny.save("llama", tmp_path / name) for name in ("target", "draft"))
    told = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    _give_template(target, told)
    _give_template(draft, told.replace("[{{ m.role }}]", "{{ '[' + m.role + ']' }}") + "{# by another hand #}")
    _engine(target, {"model": str(draft)}).shutdown()
    _give_template(draft, told + "{% if tools %}!{% endif %}")
    with pytest.raises(ConfigError, match="another chat template"):
        _engine(target, {"model": str(draft)})


def _give_template(folder: Path, template: str) -> None:
    options = folder / "tokenizer_config.json"
    given = json.loads(options.read_text()) if options.exists() else {}
    options.write_text(json.dumps(given | {"chat_template": template}))
