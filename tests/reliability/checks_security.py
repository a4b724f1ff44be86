"""The checks of what may run, who may speak, and what a model's files may do (rows 50, 51, 52, 53, 54, 55).

What lives here: the checks, each in a size its caller picks; a check raises AssertionError or returns its figure in
words. What may not: pytest, starting servers with defects.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import json
import math
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.config import ModelConfig, ServerConfig
from headrace.engine import connection as frames
from headrace.engine.tokenizer import load_tokenizer
from headrace.errors import HeadraceError, Unauthorized
from headrace.models import gguf_file
from headrace.models.families import spec_from_config
from headrace.models.loader import open_checkpoint
from headrace.models.source import find_model
from headrace.processes.messages import BadFrame, Unpacker, pack
from headrace.server.app import ROUTES
from headrace.server.limits import Guard
from tests.support.planted import Command
from tests.support.serving import ROOT, SERVE, Server, serving
from tests.support.snapshot import listening, metric, names_of_sockets
from tests.support.traffic import ask, together

SOURCES = ROOT / "src" / "headrace"
BANNED_MODULES = frozenset(("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"))
BANNED_CALLS = frozenset(
    (
        "eval",
        "exec",
        "__import__",
        "torch.load",
        "yaml.load",
        "yaml.unsafe_load",
        "torch.hub.load",
        "np.load",
        "os.system",
    )
)
BANNED_NAMES = frozenset(("recv_pyobj", "send_pyobj", "trust_remote_code", "allow_pickle"))
BANNED_KEYWORDS = BANNED_NAMES | {"shell"}
NODES = (ast.Import, ast.ImportFrom, ast.Call, ast.keyword, ast.Attribute, ast.Assert)
# Where what clients send is judged: an assert there is gone under -O.
JUDGES = (
    "request.py",
    "engine/inputs.py",
    "server/wire.py",
    "server/limits.py",
    "server/dialects",
)


# --- row 50


def code_from_data(folder: Path = SOURCES) -> str:
    """Nothing in the sources makes code of data, and nothing that judges a client's input relies on assert."""
    found = [hit for path in sorted(folder.rglob("*.py")) for hit in banned(path, folder)]
    assert not found, found
    return f"{sum(1 for _ in folder.rglob('*.py'))} files, 0 hits"


def banned(path: Path, folder: Path) -> Iterator[str]:
    name = str(path.relative_to(folder))
    judges = name.startswith(JUDGES)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, NODES):
            continue
        place = f"{name}:{node.lineno}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{place}: import {name}" for name in names if name.partition(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.Call) and (called := _dotted(node.func)) in BANNED_CALLS:
            yield f"{place}: {called}()"
        elif (
            isinstance(node, ast.keyword)
            and node.arg in BANNED_KEYWORDS
            and getattr(node.value, "value", None) is not False
        ):
            yield f"{place}: {node.arg}="
        elif isinstance(node, ast.Attribute) and node.attr in BANNED_NAMES:
            yield f"{place}: {node.attr}"
        elif isinstance(node, ast.Assert) and judges and not _is_our_own(node):
            yield f"{place}: assert {ast.unparse(node.test)}"


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as it is written; anything else is no name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _is_our_own(node: ast.Assert) -> bool:
    """``assert x is not None`` tells a type checker what the line before has made sure."""
    return isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.IsNot)


LISTENER = """
import os, sys

def hear(event, args):
    if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.bind") or (
        event == "socket.connect" and not isinstance(args[1], (str, bytes))
    ):
        with open(os.environ["HEARD"], "ab", buffering=0) as file:
            file.write(f"{os.getpid()} {event} {args!r:.200}\\n".encode())

if "HEARD" in os.environ:
    sys.addaudithook(hear)
"""


def audited(work: Callable[[Server], Any], *flags: str, optimised: bool = False, command: Command = SERVE) -> str:
    """An audit hook in every process of a server: while ``work`` goes on, nothing is unpickled, started, bound or
    connected to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(LISTENER)
        heard = Path(folder, "heard")
        env = {
            "HEARD": str(heard),
            "PYTHONPATH": f"{folder}:{ROOT / 'src'}",
            **({"PYTHONOPTIMIZE": "1"} if optimised else {}),
        }
        with serving("--executor", "keyed-hash", "--max-model-len", "512", *flags, command=command, env=env) as server:
            # The first conversation starts the template's process.
            server.ask(
                "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            )
            before = heard.read_text().splitlines()
            work(server)
            after = heard.read_text().splitlines()[len(before) :]
    assert any("subprocess.Popen" in line or "posix_spawn" in line or "os.fork" in line for line in before), (
        "the hook heard nothing of the start"
    )
    assert not after, after[:5]
    return f"{len(before)} events at start, 0 afterwards"


# --- row 51


def strangers(*, command: Command = SERVE) -> str:
    """Between the parent, its front ends and the engine there is no address to come to: no socket has a name, and only
    the API's listens."""
    with serving("--executor", "keyed-hash", "--api-server-count", "2", command=command) as server:
        pids = [server.process.pid, *server.children()]
        assert len(pids) >= 4 and not names_of_sockets(pids), names_of_sockets(pids)
        assert listening(pids) == [f"tcp 0100007F:{server.port:04X}"], listening(pids)
    return f"{len(pids)} processes: no socket with a name, one that listens"


