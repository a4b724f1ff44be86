"""The load generator against a scripted server: what counts as an answer, what as a failure, and when."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

import pytest

from headrace.bench.load import Answer, HttpClient, LoadGenerator, first_model
from headrace.bench.serve import add_arguments, create_workload
from headrace.errors import BenchFailed, ConfigError
from headrace.planner.workload.conversations import Conversation, Turn
from headrace.planner.workload.statistics import Sample, failure_reasons

T = TypeVar("T")
Handler = Callable[[str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}},
}


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(payload: Any) -> bytes:
    return b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def plain(status: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


class Scripted:
    """Answers each POST by ``handler``; remembers paths, bodies, and how many connections there were."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []
        self.connections = self.now = self.most = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.split("\r\n")
                        if line.lower().startswith("content-length")
                    ),
                    0,
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.bodies.append(body)
                self.now += 1
                self.most = max(self.most, self.now)
                await self.handler(head.split(" ")[1], body, writer)
                self.now -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def against(handler: Handler, work: Callable[[HttpClient, Scripted], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        scripted = Scripted(handler)
        server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=5)
        try:
            return await work(client, scripted)
        finally:
            await client.close()
            server.close()

    return asyncio.run(run())


def script(*pieces: bytes, pause: float = 0.0) -> Handler:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return handler


GOOD = (
    STREAM,
    chunk(token("a")),
    chunk(token("b")),
    chunk(token("", "length") + event(USAGE)),
    chunk(event(b"[DONE]")),
    b"0\r\n\r\n",
)


async def one_request(client: HttpClient, scripted: Scripted) -> LoadGenerator:
    generator = LoadGenerator(client, "m", "completions", 1, as_ids=True)
    await generator.run([Conversation((Turn((1, 2, 3), 5),))])
    return generator


def test_each_event_with_a_token_is_an_arrival_and_usage_is_believed() -> None:
    (sample,) = against(script(*GOOD, pause=0.02), one_request).samples
    assert sample.error is None
    assert len(sample.arrivals) == 2  # the last event has no text, only the reason
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens) == (3, 5, 2)
    assert 0.02 < sample.ttft < 0.5 and sample.gaps[0] > 0.015


def test_a_last_token_without_text_is_an_arrival_where_usage_counts_it() -> None:
    """As of a model without a tokenizer: the event that says why the answer ended brought its last token."""
    usage = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}})
    pieces = (
        STREAM,
        chunk(token("")),
        chunk(token("")),
        chunk(token("", "length") + usage),
        chunk(event(b"[DONE]")),
        b"0\r\n\r\n",
    )
    (sample,) = against(script(*pieces), one_request).samples
    assert len(sample.arrivals) == sample.output_tokens == 3


@pytest.mark.parametrize("size", [1, 2, 7])
def test_bytes_may_be_cut_anywhere(size: int) -> None:
    whole = b"".join(GOOD)
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    (sample,) = against(script(*pieces), one_request).samples
    assert sample.error is None and len(sample.arrivals) == 2


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([plain("400 Bad Request", {"error": {"message": "too long"}})], "status 400: too long"),
        ([plain("200 OK", {"choices": []})], "without [DONE]"),
        ([STREAM, chunk(token("a")), b"0\r\n\r\n"], "without [DONE]"),
        (
            [
                STREAM,
                chunk(token("a")),
                chunk(event({"error": {"message": "died"}})),
                chunk(event(b"[DONE]")),
                b"0\r\n\r\n",
            ],
            "died",
        ),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"],
            "without [DONE]",
        ),
        ([b"nonsense\r\n\r\n"], "not an HTTP/1.1 answer"),
        ([STREAM, b"zz\r\n"], "in chunk size"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure_with_its_reason(pieces: list[bytes], reason: str) -> None:
    generator = against(script(*pieces), one_request)
    ((found, count),) = failure_reasons(generator.samples).items()
    assert reason in found and count == 1


def test_a_connection_that_breaks_in_the_middle_is_a_failure() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(token("a")))
        await writer.drain()
        writer.close()

    (sample,) = against(handler, one_request).samples
    assert sample.error is not None and "broke in the middle" in sample.error


def test_connections_are_used_again_and_concurrency_is_bounded() -> None:
    async def work(client: HttpClient, scripted: Scripted) -> Scripted:
        generator = LoadGenerator(client, "m", "completions", 2, as_ids=True)
        await generator.run([Conversation((Turn((index,), 5),)) for index in range(8)])
        assert len(generator.samples) == 8 and all(sample.error is None for sample in generator.samples)
        return scripted

    scripted = against(script(*GOOD, pause=0.003), work)
    assert scripted.connections == scripted.most == 2


