"""The whole engine on the bundled model: golden tokens, texts and scores, in one batch, and with each technique off."""

from __future__ import annotations

import gc
import json
import weakref
from functools import lru_cache
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from tests.support.outside import shared

CONFIG = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 1024,
    "num_blocks": 512,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 64,
}
TOKENS = 24


@lru_cache
def golden() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads(shared("models", "demo", "golden.json").read_text())["prompts"]
    return [prompt for prompt in prompts if len(prompt["prompt_ids"]) < 900]


def greedy(llm: LLM, prompts: list[dict[str, Any]], **params: Any) -> list[Any]:
    asked = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **params})
    return llm.generate([{"prompt_token_ids": prompt["prompt_ids"]} for prompt in prompts], asked, use_tqdm=False)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(**CONFIG) as made:
        yield made


def test_all_golden_prompts_at_once_chunk_by_chunk(llm: LLM) -> None:
    for output, prompt in zip(greedy(llm, golden(), prompt_logprobs=0), golden(), strict=True):
        assert output.outputs[0].token_ids == prompt["greedy_ids"][:TOKENS], prompt["name"]
        scores = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        assert scores == pytest.approx(prompt["prompt_logprobs"], abs=1e-4), prompt["name"]


def test_what_was_cached_gives_the_same_tokens(llm: LLM) -> None:
    again = greedy(llm, golden())
    assert [each.outputs[0].token_ids for each in again] == [prompt["greedy_ids"][:TOKENS] for prompt in golden()]
    assert sum(each.num_cached_tokens for each in again) > sum(len(prompt["prompt_ids"]) for prompt in golden()) // 2


def test_answers_end_at_the_models_own_end_and_read_as_text(llm: LLM) -> None:
    ending = [prompt for prompt in golden() if prompt["stop_index"] is not None and prompt["stop_index"] < 64][:6]
    assert ending
    for output, prompt in zip(greedy(llm, ending, max_tokens=64, ignore_eos=False), ending, strict=True):
        answer = output.outputs[0]
        assert (answer.finish_reason, answer.token_ids) == ("stop", prompt["greedy_ids"][: prompt["stop_index"] + 1])
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None and answer.text == tokenizer.decode(answer.token_ids)


def test_a_bad_word_is_not_said_however_it_is_cut_into_tokens(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None and len(tokenizer.encode("afraid", False)) > len(tokenizer.encode(" afraid", False))
    free, spared = (
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=24, bad_words=words), use_tqdm=False)[
            0
        ]
        .outputs[0]
        .text
        for words in ((), ("afraid",))
    )
    assert "afraid" in free and "afraid" not in spared


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_shut_down_llm_holds_no_model(overlap: int) -> None:
    llm = LLM(
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=64,
        num_blocks=8,
        max_num_seqs=2,
        technique={"overlap": overlap},
    )
    llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
    decoder = weakref.ref(llm.engine.core.executor._runner.decoder)  # type: ignore[attr-defined]
    llm.shutdown()
    gc.collect()
    assert decoder() is None, "the weights outlive shutdown()"


OFF: list[dict[str, Any]] = [
    {"kv_caching": False},
    {"continuous_batching": False},
    {"token_concatenation": False},
    {"chunked_prefill": False},
    {"paged_allocation": False},
    {"prefix_caching": False},
    {"overlap": 1},
    {"overlap": 2, "chunked_prefill": False},
]


@pytest.mark.parametrize("technique", OFF, ids=lambda each: ",".join(f"{name}={value}" for name, value in each.items()))
def test_no_technique_changes_a_token(technique: dict[str, Any]) -> None:
    few = sorted(golden(), key=lambda prompt: len(prompt["prompt_ids"]))[::3][:6]
    with LLM(**CONFIG, technique=technique) as llm:
        found = [each.outputs[0].token_ids for each in greedy(llm, [*few, few[0]], max_tokens=12)]
    assert found == [prompt["greedy_ids"][:12] for prompt in [*few, few[0]]]
