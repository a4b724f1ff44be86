"""The check of what one tenant learns of another's prefixes (row 18).

What lives here: the check, in a size its caller picks; it raises AssertionError or returns its figure in words.
What may not: pytest, starting servers with defects.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time

from tests.reliability.trend import alike
from tests.support.planted import Command
from tests.support.serving import SERVE, send, serving

FLAGS = (
    "--executor",
    "keyed-hash",
    "--device-time",
    "0.003",
    "--max-num-batched-tokens",
    "64",
    "--max-num-seqs",
    "4",
    "--num-blocks",
    "128",
)
PROMPT = 320  # tokens: five steps without the cache, one with it


def foreign_prefixes(pairs: int, *, chance: float = 0.01, command: Command = SERVE) -> str:
    """What another tenant has in the cache takes as long as what nobody has; what is one's own is seen to take less.

    On a machine that does other things too it may take up to three times as many pairs until that is seen.
    """
    rng = random.Random(18)
    times: dict[str, list[float]] = {"foreign": [], "nobody's": [], "own": []}
    with (
        serving(*FLAGS, "--block-size", "16", command=command) as server,
        contextlib.closing(server.connect()) as connection,
    ):

        def timed(salt: str, prompt: list[int]) -> tuple[float, int]:
            body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            begun = time.perf_counter()
            usage = send(connection, "POST", "/v1/completions", body).json["usage"]
            return time.perf_counter() - begun, (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

        def one_pair() -> None:
            mine, other = ([rng.randrange(8, 8000) for _ in range(PROMPT)] for _ in range(2))
            timed("a", mine)
            for kind, prompt in rng.sample((("foreign", mine), ("nobody's", other)), 2):
                seconds, cached = timed("b", prompt)
                times[kind].append(seconds)
                assert cached == 0 or kind == "nobody's", f"{cached} tokens of another tenant's prefix are told"
            times["own"].append(timed("b", mine)[0])

        for _ in range(3):
            for _ in range(pairs):
                one_pair()
            if alike(times["own"], times["nobody's"]) < chance:
                break
    same, seen = alike(times["foreign"], times["nobody's"]), alike(times["own"], times["nobody's"])
    assert seen < chance, f"a prefix of one's own is not seen by its time: this proves nothing (p {seen:.3f})"
    assert same > chance, f"another tenant's prefix is seen by its time (p {same:.5f})"
    medians = ", ".join(f"{kind} {statistics.median(values) * 1000:.1f} ms" for kind, values in times.items())
    return f"{len(times['own'])} pairs: p {same:.2f} ({medians}), 0 tokens told"
