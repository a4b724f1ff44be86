"""/openapi.json against the server that gives it: what it says a body may hold is taken, what it forbids is refused,
answers are as described.

Few examples by default; HEADRACE_SCHEMA_EXAMPLES=500 gives each route so many, and tries every combination that
schemathesis knows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.request import BOUNDS, SamplingParams
from headrace.server.app import ROUTES
from headrace.server.dialects.body import TOLD
from headrace.server.dialects.completions import CompletionBody
from headrace.server.dialects.pooling import PoolingBody
from headrace.server.openapi import body_schemas, document
from tests.support.serving import Server, serving

KEY = "sk-right"
EXAMPLES = os.environ.get("HEADRACE_SCHEMA_EXAMPLES", "")
TOOL = Path(sys.executable).with_name("schemathesis")
# A body may be right by itself and still not be served: its tokens are not the model's, its fields do not go together,
# it is too long. One with more items than a list may have may be larger than a body may be: it is refused unread.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "429"]
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429"]
"""


# 404, unless an operator asks for them with a flag, or serves a model that pools
CLOSED = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    *(route.path for route in ROUTES if route.body is not None and issubclass(route.body, PoolingBody)),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", KEY, "--token-seconds", "0", "--max-model-len", "256") as running:
        yield running


def test_the_document_names_every_route_and_field(server: Server) -> None:
    got = server.ask("GET", "/openapi.json", headers={"x-api-key": KEY}).json
    assert got == document(ROUTES, got["info"]["version"], keys=True)
    assert {(path, method) for path, item in got["paths"].items() for method in item} == {
        (route.path, route.method.lower()) for route in ROUTES
    }
    for route in ROUTES:
        if route.body is None:
            continue
        schema = got["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        wanted = 404 if route.path in CLOSED else 200
        assert (
            server.ask("POST", route.path, TOLD["examples"][route.body.__name__], {"x-api-key": KEY}).status == wanted
        )
        assert set(schema["properties"]) == set(route.body.names()) and schema["additionalProperties"] is False
    assert got["paths"]["/health"]["get"]["security"] == [] and got["paths"]["/v1/models"]["get"]["security"]
    assert server.ask("GET", "/openapi.json").status == 401


def test_bounds_are_those_that_are_checked() -> None:
    properties = body_schemas((CompletionBody,))[0][CompletionBody]["properties"]
    for name, bounds in BOUNDS.items():
        number = properties[name]["anyOf"][0]
        assert number["maximum"] == bounds.high
        for value in (bounds.low, bounds.high):
            if not (bounds.open_low and value == bounds.low) and name != "min_tokens":
                SamplingParams(**{name: value})
        for value in (bounds.low - 1, bounds.high * 2 + 1):
            with pytest.raises(InvalidRequest) as caught:
                SamplingParams(**{name: value})
            assert caught.value.param == name


def test_without_a_key_nothing_asks_for_one() -> None:
    said = document(ROUTES, "0", keys=False)
    assert "securitySchemes" not in said["components"] and all(
        "security" not in each for item in said["paths"].values() for each in item.values()
    )


@pytest.mark.skipif(not TOOL.exists(), reason="schemathesis is not installed")
@pytest.mark.timeout(3600 if EXAMPLES else 180)
def test_schemathesis_finds_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    phases = "examples,coverage,fuzzing,stateful" if EXAMPLES else "examples,fuzzing,stateful"
    command: list[Any] = [
        TOOL, "--config-file", tmp_path / "schemathesis.toml", "run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--generation-with-security-parameters", "false", "--generation-database", "none", "--phases", phases, "--max-examples", EXAMPLES or "10",
        "--continue-on-failure", "--no-color", "--warnings", "off", *(() if EXAMPLES else ("--seed", "1")),
    ]  # fmt: skip
    before = answers_of(server)  # of /ready, while it started
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)},
    )
    assert ran.returncode == 0 and "No issues found" in ran.stdout, ran.stdout[-6000:] + ran.stderr[-2000:]
    shutil.rmtree(tmp_path / ".schemathesis", ignore_errors=True)
    assert server.process.poll() is None and not any("Traceback" in line for line in server.lines)
    answered = answers_of(server)
    assert all(answered[route.path, "4xx"] for route in ROUTES if route.body), answered
    assert all(bool(answered[route.path, "2xx"]) == (route.path not in CLOSED) for route in ROUTES if route.body), (
        answered
    )
    assert not {key: count for key, count in answered.items() if key[1] == "5xx" and count > before.get(key, 0)}


def answers_of(server: Server) -> dict[tuple[str, str], int]:
    """How often each route gave each class of status."""
    page = server.ask("GET", "/metrics", headers={"x-api-key": KEY}).body.decode()
    found = re.findall(r'^headrace_http_responses_total{route="(.*)",status="(.*)"} (\d+)', page, re.M)
    return {(route, status): int(count) for route, status, count in found}
