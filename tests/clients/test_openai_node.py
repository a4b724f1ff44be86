"""The openai package for Node against the real server: what it made of each answer is what it should be.

Needs node, and a copy of the folder node with what npm installs (`python -m tests.clients.run openai-node` makes one).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.questions import ABSENT, SCRIPTED
from tests.support.serving import Server

FOLDER = Path(os.environ.get("HEADRACE_TEST_NODE", Path(__file__).parent / "node"))
NODE = shutil.which("node")

if NODE is None or not (FOLDER / "node_modules" / "openai").is_dir():
    pytest.skip(ABSENT, allow_module_level=True)


@pytest.fixture(scope="module")
def shown(demo: Server, scripted: Server) -> dict[str, Any]:
    command = [str(NODE), str(FOLDER / "openai.mjs"), demo.url, scripted.url, str(SCRIPTED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {each.pop("name"): each for each in map(json.loads, done.stdout.splitlines())}
    assert not {name: each for name, each in found.items() if "failed" in each}
    return found


def test_a_chat_whole_and_streamed_is_one_answer(shown: dict[str, Any]) -> None:
    whole, streamed = shown["whole"], shown["streamed"]
    assert whole["text"] == streamed["text"] == shown["helper"]["text"] == shown["responses"]["text"] and whole["text"]
    assert whole["reason"] == streamed["reason"] == shown["helper"]["reason"] == "length"
    assert whole["usage"]["completion_tokens"] == streamed["usage"]["completion_tokens"] == 12
    assert streamed["roles"] == 1 and streamed["last"] == 0 and whole["id"]
    assert shown["unicode"]["same"]


def test_calls_forced_and_of_the_models_own(shown: dict[str, Any]) -> None:
    forced = shown["forced"]
    assert forced["function"] == "grind" and forced["same"] and isinstance(json.loads(forced["arguments"])["size"], int)
    own = shown["own_call"]
    assert (
        own["shown"] == [["tool_calls", "Let me see.", '{"size": 3}']] * 2
        and own["reasoning"] == "hm"
        and own["next"] == "Done."
    )


def test_structured_output_logprobs_and_stop(shown: dict[str, Any]) -> None:
    assert isinstance(shown["structured"]["content"]["size"], int)
    assert shown["logprobs_and_stop"] == {"tops": [2, 2, 2], "cut": True}


def test_the_other_routes(shown: dict[str, Any]) -> None:
    assert (
        shown["completions"]["same"]
        and shown["completions"]["text"]
        and shown["models"]["names"] == ["demo", "org/demo"]
    )
    responses = shown["responses"]
    assert (
        responses["text"] == responses["streamed"] == responses["helper"] and responses["last"] == "response.incomplete"
    )


def test_errors_are_what_the_client_knows_them_by(shown: dict[str, Any]) -> None:
    errors = shown["errors"]
    assert (errors["param"]["name"], errors["param"]["param"]) == ("BadRequestError", "temperature")
    for each in (errors["long"], errors["long_stream"]):
        assert (each["status"], each["code"]) == (
            400,
            "context_length_exceeded",
        ) and "maximum context length is 4096 tokens" in each["message"]
    assert (errors["model"]["name"], errors["model"]["code"]) == ("NotFoundError", "model_not_found")
    assert errors["embeddings"]["status"] == 404 and "embeddings" in errors["embeddings"]["message"]


def test_what_is_left_or_aborted_frees_the_engine(shown: dict[str, Any], demo: Server) -> None:
    assert shown["cancelled"]["aborted"] == "APIUserAbortError"
    demo.wait_idle()
