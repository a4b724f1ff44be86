"""The measuring client: it counts every event, and refuses a figure when one is missing. Rates are not judged here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.stream_rate import StreamRateError, children, cpu_seconds, measure, show
from tests.support.serving import SERVE, Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--executor", "keyed-hash", "--max-num-seqs", "16", "--max-queue", "16", command=SERVE) as running:
        yield running


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_every_token_has_its_event_even_when_the_engine_is_far_faster_than_its_readers(
    server: Server, route: str
) -> None:
    rate = measure(server.url, clients=16, tokens=600, route=route)
    assert rate.tokens_per_second == pytest.approx(16 * 600 / rate.seconds) and rate.client_microseconds
    assert "16 clients x 600 tokens" in show(rate)


def test_streams_that_are_refused_or_cut_give_no_figure(server: Server) -> None:
    with pytest.raises(StreamRateError, match="429"):
        measure(server.url, clients=24, tokens=2000)
    with pytest.raises(StreamRateError, match="400"):
        measure(server.url, clients=1, tokens=10**6)


def test_cpu_time_is_that_of_the_named_process(server: Server) -> None:
    assert cpu_seconds(server.process.pid) > 0 and len(children(server.process.pid)) >= 1
