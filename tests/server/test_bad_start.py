"""Starts that must fail: each in one line that names what is wrong, within seconds, with nothing left behind."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.conftest import slowness_now
from tests.support.serving import ROOT, SERVE, environment

DEMO = ROOT / "src" / "headrace" / "data" / "demo"
SECONDS = 30.0  # after which a start is given up
PROMISED = 10.0  # seconds, of a machine as fast as budgets suppose
AT_ONCE = 3


def variant(folder: Path, name: str, file: str, change: Callable[[bytes], bytes]) -> str:
    """The bundled model with one file changed."""
    copy = folder / name
    copy.mkdir()
    for each in DEMO.iterdir():
        if each.name == file:
            (copy / file).write_bytes(change(each.read_bytes()))
        else:
            (copy / each.name).symlink_to(each)
    return str(copy)


def with_fields(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **fields}).encode()


def with_header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Changes the table of contents of a safetensors file."""

    def changed(data: bytes) -> bytes:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        change(header)
        raw = json.dumps(header).encode()
        return struct.pack("<Q", len(raw)) + raw + data[8 + size :]

    return changed


QUERY = "model.layers.0.self_attn.q_proj.weight"


def reshape(header: dict[str, Any]) -> None:
    rows, columns = header[QUERY]["shape"]
    header[QUERY]["shape"] = [rows * 2, columns // 2]


def with_a_token_too_many(data: bytes) -> bytes:
    tokenizer = json.loads(data)
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<one more>"})
    return json.dumps(tokenizer).encode()


# name → the file that is changed, how, and what the line must say. One goes through the engine's process, which loads
# torch; what else is refused in a model's folder: tests/engine/test_loader.py, tests/unit/test_families.py.
BROKEN: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "shape": ("model.safetensors", with_header(reshape), QUERY),
    "json": ("config.json", lambda data: data[:-10], "not JSON"),
    "tokenizer": ("tokenizer.json", with_a_token_too_many, "vocab_size is 8192"),
    "sampling": ("generation_config.json", with_fields(temperature=-1), "temperature is -1"),
}
FLAGS = {
    "memory": (("--kv-cache-memory", "100TiB"), "Lower --kv-cache-memory"),
    "length": (("--max-model-len", "1M"), "at most 4096"),
    "template": (("--chat-template", "/nope.jinja"), "'/nope.jinja'"),
    "jinja": (("--chat-template", "{{ a\n}} {% if %}"), "line 2"),
    "moderation": (("--moderation", "nowhere:judge"), "there is no nowhere"),
    "words": (("--moderation-words", "/nope.txt"), "no such file"),
    "fronts": (("--moderation", "nowhere:judge", "--api-server-count", "2"), "there is no nowhere"),
}
BEFORE_IT_LISTENS = ("template", "jinja", "moderation", "words", "fronts")  # found out before anything is announced


def failed_start(arguments: tuple[str, ...], mark: str) -> tuple[int, list[str], float]:
    """Exit status, what was said on stderr, and seconds."""
    begun = time.monotonic()
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run(
        [*SERVE, *arguments], timeout=SECONDS, check=False, env={**environment(), "STARTED_FOR_TEST": mark}, **options
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines(), time.monotonic() - begun


def left_behind(mark: str) -> list[str]:
    """Processes that were started under the mark and still live."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"STARTED_FOR_TEST={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(entry)
        except OSError:
            continue
    return found


def test_starts_that_cannot_succeed(tmp_path: Path) -> None:
    cases = {
        name: (("--model", variant(tmp_path, name, file, change)), word)
        for name, (file, change, word) in BROKEN.items()
    } | FLAGS
    with ThreadPoolExecutor(AT_ONCE) as threads:
        results = {
            name: threads.submit(failed_start, arguments, str(tmp_path)) for name, (arguments, _) in cases.items()
        }
        promised = PROMISED * slowness_now()
    for name, (_, word) in cases.items():
        status, lines, seconds = results[name].result()
        greeted = [lines.pop(0) for line in lines[:1] if line.startswith("Headrace ")]
        assert not greeted or name not in BEFORE_IT_LISTENS
        assert status in (1, 2) and len(lines) == 1 and lines[0].startswith("headrace: ") and word in lines[0], (
            name,
            status,
            lines,
        )
        assert seconds < promised, f"{name} failed after {seconds:.1f} s"
    assert not left_behind(str(tmp_path))
