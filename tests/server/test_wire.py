"""What goes over the wire, byte by byte: framing, errors in one shape, keep-alives, ends that no client can mistake."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import (
    Server,
    events_of,
    post_bytes,
    read_until,
    read_until_closed,
    send,
    serving,
    split_response,
)

# The behaviours of fake_engine.py, by seed.
SILENT, DIES, STEP_FAILS, DEFECT, ENDLESS, SEPARATORS, FAST = range(1001, 1008)
TURNED_AWAY, NEVER = 1011, 1012

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TEXT = {"prompt": "hello there"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--ping-seconds", "0.2", "--laggard-seconds", "1") as running:
        yield running


def stream(server: Server, path: str, body: dict[str, Any]) -> tuple[bytes, list[Any]]:
    """Headers and events of a stream that came to its proper end."""
    with server.raw(post_bytes(path, {**body, "stream": True}, "Connection: close")) as sock:
        head, events, complete = split_response(read_until_closed(sock))
    assert complete and head.startswith(b"HTTP/1.1 200 ")
    return head, events_of(events)


def test_chat_stream_framing(server: Server) -> None:
    body = {**CHAT, "max_tokens": 3, "n": 2, "seed": FAST, "stream_options": {"include_usage": True}}
    head, events = stream(server, "/v1/chat/completions", body)
    assert b"content-type: text/event-stream; charset=utf-8" in head.lower()
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 6
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["index"] == 0 and choices[0]["delta"] == {"role": "assistant", "content": ""}
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert ["role" in choice["delta"] for choice in own] == [True, False, False, False, False]
        assert [choice["delta"].get("content") for choice in own] == ["", "tok0 ", "tok1 ", "tok2 ", None]
        assert [choice["finish_reason"] for choice in own] == [None, None, None, None, "length"]


def test_completion_stream_has_one_event_a_token_and_finishes_with_the_last(server: Server) -> None:
    _, events = stream(server, "/v1/completions", {**TEXT, "max_tokens": 4, "seed": FAST})
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["tok0 ", "tok1 ", "tok2 ", "tok3 "]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "length"]
    assert all("usage" not in event for event in events[:-1])


def test_prompts_of_one_completion_stream_side_by_side(server: Server) -> None:
    _, events = stream(
        server, "/v1/completions", {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 2, "echo": True}
    )
    texts = {index: "" for index in range(6)}
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {index: ("one", "two", "three")[index // 2] + "tok0 tok1 " for index in range(6)}


def test_line_separators_leave_as_escapes(server: Server) -> None:
    body = {**CHAT, "max_tokens": 1, "seed": SEPARATORS}
    with server.raw(post_bytes("/v1/chat/completions", {**body, "stream": True}, "Connection: close")) as sock:
        streamed = read_until_closed(sock)
    whole = server.ask("POST", "/v1/chat/completions", body)
    assert streamed.isascii() and whole.body.isascii()
    text = "a\u2028b\u2029c\u0085d\U0001f600é"
    assert whole.json["choices"][0]["message"]["content"] == text
    assert events_of(split_response(streamed)[1])[1]["choices"][0]["delta"]["content"] == text


def test_logprobs_of_both_apis_are_finite_and_aligned(server: Server) -> None:
    chat = server.ask(
        "POST", "/v1/chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    ).json
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 2 and all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert min(top["logprob"] for top in content[0]["top_logprobs"]) == -9999.0
    _, events = stream(server, "/v1/chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 3})
    assert [event["choices"][0]["logprobs"]["content"][0] for event in events[1:3]] == content
    text = server.ask("POST", "/v1/completions", {**TEXT, "max_tokens": 2, "logprobs": 2, "echo": True}).json[
        "choices"
    ][0]["logprobs"]
    assert {len(column) for column in text.values()} == {len(text["tokens"])}
    assert text["token_logprobs"][0] is None and text["top_logprobs"][0] is None


def test_token_ids_and_prompt_logprobs_come_when_asked(server: Server) -> None:
    asked = {**CHAT, "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}
    chat = server.ask("POST", "/v1/chat/completions", asked).json
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["token_ids"] == chat["prompt_token_ids"][:2] and chat["prompt_logprobs"][0] is None
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    _, events = stream(server, "/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True})
    assert events[0]["choices"][0]["prompt_token_ids"] == [5, 6]
    assert [event["choices"][0]["token_ids"] for event in events[1:3]] == [[5], [6]]


def test_max_tokens_zero_with_echo_shows_the_prompt_alone(server: Server) -> None:
    answer = server.ask("POST", "/v1/completions", {**TEXT, "max_tokens": 0, "echo": True}).json
    assert answer["choices"][0]["text"] == "hello there" and answer["usage"]["completion_tokens"] == 0
    assert server.ask("POST", "/v1/completions", {**TEXT, "max_tokens": 0}).error["param"] == "max_tokens"


def test_truncation_keeps_the_end_of_the_prompt(server: Server) -> None:
    answer = server.ask(
        "POST",
        "/v1/completions",
        {"prompt": [9, 8, 7, 6], "max_tokens": 1, "truncate_prompt_tokens": 2, "return_token_ids": True},
    )
    assert answer.json["choices"][0]["prompt_token_ids"] == [7, 6]
    long = {"prompt": "one two three " * 500, "max_tokens": 1, "truncate_prompt_tokens": 2, "echo": True}
    assert server.ask("POST", "/v1/completions", long).json["choices"][0]["text"] == " three tok0 "


ERRORS = [
    ("GET", "/nowhere", None, {}, 404, "route_not_found"),
    ("GET", "//v1/models", None, {}, 404, "route_not_found"),
    ("GET", "/v1/models/other", None, {}, 404, "model_not_found"),
    ("DELETE", "/v1/models", None, {}, 405, "method_not_allowed"),
    ("GET", "/v1/chat/completions", None, {}, 405, "method_not_allowed"),
    ("OPTIONS", "/v1/chat/completions", None, {}, 405, "method_not_allowed"),
    ("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"}, 415, None),
    ("POST", "/v1/completions", b"{}", {"Content-Encoding": "gzip"}, 415, None),
    ("POST", "/v1/completions", b" " * (1 << 21), {}, 413, "body_too_large"),
    ("POST", "/v1/completions", b"{", {}, 400, "invalid_json"),
    ("POST", "/v1/completions", b"[1]", {}, 400, "invalid_json"),
    ("POST", "/v1/completions", b"\xef\xbb\xbf{}", {}, 400, "invalid_json"),
    ("POST", "/v1/completions", b'{"prompt": "\xff"}', {}, 400, "invalid_json"),
    ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', {}, 400, "invalid_json"),
    ("POST", "/v1/completions", b'{"temperature": NaN}', {}, 400, "invalid_json"),
    ("POST", "/v1/completions", b"[" * 100_000, {}, 400, "invalid_json"),
    ("POST", "/v1/completions", b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", {}, 400, "invalid_json"),
    ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, {}, 404, "model_not_found"),
    ("POST", "/v1/completions", {"prompt": "x" * 5000}, {}, 400, "context_length_exceeded"),
    ("GET", "/v1/models", None, {"Host": "evil.example"}, 403, "foreign_host"),
    ("GET", "/v1/models", None, {"Origin": "https://evil.example"}, 403, "foreign_origin"),
    ("GET", "/v1/models", None, {"Origin": "null"}, 403, "foreign_origin"),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "code"), ERRORS)
def test_every_error_has_the_one_shape(
    server: Server, method: str, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    answer = server.ask(method, path, body, headers)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert "access-control-allow-origin" not in answer.headers and answer.headers["x-request-id"]
    if status == 405:
        assert answer.headers["allow"]
    if code == "context_length_exceeded":
        assert "maximum context length is 512 tokens" in answer.error["message"]


def test_own_host_and_origin_pass(server: Server) -> None:
    for host in (f"localhost:{server.port}", f"127.0.0.1:{server.port}", "[::1]:80", "LOCALHOST"):
        assert server.ask("GET", "/v1/models", headers={"Host": host, "Origin": f"http://{host}"}).status == 200


def test_request_ids_are_repeated_only_when_harmless(server: Server) -> None:
    assert server.ask("GET", "/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.ask("GET", "/health", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"] != "x" * 500


def test_head_answers_without_a_body(server: Server) -> None:
    answer = server.ask("HEAD", "/health")
    assert answer.status == 200 and answer.body == b""


def test_bytes_that_are_not_http_get_json_too(server: Server) -> None:
    for data, status in (
        (b"\x00\x01\x02\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 200_000, b" 431 "),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n", b" 431 "),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b" 400 ",
        ),
    ):
        with server.raw() as sock:
            sock.sendall(data)
            answer = read_until_closed(sock)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert status in head.split(b"\r\n")[0] and b"application/json" in head
        assert set(json.loads(body)) == {"error"}


def test_headers_that_do_not_come_are_not_waited_for(server: Server) -> None:
    """After 1 s here (20 s in the product)."""
    with server.raw(b"GET /health HTTP/1.1\r\nHost: local") as sock:
        answer = read_until_closed(sock)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"error"' in answer


def test_a_body_that_is_announced_too_large_is_not_sent_for(server: Server) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with server.raw(head + b"Content-Length: 5000000\r\nExpect: 100-continue\r\n\r\n") as sock:
        assert read_until_closed(sock).startswith(b"HTTP/1.1 413 ")
    with server.raw(head + b"Content-Length: 14\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n") as sock:
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        sock.sendall(b'{"prompt":"x"}')
        assert b" 200 OK" in read_until_closed(sock)


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with server.raw(
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        + post_bytes("/v1/completions", {**TEXT, "max_tokens": 1}, "Connection: close")
    ) as sock:
        data = read_until_closed(sock)
    assert data.index(b'"version"') < data.index(b'"text_completion"')


def test_silence_is_filled_with_comments(server: Server) -> None:
    """The engine says nothing for 1.2 s; pings are set to 0.2 s here (8 s in the product)."""
    with server.raw(
        post_bytes(
            "/v1/chat/completions", {**CHAT, "seed": SILENT, "max_tokens": 2, "stream": True}, "Connection: close"
        )
    ) as sock:
        _, body, complete = split_response(read_until_closed(sock))
    assert complete and body.startswith(b": ping\n\n") and body.count(b": ping\n\n") >= 3
    assert events_of(body)[-1] == "[DONE]"


def test_an_error_found_before_the_first_token_has_its_own_status(server: Server) -> None:
    answer = server.ask("POST", "/v1/chat/completions", {**CHAT, "seed": DEFECT, "stream": True})
    assert answer.status == 500 and "KeyError" not in answer.body.decode() and answer.error["type"] == "internal_error"


def test_a_step_that_fails_mid_stream_ends_in_an_error_event_and_a_broken_body(server: Server) -> None:
    with server.raw(post_bytes("/v1/chat/completions", {**CHAT, "seed": STEP_FAILS, "stream": True})) as sock:
        _, body, complete = split_response(read_until_closed(sock))
    events = events_of(body)
    assert not complete and "[DONE]" not in events and set(events[-1]) == {"error"}
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert server.ask("POST", "/v1/chat/completions", {**CHAT, "seed": STEP_FAILS}).status == 500


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_request(server: Server, streamed: bool) -> None:
    """Twice at once, at different moments; the engine then holds nothing."""
    for wait in (0.0, 0.15):
        body = {**CHAT, "max_tokens": 400, "n": 2, "stream": streamed}
        socks = [server.raw(post_bytes("/v1/chat/completions", body)) for _ in range(2)]
        time.sleep(wait)
        for sock in socks:
            sock.close()
        server.wait_idle(2.0)


def test_a_client_that_stops_reading_is_cut_off_and_others_go_on(server: Server) -> None:
    """After 1 s here (60 s in the product); its buffered bytes are not waited for."""
    slow = server.raw(
        post_bytes("/v1/completions", {**TEXT, "max_tokens": 400, "n": 8, "seed": ENDLESS, "stream": True}),
        receive_buffer=4096,
    )
    with slow:
        time.sleep(0.3)
        assert server.running() == 1
        assert server.ask("POST", "/v1/completions", {**TEXT, "max_tokens": 2}).status == 200
        server.wait_idle(5.0)


def test_a_client_that_reads_a_byte_at_a_time_gets_everything(server: Server) -> None:
    with server.raw(
        post_bytes("/v1/completions", {**TEXT, "max_tokens": 3, "stream": True}, "Connection: close"),
        receive_buffer=2048,
    ) as sock:
        data = b""
        while part := sock.recv(1):
            data += part
    assert events_of(split_response(data)[1])[-1] == "[DONE]"


def test_a_body_that_dribbles_in_is_taken(server: Server) -> None:
    data = post_bytes("/v1/completions", {**TEXT, "max_tokens": 1}, "Connection: close")
    with server.raw() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(data)):
            sock.sendall(data[index : index + 1])
        assert b" 200 OK" in read_until(sock, b"\r\n\r\n")


def test_connections_are_kept_alive(server: Server) -> None:
    connection = server.connect()
    for path in ("/health", "/nowhere", "/v1/models"):
        send(connection, "GET", path)
        local = connection.sock.getsockname()
        assert send(connection, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
        assert connection.sock.getsockname() == local
    assert isinstance(connection, http.client.HTTPConnection)
    connection.close()


def test_metrics_have_both_names_and_a_fixed_number_of_series(server: Server) -> None:
    before = server.ask("GET", "/metrics")
    assert before.headers["content-type"].startswith("text/plain; version=0.0.4")
    for index in range(50):
        server.ask("GET", f"/nowhere/{index}")
        server.ask(f"M{index}", "/v1/models")
    lines = [line for line in server.ask("GET", "/metrics").body.decode().splitlines() if not line.startswith("#")]
    unmatched = next(line for line in lines if line.startswith('headrace_http_responses_total{route="-",status="4xx"}'))
    assert int(unmatched.split()[-1]) >= 50
    assert len(lines) == len([line for line in before.body.decode().splitlines() if not line.startswith("#")])
    names = {line.partition("{")[0] for line in lines}
    twins = {name.removeprefix("vllm:") for name in names if name.startswith("vllm:")}
    assert {"num_requests_running", "generation_tokens_total", "time_to_first_token_seconds_bucket"} <= twins
    assert twins - {"prefix_cache_queries_total", "prefix_cache_hits_total"} == {
        name for name in twins if f"headrace_{name}" in names
    }


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_who_is_turned_away_gets_a_plain_answer_before_anything_is_streamed(
    server: Server, path: str, streamed: bool
) -> None:
    body = {**(CHAT if "chat" in path else TEXT), "stream": streamed, "n": 2}
    late, never = (server.ask("POST", path, {**body, "seed": seed}) for seed in (TURNED_AWAY, NEVER))
    assert (late.status, late.headers["retry-after"], late.json["error"]["code"]) == (429, "7", "too_late")
    assert "8.2 s" in late.json["error"]["message"]
    assert (never.status, never.json["error"]["param"], never.json["error"]["code"]) == (
        400,
        "expected_ttft",
        "cannot_be_met",
    )
    assert b'finished_reason="refused"' in server.ask("GET", "/metrics").body
