"""How hosts meet: who is let in, who is turned away, and what is said of those that differ or do not come."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import DeviceConfig, EngineConfig, ModelConfig
from headrace.errors import ConfigError, EngineDead
from headrace.parallel import frames, ranks, rendezvous
from headrace.parallel.node import Node
from headrace.parallel.ranks import Ranks
from headrace.parallel.rendezvous import Place, join_master, read_secret, versions
from headrace.processes.messages import BadFrame, Unpacker, pack, receive
from headrace.processes.seal import Seal

SECRET = "a secret of some length"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "NODE_WORDS_SECONDS", 0.05)
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, SECRET)


def config_of(**device: Any) -> EngineConfig:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return EngineConfig(
        device=DeviceConfig(**{"tensor_parallel_size": 2, "nnodes": 2, "master_port": port, "device": "cpu", **device})
    )


def place_of(config: EngineConfig, secret: str = SECRET) -> Place:
    return Place(config.device.master_addr, config.device.master_port, secret.encode())


@pytest.fixture
def config() -> EngineConfig:
    return config_of()


@pytest.fixture
def first(config: EngineConfig) -> Iterator[Ranks]:
    """Node 0's: all ranks but the first are elsewhere, so it starts no process."""
    ranks = Ranks(config, "a model", "", None)
    yield ranks
    ranks.close()


def whole(config: EngineConfig, node: int = 1, model: str = "a model") -> frames.Join:
    return frames.Join(node, versions=versions(), model=model, config=config)


def come(config: EngineConfig, join: frames.Join) -> tuple[socket.socket, Seal]:
    sock, key = join_master(place_of(config), lambda _: join, time.monotonic() + 5)
    return sock, Seal(key, first=False, count=1)


def until_closed(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


def test_a_node_and_its_rank_come_in_and_are_told_all_under_seal(config: EngineConfig, first: Ranks) -> None:
    node, _ = come(config, whole(replace(config, device=replace(config.device, node_rank=1))))
    rank, seal = come(config, frames.Join(1, 1, "127.0.0.1"))
    with node, rank:
        assert receive(rank, frames.Begin, seal.opened) == frames.Begin("")
        first.launch(config)
        assert receive(rank, frames.Launch, seal.opened).rank == 1
        rank.sendall(seal.sealed(pack(frames.Here("cpu"))))
        assert first.hear(frames.Here) == [frames.Here("cpu")]
        assert first.addresses == ("127.0.0.1", "127.0.0.1")
        first.put("0", b"address")
        assert receive(rank, frames.Put, seal.opened).value == b"address"
        rank.sendall(pack(frames.Ready()))  # not under the seal
        with pytest.raises(EngineDead, match=r"rank 1 of node 1 \(127\.0\.0\.1\) closed its connection"):
            first.hear(frames.Ready)


def test_a_node_that_dies_is_everybodys_failure_and_is_told_why_others_did(config: EngineConfig, first: Ranks) -> None:
    node, seal = come(config, whole(config))
    rank, _ = come(config, frames.Join(1, 1, "127.0.0.1"))
    with node, rank:
        first.launch(config)
        node.sendall(
            seal.sealed(pack(frames.Failed("", "rank 1 of node 1 (process 7) was ended by signal 9 (SIGKILL)")))
        )
        with pytest.raises(EngineDead, match=r"rank 1 of node 1 \(process 7\) was ended by signal 9"):
            first.hear(frames.Ready)
        assert "process 7" in receive(node, frames.Failed, seal.opened).message


def test_who_does_not_know_the_secret_is_turned_away_and_others_still_come(
    config: EngineConfig, first: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(ConfigError, match=r"another secret.*HEADRACE_NODE_SECRET"):
        join_master(place_of(config, "another secret here"), lambda _: whole(config), 0.0)
    assert "127.0.0.1 was turned away: it does not know the secret" in caplog.text
    with socket.create_connection(("127.0.0.1", config.device.master_port)) as stranger:
        stranger.sendall(b"\xff\xff\xff\xffGET / HTTP/1.1\r\n\r\n")
        until_closed(stranger)
    with socket.create_connection(("127.0.0.1", config.device.master_port)) as older:
        older.sendall(pack(frames.Hello("0.0.8", b"")))
        until_closed(older)
    assert "Headrace is 0.0.8 there and" in caplog.text
    come(config, whole(config))[0].close()


def test_a_second_node_of_one_rank_is_one_too_many(config: EngineConfig, first: Ranks) -> None:
    with come(config, whole(config))[0], pytest.raises(ConfigError, match=r"node 1 .*has come before.*--node-rank"):
        come(config, whole(config))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda c: whole(replace(c, model=ModelConfig(dtype="float32"))), "dtype is 'auto' on node 0 and 'float32' on node 1"),
        (lambda c: whole(config_of(tensor_parallel_size=4, nnodes=4)), "tensor_parallel_size is 2 on node 0 and 4.*nnodes is 2"),
        (lambda c: whole(c, model="another"), "weight files on node 1 are not those of node 0"),
        (lambda c: frames.Join(1, versions={**versions(), "torch": "1.0"}, model="a model", config=c), "torch is .* and 1.0"),
    ],
    ids=["dtype", "nodes", "weights", "torch"],
)  # fmt: skip
def test_what_differs_is_said_on_both_sides(config: EngineConfig, first: Ranks, other: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"node 1 \(127.0.0.1\) does not fit.*{said}"):
        come(config, other(config))
    with pytest.raises(ConfigError, match=said):
        first.launch(config)


