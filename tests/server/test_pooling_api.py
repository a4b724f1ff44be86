"""/v1/embeddings, /v1/rerank and /v1/score of a real server with a tiny encoder: through OpenAI's client and by hand."""

from __future__ import annotations

import array
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import torch

from headrace.errors import InvalidRequest
from headrace.server.dialects.pooling import ScoreBody, parse_score
from headrace.server.limits import _parse_known
from tests.support.pooled import hidden_states, save_encoder, save_modules, unit
from tests.support.serving import SERVE, Server, serving

FLAGS = ("--threads", "1", "--dtype", "float32", "--max-num-seqs", "8", "--served-model-name", "tiny")
_STOPPED = r'headrace_request_success_total{model_name="tiny",finished_reason="stop"}'
_GENERATED = r'headrace_generation_tokens_total{model_name="tiny"}'
DOCUMENTS = ["water runs", "a stone", "a mill"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    folder = tmp_path_factory.mktemp("embedder")
    oracle = save_encoder("bert", folder)
    save_modules(folder, "Transformer", "Pooling", "Normalize")
    with serving(str(folder), *FLAGS, "--max-queue", "64", command=SERVE) as running:
        yield running, oracle


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    folder = tmp_path_factory.mktemp("reranker")
    oracle = save_encoder("bert", folder, reranks=True)
    with serving(str(folder), *FLAGS, command=SERVE) as running:
        yield running, oracle


def wanted(oracle: Any, ids: list[int], dimensions: int = 64) -> list[float]:
    return unit(hidden_states(oracle, ids).mean(0)[:dimensions])


def test_embeddings_through_openais_client(embedder: tuple[Server, Any]) -> None:
    """Which asks for base64 unless told otherwise."""
    server, oracle = embedder
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        ids = [[1, 5, 6, 2], [1, 7, 2], [9]]
        made = client.embeddings.create(model="tiny", input=ids)
        short = client.embeddings.create(model="tiny", input="a mill", dimensions=8, encoding_format="float")
        with pytest.raises(openai.NotFoundError, match="embeds texts and generates none"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.NotFoundError, match="embeds texts"):
            client.completions.create(model="tiny", prompt="hi")
    for each, item in zip(ids, made.data, strict=True):
        assert item.embedding == pytest.approx(wanted(oracle, each), abs=2e-6)
    assert (made.usage.prompt_tokens, made.usage.total_tokens, made.model) == (8, 8, "tiny")
    assert len(short.data[0].embedding) == 8 and sum(x * x for x in short.data[0].embedding) == pytest.approx(1.0)


def test_every_form_of_input(embedder: tuple[Server, Any]) -> None:
    server, oracle = embedder

    def ask(**fields: Any) -> Any:
        return server.ask("POST", "/v1/embeddings", fields).json["data"]

    one, two, ids = ask(input="a"), ask(input=["a", "bc"]), ask(input=[1, 4, 2])
    assert one[0]["embedding"] == ids[0]["embedding"] == pytest.approx(wanted(oracle, [1, 4, 2]), abs=2e-6)
    assert [each["index"] for each in two] == [0, 1]
    packed = array.array("f", base64.b64decode(ask(input="a", encoding_format="base64")[0]["embedding"]))
    assert packed.tolist() == one[0]["embedding"]
    many = ask(input=[[4 + place % 50] for place in range(300)])
    assert many[257]["embedding"] == pytest.approx(wanted(oracle, [4 + 257 % 50]), abs=2e-6)
    cut = ask(input="a " * 500, truncate_prompt_tokens=5)[0]["embedding"]
    assert cut == pytest.approx(wanted(oracle, [1, 4, 4, 4, 2]), abs=2e-6)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "not empty"),
        ({"input": ""}, None, None),  # special tokens alone
        ({"input": [[]]}, "input", "input is empty"),
        ({"input": ["a", 1]}, "input", "mixes texts"),
        ({"input": [1, "a"]}, "input", "list of token ids"),
        ({"input": [96]}, "input", "96"),
        ({"input": [-1]}, "input", "-1"),
        ({"input": {"a": 1}}, "input", "must be a text"),
        ({"input": "a " * 400}, "input", "maximum context length is 130 tokens, but the text has 402 tokens"),
        ({"input": "a " * 9_000_000}, "input", "maximum context length is 130 tokens"),
        ({"input": ["a"] * 2049}, "input", "holds 2049 entries; send at most 2048"),
        ({"input": ["a"] * 600}, "input", "600 prompts are more than the whole queue takes (512)"),
        ({"input": "a", "dimensions": 65}, "dimensions", "from 1 to 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64 or float"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "give 3 or more"),
        ({"input": "a", "truncate_prompt_tokens": 131}, "truncate_prompt_tokens", "from 1 to 130"),
        ({"input": "a", "priority": 3}, "priority", "--scheduling-policy priority"),
        ({"input": "a", "model": "other"}, "model", "not served here"),
        ({"input": "a", "normalize": False}, "normalize", "the checkpoint says"),
    ],
)
def test_mistakes_name_the_field(embedder: tuple[Server, Any], fields: dict[str, Any], param: str, told: str) -> None:
    got = embedder[0].ask("POST", "/v1/embeddings", fields)
    if told is None:
        assert got.status == 200
        return
    assert got.status in (400, 404) and got.error["param"] == param and told in got.error["message"], got


