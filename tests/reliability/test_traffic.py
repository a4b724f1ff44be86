"""The checks of checks_traffic.py in their fast form, each with a planted defect that turns it red."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability import checks_traffic
from tests.support.planted import planted
from tests.support.serving import SERVE, Server, serving

PATIENCE = 6.0  # seconds where the promise is two: the machine may be busy with other tests


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*checks_traffic.QUICK, command=SERVE) as running:
        yield running


def test_many_clients_that_are_cut_leave_nothing() -> None:
    checks_traffic.mass_disconnect(80, 2, seconds=PATIENCE)


def test_requests_that_go_on_without_their_client_are_noticed() -> None:
    defect = "from headrace.engine import client; client.AsyncLLM.forget = lambda self, request_id: self._streams.pop(request_id, None)"
    with pytest.raises(AssertionError, match=r"not as before|no request holds"):
        checks_traffic.mass_disconnect(4, 1, seconds=0.4, command=planted(defect))


def test_equal_names_collide_with_nobody(server: Server) -> None:
    checks_traffic.equal_names(server, 150)


def test_names_that_are_keys_are_noticed() -> None:
    defect = """
        from types import SimpleNamespace
        from headrace.engine import client
        client.itertools = SimpleNamespace(count=lambda start: iter(lambda: 7, 8))
    """
    with serving(*checks_traffic.QUICK, command=planted(defect)) as mixed_up, pytest.raises((AssertionError, KeyError)):
        checks_traffic.equal_names(mixed_up, 60)


def test_what_the_cache_could_never_hold_is_refused_at_once() -> None:
    checks_traffic.unservable(60)


def test_a_prompt_that_is_refused_too_late_is_noticed() -> None:
    defect = (
        "from headrace.engine import inputs; inputs.ContextLengthExceeded = lambda *given, **named: KeyError('planted')"
    )
    with pytest.raises(AssertionError):
        checks_traffic.unservable(1, command=planted(defect))


def test_ten_times_too_much_is_told_to_come_back() -> None:
    checks_traffic.overload(0.8, step=0.01, slack=15.0)


def test_refusals_that_do_not_say_when_are_noticed() -> None:
    defect = "from headrace.server import exchange; exchange._error_headers = lambda *given: ()"
    with pytest.raises(AssertionError, match="do not say when"):
        checks_traffic.overload(0.25, step=0.01, command=planted(defect))


def test_refusals_that_take_their_time_are_noticed() -> None:
    defect = """
        import asyncio
        from headrace.server.exchange import Exchange
        refuse = Exchange.reply_error
        async def late(self, error):
            await asyncio.sleep(0.5)
            await refuse(self, error)
        Exchange.reply_error = late
    """
    with pytest.raises(AssertionError, match="refusals took"):
        checks_traffic.overload(0.25, step=0.01, slack=4.0, command=planted(defect))


def test_the_books_balance(server: Server) -> None:
    checks_traffic.ledger(server, 200)


@pytest.mark.parametrize(
    "defect",
    [
        "from headrace.server.exposition import ServerMetrics as M; M.count_answer = lambda *given: None",
        "from headrace.server.exposition import ServerMetrics as M; M.count_end = lambda *given: None",
    ],
)
def test_books_that_do_not_balance_are_noticed(defect: str) -> None:
    with serving(*checks_traffic.QUICK, command=planted(defect)) as careless, pytest.raises(AssertionError):
        checks_traffic.ledger(careless, 60)


def test_slow_readers_cost_little() -> None:
    checks_traffic.slow_readers(8, 0.8)


def test_sigterm_lets_thirty_two_streams_end() -> None:
    checks_traffic.drain(32)


def test_streams_that_sigterm_cuts_are_noticed() -> None:
    defect = "from headrace.server.lifecycle import Lifecycle; Lifecycle._drain = lambda self, *given: self._end_without_engine()"
    with pytest.raises((AssertionError, ConnectionError)):  # a server that is gone may cut even the question
        checks_traffic.drain(4, command=planted(defect))


def test_streams_of_both_routes_keep_the_rules(server: Server) -> None:
    checks_traffic.conforming_streams(server, 320)
