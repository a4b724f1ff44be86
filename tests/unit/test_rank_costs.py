"""What several ranks cost: what they send each other, by hand, and a simulation beside that of one."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from headrace.config import DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.cost.cost_model import StepLoad
from headrace.cost.links import (
    HOST_WAIT,
    LARGEST,
    MOST_PASSED,
    KeyTraffic,
    Link,
    SmallSums,
    key_traffic_of,
    shared_rows,
    traffic_of,
)
from headrace.errors import ConfigError
from headrace.parallel.context import KeyShare
from headrace.parallel.shares import share
from headrace.planner.devices import known_devices
from headrace.planner.pricing import priced
from headrace.request import StepPlan
from tests.support.specs import LLAMA_8B, TINY

EXACT = Link(bandwidth=100.0, latency=2.0)


def test_what_is_sent_is_what_is_counted_by_hand() -> None:
    """3 layers of 4 values, 10 tokens: 7 sums of 8 bytes a token, of which 2 ranks send as many, and half of 20 bytes
    of logits a row."""
    traffic = traffic_of(replace(TINY, ranks=2), 2.0)
    assert (traffic.sums, traffic.token_bytes, traffic.row_bytes) == (7, 8, 10)
    assert traffic.seconds(EXACT, 3, 2) == (16.0 + 1.88, 1.88) and traffic.seconds(EXACT, 0, 0) == (0.0, 0.0)
    assert traffic_of(replace(TINY, ranks=4), 2.0).seconds(EXACT, 1, 0)[1] == 1.5 * 7 * 8 / 100
    assert traffic_of(TINY, 2.0).seconds(EXACT, 3, 2) == (0.0, 0.0)
    small = replace(EXACT, small=SmallSums(100.0, 1.0, 0.5, 1e6))
    sent = [replace(traffic, row_bytes=each).seconds(small, 3, 2)[1] for each in (0.0, 10.0)]
    assert sent == pytest.approx([1.68, 1.68 + 2 * LARGEST / 100])  # a stage without logits has no largest


def test_rows_are_shared_out_where_what_is_saved_exceeds_what_nothing_hides() -> None:
    """Of 8 bytes a row, of which each of 4 ranks norms a quarter; of 2 experts, 9 of 16 ranks have none."""
    slow, quick = Link(bandwidth=100.0, latency=3.0), Link(bandwidth=1000.0, latency=3.0)
    assert shared_rows(quick, 4, 8.0, bandwidth=1000.0) == round(3 / (24 / 1000 - 1.5 * 6 / 1000))
    assert shared_rows(slow, 4, 8.0, bandwidth=1000.0) is None
    gain = 2 * 24 / 1000 + 6 / 100 * (2 * 9 / 16 - 1.5)
    assert shared_rows(slow, 4, 8.0, 1000.0, 2) == -(-(6.0 + HOST_WAIT) // gain)
    assert shared_rows(slow, 4, 8.0, 1000.0, 8) is None


def test_what_goes_to_the_keys_and_back_is_what_is_counted_by_hand() -> None:
    """In each layer every rank sends 8 rows' worth of what it finds, or of 4 rows of its own queries and results, in two
    collectives, or in one the keys, behind attention to its own."""
    traffic = key_traffic_of(TINY, 2, 2.0)
    query, layers = 2.0 * TINY.num_heads * TINY.head_dim, TINY.num_layers
    assert (traffic.query, traffic.found) == (query, query + 4 * TINY.num_heads)
    assert traffic.seconds(EXACT, 8, spread=False)[1] == pytest.approx(layers * 8 * traffic.found / 100)
    keys = traffic.seconds(EXACT, 8, spread=True, keys=8)
    assert keys[1] == pytest.approx(layers * 8 / 2 * traffic.key / 100)
    assert keys[0] == pytest.approx(keys[1] + layers * 2.0)
    hidden = traffic.seconds(EXACT, 8, spread=True, keys=8, meanwhile=1.5)
    assert hidden == pytest.approx((keys[0] - 1.5, max(0.0, keys[1] - 1.5)))
    taken = traffic.seconds(replace(EXACT, taken=2.0), 8, spread=True, keys=8, meanwhile=1.5)
    assert taken == pytest.approx((hidden[0] + 2.0 * 1.5, hidden[1]))
    every, sent = traffic.seconds(EXACT, 8, spread=True, keys=1e6, meanwhile=1.5)
    assert sent == pytest.approx(layers * 4 * (query + traffic.found) / 100)
    assert every == pytest.approx(sent + layers * 2 * 2.0) and traffic.seconds(EXACT, 0, spread=True) == (0.0, 0.0)


def test_keys_travel_as_long_as_queries_would_be_waited_for_longer() -> None:
    """However many there are, where attention to a rank's own hides them; else while they are less, but for a meeting."""
    traffic = key_traffic_of(TINY, 2, 2.0)
    rows = 8 * (traffic.query + traffic.found) / traffic.key  # as many keys are as many bytes
    more = 2.0 * EXACT.bandwidth * 2 / traffic.key  # or a meeting longer
    for meanwhile, keys in ((0.0, rows + more), (7.0, rows + more + 7.0 * 100 * 2 / (traffic.layers * traffic.key))):
        assert traffic.passes_keys(EXACT, 8, 0.999 * keys, meanwhile)
        assert not traffic.passes_keys(EXACT, 8, 1.001 * keys, meanwhile)


