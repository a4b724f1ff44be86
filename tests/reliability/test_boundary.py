"""The checks of checks_boundary.py in their fast form, each with a planted defect that turns it red."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from headrace.server.limits import INLINE_BYTES, Threads
from tests.reliability import checks_boundary
from tests.support.planted import planted
from tests.support.serving import SERVE, Server, serving
from tests.support.wire_rules import check_stream, unclean


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*checks_boundary.HASH, command=SERVE) as running:
        yield running
        assert not unclean("\n".join(running.lines).encode()), running.lines


@pytest.fixture(scope="module")
def careless() -> Iterator[Server]:
    """A server that fails on one value, counts nothing and knows no bad token ids."""
    defects = """
        from headrace import request
        from headrace.engine import inputs
        from headrace.request import SamplingParams
        check = SamplingParams.__post_init__
        def fail(self):
            if self.temperature == 2:
                raise KeyError("planted")
            check(self)
        SamplingParams.__post_init__ = fail
        request.MAX_STOP_STRINGS = 10**9
        request.check_token_ids = inputs.check_token_ids = lambda *given: None
        SamplingParams.check_token_ids = lambda self, vocab_size: None
        from headrace.server import limits
        limits.Guard.check_browser = lambda self, headers: ()
    """
    with serving(*checks_boundary.HASH, command=planted(defects)) as running:
        yield running


def test_every_value_of_every_field_is_taken_or_refused_by_name_on_all_routes_alike(
    server: Server, careless: Server
) -> None:
    checks_boundary.lattice(500, server, every=3)
    with pytest.raises(AssertionError, match="status 500"):
        checks_boundary.lattice(0, careless)


def test_bad_token_ids_are_refused_beside_neighbours(server: Server, careless: Server) -> None:
    checks_boundary.token_ids(server)
    with pytest.raises((AssertionError, KeyError)):
        checks_boundary.token_ids(careless)


def test_what_would_become_millions_of_things_is_refused_before(server: Server) -> None:
    checks_boundary.fan_out(server, 200_000, seconds=3.0)
    checks_boundary.longest_legal(server)


def test_a_bound_that_is_missing_is_noticed(careless: Server) -> None:
    with pytest.raises(AssertionError, match="stop"):
        checks_boundary.fan_out(careless, 20_000)


def test_a_million_tokens_of_prompt_hold_up_nobody() -> None:
    checks_boundary.million_tokens(10, 4 << 20, slack=5.0)


def test_large_work_is_done_beside_the_event_loop() -> None:
    async def where(size: int) -> int:
        return await threads.run(size, threading.get_ident)

    threads = Threads()
    try:
        assert asyncio.run(where(INLINE_BYTES)) == threading.get_ident()
        assert threading.get_ident() not in {asyncio.run(where(size)) for size in (INLINE_BYTES + 1, 10**6, 10**8)}
    finally:
        threads.close()


def test_large_bodies_that_hold_up_everybody_are_noticed() -> None:
    defect = """
        import time
        from headrace.server.limits import Threads
        async def inline(self, size, work, tenant=""):
            time.sleep(0.6 * (size > 10**6))
            return work()
        Threads.run = inline
    """
    with pytest.raises(AssertionError, match="probes p99"):
        checks_boundary.million_tokens(3, 2 << 20, slack=5.0, command=planted(defect))


def test_bodies_in_tiny_chunks_and_pipelines_and_halves(server: Server) -> None:
    checks_boundary.dribble(server, 30_000)
    checks_boundary.pipeline(server, 60)
    checks_boundary.slowloris(server, 200)


def test_nothing_that_leaves_tells_of_the_inside() -> None:
    checks_boundary.hygiene(200)


def test_a_log_that_tells_prompts_is_noticed() -> None:
    defect = """
        from headrace.server import limits
        decode = limits.decode_object
        limits.decode_object = lambda body, **named: print("got", body, file=sys.stderr, flush=True) or decode(body, **named)
    """
    with pytest.raises(AssertionError, match=r"xylophone|x1b"):
        checks_boundary.hygiene(60, command=planted(defect))


@pytest.mark.parametrize(
    "data", [b"at 0x7f12ab34", b"Traceback (most", b'File "/usr/lib/x.py"', b"a\x1b[31m", b"key sk-1"]
)
def test_what_may_not_leave_is_seen(data: bytes) -> None:
    assert unclean(b"before " + data + b" after", b"sk-1") and not unclean(b"0x12 is fine, usr too")


def chunk(**choice: object) -> bytes:
    body = {
        "id": "1",
        "object": "o",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": "", "finish_reason": None, **choice}],
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


END, DONE = chunk(finish_reason="stop"), b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "body",
    [
        END,
        DONE + END,
        END + DONE + DONE,
        chunk() + DONE,
        END + chunk() + DONE,
        chunk(finish_reason="abort") + DONE,
        END.replace(b'"1"', b"NaN") + DONE,
        b"id: 3\n" + END + DONE,
        b"data: \n\n" + END + DONE,
        chunk() + END.replace(b'"1"', b'"2"') + DONE,
        chunk(text="\u2028").replace(b"\\u2028", b"\xe2\x80\xa8") + END + DONE,
    ],
)
def test_streams_against_the_rules_are_seen(body: bytes) -> None:
    check_stream(chunk() + END + DONE, chat=False)
    with pytest.raises(AssertionError):
        check_stream(body, chat=False)