def damaged_frames(count: int, seed: int = 51) -> str:
    """Frames of both directions with bytes changed: decoded, or refused as outside the schema; nothing else is ever
    raised."""
    rng, refused = random.Random(seed), 0
    whole = [
        pack(each)
        for each in (frames.Abort(7), frames.Finish(1, 0, 3), frames.AskStats(1), frames.Beat(3, "device", 1.0, 30.0))
    ]
    for _ in range(count):
        data = bytearray(b"".join(rng.choices(whole, k=3)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for kinds in (frames.Command, frames.Event):
            try:
                list(Unpacker(kinds, 4096).feed(bytes(data)))
            except BadFrame:
                refused += 1
    assert refused > count // 2
    return f"{count} damaged messages, {refused} times refused, 0 other errors"


# --- row 52

RIGHT = b"k" * 32
SUSPICIOUS = 4.5  # by chance once in 150,000 times
# of what looks like a leak: a busy or unlucky stretch of this machine does not look the same each time, a leak does
REPETITIONS = 3

Headers = list[tuple[bytes, bytes]]


def key_timing(samples: int, seed: int = 52) -> str:
    """How much oftener than by chance a key that shares its beginning with the right one takes longer to refuse than
    one that does not.

    The two follow each other in an order that a coin decides, and only which of them took longer counts: whatever else
    the machine does, it does to both alike, and without a leak the count is that of a fair coin. What looks like a leak
    has to look like it each time again, with other keys at other places in memory, and to the same side.
    """
    rng, found = random.Random(seed), list[float]()
    while len(found) < 1 + REPETITIONS:
        found.append(_oftener(Guard(ServerConfig(api_key=(RIGHT.decode(),))), rng, samples))
        if abs(found[-1]) < SUSPICIOUS or found[-1] * found[0] < 0:
            return f"z = {found[-1]:.2f} over {samples} pairs"
    raise AssertionError(f"z = {', then '.join(f'{z:.1f}' for z in found)}")


def _oftener(guard: Guard, rng: random.Random, pairs: int) -> float:
    """In standard deviations of a fair coin's."""
    longer, differ = 0, 0
    for tries in [
        _tries(rng) for _ in range(pairs)
    ]:  # all made before the first is timed: where they lie is as random as what they hold
        took = {alike: _refusal(guard, headers) for alike, headers in tries}
        longer, differ = longer + (took[True] > took[False]), differ + (took[True] != took[False])
    return (2 * longer - differ) / math.sqrt(max(1, differ))


def _tries(rng: random.Random) -> list[tuple[bool, Headers]]:
    """Whether a key shares its beginning with the right one, and a request's headers with that key; in random order."""
    tries = [
        (alike, (RIGHT[:31] if alike else bytes(rng.choices(b"abcdefgh", k=31))) + b"x")
        for alike in rng.sample((True, False), 2)
    ]
    return [(alike, [(b"authorization", b"Bearer " + key)]) for alike, key in rng.sample(tries, 2)]


def _refusal(guard: Guard, headers: Headers) -> int:
    """Nanoseconds."""
    begun = time.perf_counter_ns()
    with contextlib.suppress(Unauthorized):
        guard.check_key(headers)
    return time.perf_counter_ns() - begun


# --- row 53

FOREIGN = (
    ("Host", "evil.example"), ("Host", "evil.example:80"), ("Host", "127.0.0.1.evil.example"), ("Origin", "https://evil.example"), ("Origin", "null"),
)  # fmt: skip


def browsers(server: Server) -> str:
    """What a foreign page could make a browser send is refused on every route, and no answer invites it."""
    for route, (name, value) in itertools.product(ROUTES, FOREIGN):
        answer = server.ask(route.method, route.path, None, {name: value})
        assert answer.status == 403, (route.method, route.path, name, value, answer)
        _assert_no_invitation(answer)
    good, post = {"Content-Type": "application/json"}, ("POST", "/v1/completions", b'{"prompt":"x","max_tokens":1}')
    refused = {
        415: [
            {"Content-Type": kind}
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
        ],
    }
    for status, tries in refused.items():
        for headers in tries:
            answer = server.ask(*post, {**good, **headers})
            assert answer.status == status, (headers, answer)
            _assert_no_invitation(answer)
    preflight = server.ask(
        "OPTIONS", "/v1/completions", None, {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status in (401, 403, 405)
    _assert_no_invitation(preflight)
    allowed = server.ask(
        *post, {**good, "Origin": f"http://127.0.0.1:{server.port}", "Host": f"127.0.0.1:{server.port}"}
    )
    assert allowed.status == 200
    _assert_no_invitation(allowed)
    return f"{len(ROUTES) * len(FOREIGN) + sum(map(len, refused.values())) + 1} tries refused, no CORS header anywhere"


def _assert_no_invitation(answer: Any) -> None:
    assert not any(name.startswith("access-control-") for name in answer.headers), answer.headers


# --- row 54


def cardinality(count: int, *, command: Command = SERVE) -> str:
    """Unique methods, paths, models, users and ids: the number of series stays, and the log does not grow with them."""
    with serving("--executor", "keyed-hash", command=command) as server:
        server.ask(
            "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}
        )  # the first step brings the series of steps
        before, lines, begun = _series(server), len(server.lines), time.perf_counter()
        for start in range(0, count, 50):
            together(_unique(server, number) for number in range(start, min(start + 50, count)))
        after, said, seconds = _series(server), server.lines[lines:], time.perf_counter() - begun
        assert after == before, f"{after} series, {before} before"
        refusals = metric(
            server.ask("GET", "/metrics").body.decode(), "headrace_http_responses_total", 'route="-",status="4xx"'
        )
        assert refusals >= count // 4
    refused = sum(
        "status=200" not in line for line in said
    )  # what was answered had its place in the queue, and has its line
    assert refused <= 21 * (seconds + 2), (
        f"{refused} lines for {count} requests in {seconds:.1f} s"
    )  # twenty a second, and how many more there were
    return f"{count} unique requests: {after} series before and after, {len(said)} lines of log"


def _series(server: Server) -> int:
    return sum(not line.startswith("#") for line in server.ask("GET", "/metrics").body.decode().splitlines())


async def _unique(server: Server, number: int) -> None:
    bodies = ({"model": f"m{number}"}, {"user": f"u{number}", "max_tokens": 1}, {f"field{number}": 1})
    if number % 4 == 3:
        await asyncio.to_thread(server.ask, f"M{number}", f"/path/{number}")
    else:
        path = "/v1/completions" if number % 4 else f"/v1/{number}"
        await ask(server.port, path, {"prompt": "x", **bodies[number % 3]}, f"X-Request-Id: id{number}")


# --- row 55


def model_files(count: int, seed: int = 55) -> str:
    """Damaged files of every kind a model has: an error of ours or a readable model, soon, and nothing is imported."""
    rng, tallies, slowest = random.Random(seed), {"refused": 0, "read": 0}, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        modules = set(sys.modules)
        (folder / "evil.py").write_text("raise SystemExit('imported')")
        kinds = (*(_config, _safetensors, _gguf) * 8, _tokenizer)
        for number in range(count):
            begun = time.perf_counter()
            try:
                kinds[number % len(kinds)](folder, rng)
                tallies["read"] += 1
            except HeadraceError:
                tallies["refused"] += 1
            slowest = max(slowest, time.perf_counter() - begun)
        assert not {each for each in set(sys.modules) - modules if "evil" in each}
    assert slowest < 5 and tallies["refused"] > count // 10, (slowest, tallies)
    return f"{count} damaged files: {tallies['refused']} refused, {tallies['read']} readable all the same, the slowest {slowest * 1000:.0f} ms"


def damage(rng: random.Random, data: bytes, end: int) -> bytes:
    """Some bytes before ``end`` replaced, cut out, put in or cut off."""
    snippets = (
        b"-1",
        b"9" * 30,
        b"[" * 3000,
        b"null",
        b"1e400",
        b'"',
        b"}",
        b"NaN",
        b"\xff" * 8,
        b"\x00" * 8,
        b"../evil",
        struct.pack("<Q", 2**62),
    )
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(end)
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at]
            end = max(1, len(data))
        elif kind == 1:
            data = data[:at] + rng.choice(snippets) + data[at:]
        elif kind == 2:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        else:
            data = data[:at] + data[at + rng.randint(1, 20) :]
            end = max(1, min(end, len(data)))
    return data


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
}  # fmt: skip


def _config(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        data = json.dumps(
            {**CONFIG, rng.choice(list(CONFIG)): rng.choice((-1, 0, 1e308, 2**63, "x", None, [], {}, True))}
        ).encode()
    else:
        whole = json.dumps(CONFIG).encode()
        data = damage(rng, whole, len(whole))
    (folder / "config.json").write_bytes(data)
    spec_from_config(find_model(ModelConfig(model=str(folder), load_format="dummy")).config)


def _safetensors(folder: Path, rng: random.Random) -> None:
    single, half = (
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    )
    head = json.dumps({"a": single, "b": half})
    whole = struct.pack("<Q", len(head)) + head.encode() + bytes(32)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(damage(rng, whole, len(whole) - 32))
    checkpoint = open_checkpoint(find_model(ModelConfig(model=str(folder))))
    for key in list(checkpoint.keys()):
        assert checkpoint.read(key).shape == checkpoint.shape(key)
    checkpoint.close()


def _gguf(folder: Path, rng: random.Random) -> None:
    text = b"general.architecture"
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 0, 0)
    whole = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 1, 1)
        + struct.pack("<Q", len(text))
        + text
        + struct.pack("<IQ", 8, 5)
        + b"llama"
        + tensor
    )
    whole += bytes(-len(whole) % 32) + bytes(128)
    file = folder / "m.gguf"
    file.write_bytes(damage(rng, whole, len(whole) - 128))
    gguf_file._read_cached.cache_clear()
    gguf_file.read_gguf(file)


def _tokenizer(folder: Path, rng: random.Random) -> None:
    """The bundled model's tokenizer, which is megabytes long, is damaged at its beginning or end, where its structure
    is."""
    whole = (SOURCES / "data" / "demo" / "tokenizer.json").read_bytes()
    cut = rng.random() < 0.5
    (folder / "tokenizer.json").write_bytes(
        damage(rng, whole, 1500) if cut else whole[:-1500] + damage(rng, whole[-1500:], 1500)
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = load_tokenizer(find_model(ModelConfig(model=str(folder), load_format="dummy")))
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("Hello there"))
