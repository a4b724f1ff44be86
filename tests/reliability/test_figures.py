"""The product's own constants where a check may not wait for them: what is patched to be shorter elsewhere keeps the
promise as it is shipped."""

from __future__ import annotations

import pytest

from headrace.engine import (
    connection,
    grammar_check,
    grammar_masks,
    grammar_worker,
    loop,
    process,
    template,
    template_worker,
)
from headrace.processes import sandbox
from headrace.server import connection as http
from headrace.server import exchange, lifecycle, limits

# what, how much it is, how much the promise allows
FIGURES = (
    ("silence before a comment, with the beat that sends it", exchange.PING_SECONDS + exchange.PULSE_SECONDS, 10.0),
    ("a client that takes nothing", exchange.LAGGARD_SECONDS + exchange.PULSE_SECONDS, 61.0),
    ("an answer that nobody reads", http.UNREAD_SECONDS, 70.0),
    ("headers that do not come", http.HEADER_SECONDS, 30.0),
    ("a body that stops coming", limits.IDLE_SECONDS, 30.0),
    ("a body in all", limits.WHOLE_SECONDS, 300.0),
    ("bytes of headers", http.MAX_HEADER_BYTES, 1 << 20),
    ("a turn of the loop outside the device", loop.HOST_LIMIT, 5.0),
    ("a call of the device", loop.DEVICE_LIMIT, 30.0),
    ("an engine that is not heard", connection.HANG_SECONDS, 5.0),
    (
        "a hang, from the last turn to the end",
        connection.HANG_SECONDS + connection.GONE_SECONDS + process.BEAT_SECONDS,
        30.0,
    ),
    ("rendering a template", template.RENDER_SECONDS, 1.0),
    ("bytes of a rendered prompt", template.MAX_OUTPUT_BYTES, 16 << 20),
    ("bytes of a template's process", template_worker.MEMORY_BYTES, 512 << 20),
    ("templates that render at once", sandbox.MAX_PROCESSES, 16),
    ("compiling a grammar", grammar_check.COMPILE_SECONDS, 2.0),
    ("bytes of a grammar's trial", grammar_worker.MEMORY_BYTES, 256 << 20),
    ("bytes of compiled grammars", grammar_masks.CACHE_BYTES, 256 << 20),
    ("last words", lifecycle.LAST_WORDS_SECONDS + lifecycle.ENGINE_EXIT_SECONDS, 2.0),
)


@pytest.mark.parametrize(("what", "figure", "allowed"), FIGURES, ids=[name for name, *_ in FIGURES])
def test_the_products_own_constants_keep_the_promises(what: str, figure: float, allowed: float) -> None:
    assert figure <= allowed, f"{what}: {figure}, promised {allowed}"
