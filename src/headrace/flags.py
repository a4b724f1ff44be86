"""Config fields as command-line flags, and back: one field, one flag, the same name in a config file.

What lives here: the parser class of all commands, the flags made from config fields, reading sizes, config files and
``--technique``. What may not: fields or their bounds (config.py), commands, and any import that costs time.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from headrace import config
from headrace.config import ENGINE_PARTS, EngineConfig, FieldType, ServerConfig, field_types, switches, technique_name
from headrace.errors import ConfigError

MANY_FLAGS = 16  # beyond these the usage line does not list them
# What most people need of the configs' fields: --help shows these and a command's own flags, --help=all every one.
COMMON_FIELDS = frozenset(
    {
        "model", "tokenizer", "served_model_name", "dtype", "max_model_len", "chat_template", "gpu_memory_utilization", "kv_cache_memory",
        "max_num_seqs", "scheduling_policy", "device", "threads", "host", "port", "api_key", "allowed_origins", "api_server_count", "supervise",
    }
)  # fmt: skip

WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}

# As vLLM reads them: small letters are decimal, capitals and ...iB are binary, ...B is decimal.
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[kmgtKMGT])(?P<binary>i)?(?P<bytes>[bB])?|[bB])?\s*")


@cache
def elsewhere(kind: Literal["commands", "flags"]) -> Mapping[str, str]:
    """A sentence for each that people bring along from other engines, instead of "unknown"."""
    found: Mapping[str, str] = tomllib.loads(
        (Path(__file__).parent / "data" / "elsewhere.toml").read_text(encoding="utf-8")
    )[kind]
    return found


def parse_size(text: str) -> int:
    """A whole number with an optional unit: 4096, 32k (32,000), 32K (32,768), 20GiB, 1.5GB."""
    match = _SIZE.fullmatch(text)
    if match is None or (match["binary"] and not match["bytes"]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 4096, 32k, 2M or 20GiB")
    number, unit = match["number"], match["unit"] or ""
    base = 1024 if match["binary"] or (unit.isupper() and not match["bytes"]) else 1000
    factor = base ** ("kmgt".index(unit.lower()) + 1 if unit else 0)
    value = float(number) * factor if "." in number else int(number) * factor
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that takes flags from ``--config FILE`` too, and whose errors are one line with a near match.

    It is the class of the top command and of every sub-command; each knows ``--debug``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs, "add_help": False})
        self.reads_config_file = False
        self.rare: set[str] = set()  # fields that --help leaves out
        help_text = "show this help and exit; --help=all shows all flags, --help=WORD those that match a word"
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", metavar="WORD", default=argparse.SUPPRESS, help=help_text
        )
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks with errors, and log more"
        )

    def add_config_file_flag(self) -> None:
        """Declares ``--config FILE``: every other flag of this parser may stand in the file; the command line wins."""
        self.reads_config_file = True
        self.add_argument(
            "--config",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="YAML file with any of these flags; command-line flags win",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The file's flags are put before the command line's, so that a later one replaces an earlier one."""
        words = self._with_hyphens(list(args or ()))
        path = self._config_path(words) if self.reads_config_file else None
        from_file = self._read_config(Path(path), self._lists_in(words)) if path is not None else []
        values, unknown = super().parse_known_args([*from_file, *words], namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        if (
            "--model" not in [word.partition("=")[0] for word in words]
            and getattr(values, "model_argument", None) is not None
        ):
            values.__dict__.pop("model", None)  # a model from the file gives way to MODEL on the command line
        return values, unknown

    def declare(self) -> None:
        """Adds what a parser takes only once it is asked for."""

    def subcommands(self) -> dict[str, CommandParser]:
        """Its sub-commands' parsers by name."""
        return {
            name: each
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, each in action.choices.items()
        }

    def help_about(self, word: str) -> str:
        """Of the flags whose spelling or help has ``word`` in it; of every one (all), of a sub-command, of the common
        ones where nothing has."""
        if word in self.subcommands():
            return self.subcommands()[word].format_help()
        if word == "all":
            return self._format_help(set())
        spelled = word.lstrip("-").replace("_", "-").lower()
        others = {
            each.dest
            for each in self._actions
            if not any(spelled in text.lower() for text in (*each.option_strings, each.help or ""))
        }
        if len(others) == len({each.dest for each in self._actions}):
            return f"{self.format_help()}\nNo flag is about {word!r}.\n"
        return self._format_help(others)

    def format_help(self) -> str:
        """The common ones."""
        more = (
            f"\n{len(self.rare)} more flags: {self.prog} --help=all, or --help=WORD for those about a word.\n"
            if self.rare
            else ""
        )
        return self._format_help(self.rare) + more

    def _format_help(self, hidden: set[str]) -> str:
        """A usage line of dozens of flags cannot be read: they follow, one by one."""
        said = {each: each.help for each in self._actions if each.dest in hidden}
        for each in said:
            each.help = argparse.SUPPRESS
        try:
            return self._format_all()
        finally:
            for each, text in said.items():
                each.help = text

    def _format_all(self) -> str:
        if self.usage is None and len(self.options()) > MANY_FLAGS:
            positionals = [_positional_usage(action) for action in self._actions if not action.option_strings]
            self.usage = " ".join([self.prog, *positionals, "[flags]"])
        return super().format_help()

    def _with_hyphens(self, words: list[str]) -> list[str]:
        """``--max_model_len`` is ``--max-model-len``: flags of this parser only, none behind ``--``."""
        end = words.index("--") if "--" in words else len(words)
        return [*map(self._with_hyphen, words[:end]), *words[end:]]

    def _with_hyphen(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        spelled = flag.replace("_", "-")
        return spelled + equals + value if flag.startswith("--") and spelled in self._option_string_actions else word

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A command that is none: the nearest, or what those who know it from elsewhere look for."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            remedy = elsewhere("commands").get(value) if action.dest == "command" else None
            near = near_match(value, action.choices) or f"; there are {', '.join(action.choices)}"
            self.error(f"there is no {action.metavar} {value!r}{f': {remedy}' if remedy else near}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """One line and exit status 2."""
        self.exit(2, f"headrace: {message} (see {self.prog} --help)\n")

    def options(self) -> dict[str, argparse.Action]:
        """Every flag of this parser by each of its spellings."""
        return dict(self._option_string_actions)

    def _unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            return f"unexpected argument {word!r}"
        if sentence := elsewhere("flags").get(flag):
            return f"{flag}: {sentence}"
        return f"unknown flag {flag}{near_match(flag, self.options())}"

    def _config_path(self, words: list[str]) -> str | None:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", nargs="?")
        path: str | None = finder.parse_known_args(words)[0].config
        return path

    def _lists_in(self, words: Sequence[str]) -> set[str]:
        """Fields whose lists the command line gives: they take the place of the file's."""
        given = (self.options().get(word.partition("=")[0]) for word in words)
        return {action.dest for action in given if isinstance(action, _Extend)}

    def _read_config(self, path: Path, replaced: set[str]) -> list[str]:
        """The file's entries as command-line words; lists first, so that none can swallow a positional argument."""
        words = self.words_of(path, read_yaml_mapping(path), replaced)
        # A flag with a list takes all words up to the next flag: end with one that takes exactly one.
        return [*words, f"--config={path}"] if words else []

    def words_of(self, where: object, entries: Mapping[Any, Any], replaced: Collection[str] = ()) -> list[str]:
        """Entries as in a config file, as command-line words; without those of ``replaced``."""
        words: list[str] = []
        for key, value in entries.items():
            found = [] if str(key).replace("-", "_") in replaced else [*self._entry_words(where, str(key), value)]
            words = [*found, *words] if len(found) > 1 else [*words, *found]
        return words

    def _entry_words(self, path: object, key: str, value: Any) -> Iterator[str]:
        flag = ("-" if len(key) < 3 else "--") + key.replace("_", "-")
        action = self.options().get(flag)
        if action is None or flag in ("--config", "--help"):
            sentence = elsewhere("flags").get(flag)
            self.error(
                f"{path}: {f'{key}: {sentence}' if sentence else f'unknown key {key!r}{near_match(key, self._keys())}'}"
            )
        if flag == "--technique":
            yield from (f"{flag}={entry}" for entry in _technique_entries(value))
        elif isinstance(value, bool) and action.nargs == 0:
            yield from _boolean_words(flag, value, self.options())
        elif isinstance(value, (list, tuple)) and action.nargs in ("+", "*"):
            yield from (flag, *map(str, value))
        elif isinstance(value, (str, int, float)) and not isinstance(value, bool) and action.nargs != 0:
            yield f"{flag}={value}"
        elif value is not None:
            self.error(f"{path}: {key} is {value!r}, which {flag} cannot take")

    def _keys(self) -> list[str]:
        return [flag.lstrip("-") for flag in self.options() if flag.startswith("--")]


class _Help(argparse.Action):
    """``--help``, ``--help=all``, ``--help=WORD``."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        assert isinstance(parser, CommandParser)
        parser._print_message(parser.format_help() if values is None else parser.help_about(values), sys.stdout)
        parser.exit()


class _Extend(argparse.Action):
    """Words of a list: several behind a flag, a flag that is repeated, or (``json``) all of them in one word."""

    def __init__(self, *args: Any, json: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._json = json

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        words = [each for word in values for each in (self._listed(word) if self._json else [word])]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *words])

    def _listed(self, word: str) -> list[str]:
        if not word.startswith("["):
            return [word]
        try:
            found = json.loads(word)
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise argparse.ArgumentError(self, f"{word[:100]!r} is no JSON list of strings")
        return found


def _positional_usage(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def near_match(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` or nothing. Underscores and hyphens count as equal, and those before a flag as nothing."""
    by_spelling = {name.replace("_", "-").lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.replace("_", "-").lstrip("-"), by_spelling, n=1, cutoff=0.6)
    return f"; did you mean {by_spelling[close[0]]}?" if close else ""


def read_yaml_mapping(path: Path) -> Mapping[str, Any]:
    """The top level of a YAML file. Raises ConfigError when it cannot be read or is no mapping."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML lets the last of two equal keys win, in silence."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
            if twice is not None:
                raise ConfigError(f"The config file {path} has {str(twice)[:80]!r} twice; give each key once.")
            return super().construct_mapping(node, deep)

    try:
        loader = Loader(path.read_text(encoding="utf-8"))
        content = loader.get_single_data()
    except OSError as error:
        raise ConfigError(
            f"The config file {path} cannot be read: {error.strerror}. Give an existing YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"The config file {path} is not YAML: {error}. Mend that place.") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"The config file {path} holds a {type(content).__name__}; write one `flag: value` a line.")
    return content


def _technique_entries(value: Any) -> Iterator[str]:
    """``{name: value}``, ``[name=value, …]`` and ``name=value`` all read as NAME=VALUE. YAML makes on and off
    booleans."""
    if isinstance(value, Mapping):
        yield from (
            f"{name}={('on' if setting else 'off') if isinstance(setting, bool) else setting}"
            for name, setting in value.items()
        )
    else:
        yield from map(str, value if isinstance(value, list) else [value])


def _boolean_words(flag: str, value: bool, options: Mapping[str, argparse.Action]) -> Iterator[str]:
    negative = f"--no-{flag.removeprefix('--')}"
    if value:
        yield flag
    elif negative in options:
        yield negative


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL as a positional argument, beside --model."""
    help_text = "directory, .gguf file or hub id (default: the bundled demo model)"
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", default=None, help=help_text)


def add_config_flags(parser: argparse.ArgumentParser, *config_classes: type) -> None:
    """A flag for every field of the classes (EngineConfig stands for its parts), ``--config``, and ``--technique``
    where a switch is among them.

    Only what was given is in the namespace afterwards; the config classes hold the defaults.
    """
    parts = [part for each in config_classes for part in (ENGINE_PARTS.values() if each is EngineConfig else (each,))]
    for part in parts:
        group = parser.add_argument_group((part.__doc__ or part.__name__).rstrip("."))
        for each in config_fields(part):
            if each.metadata["flag"]:
                _add_flag(group, each, field_types(part)[each.name])
    if isinstance(parser, CommandParser):
        parser.rare |= {name for part in parts for name in config.OPTIONS[part.__name__]} - COMMON_FIELDS
    if any(each.metadata.get("technique") for part in parts for each in config_fields(part)):
        parser.add_argument(
            "--technique",
            metavar="NAME=VALUE",
            action="append",
            default=argparse.SUPPRESS,
            help="turn a technique on or off, or set its value (may be repeated; headrace techniques lists them)",
        )
    if isinstance(parser, CommandParser):
        parser.add_config_file_flag()


def config_fields(config_class: type) -> tuple[Field[Any], ...]:
    """The fields of a config class that users set."""
    return tuple(each for each in fields(config_class) if each.metadata)


def _add_flag(group: Any, of: Field[Any], kind: FieldType) -> None:
    names = [f"--{of.name.replace('_', '-')}", *of.metadata.get("flags", ())]
    help_text = of.metadata["help"].replace("%", "%%") + _default_text(of)
    common: dict[str, Any] = {"dest": of.name, "default": argparse.SUPPRESS, "help": help_text}
    if kind.base is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        return
    choices = of.metadata.get("choices") or None
    usual = None if choices else {int: "N", float: "X"}.get(kind.base, of.name.upper())
    metavar = of.metadata.get("metavar", usual)
    if choices and kind.optional:
        metavar = f"{{auto,{','.join(map(str, choices))}}}"
        choices = None  # the config checks them: argparse would name None among them
    if kind.many:
        common.update(nargs="+", action=_Extend, json=of.metadata.get("json", False))
    group.add_argument(*names, type=_reader(of, kind), choices=choices, metavar=metavar, **common)


def _default_text(of: Field[Any]) -> str:
    words = {True: "on", False: "off"}
    return (
        ""
        if of.default in (None, (), MISSING)
        else f" (default: {words[of.default] if isinstance(of.default, bool) else of.default})"
    )


def _reader(of: Field[Any], kind: FieldType) -> Callable[[str], Any]:
    """What turns a flag's text into the field's value. ``auto`` is the word for leaving a choice to the engine."""
    base: Callable[[str], Any] = parse_size if of.metadata.get("size") else kind.base
    if aliases := of.metadata.get("aliases"):
        return lambda text: aliases.get(text, text)
    if not kind.optional or kind.base is str:
        return base

    def read(text: str) -> Any:
        return None if text == "auto" else base(text)

    read.__name__ = kind.base.__name__  # argparse puts it into "invalid … value"
    return read


def technique_values(entries: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` entries as field values; the last one of a name wins. Raises ConfigError for what is not a switch
    or not a value of it."""
    known, values = switches(), dict[str, Any]()
    for entry in entries:
        name, equals, text = entry.partition("=")
        spelled = name.strip().replace("-", "_")
        if spelled not in known:
            near = near_match(spelled, known)
            raise ConfigError(
                f"--technique {spelled}: there is no such switch{near or '.'} `headrace techniques` lists them all."
            )
        if not equals or not text:
            raise ConfigError(f"--technique {entry}: write it as {spelled}=on, {spelled}=off or {spelled}=VALUE.")
        part, of = known[spelled]
        values[of.name] = _technique_value(of, field_types(part)[of.name], text.strip())
    return values


def _technique_value(of: Field[Any], kind: FieldType, text: str) -> Any:
    word, entry = text.lower(), f"--technique {technique_name(of)}={text}"
    if word in ("on", "off") and word in of.metadata:
        return of.metadata[word]
    if kind.base is bool:
        if kind.optional and word == "auto":
            return None
        if word not in WORDS:
            raise ConfigError(f"{entry}: give {'on, off or auto' if kind.optional else 'on or off'}.")
        return of.metadata.get("on" if WORDS[word] else "off", WORDS[word])
    try:
        return _reader(of, kind)(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        choices = of.metadata.get("choices")
        accepted = f"one of {', '.join(map(str, choices))}" if choices else "a number"
        raise ConfigError(f"{entry}: give {accepted}.") from error


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's config from parsed arguments: MODEL or --model, flags, --technique."""
    given = dict(vars(args))
    model = _model_choice(given.get("model_argument"), given.get("model"))
    if model is not None:
        given["model"] = model
    switched = technique_values(given.get("technique") or ())
    for name, value in switched.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"--{name.replace('_', '-')} says {given[name]} and --technique says {value}; give one of them."
            )
    return config.engine_config({**given, **switched})


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server's config from parsed arguments; a key may come from HEADRACE_API_KEY."""
    given = dict(vars(args))
    key = os.environ.get("HEADRACE_API_KEY")
    if key and not given.get("api_key"):
        given["api_key"] = (key,)
    return config.built(ServerConfig, given)


def _model_choice(positional: str | None, option: str | None) -> str | None:
    if positional is not None and option is not None and positional != option:
        raise ConfigError(f"MODEL is {positional!r} and --model is {option!r}; give one of them.")
    return positional if positional is not None else option
