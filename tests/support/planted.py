"""Servers with a defect on purpose: what a check must turn red for.

What lives here: the command that starts one. What may not: the defects, checks.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

Command = Sequence[str]

_START = """
import sys
{defect}
from headrace.cli import main
sys.exit(main(["serve", "--port", "0", *sys.argv[1:]]))
"""


def planted(defect: str) -> Command:
    """``headrace serve`` after ``defect``, statements that change modules of the front end's process."""
    return (sys.executable, "-c", _START.format(defect=textwrap.dedent(defect)))
