"""Which replica a request goes to: conversations come back, load outweighs the cache, counts return to nothing."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.routing import ROW_COST, Router, chain, memory_size
from headrace.request import Request, SamplingParams

ALL = (0, 1, 2, 3)


def asking(number: int, ids: list[int], *, n: int = 1, salt: str = "", adapter: str | None = None) -> Request:
    params = SamplingParams(n=n, max_tokens=4, detokenize=False)
    return Request(request_id=number, prompt_token_ids=array("i", ids), params=params, cache_salt=salt, adapter=adapter)


def router(count: int = 4, blocks: int = 1000, **how: str) -> Router:
    made = Router(count, **how)
    for number in range(count):
        made.learn(number, blocks, 16)
    return made


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(30_000) for _ in range(count)]


def test_a_conversation_returns_to_where_it_began() -> None:
    made = router()
    said = {talk: words(talk, 200) for talk in range(8)}
    first: dict[int, int] = {}
    for turn in range(5):
        for talk, ids in said.items():
            at = made.route(asking(10 * talk + turn, ids), ALL)
            assert first.setdefault(talk, at) == at
            made.began(10 * talk + turn)
            made.ended(10 * talk + turn)
            ids += words(1000 + 10 * talk + turn, 50)
    assert sorted(first.values()) == [0, 0, 1, 1, 2, 2, 3, 3]  # and they began everywhere


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    made, prefix = router(2), words(1, 801)  # 800 are cached: what is computed anew elsewhere
    home = made.route(asking(0, prefix), (0, 1))
    made.ended(0)
    made.route(asking(1, words(2, 600)), (home,))
    assert made.route(asking(2, [*prefix, *words(3, 9)]), (0, 1)) == home  # 600 + ROW_COST wait there
    made.ended(2)
    made.route(asking(3, words(4, 900)), (home,))
    assert made.route(asking(4, [*prefix, *words(3, 9)]), (0, 1)) == 1 - home
    assert 600 + ROW_COST < 800 < 1500


def test_answers_count_until_each_has_ended() -> None:
    made = router(2)
    home = made.route(asking(0, words(0, 20), n=3), (0, 1))
    made.began(0)
    for index in (0, 1, 1):  # the last one both here and there
        made.answered(0, index)
    assert made.where(0) == home and made.route(asking(1, words(1, 20)), (0, 1)) == 1 - home
    made.answered(0, 2)
    assert made.where(0) is None and made.ended(0) is None
    made.ended(1)
    assert {made.route(asking(2 + at, words(2 + at, 20)), (0, 1)) for at in range(2)} == {0, 1}


def test_a_dead_replica_gives_up_its_requests_and_what_it_knew() -> None:
    made, ids = router(2), words(7, 320)
    home = made.route(asking(0, ids), (0, 1))
    assert made.lost(home) == [0] and made.lost(home) == []
    made.forget_prefixes(home)
    made.route(asking(1, words(8, 20)), (1 - home,))
    made.ended(1)
    other = made.route(asking(2, ids), (1 - home,))  # the only one that is up
    made.ended(2)
    assert other == 1 - home and made.route(asking(3, ids), (0, 1)) == other


def test_a_salt_and_an_adapter_have_prefixes_of_their_own() -> None:
    ids = array("i", words(1, 64))
    assert len(chain(ids, 16, "a")) == 3  # the last token is always computed
    assert not set(chain(ids, 16, "a\n")) & set(chain(ids, 16, "b\n"))
    other = array("i", [*ids[:20], 5, *ids[21:]])
    assert [mine == theirs for mine, theirs in zip(chain(ids, 16), chain(other, 16), strict=True)] == [
        True,
        False,
        False,
    ]
    assert chain(array("i", [1]), 16) == chain(array("i", []), 16) == []


def test_front_ends_share_what_they_know() -> None:
    """Each writes its own loads; the tables are everybody's."""
    memory = memoryview(bytearray(memory_size(2, 2)))
    one, two = (Router(2, memory, fronts=2, front=front) for front in range(2))
    ids = words(5, 400)
    home = one.route(asking(1, ids), (0, 1))
    assert two.route(asking(1 << 40, words(6, 20)), (0, 1)) == 1 - home  # it is told of the load
    one.ended(1)
    two.ended(1 << 40)
    assert two.route(asking(2 << 40, ids), (0, 1)) == home
    assert any(map(sum, one._rows))
    Router(2, memory, fronts=2, front=1)  # whoever takes the place of a front end that died
    assert not any(map(sum, one._rows))


@pytest.mark.parametrize("how", ["load", "turns"])
def test_the_other_rules_are_blind_to_prefixes(how: str) -> None:
    made, ids = router(routing=how), words(5, 400)
    found = []
    for number in range(8):
        found.append(made.route(asking(number, ids), ALL))
        made.ended(number)
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 3, 3]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loads_come_back_to_nothing(data: st.DataObject) -> None:
    made, live = router(3), list[int]()
    for number in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(("send", "began", "answered", "ended", "lost")))
        if what == "send" or not live:
            ids = words(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 100)))
            made.route(
                asking(number, ids, n=data.draw(st.integers(1, 3))),
                data.draw(st.sampled_from(((0, 1, 2), (1,), (2, 0)))),
            )
            live.append(number)
        elif what == "lost":
            made.lost(data.draw(st.integers(0, 2)))
        else:
            index = (data.draw(st.integers(0, 2)),) if what == "answered" else ()
            getattr(made, what)(data.draw(st.sampled_from(live)), *index)
    for number in live:
        made.ended(number)
    assert not any(map(sum, (*made._waiting, *made._rows)))


def test_a_prompt_of_100_000_tokens_is_routed_in_milliseconds() -> None:
    made, request = router(8), asking(0, words(0, 100_000))
    begun = time.perf_counter()
    made.route(request, tuple(range(8)))
    assert time.perf_counter() - begun < 0.2
