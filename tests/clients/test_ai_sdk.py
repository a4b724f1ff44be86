"""The AI SDK (npm `ai`) against the real server, by its providers for compatible servers, OpenAI's responses and
Anthropic's messages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

FOLDER = Path(os.environ.get("HEADRACE_TEST_NODE", Path(__file__).parent / "node"))
NODE = shutil.which("node")

if NODE is None or not (FOLDER / "node_modules" / "ai").is_dir():
    pytest.skip(q.ABSENT, allow_module_level=True)

apis = pytest.mark.parametrize("api", ["compatible", "responses", "messages"])


@pytest.fixture(scope="module")
def shown(demo: Server) -> dict[tuple[str, str], dict[str, Any]]:
    asked = {"capital": q.CAPITAL, "weather": q.WEATHER, "extract": q.EXTRACT, "reports": q.REPORTS}
    command = [str(NODE), str(FOLDER / "ai.mjs"), demo.url, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {(each["api"], each["check"]): each for each in map(json.loads, done.stdout.splitlines())}


Shown = dict[tuple[str, str], dict[str, Any]]


@apis
def test_a_chat_whole_and_streamed_is_one_answer(shown: Shown, api: str) -> None:
    found = shown[api, "chat"]
    assert "failed" not in found, found
    assert found["whole"] == found["streamed"] == q.PARIS and found["pieces"] > 4
    assert found["reasons"] == ["stop", "stop"] and found["usages"][0] == found["usages"][1] and all(found["usages"][0])


@apis
def test_an_agent_calls_a_tool_uses_its_result_and_ends(shown: Shown, api: str) -> None:
    found = shown[api, "agent"]
    assert "failed" not in found, found
    assert found["calls"] == [[list(q.WEATHER_CALL)]] * 2 and found["texts"] == [q.WEATHER_ANSWER] * 2


@apis
def test_a_forced_call_is_the_models_own(shown: Shown, api: str) -> None:
    assert shown[api, "forced"].get("calls") == [list(q.WEATHER_CALL)], shown[api, "forced"]


@apis
def test_an_object_is_what_the_model_says(shown: Shown, api: str) -> None:
    found = shown[api, "object"]
    assert "failed" not in found, found
    assert found["objects"] == [q.PERSON] * 2 and found["partial"] > 2