def test_cosines_and_orders_of_an_embedder(embedder: tuple[Server, Any]) -> None:
    server, _ = embedder
    got = server.ask("POST", "/v1/rerank", {"query": "a mill", "documents": DOCUMENTS}).json
    assert got["results"][0]["index"] == 2 and got["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert [each["relevance_score"] for each in got["results"]] == sorted(
        (each["relevance_score"] for each in got["results"]), reverse=True
    )
    pairs = server.ask("POST", "/v1/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS}).json["data"]
    assert [each["score"] for each in pairs] == pytest.approx([1.0, 1.0, 1.0])
    assert server.ask("POST", "/score", {"queries": "a", "documents": ["a", "b"]}).json["usage"]["prompt_tokens"] == 6
    asked = {"query": "a", "documents": ["b"], "activation": False}
    assert server.ask("POST", "/rerank", asked).error["param"] == "activation"


def test_a_cross_encoder_reranks(reranker: tuple[Server, Any]) -> None:
    server, oracle = reranker
    asked = {"query": "a mill", "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]], "activation": False}
    got = server.ask("POST", "/v1/rerank", asked).json
    folder = Path(server.ask("GET", "/server_info").json["config"]["model"]["model"])
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    encoded = [backend.encode("a mill", each) for each in DOCUMENTS]
    with torch.no_grad():
        logits = [
            oracle(torch.tensor([each.ids]), token_type_ids=torch.tensor([each.type_ids])).logits.item()
            for each in encoded
        ]
    assert got["usage"]["total_tokens"] == sum(len(each.ids) for each in encoded)
    for result in got["results"]:
        assert result["relevance_score"] == pytest.approx(logits[result["index"]], abs=1e-5)
        assert result["document"]["text"] == DOCUMENTS[result["index"]]
    best = server.ask("POST", "/v2/rerank", {**asked, "top_n": 1, "return_documents": False}).json["results"]
    assert best == [
        {"index": max(range(3), key=lambda each: logits[each]), "relevance_score": best[0]["relevance_score"]}
    ]
    scored = server.ask("POST", "/v1/score", {"text_1": "a mill", "text_2": DOCUMENTS}).json["data"]
    assert [each["score"] for each in scored] == pytest.approx([torch.tensor(each).sigmoid().item() for each in logits])
    assert server.ask("POST", "/v1/embeddings", {"input": "a"}).error["code"] == "unsupported_task"
    unequal = server.ask("POST", "/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}).error
    assert unequal["param"] == "text_2" and "2 texts and text_2 3" in unequal["message"]


def test_what_is_counted(embedder: tuple[Server, Any]) -> None:
    server, _ = embedder
    server.ask("POST", "/v1/embeddings", {"input": ["a", "b"]})
    page = server.ask("GET", "/metrics").body.decode()
    success, generated = (re.search(rf"^{name} (\S+)$", page, re.M) for name in (_STOPPED, _GENERATED))
    assert success is not None and float(success[1]) >= 2
    assert generated is not None and float(generated[1]) == 0
    assert server.ask("GET", "/v1/models").json["data"][0]["max_model_len"] == 130


def test_other_names_of_the_two_texts_are_no_unknown_fields() -> None:
    """Of which ``--unknown-fields ignore`` leaves out the others alone."""
    for first, second in (("queries", "documents"), ("data_1", "data_2"), ("text_1", "text_2")):
        raw = bytearray(json.dumps({first: "a", second: ["b", "c"], "unheard": 1}).encode())
        (body, pairs), left_out = _parse_known(raw, ScoreBody, parse_score)
        assert (pairs, left_out) == ([("a", "b"), ("a", "c")], ["unheard"]) and body.text_1 == "a"
    with pytest.raises(InvalidRequest, match="'queries' is not a field"):
        parse_score({"text_1": "a", "text_2": "b", "queries": "c"})
