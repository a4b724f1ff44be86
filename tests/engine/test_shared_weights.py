"""Weights that processes of one host share: the same answers, one copy, and no trust in what is not ours."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, ModelError
from headrace.models import shared_weights
from headrace.models.shared_weights import share_weights
from tests.support import quantised, tiny

FOLDER = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs /dev/shm")


def files() -> set[Path]:
    return set(FOLDER.glob(f"headrace-{os.getuid()}-*"))


def dirty_kib(path: Path) -> int:
    """Of this process's mappings of the file: pages that are its own."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        ours = line.endswith(str(path)) if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line) else ours
        found += int(line.split()[1]) if ours and line.startswith("Private_Dirty") else 0
    return found


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    return list(llm.generate([{"prompt_token_ids": [5, 9, 200, 31]}], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_second_engine_answers_from_the_first_ones_weights(family: str, tmp_path: Path) -> None:
    tiny.create(family, seed=3).save_pretrained(tmp_path)
    before = files()
    with LLM(tmp_path, threads=1) as plain, LLM(tmp_path, threads=1, share_weights=True) as first:
        (made,) = files() - before
        inode = made.stat().st_ino
        with LLM(tmp_path, threads=1, share_weights=True) as second:
            said = [each.reason for llm in (first, second) for each in llm.info.decisions if each.value == "shared"]
            assert answer(plain) == answer(first) == answer(second)
            assert "others that start now" in said[0] and "another process" in said[1]
            assert made.stat().st_ino == inode and dirty_kib(made) <= made.stat().st_size // 1024 // 4
        gc.collect()
        assert made.exists(), "the first one still has it"
    gc.collect()
    assert files() == before


def module(value: float) -> nn.Module:
    made = nn.Linear(5, 3, bias=True)
    made.requires_grad_(False)
    made.weight.data.fill_(value), made.bias.data.fill_(value + 1)
    return made


def fill(held: nn.Module, value: float) -> None:
    for each in held.parameters():
        each.data.fill_(value)


def test_what_a_crash_left_is_taken_if_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "leave", lambda fd, path: os.close(fd))  # as a process that is killed
    before, held, third = files(), [module(0), module(0)], module(0)
    try:
        assert not share_weights(held[0], ("crash",), lambda: fill(held[0], 2.5))
        assert share_weights(held[1], ("crash",), lambda: pytest.fail("it was there"))
        assert torch.equal(held[1].weight, torch.full((3, 5), 2.5))
        held[1].weight.data[0, 0] = 7.0
        assert held[0].weight[0, 0] == 2.5, "who writes has a copy"
        held.clear()  # each has it until its module goes
        (path,) = files() - before
        with path.open("r+b") as stream:
            stream.write(bytes(8))  # it was being filled
        assert not share_weights(third, ("crash",), lambda: fill(third, 4.0))
        assert torch.equal(third.bias, torch.full((3,), 4.0))
    finally:
        for path in files() - before:
            path.unlink()


def test_what_others_may_write_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    before, held = files(), module(0)
    assert not share_weights(held, ("trust",), lambda: None)
    (path,) = files() - before
    path.chmod(0o666)
    with pytest.raises(ModelError, match="not this user's alone"):
        share_weights(module(0), ("trust",), lambda: None)
    target = path.with_suffix(".elsewhere")
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(ModelError, match=r"cannot open .* Start without --share-weights"):
        share_weights(module(0), ("trust",), lambda: None)
    path.unlink(), target.unlink()


def test_no_room_is_an_error_with_numbers_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    before = files()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ModelError, match=r"no room for 0\.00 GiB of weights \(No space left on device\)"):
        share_weights(module(0), ("room",), lambda: None)
    assert all(path.stat().st_size == 0 for path in files() - before)
    for path in files() - before:
        path.unlink()


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    stored, _ = quantised.write("compressed-w4a16", tmp_path)
    with pytest.raises(ConfigError, match="quantized ones are packed"):
        LLM(stored, threads=1, share_weights=True)
