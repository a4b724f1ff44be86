"""The roofline meter on the card: limits that agree with each other, memory given back, and what each step's record
says."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.bench.steps import steady_decode
from headrace.engine.resolve import create_config
from headrace.worker.card import card_limits, glance_at_card, measure_launches
from lab.skip import launch_floor, profiled, run_skip_profile
from tests.support.card import STRICT, params, require_card
from tests.support.residue_masks import follow_residues, masked

require_card()


def test_a_glance_agrees_with_the_full_measurement_and_gives_its_memory_back() -> None:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # the library's own workspace
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    glance = glance_at_card()
    assert torch.cuda.memory_reserved() <= reserved + 64 * 2**20
    full = card_limits()
    assert glance.read_bandwidth == pytest.approx(full.read_bandwidth, rel=0.15)
    assert glance.gemm_rates["bfloat16"] == pytest.approx(full.gemm_rates["bfloat16"], rel=0.2)
    assert full.copy_bandwidth < 1.05 * full.read_bandwidth


def test_a_kernel_in_a_graph_costs_less_than_its_launch() -> None:
    costs = measure_launches()
    assert 0.1e-6 < costs.gap < costs.in_graph < costs.plain < 100e-6


def test_steps_have_the_cards_own_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(load_format="dummy", trace=str(path)) as llm:
        prompts = [{"prompt_token_ids": [7] * 20} for _ in range(8)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True), use_tqdm=False)
        records = llm.engine.recorder.records
        steady = steady_decode(records)
    for before, step in pairwise(records):
        assert before.end <= step.begin < step.end and 0 < step.host_seconds < 1
        assert step.fraction is not None and 0 < step.fraction < 1.2
    assert steady is not None and steady.steps > 80 and 0 <= steady.idle_share < 0.9
    events = json.loads(path.read_text())
    assert len([event for event in events if event["ph"] == "X" and event["tid"] == 2]) == len(records)


def test_the_profiler_sees_every_kernel_of_a_graph_and_its_one_launch() -> None:
    floor = launch_floor()
    assert 1.0 < floor.alone < 200.0 and 1.0 < floor.graph < 300.0
    x, graph = torch.zeros(16, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            x.add_(1.0)
    events = profiled(graph.replay)
    assert len([event for event in events if event.get("cat") == "kernel"]) == 10
    graphs, eager = run_skip_profile(create_config(load_format="dummy"), batch_size=4, input_len=16, steps=8)
    assert (
        graphs.mode == "graphs"
        and graphs.launches_per_step < eager.launches_per_step
        and graphs.kernels_per_step > graphs.launches_per_step
    )
    assert eager.verdict == "CPU-bound" and 0 < eager.busy_share < 1


def test_waiting_for_masks_is_idle_time() -> None:
    """A masked step whose masks come late: the device had nothing to do meanwhile, and that is no work of the
    step's."""
    with LLM(**{**STRICT, "overlap": 1}) as llm:
        masks = follow_residues(llm)
        slow, late = masks.masks, 0.01

        def after_a_while(wanted: Any, *paths: Any) -> Any:
            time.sleep(late)
            return slow(wanted, *paths)

        masks.masks = after_a_while  # type: ignore[method-assign]
        llm.generate({"prompt_token_ids": list(range(4))}, masked(params(max_tokens=40), 1, 3), use_tqdm=False)
        steps = [record for record in llm.engine.recorder.records if record.decodes][5:35]
        assert all(record.idle_seconds >= 0.8 * late for record in steps)
        # The one in the middle: a host that pauses makes some of them long.
        assert median(record.measured_seconds for record in steps) <= late
