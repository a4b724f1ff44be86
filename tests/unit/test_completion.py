"""Completion as the shells themselves see it: the script asks the command, which answers by its own parsers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import cli
from headrace.commands.bench import BENCHMARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``headrace`` as a command, and each shell's script."""
    made = tmp_path_factory.mktemp("completion")
    command = made / "headrace"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace "$@"\n')
    command.chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        said = subprocess.run([command, "completion", shell], capture_output=True, timeout=20, check=True)
        (made / shell).write_bytes(said.stdout)
    return made


def offered(folder: Path, line: str) -> list[str]:
    """What bash offers at the end of the line, where the last word stands alone."""
    ask = (
        f"source {folder}/bash; compopt() {{ :; }}; COMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_TYPE=9; "
        "_python_argcomplete headrace; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", ask], capture_output=True, text=True, timeout=20, check=True, env=environment
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_flags_and_values(folder: Path) -> None:
    assert set(cli.COMMANDS) < set(offered(folder, "headrace "))
    assert set(BENCHMARKS) < set(offered(folder, "headrace bench "))
    assert offered(folder, "headrace serve org/name --config half --por") == ["--port"]
    assert offered(folder, "headrace chat --por") == []  # a server's
    assert offered(folder, "headrace bench latency --batch-s") == ["--batch-size"]
    assert offered(folder, "headrace serve --dtype=fl") == ["float16", "float32"]
    assert offered(folder, "headrace serve --block-size 1") == ["16", "128"]  # an optional choice
    assert offered(folder, "headrace serve x.gg") == []  # bash goes on with files


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_take_their_scripts(folder: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    done = subprocess.run([shell, "-n", str(folder / shell)], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_heavy_is_imported_for_an_answer() -> None:
    said = "import sys; from headrace import cli; cli.main(['completion', 'bash']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", said], capture_output=True, timeout=20, check=True)
