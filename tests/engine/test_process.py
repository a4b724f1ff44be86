"""The engine in a process of its own: frames, streams, readers that are slow or leave, and every way it can end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.engine import client, connection
from headrace.engine import connection as frames
from headrace.engine.output import RequestDelta
from headrace.engine.resolve import create_config
from headrace.errors import ConfigError, EngineDead, InvalidRequest, ModelError, Unavailable
from headrace.processes.frames import HEADER
from headrace.processes.messages import BadFrame, Unpacker, pack
from headrace.request import (
    Expectations,
    Finished,
    FinishReason,
    Request,
    RequestTimes,
    SequenceOutput,
    Singles,
    TokenLogprobs,
    TokenOutputs,
)
from tests.support.snapshot import listening, names_of_sockets

SMALL = {"executor": "keyed-hash", "max_model_len": 4000, "max_num_seqs": 8, "num_blocks": 1024}
LONG = SamplingParams(temperature=0, max_tokens=3900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Result = TypeVar("Result")


@contextlib.asynccontextmanager
async def engine(**config: Any) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.start(**{**SMALL, **config})
    try:
        yield llm
    finally:
        await llm.shutdown()


def with_engine(work: Callable[[AsyncLLM], Awaitable[Result]], **config: Any) -> Result:
    async def run() -> Result:
        async with engine(**config) as llm:
            return await work(llm)

    return asyncio.run(asyncio.wait_for(run(), 30))


def pid_of(llm: AsyncLLM) -> int:
    process = llm._connection._process
    assert process is not None
    return process.pid


def gone(pid: int) -> bool:
    """No such process, or only its name is left (nobody has asked how it ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def idle(llm: AsyncLLM) -> None:
    """The engine's rows and blocks are back within two seconds."""
    deadline = time.monotonic() + 2
    while True:
        stats = await llm.stats()
        if not (stats["num_running"] or stats["num_waiting"] or stats["num_used_blocks"]):
            return
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.02)


# --- frames

scores = st.lists(
    st.integers(1, 4).flatmap(
        lambda k: st.builds(
            TokenLogprobs,
            st.tuples(*[st.integers(0, 2**31 - 1)] * k),
            st.tuples(*[st.floats(allow_nan=False)] * k),
            st.integers(1, 2**31 - 1),
        )
    ),
    max_size=3,
).map(tuple)
seconds = st.none() | st.floats(0, 1e6)
finishes = st.none() | st.builds(
    Finished,
    st.sampled_from(FinishReason),
    st.none() | st.integers(0, 2**31 - 1),
    st.none() | st.text(max_size=5),
    st.integers(0, 9),
    st.none() | st.builds(RequestTimes, st.floats(0, 1e6), seconds, seconds, seconds),
)
outputs = st.builds(
    SequenceOutput,
    st.integers(0, 2**62),
    st.integers(0, 127),
    st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    scores,
    scores,
    st.none() | st.integers(0, 2**31 - 1),
    finishes,
    seconds,
)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(outputs, max_size=6), cut=st.integers(0, 200))
def test_a_step_comes_out_of_its_frame_as_it_went_in_however_the_bytes_arrive(
    rows: list[SequenceOutput], cut: int
) -> None:
    data = frames.pack_step(rows)
    unpacker = Unpacker(frames.Event)
    found = [frame for part in (data[:cut], data[cut:]) for frame in unpacker.feed(part)]
    assert [row for frame in found for row in frames.unpack_step(frame)] == rows


def test_a_request_comes_out_of_its_frame_as_it_went_in() -> None:
    params = SamplingParams(
        n=3,
        logit_bias={4: -2.5},
        stop=["x"],
        seed=2**64 - 1,
        allowed_token_ids=[1],
        logprobs=2,
        min_tokens=2,
        max_tokens=9,
    )
    asked = Request(
        request_id=2**40,
        prompt_token_ids=array("i", [1, 2**31 - 1]),
        params=params,
        seed=2**64 - 1,
        priority=-3,
        arrival_time=1.5,
        cache_salt="s",
        bad_word_ids=((1, 2), (3,)),
        explain=True,
        tenant="key1/ann",
        expects=Expectations(ttft=0.5, tpot=0.1, reading_speed=8.0),
    )
    assert list(Unpacker(frames.Command).feed(pack(asked))) == [asked]


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, HEADER.pack(3) + b"abc", HEADER.pack(2**31), pack(frames.Abort(1)) + b"\x01\x00\x00\x00\xc1"]
)
def test_bytes_outside_the_schema_are_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        list(Unpacker(frames.Event).feed(data))


