"""``headrace generate`` and ``headrace chat``, without a model: lines in and out, turns of a conversation, errors in
one line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.commands.chat import Conversation
from headrace.engine.llm import LLM
from headrace.request import SamplingParams

FLAGS = ["--executor", "keyed-hash", "--max-model-len", "256", "--max-num-seqs", "2"]


def generate(tmp_path: Path, lines: list[Any], *flags: str) -> tuple[int, list[dict[str, Any]]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    status = main(["generate", "--input", str(source), "--output", str(target), *FLAGS, *flags])
    return status, [json.loads(line) for line in target.read_text().splitlines()]


def test_every_line_gets_its_answer_in_order(tmp_path: Path) -> None:
    lines = [
        {"prompt_token_ids": [5, n], "max_tokens": 1 + n % 7, "ignore_eos": True, "id": n} for n in range(40)
    ]  # more than the window holds
    status, results = generate(tmp_path, lines)
    assert status == 0
    assert [(each["line"], each["id"]) for each in results] == [(n + 1, n) for n in range(40)]
    assert [len(each["outputs"][0]["token_ids"]) for each in results] == [1 + n % 7 for n in range(40)]
    assert results[3]["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "cached_tokens": 0}


def test_a_bad_line_is_its_own_error_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad: list[tuple[Any, str | None]] = [
        ("not json", None),
        ("[" * 100_000, None),
        ("[1]", None),
        ({"prompt": "x", "temprature": 1}, "temprature"),
        ({"max_tokens": 3}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt_token_ids": [10**6]}, "prompt"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ]
    good = {
        "messages": [{"role": "user", "content": "x"}],
        "logit_bias": {"5": 1.0},
        "max_tokens": 2,
        "n": 2,
        "logprobs": 1,
        "prompt_logprobs": 0,
    }
    status, results = generate(tmp_path, [line for line, _ in bad] + ["", good])
    assert status == 1
    assert [each["error"]["param"] for each in results[:-1]] == [param for _, param in bad]
    assert [each["line"] for each in results] == [*range(1, len(bad) + 1), len(bad) + 2]
    assert [len(output["logprobs"]) for output in results[-1]["outputs"]] == [2, 2] and results[-1]["prompt_logprobs"][
        0
    ] is None
    assert f"{len(bad)} of the lines" in capsys.readouterr().err


def test_flags_are_defaults_and_lines_win(tmp_path: Path) -> None:
    _, results = generate(
        tmp_path,
        [{"prompt": "x", "ignore_eos": True}, {"prompt": "x", "max_tokens": 2}],
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    )
    assert [len(each["outputs"][0]["token_ids"]) for each in results] == [4, 2]


def test_prompts_on_the_command_line_print_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "Once", "--max-tokens", "3", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() and "{" not in captured.out and captured.err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate"], "--input"),
        (["generate", "--prompt", "x", "--input", "y"], "--input"),
        (["generate", "--input", "/no/such/file"], "/no/such/file"),
        (["generate", "--prompt", "x", "--temperature", "-1", *FLAGS], "temperature"),
        (["chat", "--model", "/no/such/model", "hi"], "/no/such/model"),
        (["chat", "/"], "--model /"),
        (["chat", "word " * 20_000, "--model", "/no/such/model"], "/no/such/model"),  # no file has so long a name
    ],
)
def test_errors_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--top-p", "3"], ["--max-tokens", "0"], ["--stop", ""]])
@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["chat", "x"]])
def test_a_wrong_sampling_flag_is_wrong_usage_before_a_model_is_looked_for(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags, "--model", "/no/such/model"]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == "" and flags[0].strip("-").replace("-", "_") in captured.err and captured.err.count("\n") == 1
    )


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x"}\n')
    assert main(["generate", "--input", str(file), "--output", str(file), *FLAGS]) == 2
    assert file.read_text() == '{"prompt": "x"}\n'


def test_one_message_is_answered_and_that_is_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["chat", "Hi", "there", "--max-tokens", "4", "--temperature", "0", *FLAGS]) == 0
    first = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi there\n"))
    assert main(["chat", "--max-tokens", "4", "--temperature", "0", *FLAGS]) == 0
    assert capsys.readouterr().out == first.out and first.out.endswith("\n") and first.err == ""


def converse(monkeypatch: pytest.MonkeyPatch, lines: list[Any], *flags: str) -> int:
    """A terminal in which somebody types ``lines``; an exception stands for a key (Ctrl-C, Ctrl-D)."""
    typed: Iterator[Any] = iter([*lines, EOFError()])

    def read(prompt: str = "") -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", read)
    return main(["chat", "--temperature", "0", "--max-tokens", "5", *FLAGS, *flags])


def test_a_conversation_remembers_forgets_and_survives_its_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[tuple[str, str]]] = []
    stream = LLM.stream

    def listen(self: LLM, messages: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append([(each["role"], each["content"][:8]) for each in messages])
        if messages[-1]["content"] == "interrupt":
            raise KeyboardInterrupt
        return stream(self, messages, *args, **kwargs)

    monkeypatch.setattr(LLM, "stream", listen)
    lines = [
        "Hi",
        "again",
        "long " * 400,
        "interrupt",
        KeyboardInterrupt(),
        "/system be brief",
        "/reset",
        "new",
        "/nonsense",
        "/help",
    ]
    assert converse(monkeypatch, lines) == 0
    roles = [[role for role, _ in turns] for turns in asked]
    assert roles == [
        ["user"],
        ["user", "assistant", "user"],
        ["user", "assistant"] * 2 + ["user"],
        ["user", "assistant"] * 2 + ["user"],
        ["system", "user"],
    ]
    said = capsys.readouterr()
    assert "maximum context length is 256 tokens" in said.err and "(stopped)" in said.err and "/nonsense" in said.err
    assert "Traceback" not in said.err


def test_quit_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, ["/quit", AssertionError("asked again after /quit")]) == 0


def test_a_stopped_answer_stays_as_far_as_it_was_shown() -> None:
    with LLM(executor="keyed-hash") as llm:
        conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), None)
        answer = conversation.answer("Hi")
        shown = next(answer) + next(answer)
        answer.close()
        assert conversation.turns == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": shown}]
        assert not llm.engine.core.has_work
