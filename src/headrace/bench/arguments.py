"""Types of command-line arguments for benchmarks.

What lives here: conversions for argparse, which reports their error with the argument's name, the key, and how flags.toml
becomes flags. What may not: torch, measuring.
"""

from __future__ import annotations

import argparse
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from headrace.config import first_conflict
from headrace.errors import ConfigError

Number = TypeVar("Number", int, float)

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def _kind(read: Callable[[str], Number], allows: Callable[[Number], bool], said: str) -> Callable[[str], Number]:
    """A conversion that raises ArgumentTypeError for anything that is not ``said``."""

    def convert(text: str) -> Number:
        try:
            found = read(text)
        except ValueError:
            found = None
        if found is None or not allows(found):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {said}")
        return found

    return convert


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


count = _kind(_whole, lambda found: found > 0, "whole number of at least 1")
natural = _kind(_whole, lambda found: True, "whole number of at least 0")
share = _kind(float, lambda found: 0.0 <= found <= 1.0, "number from 0 to 1")
positive = _kind(float, lambda found: 0.0 < found < math.inf, "finite number above 0")
amount = _kind(float, lambda found: 0.0 <= found < math.inf, "finite number of at least 0")
percentile = _kind(float, lambda found: 0.0 <= found <= 100.0, "number from 0 to 100")


def output(text: str) -> Path:
    """A file to write, checked before anything is measured. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: there is no folder {str(path.parent)!r}; create it or give another file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied; give another file")
    return path


def picture(text: str) -> Path:
    """The same for a plot. Raises ArgumentTypeError."""
    path = output(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an image; give a file name ending in {', '.join(PICTURES[:3])}"
        )
    return path


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int, "float": float, "Path": Path, "count": count, "natural": natural, "share": share, "positive": positive, "amount": amount,
    "percentile": percentile, "output": output, "picture": picture,
}  # fmt: skip


@cache
def declared() -> Mapping[str, Any]:
    """flags.toml."""
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))


def declare(parser: argparse._ActionsContainer, section: str, **changes: Mapping[str, Any]) -> None:
    """Adds the flags of a section of flags.toml. ``changes``: by a flag's name, what only the command knows of it."""
    command, _, place = section.partition(".")
    for flag, row in declared()[command][place].items():
        given = {**row, **changes.get(flag.lstrip("-").replace("-", "_"), {})}
        if isinstance(given.get("type"), str):
            given["type"] = _TYPES[given["type"]]
        parser.add_argument(*given.pop("names", [flag]), **given)


def check_together(args: argparse.Namespace, section: str) -> None:
    """What flags.toml says of flags that do not go together. Raises ConfigError."""
    if (broken := first_conflict(declared()["conflicts"][section], args)) is not None:
        raise ConfigError(broken[1])


def add_server_arguments(parser: argparse._ActionsContainer, **base_url: Any) -> None:
    """Where it is (``base_url``: what is other than usual), and its key: by default, as a server started here has it."""
    key = {"default": os.environ.get("HEADRACE_API_KEY") or None}
    declare(parser, "server.arguments", base_url=base_url, api_key=key)
