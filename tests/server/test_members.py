"""Several models behind one port: by name, within a budget, asleep and awake by use; one's trouble is nobody else's."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.commands.serve_models import read_models
from headrace.config import EngineConfig, ModelConfig, ServerConfig
from headrace.errors import ConfigError, EngineDead, OutOfMemory, Unavailable
from headrace.server.members.manager import Member, ModelManager
from tests.support.serving import PYTHON, Answer, Server, post_bytes, wait_for

# Each needs 1.28 MB awake and nothing asleep.
FILE = """
memory: 2MB
models:
  one: {model: MODEL, executor: keyed-hash, num-blocks: 5000, seed: 1, max-num-seqs: 4}
  two: {model: MODEL, executor: keyed-hash, num-blocks: 5000, seed: 2, served-model-name: [zwei, "2"], device-time: 0.002}
  huge: {model: MODEL, executor: keyed-hash, kv-cache-memory: 1GB}
  absent: {model: /nowhere/at/all}
"""


def a_model() -> str:
    """The bundled one, by its folder."""
    from headrace.models.source import find_model

    return str(find_model(ModelConfig()).path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("members") / "models.yaml"
    path.write_text(FILE.replace("MODEL", a_model()), encoding="utf-8")
    running = Server((PYTHON, "-m", "headrace", "serve", "--port", "0", "--models", str(path), "--device", "cpu"))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def ask(server: Server, model: Any, tokens: int = 4) -> Answer:
    body = {
        "model": model,
        "prompt": [5, 6, 7],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server.ask("POST", "/v1/completions", body)


def ids(answer: Answer) -> list[int]:
    assert answer.status == 200, answer
    return list(answer.json["choices"][0]["token_ids"])


def states(server: Server) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.ask("GET", "/v1/models").json["data"]}


def test_models_take_turns_and_answer_as_before(server: Server) -> None:
    assert states(server) == {
        "one": "asleep", "two": "awake", "zwei": "awake", "2": "awake", "huge": "failed", "absent": "failed",
    }  # fmt: skip
    first = {name: ids(ask(server, name)) for name in ("one", "two")}
    assert first["one"] != first["two"]
    for name in ("zwei", "2", "one", "two", "one", "one"):
        assert ids(ask(server, name)) == first[name if name == "one" else "two"], name
        assert states(server) | {"huge": "", "absent": ""} == {
            each: "" if each in ("huge", "absent") else "awake" if (each == "one") == (name == "one") else "asleep"
            for each in states(server)
        }


def test_a_crowd_of_both_is_answered(server: Server) -> None:
    expected = {name: ids(ask(server, name, 40)) for name in ("one", "two")}
    found: list[tuple[str, list[int]]] = []

    def use(name: str) -> None:
        for _ in range(3):
            found.append((name, ids(ask(server, name, 40))))

    threads = [threading.Thread(target=use, args=(name,)) for name in expected for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len(found) == 18 and all(tokens == expected[name] for name, tokens in found)


def jobs(server: Server) -> dict[str, str]:
    return {each["model"]: each["id"] for each in server.ask("GET", "/v1/requests").json["data"]}


def test_who_waits_is_told_and_may_leave(server: Server) -> None:
    running, waiting = (
        server.raw(
            post_bytes("/v1/completions", {"model": name, "prompt": [1], "max_tokens": 1500, "ignore_eos": True})
        )
        for name in ("two", "one")
        if ids(ask(server, "two"))
    )
    wait_for(lambda: jobs(server).keys() == {"one", "two"}, 5, "one waits")
    told = server.ask("GET", f"/v1/requests/{jobs(server)['one']}").json
    assert told["model"] == "one" and told["waits_for"]["kind"] in ("asleep", "waking"), told
    assert told["waits_for"]["text"] == "one sleeps, and is woken in its turn: two is falling asleep."
    waiting.close()
    wait_for(lambda: "one" not in jobs(server), 5, "it left")
    running.close()
    assert ids(ask(server, "one"))


def test_a_model_that_dies_starts_again_and_others_never_notice(server: Server) -> None:
    before = {name: ids(ask(server, name)) for name in ("one", "two")}
    engines = server.members("headrace.engine.process")
    assert len(engines) == 2
    os.kill(engines[0], signal.SIGKILL)  # the first in the file
    assert ids(ask(server, "two")) == before["two"]
    wait_for(
        lambda: len(server.members("headrace.engine.process")) == 2 and states(server)["one"] in ("awake", "asleep"),
        15,
        "it is back",
    )
    assert ids(ask(server, "one")) == before["one"]
    assert server.ask("GET", "/health").status == server.ask("GET", "/ready").status == 200


def test_operators_and_readers_name_the_model(server: Server) -> None:
    ids(ask(server, "one"))
    assert server.ask("POST", "/sleep?model=one&level=1").status == 200
    assert server.ask("GET", "/is_sleeping?model=one").json == {"is_sleeping": True}
    assert server.ask("POST", "/wake_up?model=one").status == 200 and states(server)["one"] == "awake"
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        assert "?model=" in server.ask("POST", path).error["message"]
    assert server.ask("GET", "/server_info?model=zwei").json["engine"]["served_names"] == ["two", "zwei", "2"]
    assert server.ask("GET", "/v1/dashboard?model=two").json["engine"]["model"] == "two"
    assert server.ask("GET", "/v1/models/zwei").json["root"] == "two"
    chat = {"model": "two", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert server.ask("POST", "/v1/chat/completions", chat).json["model"] == "two"
    assert server.ask("POST", "/tokenize", {"model": "two", "prompt": "a b"}).json["count"] > 0


@pytest.mark.parametrize(
    ("model", "status"),
    [
        (None, 400),
        ("", 404),
        ("One", 404),
        ("one ", 404),
        ("../one", 404),
        ("o\u0000ne", 404),
        ("x" * 5000, 404),
        (7, 400),
        (["one"], 400),
    ],
    ids=repr,
)
def test_names_that_mean_nothing(server: Server, model: Any, status: int) -> None:
    answer = ask(server, model)
    assert answer.status == status and answer.error["param"] == "model", answer
    assert len(answer.body) < 2000


def test_what_is_no_body_is_refused_as_ever(server: Server) -> None:
    for body in (b"{", b"[1]", b'{"model": "one"', b"\xff", b"[" * 5000):
        answer = server.ask("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert answer.status == 400 and answer.error["message"], body
    assert server.ask("GET", "/v1/dashboard?model=one&model=two").status == 400
    assert server.ask("GET", "/v1/dashboard?model=%00").status == 404
    assert server.ask("GET", "/v1/requests/nothing").status == 404


def test_those_who_failed_say_why(server: Server) -> None:
    assert "budget" in ask(server, "huge").error["message"] and ask(server, "huge").status == 503
    assert "/nowhere/at/all" in ask(server, "absent").error["message"]
    assert any("absent cannot be served" in line for line in server.lines)


def test_metrics_are_by_model_and_every_metric_stands_once(server: Server) -> None:
    ids(ask(server, "one"))
    page = server.ask("GET", "/metrics").body.decode()
    types = re.findall(r"^# TYPE (\S+)", page, re.M)
    assert len(types) == len(set(types)) > 50
    seen, last = set[str](), ""
    for line in page.splitlines():
        if line.startswith("# TYPE"):
            last = line.split()[2]
            assert last not in seen
            seen.add(last)
        elif not line.startswith("#"):
            unnamed = last.startswith(("process_", "http_", "headrace_http_", "headrace_memory_budget"))
            assert line.startswith(last) and unnamed != ("model_name=" in line), line
    assert re.search(r'^headrace_http_responses_total{route="/v1/completions",status="2xx"} [1-9]', page, re.M)
    assert 'headrace_model_state{model_name="one",state="awake"} 1' in page
    assert "headrace_memory_budget_bytes 2000000" in page
    assert int(re.search(r'headrace_model_wakes_total{model_name="one"} (\d+)', page)[1]) > 3  # type: ignore[index]


# --- the file


GOOD = "models: {a: {model: x}, b: {model: y}}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no models"),
        ("models: []", "names no models"),
        ("models: {a: {model: x}}\nmodles: 1", "modles.*did you mean models"),
        ("models: {a: {model: x}, a: {model: y}}", "'a' twice"),
        ("models: {a: {model: x, served-model-name: [b]}, b: {model: y}}", "'b' is a name of a and of b"),
        ("models: {a: {}}", "a has no model"),
        ("models: {a: 7}", "a is '7'"),
        ("models: {a: [model]}", "write `key: value` lines"),
        ("models: {7: {model: x}}", "called '7'"),
        ('models: {"a\\nb": {model: x}}', "printable"),
        ("models: {a: {model: x, port: 1}}", "--port on the command line"),
        ("models: {a: {model: x, api-key: k}}", "whole server"),
        ("models: {a: {model: x, block-size: 7}}", "block_size"),
        ("memory: 0\n" + GOOD, "above 0"),
        ("memory: lots\n" + GOOD, "lots"),
        ("memory: true\n" + GOOD, "memory"),
        ("sleep-level: 3\n" + GOOD, "1 or 2"),
        ("models: {a: {model: x}", "not YAML"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_models(path, argparse.Namespace(), ServerConfig())
    assert re.search(words, caught.value.message), caught.value.message
    assert "\n" not in caught.value.message or "not YAML" in caught.value.message


@pytest.mark.parametrize("entry", ["model: x, no-such-key: 1", "model: x, max-model-len: [1]", "model: x, dtype: bf17"])
def test_entries_are_those_of_a_config_file(tmp_path: Path, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(f"models: {{a: {{{entry}}}}}", encoding="utf-8")
    with pytest.raises(SystemExit):
        read_models(path, argparse.Namespace(), ServerConfig())
    assert "headrace:" in capsys.readouterr().err


def test_what_the_file_means(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "memory: 8GiB\nsleep_level: 2\nmodels:\n  a: {model: x, max_model_len: 8k}\n  b: {model: y, seed: 9, technique: {chunked_prefill: off}}\n"
    )
    found = read_models(path, argparse.Namespace(seed=3, technique=["fast_forward=off"]), ServerConfig(max_queue=7))
    a, b = (each.engine for each in found.members)
    assert (found.budget, found.level, a.model.max_model_len, a.model.seed, b.model.seed) == (8 * 2**30, 2, 8000, 3, 9)
    assert (
        a.cache.kv_cache_memory == 2 * 2**30
        and a.device.enable_sleep_mode
        and a.device.wide_copy is False
        and found.members[0].server.max_queue == 7
    )
    assert (a.scheduler.chunked_prefill, b.scheduler.chunked_prefill, b.scheduler.fast_forward) == (True, False, False)


# --- whose turn it is


class Engine:
    """Remembers; ``fails``: what waking raises."""

    def __init__(self, log: list[str], name: str, size: int) -> None:
        self.info = SimpleNamespace(memory={"weights": size}, device="cuda", can_sleep=True)
        self.asleep, self.num_streams, self.tokenizer, self.fails = False, 0, None, list[Exception]()
        self._log, self._name = log, name
        self.used: Any = None

    async def sleep(self, level: int) -> None:
        self._log.append(f"-{self._name}")
        self.asleep = True
        await asyncio.sleep(0.001)

    async def wake_up(self) -> None:
        await asyncio.sleep(0.001)
        if self.fails:
            raise self.fails.pop()
        self._log.append(f"+{self._name}")
        self.asleep = False

    async def shutdown(self) -> None:
        self._log.append(f"x{self._name}")


def house(log: list[str], budget: int, **sizes: int) -> tuple[ModelManager, dict[str, Member]]:
    ended: list[Exception] = []
    members = {}
    for name in sizes:
        service: Any = SimpleNamespace(
            model=SimpleNamespace(found=None, state=None), limits=SimpleNamespace(end_all=ended.append), ended=ended
        )
        service.attach = lambda engine, service=service: setattr(service.model, "found", engine)
        config: Any = SimpleNamespace(name=name, names=(name,), engine=EngineConfig())
        members[name] = Member(config, service)
    return ModelManager(list(members.values()), budget, lambda config: 0), members


async def loaded(log: list[str], manager: ModelManager, **sizes: int) -> None:
    for member in manager.members:
        await manager.load(member, lambda name=member.name: _made(Engine(log, name, sizes[name])))  # type: ignore[misc]


def test_who_came_just_before_is_not_forgotten() -> None:
    async def play() -> None:
        log, sizes = list[str](), {"a": 4, "b": 4}
        manager, members = house(log, 4, **sizes)
        await loaded(log, manager, **sizes)
        members["b"].engine.num_streams = 1  # type: ignore[union-attr]  # it came before b was told to sleep
        manager.use(members["a"])
        await asyncio.sleep(0.05)
        assert log == ["-a", "-b", "+a", "-a", "+b"]

    asyncio.run(play())


async def _made(engine: Any) -> Any:
    return engine


def test_the_one_used_longest_ago_sleeps_and_turns_are_by_arrival() -> None:
    async def play() -> None:
        log, sizes = list[str](), {"a": 4, "b": 4, "c": 4}
        manager, members = house(log, 8, **sizes)
        await loaded(log, manager, **sizes)
        assert log == ["-a"]
        for each in ("b", "a", "c", "a", "b"):
            manager.use(members[each])
        await asyncio.sleep(0.1)
        assert log == ["-a", "-c", "+a"] and members["c"].condition == "asleep"
        members["b"].engine.num_streams = 1  # type: ignore[union-attr]
        manager.use(members["c"])
        await asyncio.sleep(0.05)
        assert log[3:] == ["-a", "+c"]  # b was used before, but is busy

    asyncio.run(play())


def test_without_room_nothing_breaks() -> None:
    async def play() -> None:
        log, sizes = list[str](), {"a": 4, "b": 4}
        manager, members = house(log, 6, **sizes)
        await loaded(log, manager, **sizes)
        members["a"].engine.fails = [Unavailable("no memory"), EngineDead("gone")]  # type: ignore[union-attr]
        for _ in range(2):
            manager.use(members["a"])
            await asyncio.sleep(0.05)
        assert [type(each) for each in members["a"].service.ended] == [Unavailable]  # type: ignore[attr-defined]
        assert members["a"].condition == "asleep" and "could not be woken" in str(members["a"].service.ended)  # type: ignore[attr-defined]
        manager.use(members["a"])
        await asyncio.sleep(0.05)
        assert members["a"].condition == "awake" and log[-1] == "+a"
        more, others = house(log, 6, big=7)
        with pytest.raises(OutOfMemory, match="big needs") as raised:
            await more.load(others["big"], lambda: _made(Engine(log, "big", 7)))
        assert raised.value.status == 503 and log[-1] == "xbig"
        assert others["big"].engine is None and others["big"].held == 0

    asyncio.run(play())
