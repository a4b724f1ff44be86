"""Adapters over HTTP: named as models, listed with their parent, loaded and unloaded by an operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.serving import SERVE, Server, serving

AT = "base_model.model.model.layers.0.self_attn.q_proj"  # of the bundled model


def write(folder: Path, seed: int, rank: int = 4) -> Path:
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors = {
        f"{AT}.lora_A.weight": draw.normal(size=(rank, 384)),
        f"{AT}.lora_B.weight": draw.normal(size=(384, rank)),
    }
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second", "later", "away")):
        write(folder / "in" / name if name != "away" else folder / "away", seed)
    write(folder / "in" / "wide", 9, rank=32)
    return folder


@pytest.fixture(scope="module")
def server(adapters: Path) -> Iterator[Server]:
    modules = (
        "--lora-modules",
        f"named={adapters / 'in' / 'first'}",
        "--lora-dir",
        str(adapters / "in"),
        "--served-model-name",
        "base",
    )
    with serving(
        *modules, "--allow-runtime-lora-updating", "--max-loras", "2", "--device", "cpu", command=SERVE
    ) as running:
        yield running


def text(server: Server, model: str) -> str:
    body = {"model": model, "prompt": "The sea was", "max_tokens": 12, "temperature": 0}
    answer = server.ask("POST", "/v1/completions", body)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return str(answer.json["choices"][0]["text"])


def test_an_adapter_is_named_as_the_model(server: Server) -> None:
    cards = {card["id"]: card for card in server.ask("GET", "/v1/models").json["data"]}
    assert set(cards) == {"base", "named", "first", "second", "later", "wide"}
    assert cards["base"]["parent"] is None and cards["named"]["parent"] == cards["named"]["root"] == "base"
    assert server.ask("GET", "/v1/models/second").json["parent"] == "base"
    base, first = text(server, "base"), text(server, "first")
    assert text(server, "named") == first != base and text(server, "second") not in (base, first)
    messages = [{"role": "user", "content": "Hello"}]
    assert (
        server.ask("POST", "/v1/chat/completions", {"model": "named", "messages": messages, "max_tokens": 4}).status
        == 200
    )


@pytest.mark.parametrize("name", ["third", "../away", "..", "in/first", "first/", "FIRST"])
def test_a_name_that_stands_for_nothing(server: Server, name: str) -> None:
    answer = server.ask("POST", "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
    assert answer.status == 404 and answer.json["error"]["code"] == "model_not_found"
    assert "use base, first, later, named, second, wide." in answer.json["error"]["message"]


def test_one_that_does_not_fit_is_its_own_requests_error(server: Server) -> None:
    answer = server.ask("POST", "/v1/completions", {"model": "wide", "prompt": "a", "max_tokens": 1})
    assert answer.status == 400 and "--max-lora-rank" in answer.json["error"]["message"]
    assert text(server, "base")


def test_an_operator_loads_and_unloads(server: Server, adapters: Path) -> None:
    def change(path: str, **body: Any) -> tuple[int, str]:
        answer = server.ask("POST", f"/v1/{path}_lora_adapter", body)
        return answer.status, answer.body.decode()

    before = text(server, "base")
    assert change("load", lora_name="mine", lora_path="later") == (200, '{"status":"ok"}')
    mine = text(server, "mine")
    assert mine == text(server, "later") != before
    for path in ("later", "second"):
        status, body = change("load", lora_name="mine", lora_path=path)
        assert status == 400 and "load_inplace" in body and text(server, "mine") == mine
    assert change("unload", lora_name="mine")[0] == 200
    assert server.ask("POST", "/v1/completions", {"model": "mine", "prompt": "a"}).status == 404
    assert change("load", lora_name="mine", lora_path="later")[0] == 200
    assert change("load", lora_name="mine", lora_path="wide", load_inplace=True)[0] == 400 and text(server, "mine")
    assert change("load", lora_name="mine", lora_path="second", load_inplace=True)[0] == 200
    assert text(server, "mine") == text(server, "second") != mine, "what was computed with the one before is not reused"
    for path, said in (
        (str(adapters / "away"), "outside of --lora-dir"),
        ("../away", "outside"),
        ("wide", "--max-lora-rank"),
        ("none", "no folder"),
    ):
        status, body = change("load", lora_name="other", lora_path=path)
        assert status == 400 and said in body, body
    assert (
        change("load", lora_name="../x", lora_path="later")[0] == 400
        and change("load", lora_name="base", lora_path="later")[0] == 400
    )
    assert change("unload", lora_name="other")[0] == 404
    page = server.ask("GET", "/metrics").body.decode()
    assert "headrace_adapters_held{" in page and "headrace_adapter_loads_total{" in page
    assert text(server, "base") == before


def test_nobody_changes_them_unless_it_is_allowed(adapters: Path) -> None:
    with serving("--lora-dir", str(adapters / "in"), "--executor", "keyed-hash", command=SERVE) as closed:
        answer = closed.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "later"})
        assert answer.status == 404 and "--allow-runtime-lora-updating" in answer.json["error"]["message"]
