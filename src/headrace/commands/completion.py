"""``headrace completion``: the script by which a shell asks ``headrace`` itself what may come next (argcomplete).

What lives here: that script, and the answer to a shell. What may not: lists of commands or flags, which parsers have.
"""

from __future__ import annotations

import argparse

from headrace.flags import CommandParser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = 'for the shell\'s start-up file: eval "$(headrace completion bash)", or for fish: headrace completion fish | source'
    parser.add_argument("dialect", metavar="{bash,zsh,fish}", choices=("bash", "zsh", "fish"), help=help_text)


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["headrace"], True, args.dialect))
    return 0


def answer_shell(parser: CommandParser) -> None:
    """Tells a shell what may come next, and ends the process. ``parser``: with the chosen command's flags."""
    from argcomplete import autocomplete
    from argcomplete.completers import ChoicesCompleter

    for command in parser.subcommands().values():
        for each in (command, *command.subcommands().values()):
            each.declare()
            each.reads_config_file = False  # half of its name may be typed
            for action in each._actions:
                if isinstance(action.metavar, str) and action.metavar.startswith("{"):  # choices, some left to configs
                    vars(action)["completer"] = ChoicesCompleter(dict.fromkeys(action.metavar[1:-1].split(","), ""))
    autocomplete(parser)