def test_an_engine_passes_what_its_simulation_does() -> None:
    """8B on four H100: behind 120K tokens, from some 7,500 new ones on attention to a rank's own keys hides the others'."""
    device = known_devices()["h100"]
    config = EngineConfig(model=ModelConfig(dtype="bfloat16"), device=DeviceConfig(context_parallel_size=4))
    model = priced(LLAMA_8B, config, device).cost_model
    plans = {rows: StepPlan(0, **chunk(120_000 - rows, rows)) for rows in (4_000, 6_000, 9_000, 16_000)}
    passes = {rows: KeyShare(0, 4, 4, model.passes_keys).passes_keys(plan) for rows, plan in plans.items()}
    assert passes == {4_000: False, 6_000: False, 9_000: True, 16_000: True}
    assert not any(KeyShare(0, 4, 4).passes_keys(plan) for plan in plans.values()), "by bytes"


def chunk(start: int, count: int) -> dict[str, Any]:
    return {"rows": array("i", [0]), "starts": array("i", [start]), "counts": array("i", [count])}


def test_ranks_that_share_the_keys_hold_more_tokens_and_compute_prompts_between_them() -> None:
    """Of 8B on two cards, twice the tokens; a prompt of 32K tokens takes little more than half the time, and a decode
    step of long contexts less."""
    device = known_devices()["h200"]
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1024))
    two = replace(config, device=DeviceConfig(context_parallel_size=2))
    alone, shared = (priced(LLAMA_8B, each, device) for each in (config, two))
    held = [each.placed().kv_groups[0] for each in (alone, shared)]
    tokens = [each.num_blocks * each.spec.block_size for each in held]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.01) and shared.kv_bytes(1000) * 2 == alone.kv_bytes(1000)
    prompt = StepLoad(32768, 1, (32768 * 16384.0,), (32768.0,))
    seconds = [each.cost_model.estimate_load(prompt).seconds for each in (alone, shared)]
    assert 0.5 * seconds[0] < seconds[1] < 0.6 * seconds[0]
    assert shared.decode_seconds(8, 32000) < alone.decode_seconds(8, 32000)
    four = priced(LLAMA_8B, replace(two, device=replace(two.device, tensor_parallel_size=2)), device)
    assert four.kv_bytes(1000) * 4 == alone.kv_bytes(1000)
    assert 0.25 * seconds[0] < four.cost_model.estimate_load(prompt).seconds < 0.35 * seconds[0]
    assert four.decode_seconds(8, 32000) < shared.decode_seconds(8, 32000)
    linked = [each.cost_model.link_seconds(prompt)[0] for each in (shared, four)]
    assert device.link is not None
    exact = replace(device.link, taken=0.0)
    for each, loss in (
        (shared, linked[0]),
        (four, linked[1] - traffic_of(four.cost_model.spec, 4.0).seconds(exact, 16384, 1)[0]),
    ):
        keys = key_traffic_of(each.cost_model.spec, 2, 4.0)
        alone = keys.seconds(exact, 32768, spread=True, keys=32768)[0]
        assert loss == pytest.approx(device.link.taken * alone, rel=0.01), "keys come beside attention to a rank's own"


MEASURED = (  # of 1.3 MiB at most in one shot, over four
    *((2, kib, us) for kib, us in ((8, 2.6), (128, 3.1), (512, 4.2), (2048, 8.6), (8192, 46.8), (65536, 247))),
    *((4, kib, us) for kib, us in ((8, 4.1), (2048, 36.2), (8192, 62.1), (65536, 322))),  # the first with flags
)


@pytest.mark.parametrize(("ranks", "kib", "us"), MEASURED)
def test_sums_take_about_as_long_as_they_were_measured_to(ranks: int, kib: int, us: float) -> None:
    """docs/ranks.md."""
    link = known_devices()["h200"].link
    assert link is not None and link.sum_seconds(kib * 1024, ranks) == pytest.approx(us * 1e-6, rel=0.12)


def ranked(size: int) -> EngineConfig:
    return EngineConfig(device=DeviceConfig(tensor_parallel_size=size))


def test_ranks_are_quicker_than_one_and_hold_more_but_not_as_many_times() -> None:
    device = known_devices()["h200"]
    one, two = (priced(LLAMA_8B, ranked(size), device) for size in (1, 2))
    alone, shared = one.decode_seconds(8, 1000), two.decode_seconds(8, 1000)
    assert alone / 2 + 64 * 9e-6 < shared + 1e-3 and shared < alone
    assert two.kv_bytes(1000) * 2 == one.kv_bytes(1000)
    blocks = [each.placed().kv_groups[0].num_blocks for each in (one, two)]
    assert blocks[1] > 2 * blocks[0]
    slow = priced(LLAMA_8B, ranked(2), replace(device, link=Link(1e9, 1e-3)))
    assert slow.decode_seconds(8, 1000) > shared + 0.06


def test_a_share_that_cannot_be_is_an_error_of_the_simulation_too() -> None:
    with pytest.raises(ConfigError, match="32 attention heads do not divide by 3"):
        priced(LLAMA_8B, ranked(3), known_devices()["h200"])
    assert share(LLAMA_8B, 8).num_kv_heads == 1


def test_keys_that_no_memory_is_set_aside_for_do_not_come_at_once() -> None:
    quick, key = Link(1e15, 0.0), 4096.0
    traffic = KeyTraffic(ranks=2, layers=3, query=1e9, found=1e9, key=key)
    assert traffic.passes_keys(quick, 8, MOST_PASSED / key, 1.0)
    assert not traffic.passes_keys(quick, 8, MOST_PASSED / key + 1, 1.0)
