"""``headrace techniques``: the register of techniques, as text or JSON.

What lives here: printing. What may not: the register itself (techniques/).
"""

from __future__ import annotations

import argparse
import json
import textwrap

from headrace import techniques


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the register as JSON")


def run(args: argparse.Namespace) -> int:
    print(json.dumps(techniques.describe(), indent=1) if args.json else render())
    return 0


def render(width: int = 110) -> str:
    """One paragraph per technique: name and switch, then its purpose."""
    blocks = []
    for item in techniques.describe():
        values = "on|off" if isinstance(item["off"], bool) else "on|off|N"
        head = f"{item['name']}  (--technique {item['name']}={values}, default {item['default']})"
        facts = (
            ("improves", item["improves"]),
            ("off", item["off_means"]),
            ("source", item["source"]),
            ("measure", item["ablate"]),
        )
        lines = [
            textwrap.fill(text, width, initial_indent=f"  {label:9}", subsequent_indent=" " * 11)
            for label, text in facts
        ]
        blocks.append("\n".join([head, *lines]))
    return "\n\n".join(blocks)
