"""Two models that share one card, of which one fits beside the other only asleep: they take turns, with the same
answers, and hold no more than their budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.worker.device_memory import device_use
from tests.support.card import require_card
from tests.support.serving import PYTHON, Server

require_card()

CARD, GIB = torch.device("cuda"), 2**30
SHAPE = Path(__file__).parents[2] / "lab" / "shapes" / "Llama-3.2-1B"
LEVELS = (1, 2)
# Each needs 5.1 GiB awake, of which 1 is its keys and values; asleep, a context and what lies beside it, 1.8.
FILE = """
memory: 8GiB
sleep-level: LEVEL
models:
  one: {model: SHAPE, seed: 1}
  two: {model: SHAPE, seed: 2}
"""
ENGINE = ("--load-format", "dummy", "--dtype", "bfloat16", "--kv-cache-memory", "1GiB", "--max-model-len", "2048", "--max-num-seqs", "16",
          "--device", "cuda")  # fmt: skip


@pytest.fixture(scope="module", params=LEVELS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("many") / "models.yaml"
    path.write_text(FILE.replace("SHAPE", str(SHAPE)).replace("LEVEL", str(request.param)), encoding="utf-8")
    running = Server((PYTHON, "-m", "headrace", "serve", "--port", "0", "--models", str(path), *ENGINE))
    try:
        yield running.wait_ready(240)
    finally:
        running.stop()


def ids(server: Server, model: str) -> list[int]:
    prompt = {"prompt": list(range(5, 37)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.ask("POST", "/v1/completions", {"model": model, "return_token_ids": True, **prompt})
    assert answer.status == 200, answer
    return list(answer.json["choices"][0]["token_ids"])


def states(server: Server) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.ask("GET", "/v1/models").json["data"]}


@pytest.mark.timeout(360)
def test_they_take_turns_on_one_card(server: Server) -> None:
    assert sorted(states(server).values()) == ["asleep", "awake"]
    answers, used = {"one": ids(server, "one"), "two": ids(server, "two")}, []
    assert answers["one"] != answers["two"]
    for name, other in (("one", "two"), ("two", "one")) * 2:
        assert ids(server, name) == answers[name]
        assert states(server) == {name: "awake", other: "asleep"}
        used.append(device_use(CARD).used)
    assert max(used) - min(used) < GIB, "nothing is left behind by a turn"
    assert max(used) < 10 * GIB, "the budget, and this process's context"