def test_the_usual_step_is_two_columns() -> None:
    """64 rows with one token each: 12 bytes a row and a small frame around them."""
    outputs = TokenOutputs(range(64), [0] * 64, Singles(list(range(64))))
    data = frames.pack_step(outputs)
    assert len(data) < 64 * 12 + 32
    (frame,) = Unpacker(frames.Event).feed(data)
    assert list(frames.unpack_step(frame)) == list(outputs)


# --- answers


def test_the_process_answers_as_the_engine_in_place_does() -> None:
    prompts = ["Once upon", {"prompt_token_ids": [5, 6, 7]}]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=2, logprobs=1, prompt_logprobs=1, seed=4)
    with LLM(**SMALL) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)

    async def work(other: AsyncLLM) -> None:
        assert other.info.max_model_len == 4000 and other.alive
        for prompt, whole in zip(prompts, expected, strict=True):
            seen = [output async for output in other.generate(prompt, params, request_id="mine")]
            assert seen[-1].outputs == whole.outputs and seen[-1].prompt_logprobs == whole.prompt_logprobs
            assert (seen[-1].request_id, seen[-1].finished, seen[-1].prompt) == ("mine", True, whole.prompt)
            assert all(not output.finished for output in seen[:-1])

    with_engine(work)


def test_a_stop_string_ends_the_sequence_on_both_sides() -> None:
    async def work(llm: AsyncLLM) -> None:
        text = [out async for out in llm.generate("Once", SHORT)][-1].outputs[0].text
        stop = text[8:11]
        cut = [
            out
            async for out in llm.generate(
                "Once", SamplingParams(temperature=0, max_tokens=3900, ignore_eos=True, stop=[stop])
            )
        ][-1].outputs[0]
        assert (cut.text, cut.stop_reason, cut.finish_reason) == (text[: text.index(stop)], stop, "stop")
        await idle(llm)

    with_engine(work)


def test_where_requests_stand_is_asked_and_answered_across_the_socket() -> None:
    async def work(llm: AsyncLLM) -> None:
        running, waiting = (llm.stream([1, 2, 3], LONG, explain=True) for _ in range(2))
        await anext(aiter(running))
        answer = await llm.explain([running, waiting])
        first, second = answer["requests"]
        assert first["running"] and first["num_prompt"] == 3 and first["num_outputs"][0] > 0
        assert not second["running"] and second["position"] == 1 and second["wait"]["kind"] == "rows"
        assert 0 < second["earliest"] < second["latest"] and answer["accounts"][0]["steps"] > 0
        running.abort()
        short = llm.stream([1, 2], SHORT, explain=True)
        waiting.abort()
        account = (await collect(short))[-1].account
        assert account is not None and account.steps == 12
        assert (await llm.explain([running, short]))["requests"] == [None, None]
        assert len((await llm.explain([short] * 1000))["requests"]) == frames.MAX_ASKED

    with_engine(work, max_num_seqs=1, device_time=0.002)


def test_one_answer_of_several_is_ended_and_computed_no_further() -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream([1, 2, 3], SamplingParams(n=2, max_tokens=3000, ignore_eos=True))
        deltas = [delta for _ in range(3) for delta in await anext(aiter(stream))]
        stream.end_answer(0)
        deadline = time.monotonic() + 2
        while (await llm.stats())["num_running"] > 1:
            assert time.monotonic() < deadline
        assert {delta.index for delta in deltas} == {0, 1}
        stream._pending.clear()
        assert {delta.index for delta in await anext(aiter(stream))} == {1}
        stream.abort()
        await idle(llm)

    with_engine(work, device_time=0.002)


def test_bad_input_is_refused_before_a_stream_exists() -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequest):
            llm.stream({"prompt_token_ids": [10**6]}, SHORT)
        with pytest.raises(InvalidRequest, match="maximum context length is 4000"):
            async for _ in llm.generate("many words " * 50_000, SHORT):
                pass
        assert llm.num_streams == 0

    with_engine(work)


# --- readers that leave


def test_leaving_aborts_however_it_is_done() -> None:
    async def work(llm: AsyncLLM) -> None:
        closed, dropped = llm.stream([1], LONG), llm.stream([2], LONG)
        outer = llm.generate([3], LONG)
        task = asyncio.create_task(anext(llm.stream([4], SamplingParams(max_tokens=3000, ignore_eos=True)).__aiter__()))
        for each in (closed, dropped, outer):
            await anext(each)
        await task
        assert (await llm.stats())["num_running"] >= 3
        await closed.aclose()
        await closed.aclose()
        del dropped, task
        await outer.aclose()
        await idle(llm)
        assert llm.num_streams == 0

    with_engine(work, device_time=0.01)  # they would take far longer to end by themselves


