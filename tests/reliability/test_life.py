"""The checks of checks_life.py in their fast form, each with a planted defect that turns it red."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.reliability import checks_life
from tests.support.planted import planted
from tests.support.serving import SERVE, serving, wait_for
from tests.support.snapshot import private_bytes

# A frozen engine is seen after so long. (That it is with the product's five seconds: tests/server/test_operation.py.)
SOON = "from headrace.engine import connection; connection.HANG_SECONDS = 1.5"


def test_a_killed_engine_is_told_to_sixteen_clients() -> None:
    checks_life.engine_killed(1)


def test_a_clean_end_after_a_failure_is_noticed() -> None:
    defect = """
        from headrace.server import app
        async def hush(exchange, error):
            await exchange.finish(b"")
        app.fail_stream = hush
    """
    with pytest.raises(AssertionError):
        checks_life.engine_killed(1, 2, command=planted(defect))


def test_a_killed_front_end_takes_the_engine_along() -> None:
    checks_life.server_killed(1)


def test_a_frozen_engine_is_unhealthy_and_recovers() -> None:
    checks_life.frozen_engine(thaw=True, command=planted(SOON))


def test_health_that_does_not_ask_is_noticed() -> None:
    defect = "from headrace.engine import connection; connection.HANG_SECONDS = 1e9"
    with pytest.raises(AssertionError, match="the hang is seen"):
        checks_life.frozen_engine(thaw=True, within=2.0, command=planted(defect))


@pytest.fixture(scope="module", autouse=True)
def silent_step(request: pytest.FixtureRequest) -> Iterator[Future[str] | None]:
    """A step longer than the silence that is allowed goes on beside the other tests, which need little of it."""
    if not any(item.name == "test_a_silent_step_is_filled_with_comments" for item in request.session.items):
        yield None
        return
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(checks_life.long_step, 11.0)


def test_under_load_every_probe_succeeds() -> None:
    checks_life.saturated(1.0)


def test_killed_at_any_moment_it_starts_again() -> None:
    checks_life.crash_loop(2)


def test_a_memory_ceiling_refuses_requests_and_nothing_else() -> None:
    assert "503" in checks_life.memory_ceiling(24 << 20)  # 128 MiB, as promised, are more than twelve bodies can take


def test_an_error_of_memory_that_is_a_defect_of_ours_is_noticed() -> None:
    defect = "from headrace.server import app; app.Unavailable = lambda *given, **named: app.HeadraceError('planted')"
    with pytest.raises(AssertionError, match="500"):
        checks_life.memory_ceiling(24 << 20, command=planted(defect))


def test_one_socket_listens() -> None:
    checks_life.sockets()


@pytest.mark.parametrize("defect", ["import socket; kept = socket.create_server(('0.0.0.0', 0))"])
def test_another_socket_is_noticed(defect: str) -> None:
    with pytest.raises(AssertionError):
        checks_life.sockets(command=planted(defect))


def test_a_silent_step_is_filled_with_comments(silent_step: Future[str]) -> None:
    """With the product's own seconds; the last of this file, for its step began with the first."""
    silent_step.result()


def test_an_engine_holds_what_it_says_at_its_start() -> None:
    """The pages of the cache are touched when blocks are first used: what is said of a full one must hold then."""
    with serving("--kv-cache-memory", "64MiB", command=SERVE) as server:
        wait_for(lambda: any("Ready after" in line for line in server.lines))
        told = next(
            found for line in server.lines if (found := re.search(r"memory +([\d.]+) GiB, at most ([\d.]+) GiB", line))
        )
        at_start, at_most = (float(each) * 2**30 for each in told.groups())
        engine = next(
            pid for pid in server.children() if b"engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        held = private_bytes(engine)
        assert abs(held - at_start) < 32 << 20 and at_most - at_start >= 64 << 20
        prompts = [[(7 * place + number) % 500 for place in range(400)] for number in range(42)]  # 4 KiB a token
        for part in range(0, 42, 14):
            assert (
                server.ask(
                    "POST", "/v1/completions", {"prompt": prompts[part : part + 14], "max_tokens": 1}, timeout=60
                ).status
                == 200
            )
        assert held + (56 << 20) < private_bytes(engine) < at_most + (16 << 20)