def test_a_node_that_never_comes_is_named(config: EngineConfig, first: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=rf"node 1 did not come to 127.0.0.1:{config.device.master_port} within 0 s"):
        first.launch(config)


def test_a_port_that_is_taken_and_an_address_elsewhere_are_said(config: EngineConfig, first: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 127.0.0.1:\d+ \(Address already in use\).*--master-port"):
        Ranks(config, "a model", "", None)
    with pytest.raises(ConfigError, match=r"cannot listen at 203.0.113.1:\d+ .*--master-addr"):
        Ranks(config_of(master_addr="203.0.113.1"), "a model", "", None)
    with pytest.raises(ConfigError, match=r"--master-addr is 0.0.0.0, which is every interface"):
        Ranks(config_of(master_addr="0.0.0.0"), "a model", "", None)


def test_a_node_says_that_node_0_is_not_there_or_is_no_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    with pytest.raises(ConfigError, match=r"Node 0 cannot be reached at 127.0.0.1:\d+ .*--node-rank 0"):
        join_master(place_of(config), lambda _: whole(config), 0.0)
    with socket.create_server(("127.0.0.1", config.device.master_port)) as other:
        sock = socket.create_connection(other.getsockname())
        taken, _ = other.accept()
        taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        monkeypatch.setattr(rendezvous, "_connect", lambda place, end: sock)
        with pytest.raises(ConfigError, match="there is no node 0 that waits"):
            join_master(place_of(config), lambda _: whole(config), 0.0)
        taken.close()


def test_a_node_ends_with_node_0_and_says_how(config: EngineConfig, first: Ranks) -> None:
    node = Node(config, place_of(config), 1, (), "a model", lambda: "was ended by SIGTERM")
    with pytest.raises(EngineDead, match="This node was ended by SIGTERM"):
        node.run()
    with pytest.raises(EngineDead, match="node 1 was ended by SIGTERM; all ranks end with it"):
        first.launch(config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel_size": 3}, "nnodes is 2, but one replica has 3 devices"),
        ({"node_rank": 2}, "node_rank is 2, but nnodes is 2"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2, but replicas share one host"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode is for one host"),
        ({"master_port": 70_000}, "master_port is 70000"),
        ({"distributed_executor_backend": "ray"}, "nnodes is 2, but Ray knows its nodes itself"),
    ],
)
def test_what_cannot_be_spread_over_hosts_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(**given)


def test_a_secret_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("from a file, long enough\n", encoding="utf-8")
    assert read_secret(DeviceConfig(node_secret_file=str(file))) == b"from a file, long enough"
    for text, said in (("", "is missing"), ("short", "has 5 bytes")):
        monkeypatch.setenv(rendezvous.SECRET_VARIABLE, text)
        with pytest.raises(ConfigError, match=f"the secret that all nodes share {said}.*at least 16"):
            Ranks(config_of(), "a model", "", None)
    with pytest.raises(ConfigError, match="--node-secret-file /nowhere cannot be read"):
        read_secret(DeviceConfig(node_secret_file="/nowhere"))


def test_ray_is_asked_for_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'needs Ray, .*pip install "headrace\[ray\]"'):
        Ranks(config_of(nnodes=1, distributed_executor_backend="ray"), "a model", "", None)


def test_a_sealed_message_opens_once_in_its_place_and_as_it_was() -> None:
    ours, theirs = Seal(b"key", first=True), Seal(b"key", first=False)
    one, two = (ours.sealed(pack(frames.Collect(step))) for step in (1, 2))
    opened = Unpacker(frames.Collect, opened=theirs.opened)
    assert [*opened.feed(one)] == [frames.Collect(1)]
    changed = bytes([*two[:-1], two[-1] ^ 1])
    for wrong in (one, changed, theirs.sealed(pack(frames.Collect(2))), pack(frames.Collect(2))):
        with pytest.raises(BadFrame):
            [*opened.feed(wrong)]
    assert [*opened.feed(two)] == [frames.Collect(2)]
