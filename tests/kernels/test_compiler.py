"""The compile cache: one build a machine and source, safe against company, damage and strangers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.kernels.candidate import Declined
from headrace.kernels.cpu import compiler


@pytest.fixture
def cc() -> str:
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("no C compiler on this machine")
    return found


def touch_build(monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    """One trivial source instead of ours: the cache is tested, not gcc's patience."""
    monkeypatch.setattr(compiler, "HEADERS", ())
    monkeypatch.setattr(compiler, "SOURCES", ("answer.c",))
    monkeypatch.setattr(compiler, "_source", lambda name: b"int answer(void) { return 42; }\n")


def test_a_second_build_is_found_and_concurrent_ones_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    touch_build(monkeypatch, cc)
    folder = tmp_path / "deep" / "kernels"
    with ThreadPoolExecutor(4) as pool:
        builds = list(pool.map(lambda _: compiler.build(cc, folder), range(4)))
    assert {build.library.answer() for build in builds} == {42}
    assert [path.name for path in folder.iterdir()] == [builds[0].path.name]  # nothing half-made stays
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled although it was there"))
    assert compiler.build(cc, folder).path == builds[0].path


def test_source_flags_compiler_and_cpu_each_make_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        compiler.build_key({"a.c": b"1"}, "gcc 12", "cpu"),
        compiler.build_key({"a.c": b"2"}, "gcc 12", "cpu"),
        compiler.build_key({"b.c": b"1"}, "gcc 12", "cpu"),
        compiler.build_key({"a.c": b"1"}, "gcc 13", "cpu"),
        compiler.build_key({"a.c": b"1"}, "gcc 12", "another cpu"),
    }
    monkeypatch.setattr(compiler, "FLAGS", ("-O1",))
    assert len(keys | {compiler.build_key({"a.c": b"1"}, "gcc 12", "cpu")}) == 6


def test_a_damaged_or_foreign_build_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    touch_build(monkeypatch, cc)
    path = compiler.build(cc, tmp_path).path
    damaged = tmp_path / "other"
    damaged.mkdir()
    (damaged / path.name).write_bytes(b"\x7fELF but no more")
    assert compiler.build(cc, damaged).library.answer() == 42
    (damaged / path.name).chmod(0o666)  # others could have written it
    compiled: list[Path] = []
    original = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *args: (compiled.append(args[-1]), original(*args)))
    compiler.build(cc, damaged)
    assert compiled == [damaged / path.name]


def test_where_nothing_can_be_kept_it_is_built_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    touch_build(monkeypatch, cc)
    (tmp_path / "file").write_text("in the way")
    build = compiler.build(cc, tmp_path / "file" / "kernels")
    assert build.library.answer() == 42 and not build.path.exists()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    touch_build(monkeypatch, cc)
    monkeypatch.setattr(compiler, "_source", lambda name: b"this is no C\n")
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path)
    answer = compiler.native_library.__wrapped__()
    assert isinstance(answer, Declined) and "error:" in answer.reason
    assert list(tmp_path.iterdir()) == []


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    if isinstance(native := compiler.native_library(), Declined):
        pytest.skip(native.reason)
    assert native.threads
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line or "libiomp" in line}
    assert len(loaded) == 1