def test_arrivals_are_kept_to_and_think_time_passes_between_turns() -> None:
    async def work(client: HttpClient, scripted: Scripted) -> LoadGenerator:
        generator = LoadGenerator(client, "m", "chat", float("inf"), as_ids=False)
        await generator.run([Conversation((Turn((1,), 5), Turn((2,), 5, think_seconds=0.1)), arrival=0.05)])
        assert [message["role"] for message in scripted.bodies[1]["messages"]] == ["user", "assistant", "user"]
        assert scripted.bodies[1]["messages"][1]["content"] == "ab"
        return generator

    def delta(text: str) -> bytes:
        return chunk(event({"choices": [{"index": 0, "delta": {"content": text}}]}))

    role = chunk(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    first, second = against(
        script(STREAM, role, delta("a"), delta("b"), chunk(event(b"[DONE]")), b"0\r\n\r\n"), work
    ).samples
    assert len(first.arrivals) == 2 and first.output_tokens == 2  # the role is no token; without usage, events count
    assert first.due is not None and 0 <= first.sent - first.due < 0.05
    assert second.sent - first.ended >= 0.1


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await script(*GOOD)(path, body, writer)
        writer.close()

    async def work(client: HttpClient, scripted: Scripted) -> LoadGenerator:
        generator = LoadGenerator(client, "m", "completions", 1, as_ids=True)
        for _ in range(3):
            await generator.run([Conversation((Turn((1,), 5),))])
            await asyncio.sleep(0.02)
        return generator

    assert [sample.error for sample in against(handler, work).samples] == [None] * 3


def test_connections_may_be_opened_before_a_burst() -> None:
    async def work(client: HttpClient, scripted: Scripted) -> LoadGenerator:
        opened: list[None] = []
        connect = client._connect
        client._connect = lambda: (opened.append(None), connect())[1]  # type: ignore[method-assign, func-returns-value]
        await client.open(4)
        generator = LoadGenerator(client, "m", "completions", 4, as_ids=True)
        await generator.run([Conversation((Turn((1,), 5),))] * 4)
        assert len(opened) == 4
        return generator

    assert [sample.error for sample in against(script(*GOOD), work).samples] == [None] * 4


def test_answers_may_be_read_once_all_have_ended() -> None:
    """Reading those that end first would be seen as late tokens of the others (a burst's last ones, by 80 ms)."""
    happened = list[str]()

    class Client:
        async def post(self, path: str, body: dict[str, Any]) -> Answer:
            await asyncio.sleep(0.001 * body["prompt"][0])
            happened.append("ended")
            events = [(1.0, token("a").strip()[6:]), (2.0, b"[DONE]")][: 1 if body["prompt"] == [3] else 2]
            return Answer(200, "text/event-stream", events=events)

    class Late(LoadGenerator):
        def _read(self, sample: Sample, answer: Answer) -> str:
            happened.append("read")
            return super()._read(sample, answer)

    for late, order in ((True, ["ended"] * 3 + ["read"] * 3), (False, ["ended", "read"] * 3)):
        happened.clear()
        generator = Late(cast(Any, Client()), "m", "completions", 3, as_ids=True, reads_late=late)
        asyncio.run(generator.run([Conversation((Turn((number,), 5),)) for number in (1, 2, 3)]))
        generator.read_late()
        assert happened == order and [sample.arrivals for sample in generator.samples] == [[1.0], [1.0], []]
        assert [bool(sample.error) for sample in generator.samples] == [False, False, True]


def test_no_server_and_no_model_are_said_with_the_remedy() -> None:
    async def ask() -> None:
        await first_model(HttpClient("http://127.0.0.1:9"))

    with pytest.raises(BenchFailed, match="--base-url"):
        asyncio.run(ask())
    with pytest.raises(BenchFailed, match="--api-key"):
        against(script(plain("401 Unauthorized", {"error": {"message": "no"}})), lambda client, _: first_model(client))
    with pytest.raises(BenchFailed, match="lists no model; give --model"):
        against(script(plain("200 OK", {"data": []})), lambda client, _: first_model(client))
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient("localhost:8000")


LOADING = plain("503 Service Unavailable", {"error": {"message": "the model is loading"}})


def test_a_server_that_loads_is_no_matter_of_the_key() -> None:
    async def warm_up(client: HttpClient, scripted: Scripted) -> None:
        await LoadGenerator(client, "m", "completions", 1, as_ids=True).warm_up([Conversation((Turn((1,), 5),))], 1)

    for work in (warm_up, lambda client, _: first_model(client)):
        with pytest.raises(BenchFailed, match=r"503: the model is loading\. Wait until the server is ready") as raised:
            against(script(LOADING), work)
        assert "key" not in raised.value.message


def test_a_warm_up_that_fails_stops_the_run_with_its_reason() -> None:
    async def work(client: HttpClient, scripted: Scripted) -> None:
        generator = LoadGenerator(client, "m", "completions", 1, as_ids=True)
        await generator.warm_up([Conversation((Turn((1,), 5),))], 1)

    with pytest.raises(BenchFailed, match="no such model"):
        against(script(plain("404 Not Found", {"error": {"message": "no such model"}})), work)


def test_flags_become_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_arguments(parser)

    def made(*flags: str) -> list[Conversation]:
        return create_workload(parser.parse_args(["--num-prompts", "3", *flags]))

    assert all(conversation.arrival is None for conversation in made())
    assert all(conversation.arrival is not None for conversation in made("--request-rate", "2"))
    assert [len(conversation.turns) for conversation in made("--workload", "conversation", "--turns", "2")] == [2, 2, 2]
    with pytest.raises(ConfigError, match="--trace FILE"):
        made("--workload", "trace")
    for flags in (
        "--vocab-size 0",
        "--num-warmups -1",
        "--timeout nan",
        "--metric-percentiles 500",
        "--reading-speed inf",
    ):
        with pytest.raises(SystemExit):
            made(*flags.split())
        assert f"argument {flags.split()[0]}: '{flags.split()[1]}' is no" in capsys.readouterr().err
