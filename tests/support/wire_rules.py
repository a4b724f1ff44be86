"""What every byte that leaves a server must look like: the rules of streams, and words that may not appear anywhere.

What lives here: judging bytes; each function raises AssertionError or returns what it found. What may not: sending
anything.
"""

from __future__ import annotations

import re
from typing import Any

from tests.support.serving import events_of

REASONS = frozenset(("stop", "length", "tool_calls", "content_filter"))
UNCLEAN = re.compile(rb"0x[0-9a-f]{6,}|Traceback|/home/|/usr/|/root/|site-packages|\x1b|object at ")


def unclean(data: bytes, *secrets: bytes) -> list[bytes]:
    """Places where addresses, paths, tracebacks, escape characters or one of ``secrets`` show, with what stands around
    them."""
    hits = [match.start() for match in UNCLEAN.finditer(data)]
    hits += [at for secret in secrets if (at := data.find(secret)) >= 0]
    return [data[max(0, at - 60) : at + 60] for at in hits]


def check_stream(body: bytes, *, chat: bool, n: int = 1, usage: bool = False) -> dict[str, int]:
    """One finished stream of either OpenAI route; returns its counts: events, tokens where usage tells them."""
    for text in (b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"NaN", b"Infinity", b"\nid:", b"data: \n"):
        assert text not in body, text
    events = events_of(body)  # framing, ASCII and finite numbers are its business
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    chunks = events[:-1]
    usages = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(usages) == usage and (not usage or (chunks[-1] is usages[0] and chunks[-1]["choices"] == []))
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    ends = check_choices([choice for chunk in chunks for choice in chunk["choices"]], chat=chat)
    assert sorted(ends) == list(range(n)) and all(count == 1 for count in ends.values()), ends
    return {"events": len(events), "tokens": usages[0]["usage"]["completion_tokens"] if usage else 0}


def check_choices(choices: list[dict[str, Any]], *, chat: bool) -> dict[int, int]:
    """Choices of all chunks, in order; returns how often each index ended."""
    begun: set[int] = set()
    ends: dict[int, int] = {}
    for choice in choices:
        index, reason = choice["index"], choice["finish_reason"]
        assert index not in ends, "a choice goes on after its end"
        if chat:
            assert ("role" in choice["delta"]) == (index not in begun), "the role comes once, first"
        begun.add(index)
        if reason is not None:
            assert reason in REASONS, reason
            ends[index] = ends.get(index, 0) + 1
    assert not begun or min(begun) == 0
    return ends