def test_abort_by_name_ends_that_name_only() -> None:
    async def work(llm: AsyncLLM) -> None:
        async def run(prompt: int, name: str, params: SamplingParams) -> Any:
            return [out async for out in llm.generate([prompt], params, request_id=name)][-1]

        first, second = asyncio.create_task(run(1, "a", LONG)), asyncio.create_task(run(2, "b", SHORT))
        await asyncio.sleep(0.05)
        await llm.abort("a")
        await llm.abort("nobody")
        aborted, kept = await asyncio.gather(first, second)
        assert aborted.outputs[0].finish_reason == "abort" and aborted.finished
        assert len(kept.outputs[0].token_ids) == 12
        await idle(llm)

    with_engine(work, device_time=0.01)


def test_a_slow_reader_costs_a_bounded_number_of_objects_and_gets_the_same_text() -> None:
    async def work(llm: AsyncLLM) -> None:
        fast = [out async for out in llm.generate([1, 2], LONG)][-1].outputs[0]
        slow = llm.stream([1, 2], LONG)
        await until(lambda: slow.done, 10)
        assert len(slow._pending) <= client.MAX_PENDING
        deltas = [delta async for batch in slow for delta in batch]
        assert "".join(delta.text for delta in deltas) == fast.text
        assert [i for delta in deltas for i in delta.token_ids] == fast.token_ids

    with_engine(work)


def test_a_reader_that_never_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_PENDING_COST", 20_000)

    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream([1], LONG)
        await until(lambda: stream.done, 10)
        with pytest.raises(Unavailable, match="too slowly"):
            async for _ in stream:
                pass
        await idle(llm)

    with_engine(work)


# --- ends


def test_a_killed_engine_ends_every_stream_with_an_error_at_once() -> None:
    async def work(llm: AsyncLLM) -> None:
        streams = [llm.stream([i], LONG) for i in range(4)]
        for stream in streams:
            await anext(stream)
        os.kill(pid_of(llm), signal.SIGKILL)
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDead, match="signal 9"):
                async for _ in stream:
                    pass
        assert time.monotonic() - began < 5
        assert not llm.alive
        with pytest.raises(EngineDead):
            llm.stream([1], SHORT)
        with pytest.raises(EngineDead):
            await llm.stats()

    with_engine(work, device_time=0.01)


PARENT = """
import asyncio, os, sys
from headrace import AsyncLLM
from headrace.engine.resolve import create_config

async def main():
    llm = await AsyncLLM.start(create_config(executor="keyed-hash", device_time=float(sys.argv[1])))
    stream = llm.stream([1])
    print(llm._connection._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("device_time", [0.0, 30.0], ids=["idle", "inside a long step"])
def test_the_engine_does_not_outlive_its_parent(device_time: float) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(device_time)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.kill()
    asyncio.run(until(lambda: gone(pid), 5))


DEAF = """
import ctypes
real = ctypes.CDLL
class Deaf:
    def __init__(self, name, *given, **named):
        self.real = real(name, *given, **named)
    def prctl(self, *given):
        return 0
    def __getattr__(self, name):
        return getattr(self.real, name)
ctypes.CDLL = lambda name=None, *given, **named: (Deaf if name is None else real)(name, *given, **named)
"""


@pytest.mark.parametrize("way", ["the kernel's alone", "its own, idle", "its own, inside a long step"])
def test_either_of_two_ways_is_enough_to_end_with_the_parent(way: str, tmp_path: Path) -> None:
    """A stopped engine is ended by the kernel; one whose kernel does not (Linux's death signal is lost) sees that its
    parent's socket has closed."""
    own = way != "the kernel's alone"
    (tmp_path / "sitecustomize.py").write_text(DEAF if own else "")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    seconds = "30" if way.endswith("long step") else "0"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, seconds], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        if not own:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    try:
        asyncio.run(until(lambda: gone(pid), 5))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


