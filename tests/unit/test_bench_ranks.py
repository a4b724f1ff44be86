"""Layouts of models over devices: what their names mean, who gets which cards, and what is said of a row."""

from __future__ import annotations

import argparse
import threading
from typing import Any

import pytest

from headrace.config import EngineConfig
from lab.jobs import LARGE_SHAPES
from lab.ranks import Cards, _table, layout
from lab.ranks_link import said
from lab.ranks_predicted import predicted
from lab.table_rows import requests_of, select_rows

H100 = "NVIDIA H100 80GB HBM3, 79 GiB"


def test_a_layout_is_sizes_a_model_and_rows() -> None:
    found = layout("org/Llama-3.3-70B:tp2xpp4=decode,answers-1x20x8")
    assert found.model == "org/Llama-3.3-70B" and found.rows == ("decode", "answers-1x20x8")
    device = layout("Llama-3.1-8B:tp2xpp4").config(EngineConfig()).device
    assert (device.tensor_parallel_size, device.pipeline_parallel_size, device.num_ranks) == (2, 4, 8)
    assert layout("Llama-3.3-70B:tp4").config(EngineConfig()).model.model == str(LARGE_SHAPES / "Llama-3.3-70B")
    assert layout("ep2").config(EngineConfig()).device.enable_expert_parallel and not device.enable_expert_parallel
    assert layout("pp2-eager=decode").config(EngineConfig()).device.enforce_eager and not device.enforce_eager
    assert layout("dp2").config(EngineConfig()).device.data_parallel_size == 2


@pytest.mark.parametrize(
    "text", ["", "tp", "tp0", "tp2xtp2", "2", "tp2 pp2", "tp2=", ":tp2", "tp1000", "tp2x", "tp2xep2"]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no layout"):
        layout(text)


def test_answers_are_a_row_by_name_alone() -> None:
    (row,) = select_rows(["answers-256x60x20"])
    asked = requests_of(row, 100, 0)
    assert row.unit == "ms" and (asked.prompt_tokens, asked.output_tokens, row.count) == (256 * 60, 256 * 20, 256)
    assert not any(each.group == "answers" for each in select_rows([]))


def test_cards_are_given_out_in_order_even_where_later_ones_would_fit() -> None:
    cards, given, leave = Cards(4), [], threading.Event()

    def take(number: int, count: int) -> None:
        with cards.taken(number, count) as mine:
            given.append((number, mine))
            leave.wait(5.0)

    threads = [threading.Thread(target=take, args=each) for each in ((3, 1), (2, 4), (1, 2), (0, 1))]
    for each in threads:
        each.start()
    while len(given) < 2:
        leave.wait(0.01)
    assert not leave.wait(0.05) and given == [(0, [0]), (1, [1, 2])]  # 3 would fit, and waits for 2
    leave.set()
    for each in threads:
        each.join(5.0)
    assert given[2:] == [(2, [0, 1, 2, 3]), (3, [0])]


def test_a_row_is_said_with_its_spread_and_how_wrong_the_prediction_is() -> None:
    row: dict[str, Any] = {
        "row": "decode-8",
        "unit": "ms",
        "values": [4.0, 2.0, 3.0],
        "floor": 1.5,
        "idle": 0.25,
        "slowest": "decode, 8 rows",
        "problem": None,
    }
    missing = {**row, "row": "mixed", "values": [], "problem": "no room"}
    text = _table("tp2", {"start": 9.0, "ended": 0, "rows": [row, missing], "predicted": {"decode-8": 3.3}})
    assert "decode-8: 3.000 ms (2.000 to 4.000), predicted 3.300 (+10%), floor 1.500, device idle 25%\n" in text
    slow = _table("tp2", {"ended": 0, "rows": [row], "predicted": {"decode-8": 2.4}})
    assert slow.endswith("device idle 25%, slowest step: decode, 8 rows")  # a fifth longer than predicted
    assert "mixed: no room" in text and "tp2: ready after 9.0 s\n" in text
    assert "no time" in _table("pp2", {"ended": "no time was left for it", "predicted": {}})


def test_an_outlier_of_a_sum_is_not_its_figure() -> None:
    each = {"way": "in one shot", "ranks": 2, "bytes": 2**17, "us": [], "graphed_us": [4.0, 4.2, 355.0]}
    assert said(each) == "2 ranks, in one shot, 128 KiB: in a graph 4.2 us (4.0 to 355.0)"


def test_two_devices_are_predicted_to_be_faster_than_one() -> None:
    rows = ("decode-8", "answers-4x60x20", "shared-prefix")
    one, two = (
        predicted(layout(f"Llama-3.1-8B:{name}").config(EngineConfig()), rows, 1.0, H100) for name in ("tp1", "tp2")
    )
    assert one.keys() == set(rows) and all(0.4 * one[name] < two[name] < one[name] for name in rows)
    assert predicted(layout("tp1").config(EngineConfig()), rows, 1.0, "cpu") == {}
