"""guidellm, as users of vLLM measure with it: every request succeeds, and its counts are what was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients import questions as q
from tests.support.serving import ROOT, Server

pytest.importorskip("guidellm", reason=q.ABSENT)

TOKENIZER = ROOT / "src" / "headrace" / "data" / "demo"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("route", "profile"),
    [
        ("/v1/chat/completions", "kind=synchronous"),
        ("/v1/completions", "kind=concurrent,streams=4"),
        ("/v1/chat/completions", "kind=throughput,max_concurrency=8"),
    ],
)
def test_every_request_succeeds(demo: Server, tmp_path: Path, route: str, profile: str) -> None:
    report, wanted = tmp_path / "report.json", 8
    options = {
        "backend": f"kind=openai_http,target={demo.url},model=demo,request_format={route}",
        "profile": profile,
        "constraint": f"kind=max_requests,count={wanted}",
        "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    command = [
        sys.executable,
        "-m",
        "guidellm",
        "run",
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]
    done = subprocess.run([*command, "--disable-console"], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (measured,) = json.loads(report.read_text())["benchmarks"]
    requests = measured["requests"]
    assert len(requests["successful"]) == wanted and not requests["errored"], requests["errored"][:1]
    for each in requests["successful"]:
        assert each["output_tokens"] == 8 and each["prompt_tokens"] >= 32
    demo.wait_idle()
