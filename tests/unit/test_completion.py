"""Completion as the shells themselves see it: the scripts come from the parsers, and bash runs its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import cli
from headrace.commands.bench import BENCHMARKS

SCRIPT = """
import sys
from headrace import cli
for shell in ("bash", "zsh", "fish"):
    sys.stdout = open(sys.argv[1] + "/" + shell, "w")
    assert cli.main(["completion", shell]) == 0
    sys.stdout.close()
print(sorted({"torch", "fastapi", "uvicorn"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stderr == "[]\n"  # nothing heavy is imported
    return folder


def completed(scripts: Path, *words: str) -> list[str]:
    """What bash offers for the last word; ``=`` stands alone, as bash splits words."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"source {scripts}/bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _headrace; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "--norc", "-uc", ask], capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_flags_and_values(scripts: Path) -> None:
    assert set(cli.COMMANDS) < set(completed(scripts, "headrace", ""))
    assert completed(scripts, "headrace", "se") == ["serve"]
    assert completed(scripts, "headrace", "bench", "thr") == ["throughput"]
    assert set(BENCHMARKS) < set(completed(scripts, "headrace", "bench", ""))
    assert completed(scripts, "headrace", "models", "r") == ["remove"]
    assert completed(scripts, "headrace", "models", "remove", "--y") == ["--yes"]
    assert completed(scripts, "headrace", "serve", "--max-model") == ["--max-model-len"]
    assert completed(scripts, "headrace", "serve", "org/name", "--por") == ["--port"]
    assert completed(scripts, "headrace", "chat", "--po") == []  # a server's
    assert completed(scripts, "headrace", "bench", "latency", "--batch-s") == ["--batch-size"]
    assert completed(scripts, "headrace", "serve", "--dtype", "b") == ["bfloat16"]
    assert completed(scripts, "headrace", "serve", "--dtype", "=", "fl") == ["float16", "float32"]
    assert completed(scripts, "headrace", "serve", "--dtype", "=") == ["auto", "bfloat16", "float16", "float32"]
    assert completed(scripts, "headrace", "completion", "z") == ["zsh"]
    assert completed(scripts, "headrace", "serve", "x.gg") == []  # bash goes on with files


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_take_their_scripts(scripts: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    done = subprocess.run([shell, "-n", str(scripts / shell)], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes_by_place(scripts: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("there is no fish")

    def offered(line: str) -> list[str]:
        asked = f"source {scripts}/fish; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", asked], capture_output=True, text=True, timeout=20, check=True
        )
        return [each.split("\t")[0] for each in done.stdout.splitlines()]

    assert offered("headrace ser") == ["serve"] and offered("headrace models pu") == ["pull"]
    assert offered("headrace serve --por") == ["--port"] and offered("headrace bench serve --por") == []
    assert offered("headrace doctor --block") == ["--block-size"]
    assert offered("headrace serve --dtype bf") == ["bfloat16"] and offered("headrace bench latency --batch-s") == [
        "--batch-size"
    ]


def test_a_script_is_small_enough_for_a_start_file(scripts: Path) -> None:
    assert (scripts / "bash").stat().st_size < 12_000 and (scripts / "fish").stat().st_size < 60_000
