"""The negative control of row 2: a server that takes what its description forbids is noticed. (The check:
tests/server/test_openapi.py.)"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.server.test_openapi import CONFIG, TOOL
from tests.support.planted import planted
from tests.support.serving import serving

FLAGS = ("--executor", "keyed-hash", "--max-num-seqs", "4", "--max-model-len", "256")


def findings(url: str, folder: Path) -> str:
    (folder / "schemathesis.toml").write_text(CONFIG)
    command = [
        TOOL,
        "--config-file",
        folder / "schemathesis.toml",
        "run",
        f"{url}/openapi.json",
        "--include-path",
        "/detokenize",
        "--seed",
        "1",
    ]
    command += [
        "--phases",
        "coverage",
        "--generation-database",
        "none",
        "--max-failures",
        "1",
        "--no-color",
        "--warnings",
        "off",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.skipif(not TOOL.exists(), reason="schemathesis is not installed")
def test_a_server_that_takes_what_its_description_forbids_is_noticed(tmp_path: Path) -> None:
    defect = "from headrace.server.dialects import body; body.read = lambda kind, given: kind(**given)"
    with serving(*FLAGS, command=planted(defect)) as careless:
        assert "unique failure" in findings(careless.url, tmp_path)
