"""``headrace completion``: scripts for bash, zsh and fish, generated from the parsers themselves.

What lives here: reading all parsers. What may not: lists of commands or flags of its own, the scripts' frame
(data/completion.*).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace.flags import CommandParser

_DATA = Path(__file__).parent.parent / "data"
_ZSH = "#compdef headrace\nautoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = 'for the shell\'s start-up file: eval "$(headrace completion bash)", or for fish: headrace completion fish | source'
    parser.add_argument("dialect", metavar="{bash,zsh,fish}", choices=("bash", "zsh", "fish"), help=help_text)


def run(args: argparse.Namespace) -> int:
    from headrace.cli import COMMANDS, command_parser

    parsers = dict(_tree({name: command_parser(name) for name in COMMANDS}))
    print(
        _fish(parsers) if args.dialect == "fish" else (_ZSH if args.dialect == "zsh" else "") + _bash(parsers), end=""
    )
    return 0


def _tree(
    parsers: Mapping[str, CommandParser], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], CommandParser]]:
    """Every command with the words that lead to it."""
    for name, parser in parsers.items():
        parser.declare()
        yield (*above, name), parser
        yield from _tree(parser.subcommands(), (*above, name))


def _flags(parser: CommandParser) -> list[str]:
    return sorted(flag for flag in parser.options() if flag.startswith("--"))


def _words(parser: CommandParser) -> list[str]:
    """What may be typed where no flag is: sub-commands, and choices of positional arguments."""
    chosen = [
        str(each)
        for action in parser._actions
        if not action.option_strings and action.choices
        for each in action.choices
    ]
    return list(dict.fromkeys([*parser.subcommands(), *chosen]))


def _choices(parsers: Mapping[tuple[str, ...], CommandParser]) -> dict[str, str]:
    """The values of each flag that has a choice of values."""
    found: dict[str, dict[str, None]] = {}
    for parser in parsers.values():
        for flag, action in parser.options().items():
            shown = str(action.metavar)  # optional fields are shown as choices, and checked by the config
            listed = action.choices or (shown.strip("{}").split(",") if shown.startswith("{") else ())
            found.setdefault(flag, {}).update(dict.fromkeys(map(str, listed)))
    return {flag: " ".join(values) for flag, values in sorted(found.items()) if values}


def _bash(parsers: Mapping[tuple[str, ...], CommandParser]) -> str:
    """``shared``: flags that chat and serve have in common, listed once."""
    shared = set(_flags(parsers["chat",])) & set(_flags(parsers["serve",]))
    values = "\n".join(f'    {flag}) words="{words}" ;;' for flag, words in _choices(parsers).items())
    top = [path[0] for path in parsers if len(path) == 1]
    commands = [f'        "") words="{" ".join(top)} --help --version" ;;']
    for path, parser in parsers.items():
        flags = _flags(parser)
        own = [flag for flag in flags if flag not in shared] if shared <= set(flags) else flags
        words = " ".join([*_words(parser), *own, *(["$shared"] if shared <= set(flags) else [])])
        commands.append(f'        " {" ".join(path)}") words="{words}" ;;')
    paths = " | ".join(f'" {" ".join(path)}"' for path in parsers)
    script = (_DATA / "completion.bash").read_text(encoding="utf-8")
    parts = {"shared": " ".join(sorted(shared)), "values": values, "paths": paths, "commands": "\n".join(commands)}
    return re.sub("@([a-z]+)@", lambda found: parts[found[1]], script)


def _fish(parsers: Mapping[tuple[str, ...], CommandParser]) -> str:
    """One line per flag, for all commands that have it."""
    top = {path[0]: parser.description or "" for path, parser in parsers.items() if len(path) == 1}
    lines = [
        f"complete -c headrace -n __fish_use_subcommand -xa {name} -d {_quoted(text)}" for name, text in top.items()
    ]
    lines += [
        _at([path], f"-xa {_quoted(' '.join(words))}") for path, parser in parsers.items() if (words := _words(parser))
    ]
    choices, where = _choices(parsers), dict[tuple[int, str], list[tuple[str, ...]]]()
    for path, parser in parsers.items():
        for flag in _flags(parser):
            where.setdefault((len(path), flag), []).append(path)
    for (_, flag), paths in where.items():
        known = parsers[paths[0]].options()
        action = known[flag]
        values = f"-xa {_quoted(choices[flag])}" if flag in choices else "" if action.nargs == 0 else "-r"
        is_negation = f"--{flag.removeprefix('--no-')}" in known  # the text is of what it turns off
        said = "" if is_negation else f" -d {_quoted((action.help or '')[:80])}"
        lines.append(_at(paths, f"-l {flag[2:]} {values}{said}"))
    return (_DATA / "completion.fish").read_text(encoding="utf-8") + "\n".join(lines) + "\n"


def _at(paths: Sequence[tuple[str, ...]], rest: str) -> str:
    """After these commands, all with the same number of words."""
    spelled = " ".join(f'"{" ".join(path)}"' for path in paths)
    return f"complete -c headrace -n '__headrace_at {len(paths[0])} {spelled}' {rest}"


def _quoted(text: str) -> str:
    return "'" + text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'") + "'"
