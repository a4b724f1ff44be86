"""Kinds of arguments that benchmarks take.

What lives here: conversions for argparse, which names the argument with what they raise. What may not: arguments, measuring.
"""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and int(text[:19]) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)
