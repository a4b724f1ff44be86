"""``headrace chat``: a conversation in the terminal, or one answer to one message.

What lives here: reading lines, showing answers, the slash commands. What may not: templates, sampling, anything of the
engine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from headrace.commands.sampling_flags import add_sampling_flags, over_defaults, sampling_values
from headrace.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError, InvalidRequest
from headrace.flags import add_config_flags, engine_config
from headrace.request import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

_HELP = "/system TEXT sets the system message (alone: removes it), /reset starts over, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's text may not drive the terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="*", help="a single message to answer; without it, a conversation starts")
    parser.add_argument("--system", metavar="TEXT", default=None, help="system message")
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    message = _message(args.message)
    config, flags = engine_config(args), sampling_values(args)
    from headrace import LLM  # torch

    with LLM.from_config(config, texts=True) as llm:
        params = over_defaults(llm.get_default_sampling_params(), flags)
        conversation = Conversation(llm, params, args.system, clamp="max_tokens" not in vars(args))
        if message is not None:
            _show(conversation.answer(message))
            return 0
        print(
            f"{llm.info.model}, {llm.info.dtype} on {llm.info.device}, context {llm.info.max_model_len} tokens. {_HELP}",
            file=sys.stderr,
        )
        _converse(conversation)
    return 0


class Conversation:
    """The turns so far, and the next answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, clamp: bool = False) -> None:
        self._llm = llm
        self._params = params
        self._clamp = clamp
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self.cut = False  # the last answer reached its maximum length

    def answer(self, message: str) -> Generator[str, None, None]:
        """Pieces of text. An interrupted answer stays in the conversation as far as it was shown."""
        messages = [
            *([{"role": "system", "content": self.system}] if self.system else []),
            *self.turns,
            {"role": "user", "content": message},
        ]
        shown: list[str] = []
        deltas = self._llm.stream(messages, self._params, clamp=self._clamp)
        try:
            for delta in deltas:
                if delta.error is not None:
                    raise HeadraceError(f"the step failed: {delta.error}")
                self.cut = delta.finish_reason == "length"
                shown.append(delta.text)
                yield delta.text
        finally:
            deltas.close()
            if shown:
                self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": "".join(shown)}]


def _message(words: list[str]) -> str | None:
    """The words on the command line, or the piped input; None at a terminal."""
    if len(words) == 1 and (os.path.isdir(words[0]) or words[0].endswith(".gguf")):
        raise ConfigError(
            f"{words[0]!r} reads as a model, but `headrace chat` takes a message; write --model {words[0]}."
        )
    if words:
        return " ".join(words)
    if sys.stdin.isatty():
        return None
    piped = sys.stdin.read().strip()
    if not piped:
        raise ConfigError(
            "there is no message: standard input is empty; give one as an argument or run it in a terminal."
        )
    return piped


def _converse(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() line editing and recall)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if line == "/quit":
            return
        if line.startswith("/"):
            print(_command(conversation, line), file=sys.stderr)
        elif line:
            _reply(conversation, line)


def _reply(conversation: Conversation, line: str) -> None:
    """One turn; if it fails, the conversation continues."""
    try:
        _show(conversation.answer(line))
        if conversation.cut:
            print("(the answer reached its maximum length)", file=sys.stderr)
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
    except InvalidRequest as error:
        print(f"{error.message} (/reset starts over)", file=sys.stderr)


def _command(conversation: Conversation, line: str) -> str:
    name, _, text = line.partition(" ")
    if name == "/reset":
        conversation.turns.clear()
        return "The conversation starts over."
    if name == "/system":
        conversation.system = text.strip() or None
        return f"System message: {conversation.system}" if conversation.system else "No system message."
    return _HELP if name == "/help" else f"There is no {name}. {_HELP}"


def _show(pieces: Generator[str, None, None]) -> None:
    with contextlib.closing(pieces):
        for piece in pieces:
            print(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", piece), end="", flush=True)
    print()
