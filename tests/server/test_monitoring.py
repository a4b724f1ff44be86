"""/metrics as dashboards read it: every series of our board and of vLLM's boards is there, with its labels, and says
what it should.

(No model: keyed hash.) The last test has a real Prometheus scrape a real server and evaluate every query of the board.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.observe.metrics import Energy, StepRecorder
from headrace.server.app import ROUTES
from headrace.server.exposition import Counters, Lines, ServerMetrics
from tests.support import board
from tests.support.serving import SERVE, Server, serving, wait_for

# What vLLM's own boards read (examples/observability, autumn 2026), but for what is only there with adapters, drafts,
# sleeping and KV connectors: names and labels are facts.
VLLM_GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
VLLM_COUNTERS = {
    "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
}  # fmt: skip
VLLM_LABELLED = {
    "request_success_total": ("finished_reason", {"stop", "length", "abort", "error"}),
    "prompt_tokens_by_source_total": ("source", {"local_compute", "local_cache_hit"}),
    "num_requests_waiting_by_reason": ("reason", {"capacity", "deferred"}),
}
VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": {
        "0.1",
        "0.25",
        "0.5",
        "0.75",
        "1.0",
        "2.5",
        "5.0",
        "10.0",
    },  # bounds that its boards name
    "inter_token_latency_seconds": set(),
    "request_time_per_output_token_seconds": {"0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"},
    "e2e_request_latency_seconds": {"0.3", "1.0", "60.0"},
    "request_queue_time_seconds": set(),
    "request_prefill_time_seconds": set(),
    "request_decode_time_seconds": set(),
    "request_inference_time_seconds": set(),
    "request_prompt_tokens": {"1.0", "2.0", "5.0", "100.0", "5000.0", "100000.0"},
    "request_generation_tokens": {"1.0", "100.0", "5000.0"},
    "request_max_num_generation_tokens": {"100.0"},
    "request_params_max_tokens": {"100.0"},
    "request_params_n": {"1.0", "2.0", "5.0", "10.0", "20.0"},
    "iteration_tokens_total": {"1.0", "8.0", "16.0", "1024.0", "16384.0"},
}
VLLM_SERVER = {
    'http_requests_total{handler="/v1/completions",status="2xx"}', 'http_request_duration_seconds_sum{handler="/v1/completions"}',
    'http_request_duration_seconds_count{handler="/v1/completions"}', "process_cpu_seconds_total", "process_resident_memory_bytes",
    "process_start_time_seconds", "process_open_fds", "process_max_fds",
}  # fmt: skip
PROMPT = "a plan of several blocks " * 12


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--executor", "keyed-hash", "--device-time", "0.002", "--served-model-name", 'a"\\b')
    with serving(*flags, "--api-key", "key", command=SERVE) as running:
        yield running


def series(server: Server) -> dict[str, float]:
    """By name and labels."""
    page = server.ask("GET", "/metrics", headers={"Authorization": "Bearer key"}).body.decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert len(found) == len(lines), "no series is there twice"
    return found


def test_every_name_of_the_board_is_there(server: Server) -> None:
    there = {name.partition("{")[0] for name in series(server)}
    assert board.names() - there == board.COUNTED_BY_SOME
    counted = board.steps_page(StepRecorder(energy=lambda: Energy(1.0, 2.0)).summary())
    assert all(f"\n{name} " in counted for name in board.COUNTED_BY_SOME)


def test_every_name_of_vllms_boards_is_there_with_its_labels(server: Server) -> None:
    found, model = series(server), 'model_name="a\\"\\\\b",engine="0"'
    wanted = {f"vllm:{name}{{{model}}}" for name in VLLM_GAUGES | VLLM_COUNTERS} | VLLM_SERVER
    for name, (label, values) in VLLM_LABELLED.items():
        wanted |= {f'vllm:{name}{{{model},{label}="{value}"}}' for value in values}
    for name, bounds in VLLM_HISTOGRAMS.items():
        wanted |= {f"vllm:{name}_{each}{{{model}}}" for each in ("sum", "count")}
        wanted |= {f'vllm:{name}_bucket{{{model},le="{bound}"}}' for bound in (*bounds, "+Inf")}
    assert not wanted - set(found)


def change(server: Server, **body: Any) -> dict[str, float]:
    """What one request adds, by the part of the name behind ``vllm:``, without labels that all have."""
    before = series(server)
    answer = server.ask("POST", "/v1/completions", {"ignore_eos": True, **body}, {"Authorization": "Bearer key"})
    assert answer.status == 200, answer
    after = series(server)
    plain = {
        re.sub(r'model_name="(?:[^"\\]|\\.)*",engine="0",?', "", name): after[name] - before.get(name, 0.0)
        for name in after
    }
    return {name.removeprefix("vllm:").replace("{}", ""): value for name, value in plain.items() if value}


def test_the_series_say_what_happened(server: Server) -> None:
    tokens = len(server.ask("POST", "/tokenize", {"prompt": PROMPT}, {"Authorization": "Bearer key"}).json["tokens"])
    for cached in (0, tokens // 16 * 16):
        got = change(server, prompt=PROMPT, max_tokens=12, n=2)
        assert (
            got["prompt_tokens_total"] == got["request_prompt_tokens_sum"] == tokens
            and got["request_prompt_tokens_count"] == 1
        )
        assert (
            got["generation_tokens_total"] == got["request_generation_tokens_sum"] == 24
            and got["request_generation_tokens_count"] == 2
        )
        assert (
            got['request_generation_tokens_bucket{le="20.0"}'] == 2
            and 'request_generation_tokens_bucket{le="10.0"}' not in got
        )
        assert got["request_max_num_generation_tokens_sum"] == got["request_params_max_tokens_sum"] == 12
        assert got["request_params_n_sum"] == 2 and got["request_params_n_count"] == 1
        assert got['request_success_total{finished_reason="length"}'] == 2
        assert (
            got.get('prompt_tokens_by_source_total{source="local_cache_hit"}', 0)
            == got.get("prompt_tokens_cached_total", 0)
            == cached
        )
        assert got['prompt_tokens_by_source_total{source="local_compute"}'] == tokens - cached
        phases = [got[f"request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode")]
        assert all(
            got[f"request_{name}_time_seconds_count"] == 2 for name in ("queue", "prefill", "decode", "inference")
        )
        assert got["request_inference_time_seconds_sum"] == pytest.approx(phases[1] + phases[2])
        assert got["request_time_per_output_token_seconds_sum"] == pytest.approx(phases[2] / 11)
        assert sum(phases) <= 2 * got["e2e_request_latency_seconds_sum"]
        assert got["iteration_tokens_total_sum"] == tokens - cached + 2 * 11  # the prompt gives each its first
        assert got['http_requests_total{handler="/v1/completions",status="2xx"}'] == 1
        assert (
            got['http_request_duration_seconds_sum{handler="/v1/completions"}']
            >= got["e2e_request_latency_seconds_sum"]
        )
    single = change(server, prompt=[PROMPT, "b"], max_tokens=1)
    assert single["request_prompt_tokens_count"] == 2 and "request_time_per_output_token_seconds_sum" not in single


def test_every_counter_has_its_cells_and_none_shares_them() -> None:
    """Whoever counts first or last on a page, the other front ends read the same from it."""
    counters = Counters.create(2)
    one, two = (ServerMetrics([route.path for route in ROUTES], page) for page in counters.pages)
    one.count_lengths(10, 4, [3, 5], 7)
    two.count_lengths(20, 0, [0], 9)
    two.count_seconds("/v1/models", 1.5)
    two.count_seconds("-", 9.0)  # no route of ours: no series
    total = one.summed(counters.pages)
    prompts, answers, most = (
        total.histograms[f"request_{name}"] for name in ("prompt_tokens", "generation_tokens", "params_max_tokens")
    )
    assert (prompts.total, answers.count, most.total) == (30.0, 3, 16.0)
    lines = Lines()
    total.show(lines, "m", {})
    total.show_answers(lines)
    page = str(lines)
    assert 'http_request_duration_seconds_sum{handler="/v1/models"} 1.5' in page and 'handler="-"' not in page
    assert 'source="local_compute"} 6\n' in page, "a prompt that nobody computed counts for neither"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus here")
def test_prometheus_takes_the_page_and_answers_every_query_of_the_board(server: Server, tmp_path: Path) -> None:
    """``python -m pytest -m slow tests/server/test_monitoring.py`` on a machine with Prometheus."""
    config = yaml.safe_load((board.MONITORING / "prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    job["authorization"]["credentials_file"] = str(tmp_path / "key")
    (tmp_path / "key").write_text("key")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    checked = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    prometheus = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(query: str) -> list[Any]:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=5
        ) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return list(found["data"]["result"])

    def is_up() -> bool:
        try:
            return any(each["value"][1] == "1" for each in ask("up"))
        except OSError:
            return False

    try:
        wait_for(is_up, 30, "Prometheus scrapes")
        for _ in range(6):
            for number in range(4):
                change(server, prompt=PROMPT + str(number), max_tokens=12, n=2)
            time.sleep(1.0)
        answers = {query: ask(board.filled_in(query, "30s")) for query in board.queries()}
        empty = {query for query, found in answers.items() if not found}
        assert all("energy" in query for query in empty), empty
        odd = {
            query
            for query, found in answers.items()
            for each in found
            if each["value"] and each["value"][1] in ("NaN", "+Inf", "-Inf")
        }
        assert all("step_" in query or "handler" in query for query in odd), (
            odd
        )  # no model is computed here, and some routes are not used
    finally:
        prometheus.terminate()
        prometheus.wait(20)
