"""The ``headrace`` command: picks a sub-command, runs it, and turns errors into one line and an exit status.

What lives here: the list of commands and the outermost error handling. What may not: any command's work (commands/),
flags (flags.py), and any import that costs time: ``headrace --help`` answers in under 0.3 s, so a command's module is
imported only when it is the one chosen.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import ConfigError, HeadraceError
from headrace.flags import CommandParser
from headrace.torch_environment import prepare_for_torch

# name → one line of help; the module is headrace.commands.NAME.
COMMANDS: dict[str, str] = {
    "serve": "serve a model through the HTTP APIs of OpenAI and Anthropic",
    "chat": "talk to a model in the terminal",
    "generate": "complete prompts of a JSONL file or the command line",
    "quantize": "quantize a checkpoint to FP8, 8 or 4 bits",
    "models": "list, pull and remove models in the hub's cache",
    "bench": "measure throughput, latency, a server, start-up, kernels, techniques",
    "simulate": "predict a workload's performance on a device that you do not have",
    "doctor": "show this machine's hardware, and the automatic choices with their reasons",
    "techniques": "list the techniques: source, switch, default",
    "completion": "print a script for shell completion of commands and flags",
}

LOG_LEVELS = ("debug", "info", "warning", "error")

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class _Version(argparse.Action):
    """``--version``, read from the package only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        from headrace import __version__

        print(f"headrace {__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0 fine, 1 an error that was explained in one line, 2 wrong usage (a
    flag or a setting)."""
    return answer(_run, argv)


def answer(run: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """The status of ``run`` with these words, or with the process's; what goes wrong is explained."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _set_up_logging("--debug" in words)
        prepare_for_torch()
        return run(words)
    except HeadraceError as error:
        return _explain(error, show_traceback="--debug" in words)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _run(words: list[str]) -> int:
    asked = "_ARGCOMPLETE" in os.environ  # by a shell, what may come next
    words = os.environ["COMP_LINE"].split()[1:] if asked else words
    chosen = next((word for word in words if not word.startswith("-")), None)
    module = _load(chosen) if chosen in COMMANDS else None
    parser = create_parser(chosen, module)
    if asked:
        _load("completion").answer_shell(parser)
    args = parser.parse_args(words)
    if module is None:  # no command, and neither --help nor --version
        parser.print_help()
        return EXIT_USAGE
    return int(module.run(args))


def _load(name: str) -> Any:
    """The command's module: its ``add_arguments(parser)`` and its ``run(args)``, which returns the exit status."""
    return importlib.import_module(f"headrace.commands.{name}")


def create_parser(chosen: str | None, module: Any) -> CommandParser:
    """The whole command line. Only the chosen command gets its arguments: the others stay names with a line of help."""
    description = "LLM inference and serving, measured against the physical limit."
    begin = 'Start with headrace chat "Hello! Who are you?", then headrace serve and a browser. Both work without naming or downloading a model.'
    parser = CommandParser(prog="headrace", description=description, epilog=begin)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", dest="command")
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line[0].upper() + help_line[1:] + ".")
        if name == chosen and module is not None:
            module.add_arguments(command)
    return parser


def _set_up_logging(debug: bool) -> None:
    """Log lines go to stderr; HEADRACE_LOG_LEVEL sets the level (--debug: debug)."""
    level = "debug" if debug else os.environ.get("HEADRACE_LOG_LEVEL", "info").lower()
    if level not in LOG_LEVELS:
        raise ConfigError(f"HEADRACE_LOG_LEVEL is {level!r}; set it to one of {', '.join(LOG_LEVELS)}.")
    form = "%(levelname)s %(name)s: %(message)s" if level == "debug" else "%(levelname)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, stream=sys.stderr)
    logging.getLogger("headrace").setLevel(level.upper())


def _explain(error: HeadraceError, *, show_traceback: bool) -> int:
    """One line on stderr; a traceback before it in debug mode."""
    if show_traceback or os.environ.get("HEADRACE_LOG_LEVEL", "").lower() == "debug":
        traceback.print_exception(error)
    print(f"headrace: {' '.join(str(error).split())}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR
