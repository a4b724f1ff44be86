"""Prompts computed by one replica and answered by another: the same tokens, whoever dies, leaves or has no room.

Replicas are cores in this process over the keyed-hash executor, which checks every slot of the cache that it reads; the
front end is the real one, with turns in any order between it and them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ServerConfig
from headrace.disagg.notes import Sent
from headrace.disagg.roles import Measured
from headrace.disagg.staging import staging_size
from headrace.engine import connection as frames
from headrace.engine.executor import ExportBlocks
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.engine.loop import Left
from headrace.engine.replicas import Entry, Replicas
from headrace.engine.routing import Router, memory_size
from headrace.errors import ConfigError
from headrace.lora.registry import AdapterRegistry
from headrace.portability import shared_file
from headrace.processes.messages import Unpacker, pack
from headrace.request import Request
from headrace.server.dashboard import sentence
from headrace.server.frontends import link
from headrace.server.frontends.parent import FrontEnds
from headrace.spec import AdapterSpace
from tests.support.hand_over import House
from tests.support.hash_engine import VOCAB, engine, expected, request


def house_of(
    fd: int,
    count: int = 2,
    givers: int = 1,
    slots: int | None = None,
    swaps: bool = False,
    router: Router | None = None,
    **sizes: Any,
) -> House:
    return House(fd, [engine(**sizes) for _ in range(count)], givers, slots, swaps, router)


@pytest.fixture
def fd() -> Iterator[int]:
    made = shared_file(staging_size(4))
    yield made
    os.close(made)


def prompt(number: int, length: int) -> list[int]:
    return [(number * 37 + place * 11) % 500 + 8 for place in range(length)]


def check(house: House, asked: Request) -> None:
    for index in range(asked.params.n):
        assert house.answers.tokens[asked.request_id, index] == expected(asked, index=index), house.answers.finished


def test_answers_are_those_of_one_engine_and_prefixes_are_found_on_both_sides(fd: int) -> None:
    house = house_of(fd, depth=1, budget=32, num_blocks=200)
    first = [request(at, prompt(at, 90 + at), n=1 + at % 2, seed=at, stop_token_ids=(3,)) for at in range(3)]
    for each in first:
        house.front.submit(each)
    house.run()
    given, taken = house.handed(0), house.handed(1)
    nodes = sum((len(each.prompt_token_ids) - 1) // 4 for each in first)
    assert given.given == taken.taken == 3 and given.given_bytes == taken.taken_bytes == nodes * 64
    assert given.early_bytes >= given.given_bytes / 2  # chunks of 32: those before the last went ahead
    again = [
        request(10, prompt(0, 90)),  # all of it is where it is answered
        request(11, [*prompt(1, 91), *prompt(7, 80)]),  # its beginning
        request(12, prompt(9, 40)),  # short
        request(13, prompt(10, 90), prompt_logprobs=0),  # scored
    ]
    for each in again:
        house.front.submit(each)
        house.run()
    assert [house.answers.cached[at, 0] for at in range(10, 14)] == [88, 88, 0, 0]
    assert house.handed(0).given == 4 and house.handed(1).taken_bytes - taken.taken_bytes == (170 // 4 - 22) * 64
    for each in (*first, *again):
        check(house, each)
    house.assert_at_rest()


def test_an_adapter_is_handed_over_whatever_its_name_stood_for_before(fd: int) -> None:
    """In one replica or the other. (It is entered again and again where nobody finds what it has computed.)"""
    sizes = {"vocab_size": VOCAB, "max_model_len": 200, "max_num_seqs": 8, "num_blocks": 200, "block_size": 4}
    info = keyed_hash_info(**sizes, adapters=AdapterSpace(4, 2, 0))
    house = House(fd, [engine(info=info, executor=KeyedHashExecutor(info)) for _ in range(2)])
    for each in house.replicas:
        desk = each.core.adapters = AdapterRegistry(lambda folder: None, each.core.executor.control, 4)
        for folder in ("/old", "/older", "/new")[each is house.replicas[1] :]:
            desk.register("a", folder)
            desk.unregister("a")
        desk.register("a", "/new")
    house.front.submit(request(0, prompt(1, 90), adapter="a"))
    for _ in range(40):
        for each in house.replicas:
            if each.has_work:
                each.turn()
            while each.outbox:
                each.tell()
    assert len(house.answers.tokens[0, 0]) == 8 and house.handed(0).given == house.handed(1).taken == 1
    house.assert_at_rest()


def test_what_prompts_share_is_handed_over_once(fd: int) -> None:
    """All at once. Short rests are computed where the answer is; the last one belongs to somebody else."""
    house = house_of(fd, budget=32, num_blocks=200)
    asked = [request(at, [*prompt(0, 80), *prompt(at + 1, length)]) for at, length in enumerate((80, 80, 20, 0))]
    asked.append(replace(asked[0], request_id=4, cache_salt="other"))
    for each in asked:
        house.front.submit(each)
    house.run()
    for each in asked:
        check(house, each)
    assert house.handed(1).taken == 3
    assert house.handed(0).given_bytes == (39 + 19 + 39) * 64
    assert house.replicas[1].core.scheduler.counters.prefix_hits >= 39 * 4 + 39 * 4 + 20 * 4 + 19 * 4 + 39 * 4
    house.assert_at_rest()


def test_who_waits_for_shared_nodes_goes_on_when_their_request_is_gone(fd: int) -> None:
    house = house_of(fd, budget=32, num_blocks=200)
    asked = [request(at, [*prompt(0, 100), *prompt(at, 66)]) for at in range(3)]
    for each in asked:
        house.front.submit(each)
    for _ in range(2):
        for each in house.replicas:
            each.turn()
            while each.outbox:
                each.tell()
    house.front.abort(0)
    house.run()
    for each in asked[1:]:
        check(house, each)
    assert house.handed(0).given_bytes <= (25 + 2 * 16) * 64
    house.assert_at_rest()


def test_a_full_replica_makes_requests_wait(fd: int) -> None:
    """Of 40 blocks one prompt takes 30; staging has room for two."""
    house = house_of(fd, num_blocks=40, slots=2)
    asked = [request(at, prompt(at, 120), max_tokens=20) for at in range(4)]
    for each in asked:
        house.front.submit(each)
    for _ in range(6):
        for each in house.replicas:
            each.turn()
            while each.outbox:
                each.tell()
    state = house.replicas[1].core.explain(3)
    assert state is not None and state.wait is not None and state.wait.kind == "prefill"
    house.run()
    for each in asked:
        check(house, each)
    assert house.handed(1).taken == 4
    house.assert_at_rest()


def test_what_was_written_anew_is_not_read(fd: int) -> None:
    house = house_of(fd, budget=32)
    one = request(1, prompt(1, 100))
    house.front.submit(one)
    giver, taker = house.replicas
    while not any(isinstance(getattr(each, "sent", None), Sent) for each in taker.inbox):
        for each in house.replicas:
            each.turn() if each is giver or not taker.core.hand_over.request_ids else None  # type: ignore[union-attr]
            while each.outbox:
                each.tell()
    sent = next(each.sent for each in taker.inbox if isinstance(each, frames.HandOver))
    giver.core.executor.control(ExportBlocks(0, sent.slots[:1], (b"another's hash..",), (((0,),),)))
    house.run()
    check(house, one)
    assert house.handed(1).alone == 1 and house.handed(1).taken == 0
    house.assert_at_rest()


def test_a_front_end_that_dies_leaves_nothing_behind(fd: int) -> None:
    house = house_of(fd, budget=32, slots=3)
    for at in range(3):
        house.front.submit(request(at, prompt(at, 90)))
    for _ in range(3):
        for each in house.replicas:
            each.turn()
            while each.outbox:
                each.tell()
    assert all(each.core.hand_over.busy for each in house.replicas)  # type: ignore[union-attr]
    for each in house.replicas:
        each.inbox.append(Left())
    while any(each.has_work for each in house.replicas):
        for each in house.replicas:
            each.turn()
    for each in house.replicas:
        each.assert_at_rest()


def test_a_prompt_outlives_who_answered_it(fd: int) -> None:
    """Sent again, it is handed to another replica, and not computed again."""
    house = house_of(fd, 3, budget=32, num_blocks=200)
    first = request(0, prompt(0, 120), max_tokens=40)
    house.front.submit(first)
    while not any(len(tokens) > 4 for tokens in house.answers.tokens.values()):
        for each in house.replicas:
            each.turn()
            while each.outbox:
                each.tell()
    answered = house.front._router.where(0)
    assert answered is not None
    house.replicas[answered].die()
    assert house.lost == {0}
    house.front.submit(again := replace(first, request_id=1))
    house.run()
    check(house, again)
    assert house.handed(3 - answered).taken == 1 and house.answers.cached[1, 0] == 29 * 4
    house.assert_at_rest()


def varied(house: House) -> list[int]:
    """Of three one computes prompts, which queue there; then answers are slow, and it is enough. How many compute
    prompts after each batch."""
    asked, roles = list[Request](), list[int]()
    for batch in range(16):
        length, tokens, count, turn = (90, 2, 12, 0.1) if batch < 8 else (70, 40, 2, 0.3)
        for _ in range(count):
            asked.append(request(len(asked), prompt(len(asked), length), max_tokens=tokens))
            house.front.submit(asked[-1])
        while any(each.has_work for each in house.replicas):
            for each in house.replicas:
                each.turn()
                while each.outbox:
                    each.tell()
            house.seconds += turn
        roles.append(sum(house.front._roles.told.values()))
    for each in asked:
        check(house, each)
    house.assert_at_rest()
    return roles


def told(engine: Replicas) -> list[str]:
    return [sentence(kind, who, values) for _, _, kind, who, values, _ in engine._changes]


def test_roles_change_by_what_the_front_end_measures(fd: int) -> None:
    house = house_of(fd, 3, swaps=True, budget=32, num_blocks=200)
    roles = varied(house)
    assert roles[0] == 1 and max(roles) == 2 and roles[-1] < 2 and house.front._roles.num_changes >= 2
    entries = told(house.front)
    assert "computes prompts from now on" in entries[0] and "answers from now on" in entries[1]


def test_the_parent_knows_what_its_front_ends_change(fd: int) -> None:
    """It shows the dashboard of all of them."""
    routing = shared_file(memory_size(3, 2))
    config = EngineConfig(device=DeviceConfig(data_parallel_size=3, prefill_replicas=1, swap_roles=True))
    launch = link.Launch(config, ServerConfig(api_server_count=2), "", b"", 0, -1, -1, 0, "", routing=routing)
    house = house_of(
        fd, 3, swaps=True, router=link.create_router(structs.replace(launch, number=1)), budget=32, num_blocks=200
    )
    sockets: Any = [SimpleNamespace(listen=lambda *_: None) for _ in range(3)]
    parent = Replicas(sockets, config, link.create_router(launch))
    wire = Unpacker(link.FromFront)

    def send(entry: Entry) -> None:
        for frame in wire.feed(pack(link.Changed(entry))):
            FrontEnds._heard(SimpleNamespace(_engine=parent), None, frame)  # type: ignore[arg-type]

    house.front.on_change = send
    assert sum(parent._roles.told.values()) == varied(house)[0] == 1
    assert told(parent) and parent._told_roles == house.front._told_roles
    assert not any(map(sum, (*parent._router._waiting, *parent._router._rows)))
    os.close(routing)


def test_a_split_that_loses_is_told_once_where_roles_stay(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    assert set(varied(house_of(fd, 3, budget=32, num_blocks=200))) == {1}
    (line,) = [each.getMessage() for each in caplog.records if each.name == "headrace.engine.replicas"]
    assert "Better: --prefill-replicas 2, or --technique swap_roles=on." in line


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(at, marks=pytest.mark.slow) for at in range(8, 60))])
def test_whatever_happens_answers_are_right_and_nothing_is_left(fd: int, seed: int) -> None:
    """Clients leave, replicas die or change roles, steps come in any order, in caches that are too small for all."""
    rng = random.Random(seed)
    sizes = {"num_blocks": rng.choice((45, 64, 200)), "slots": rng.choice((1, 7, None)), "depth": seed % 3}
    swaps = seed % 2 == 1
    house = house_of(fd, 4, 2, budget=rng.choice((24, 64)), window=rng.choice((None, None, 40)), swaps=swaps, **sizes)
    deaths = rng.sample(range(4), rng.choice((0, 1, 1, 2, 3)))
    asked, left = list[Request](), set[int]()
    for at in range(rng.randint(4, 14)):
        shared = prompt(rng.randint(0, 2), rng.choice((0, 40, 100)))
        each = request(at, [*shared, *prompt(50 + at, rng.randint(1, 60))], n=rng.choice((1, 1, 3)), seed=at, max_tokens=12)  # fmt: skip
        asked.append(each)
        house.front.submit(each)
        for _ in range(rng.randint(0, 12)):
            one = rng.choice([each for each in house.replicas if each.alive])
            one.turn() if rng.random() < 0.5 else one.outbox and one.tell()
        if rng.random() < 0.25:
            left.add(gone := rng.choice(asked).request_id)
            house.front.abort(gone)
        if deaths and rng.random() < 0.3:
            house.replicas[deaths.pop()].die()
        if swaps and rng.random() < 0.3:
            house.front._roles._turn(rng.randrange(4), rng.random() < 0.5, Measured())
    house.run(rng)
    for each in asked:
        if each.request_id not in left | house.lost:
            check(house, each)
    house.assert_at_rest()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prefill_replicas": 2, "data_parallel_size": 2}, "give fewer of them, or more replicas"),
        ({"prefill_replicas": 1}, "none would answer"),
        ({"swap_roles": True, "data_parallel_size": 2}, "give --prefill-replicas"),
        ({"prefill_replicas": 1, "data_parallel_size": 2, "tensor_parallel_size": 2}, "2 ranks"),
        ({"prefill_replicas": 1, "data_parallel_size": 2, "enable_sleep_mode": True}, "enable_sleep_mode"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeviceConfig(**wrong)


def test_without_a_prefix_cache_there_is_nothing_to_hand_over() -> None:
    device = DeviceConfig(prefill_replicas=1, data_parallel_size=2)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(device=device, cache=CacheConfig(enable_prefix_caching=False))
