"""Kinds of arguments that benchmarks take.

What lives here: conversions for argparse, which names the argument with what they raise, and the key. What may not: other arguments, measuring.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def add_key_argument(parser: argparse._ActionsContainer) -> None:
    """``--api-key``, else what a server that is started here takes its key from."""
    key = os.environ.get("HEADRACE_API_KEY") or None
    parser.add_argument("--api-key", metavar="KEY", default=key, help="sent as bearer token (also HEADRACE_API_KEY)")


def count(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and int(text[:19]) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1. Raises ArgumentTypeError."""
    found = _number(text)
    if not 0.0 <= found <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return found


def positive(text: str) -> float:
    """A finite number above 0. Raises ArgumentTypeError."""
    found = _number(text)
    if not 0.0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def folder(text: str) -> Path:
    """A folder to write into; made where there is none. Raises ArgumentTypeError."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder ({error.strerror}); give another") from error
    return path


def output(text: str) -> Path:
    """A file to write, which is looked at before anything is measured. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}; make it or give another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied; give another file")
    return path


def picture(text: str) -> Path:
    """The same for a plot. Raises ArgumentTypeError."""
    path = output(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} is no picture; give a file name ending in {', '.join(PICTURES[:3])}")
    return path
