"""The command line as a process sees it: help without heavy imports, exit statuses, errors in one line."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

from headrace import cli
from headrace.errors import ConfigError, ModelError
from headrace.flags import elsewhere

HEAVY = (
    "torch",
    "fastapi",
    "uvicorn",
    "starlette",
    "pydantic",
    "httpx",
    "tokenizers",
    "safetensors",
    "jinja2",
    "gguf",
    "yaml",
    "msgspec",
)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *words]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=env, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """`headrace doctor`, replaced by something a test can steer."""
    command = types.SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--number", type=int), run=lambda args: 0
    )
    monkeypatch.setattr(cli, "_load", lambda name: command)
    return command


@pytest.mark.parametrize("name", [None, *cli.COMMANDS])
def test_help_imports_nothing_heavy(name: str | None) -> None:
    words = ["--help"] if name is None else [name, "--help"]
    script = f"""
import sys
from headrace import cli
try:
    cli.main({words!r})
except SystemExit as end:
    print("exit", end.code)
print("heavy:", sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit 0" in done.stdout and "heavy: []" in done.stdout
    assert f"usage: headrace{'' if name is None else ' ' + name}" in done.stdout


def test_help_takes_less_than_300_ms_of_processor_time() -> None:
    """Processor time, not wall time: it holds on a busy machine too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_help_lists_every_command_and_every_command_has_its_module() -> None:
    text = run("--help").stdout
    folder = Path(cli.__file__).parent / "commands"
    modules = {path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")}
    assert {name for name in cli.COMMANDS if f"\n    {name}" in text} == set(cli.COMMANDS) == modules


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0 and done.stdout.startswith("headrace 0.")


def test_no_command_prints_the_help_and_is_wrong_usage() -> None:
    done = run()
    assert done.returncode == 2 and "commands:" in done.stdout


@pytest.mark.parametrize("words", [("serv",), ("--frobnicate",), ("serve", "--prot", "1")])
def test_wrong_usage_is_one_line_and_status_2(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("headrace: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("serv",), "there is no COMMAND 'serv'; did you mean serve? "),
        (
            ("run", "org/name"),
            "there is no COMMAND 'run': use headrace chat --model MODEL to talk, headrace serve MODEL for a server",
        ),
        (("pull", "org/name"), "there is no COMMAND 'pull': use headrace models pull org/name"),
        (("xyzzy",), "there is no COMMAND 'xyzzy'; there are serve, chat, "),
        (("bench", "through"), "there is no BENCHMARK 'through'; did you mean throughput?"),
        (("bench", "run"), "there is no BENCHMARK 'run'; "),
        (("serve", "--bogus"), "unknown flag --bogus (see "),
        (("serve", "--max_model_length", "5"), "did you mean --max-model-len?"),
    ],
)
def test_a_command_that_is_none_gets_the_one_to_use(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and told in err and err.count("\n") == 1


def test_hints_name_commands_that_exist() -> None:
    named = {match for text in elsewhere("commands").values() for match in re.findall(r"headrace ([a-z]+)", text)}
    assert named <= set(cli.COMMANDS) and not elsewhere("commands").keys() & set(cli.COMMANDS)


def test_bad_log_level_is_explained() -> None:
    done = run("doctor", HEADRACE_LOG_LEVEL="loud")
    assert done.returncode == 2 and "set it to one of debug, info" in done.stderr


def test_an_error_is_one_line_and_status_1(
    fake_command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise ModelError("No config.json\n  in /x. Give a model's folder.")

    fake_command.run = fail
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "headrace: No config.json in /x. Give a model's folder.\n"


@pytest.mark.parametrize("words", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback(
    fake_command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    def fail(args: object) -> int:
        raise ConfigError("bad")

    fake_command.run = fail
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("headrace: bad\n")


def test_a_commands_own_status_and_arguments_go_through(fake_command: types.SimpleNamespace) -> None:
    fake_command.run = lambda args: args.number
    assert cli.main(["doctor", "--number", "7"]) == 7


def test_a_defect_of_ours_is_not_swallowed(fake_command: types.SimpleNamespace) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    fake_command.run = fail
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_interrupt_ends_quietly(fake_command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    fake_command.run = interrupted
    assert cli.main(["doctor"]) == 130 and capsys.readouterr().err == ""


WRITES_FOR_EVER = """
import sys, types
from headrace import cli

def run(args):
    while True:
        print("line")

cli._load = lambda name: types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
sys.exit(cli.main(["doctor"]))
"""


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITES_FOR_EVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 141