ORPHAN = """
import asyncio, os, signal
from headrace.engine import connection
from headrace.engine.resolve import create_config

async def main():
    engine = await connection.EngineConnection.launch(create_config(executor="keyed-hash"))
    print(engine._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Where temporary files go."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)


def test_a_parent_killed_while_the_engine_starts_leaves_nothing(short_tmp: Path) -> None:
    env = {**os.environ, "TMPDIR": str(short_tmp)}
    done = subprocess.run([sys.executable, "-c", ORPHAN], env=env, stdout=subprocess.PIPE, check=False)
    asyncio.run(until(lambda: gone(int(done.stdout)) and not list(short_tmp.iterdir()), 5))


def test_an_engine_that_freezes_while_it_loads_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOAD_SILENCE", 1)

    async def load() -> None:
        launched = await connection.EngineConnection.launch(create_config(**SMALL))
        process = launched._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineDead, match="silent for 1 s while it loads"):
                await launched.started()
        finally:
            await launched.close(0.0)
        assert gone(process.pid)

    asyncio.run(asyncio.wait_for(load(), 10))


def test_a_frozen_engine_is_told_from_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANG_SECONDS", 1.5)

    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream([1], SHORT)
        await asyncio.sleep(2.0)  # one step of three seconds: no token, yet alive
        assert llm.alive, llm.ailment
        os.kill(pid_of(llm), signal.SIGSTOP)
        await until(lambda: not llm.alive, 3)
        assert "silent" in str(llm.ailment)
        os.kill(pid_of(llm), signal.SIGCONT)
        await until(lambda: llm.alive, 3)
        await stream.aclose()
        os.kill(pid_of(llm), signal.SIGKILL)  # it would finish its step first

    with_engine(work, device_time=3.0)


def test_shutdown_lets_streams_end_within_its_time_and_leaves_nothing() -> None:
    async def work() -> None:
        llm = await AsyncLLM.start(create_config(**SMALL, device_time=0.01))
        pid = pid_of(llm)
        quick = asyncio.create_task(collect(llm.stream([1], SHORT)))
        endless = asyncio.create_task(collect(llm.stream([2], LONG)))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(llm.shutdown(timeout=1.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            llm.stream([3], SHORT)
        assert sum(len(delta.token_ids) for delta in await quick) == 12
        with pytest.raises(Unavailable, match="shutting down"):
            await endless
        await closing
        await llm.shutdown()
        assert gone(pid)

    asyncio.run(asyncio.wait_for(work(), 20))


async def collect(stream: Any) -> list[RequestDelta]:
    return [delta async for batch in stream for delta in batch]


@pytest.mark.usefixtures("cold_starts")
@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"model": "/no/such/model"}, ModelError, "/no/such/model"),
        ({"max_model_len": 10**9}, ConfigError, "1000000000"),  # found in the process, told here
    ],
)
def test_a_failed_start_says_why_and_leaves_no_process(
    config: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = children()

    async def start() -> None:
        await AsyncLLM.start(create_config(**{**SMALL, **config}))

    with pytest.raises(error, match=words):
        asyncio.run(asyncio.wait_for(start(), 10))
    assert children() <= before


def children() -> set[str]:
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def test_a_process_that_dies_while_loading_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDead, match="exit code 1"):
        asyncio.run(asyncio.wait_for(AsyncLLM.start(create_config(**SMALL)), 10))


def test_an_engine_that_is_told_nonsense_ends_and_says_so() -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream([1], LONG)
        await anext(stream)
        llm._connection.send(HEADER.pack(3) + b"abc")
        with pytest.raises(EngineDead, match="exit code 1"):
            async for _ in stream:
                pass

    with_engine(work, device_time=0.01)


def test_a_request_that_the_core_refuses_ends_alone() -> None:
    async def work(llm: AsyncLLM) -> None:
        object.__setattr__(llm.info, "max_sequence_tokens", 10**6)  # a front end that lets anything pass
        good, bad = llm.stream([1], SHORT), llm.generate([1] * 5000, SamplingParams(max_tokens=4))
        with pytest.raises(InvalidRequest, match="the prompt has 5000 tokens; this engine takes at most 3999"):
            async for _ in bad:
                pass
        assert sum(len(delta.token_ids) for delta in await collect(good)) == 12
        await idle(llm)

    with_engine(work)


def test_the_engines_sockets_have_no_name() -> None:
    """So nobody else can come in."""

    async def work(llm: AsyncLLM) -> None:
        assert not names_of_sockets([os.getpid(), pid_of(llm)]) and not listening([pid_of(llm)])

    with_engine(work)


@pytest.mark.usefixtures("cold_starts")
def test_nothing_listens_and_no_file_is_left(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_tmp))
    before = len(os.listdir("/proc/self/fd"))
    with_engine(lambda llm: collect(llm.stream([1], SHORT)))
    assert list(short_tmp.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before
