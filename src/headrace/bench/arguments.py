"""Kinds of arguments that benchmarks take.

What lives here: conversions for argparse, which names the argument with what they raise. What may not: arguments, measuring.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def count(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and int(text[:19]) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


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
