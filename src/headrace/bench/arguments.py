"""Types of command-line arguments for benchmarks.

What lives here: conversions for argparse, which reports their error with the argument's name, the key, and the
arguments of a benchmark whose module imports torch. What may not: torch, measuring.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Number = TypeVar("Number", int, float)

DTYPES = ("bfloat16", "float32", "float16")
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def add_key_argument(parser: argparse._ActionsContainer) -> None:
    """``--api-key``, by default from where a server started here takes its key."""
    key = os.environ.get("HEADRACE_API_KEY") or None
    parser.add_argument(
        "--api-key", metavar="KEY", default=key, help="key to send as bearer token (also HEADRACE_API_KEY)"
    )


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


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``headrace bench kernels``, whose module imports torch."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="directory with the config.json whose shapes to use (default: Llama-3.2-1B's)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--rows", type=count, nargs="+", default=[1, 16, 512], help="tokens per call (default: 1 16 512)"
    )
    parser.add_argument("--context", type=count, default=1024, help="tokens of context in attention (default: 1024)")
    parser.add_argument(
        "--ops", nargs="+", metavar="OP", default=(), help="operations, such as linear and rms_norm (default: all)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=0.3, help="seconds for each row of the table (default: 0.3)"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="time what --batch-invariant would choose, in addition to torch's own",
    )
    parser.add_argument("--threads", type=count, help="default: torch's own choice")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="find the best kernels for GEMMs of few and of many rows on this card, and store them",
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all rows as JSON")
