"""The compile cache: one build a machine and source, safe against company, damage and strangers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.kernels.build import c_compiler as compiler
from headrace.kernels.candidate import Declined


@pytest.fixture
def cc() -> compiler.Compiler:
    found = compiler.find_compiler()
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    return found


def touch_build(monkeypatch: pytest.MonkeyPatch, cc: compiler.Compiler) -> None:
    """One trivial source instead of ours: the cache is tested, not gcc's patience."""
    monkeypatch.setattr(compiler, "HEADERS", ())
    monkeypatch.setattr(compiler, "SOURCES", ("answer.c",))
    monkeypatch.setattr(compiler, "_source", lambda name: b"int answer(void) { return 42; }\n")


def test_a_second_build_is_found_and_concurrent_ones_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: compiler.Compiler
) -> None:
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


def test_a_damaged_or_foreign_build_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: compiler.Compiler
) -> None:
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


def test_where_nothing_can_be_kept_it_is_built_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: compiler.Compiler
) -> None:
    touch_build(monkeypatch, cc)
    (tmp_path / "file").write_text("in the way")
    build = compiler.build(cc, tmp_path / "file" / "kernels")
    assert build.library.answer() == 42 and not build.path.exists()


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: compiler.Compiler
) -> None:
    touch_build(monkeypatch, cc)
    monkeypatch.setattr(compiler, "_source", lambda name: b"this is no C\n")
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path)
    answer = compiler.native_library.__wrapped__()
    assert isinstance(answer, Declined) and "error:" in answer.reason
    assert list(tmp_path.iterdir()) == []


def put(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'no license' >&2; exit 1", "ended with status 1: no license"),
        ("exit 3", "ended with status 3: it says nothing"),
        ("kill -9 $$", "ended with status -9"),
        ("/bin/sleep 100 & wait", "took more than 0.2 s"),
        ("printf '\\377' >&2; exit 1", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_broken_compiler_declines_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    put(tmp_path / "bin", "cc", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(compiler, "VERSION_SECONDS", 0.2)
    lines: list[str] = []
    monkeypatch.setattr(compiler.progress, "say", lines.append)
    answer = compiler.native_library.__wrapped__()
    assert isinstance(answer, Declined) and told in answer.reason and "mend it or install one" in answer.reason
    assert len(lines) == 1 and lines[0].startswith("Slower than it could be: no C compiler works here")


def test_what_a_hanging_compiler_started_ends_with_it(tmp_path: Path) -> None:
    put(tmp_path / "bin", "cc", f"/bin/sleep 100 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(compiler.CompilerHangs):
        compiler._run([str(tmp_path / "bin" / "cc")], seconds=0.5)
    status = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    end = time.monotonic() + 5.0  # killed is not yet gone
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_no_program_and_no_compiler_at_all_decline_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    answer = compiler.find_compiler()
    assert isinstance(answer, Declined) and "was found; install one" in answer.reason
    put(tmp_path / "bin", "gcc", "")
    (tmp_path / "bin" / "gcc").write_bytes(b"\x7fELF but no more")
    answer = compiler.find_compiler()
    assert isinstance(answer, Declined) and "cannot be run" in answer.reason


def test_the_next_compiler_stands_in_for_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "bin", "cc", "exit 1")
    put(tmp_path / "bin", "clang", "echo clang version 99")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert compiler.find_compiler() == compiler.Compiler(str(tmp_path / "bin" / "clang"), "clang version 99\n")


def test_a_compiler_that_hangs_is_not_asked_again_with_other_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hang(flag: str) -> None:
        asked.append(flag)
        raise compiler.CompilerHangs("cc took more than 300 s")

    with pytest.raises(compiler.CompilerHangs):
        compiler._first_working(compiler.TARGET_FLAGS, hang)
    assert len(asked) == 1


APPLE = """for each; do
case $each in -fopenmp) [ "$before" = -Xpreprocessor ] || exit 1;; -march=native) exit 1;; -Wl,--as-needed) exit 1;; esac
before=$each; shift
case $each in -Xpreprocessor|-mcpu=native) ;; *) set -- "$@" "$each";; esac
done
exec {cc} "$@"
"""


def test_a_compiler_that_knows_other_flags_is_asked_with_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: compiler.Compiler
) -> None:
    """Apple's clang: OpenMP's pragmas through the preprocessor, -mcpu for -march, no --as-needed. Put together from the
    one that is here."""
    touch_build(monkeypatch, cc)
    source = b"int answer(void) { return 42; }\n#ifdef _OPENMP\nconst int headrace_openmp = 1;\n#endif\n"
    monkeypatch.setattr(compiler, "_source", lambda name: source)
    put(tmp_path / "bin", "cc", APPLE.format(cc=cc.path))
    build = compiler.build(compiler.Compiler(str(tmp_path / "bin" / "cc"), "as Apple's"), tmp_path / "kernels")
    assert build.library.answer() == 42 and build.threads == (compiler.openmp_runtime() is not None)


def test_another_openmp_than_torchs_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: compiler.Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """clang's code asks for a runtime of its own, which torch's is not everywhere: built without, for one thread, and
    said."""
    touch_build(monkeypatch, cc)
    source = b"#ifdef _OPENMP\nvoid nobodys(void);\nint answer(void) { nobodys(); return 1; }\n#else\nint answer(void) { return 42; }\n#endif\n"
    monkeypatch.setattr(compiler, "_source", lambda name: source)
    build = compiler.build(cc, tmp_path)
    assert build.library.answer() == 42 and not build.threads and "without OpenMP" in caplog.text
    assert not compiler.build(cc, tmp_path).threads  # the one that was kept, too


def test_torchs_openmp_is_found_where_no_maps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = compiler.openmp_runtime()
    monkeypatch.setattr(Path, "read_text", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert compiler.openmp_runtime() == told


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    if isinstance(native := compiler.native_library(), Declined):
        pytest.skip(native.reason)
    assert native.threads
    loaded = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line or "libiomp" in line
    }
    assert len(loaded) == 1
