"""The shape of the package in figures that may only sink: code lines and tokens a room, files that name a technique, …

``python -m tests.unit.test_ratchets`` prints the table and writes today's figures into ratchets.json beside this file.
A figure that rises is written there by hand, with its reason in the commit. Code lines are those without blanks,
comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from headrace.techniques import TECHNIQUES
from tests.support.rooms import PACKAGE, modules
from tests.unit.test_imports import imports, statements

RECORDED = Path(__file__).with_name("ratchets.json")
BUDGETS = {  # code lines that a room is to come down to
    "bench": 2000, "cache": 500, "commands": 900, "cost": 700, "engine": 3000, "kernels": 5000, "layers": 600, "models": 1700, "planner": 2000,
    "processes": 500, "quantize": 900, "scheduler": 1700, "server": 4500, "worker": 2300, "": 1500,
}  # fmt: skip
# What the code calls a technique, as a pattern, where that is not its name in the register.
STEMS = {
    "fast_forward": "forced?_tokens", "cuda_graphs": r"graphs?\b", "compressed_weights": "compressed(?!-tensors|_tensors| bodies|\"|-)",
    "flat_gemm": "flat_(forms|linear|measured)|triton_flat",
    "tuned_products": "tuned", "gated_products": "gated_linear|GatedLinear|gated_measured", "early_weights": "ring_forms|cuda_ring|RingLinear",
    "deep_fusion": "(?-i:Epilogue)", "persistent_decode": "persistent|decode_step", "fused_rope_attention": "rope_attention",
    "cascade_attention": "cascade", "unified_maximum": "unified", "programmatic_launch": "programmatic", "prompt_graphs": "prompt_graph|prompt_shape",
    "activation_arena": "arena",
}  # fmt: skip
SMALL = 60  # code lines: a module of one importer should be a part of it
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@cache
def sources() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in modules()}


@cache
def sizes() -> dict[str, tuple[int, int]]:
    """(code lines, tokens) of each module."""
    return {name: _size(source) for name, source in sources().items()}


def _size(source: str) -> tuple[int, int]:
    silent = set(_docstring_lines(ast.parse(source)))
    lines, count = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT and token.start[0] not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
            count += 1
    return len(lines), count


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in (tree, *statements(tree)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def figures() -> dict[str, float]:
    """All that is held, by name; less is better."""
    lines, tokens = Counter[str](), Counter[str]()
    for name, (count, dense) in sizes().items():
        room = name.partition(".")[0]
        room = room if (PACKAGE / room).is_dir() else ""  # a package's own module is of its room
        lines[room] += count
        tokens[room] += dense
    found: dict[str, float] = {f"lines of {room or 'the top level'}": count for room, count in sorted(lines.items())}
    found |= {f"tokens of {room or 'the top level'}": count for room, count in sorted(tokens.items())}
    found |= {"lines": lines.total(), "tokens a line": round(tokens.total() / lines.total(), 2)}
    found |= {"small modules of one importer": len(small_modules_of_one_importer())}
    found |= {
        "untyped callables in kernels": sum(
            text.count("Callable[..., Any]") for name, text in sources().items() if name.startswith("kernels")
        )
    }
    return found | {f"files that name {each.name}": _files_that_name(each.name) for each in TECHNIQUES}


def small_modules_of_one_importer() -> list[str]:
    importers = defaultdict[str, set[str]](set)
    for name, target in imports():
        importers[target.removeprefix("headrace.")].add(name)
    return sorted(name for name, (lines, _) in sizes().items() if 0 < lines < SMALL and len(importers[name]) == 1)


@cache
def _lowered() -> dict[str, str]:
    return {name: text.lower() for name, text in sources().items()}


def _files_that_name(technique: str) -> int:
    """Whose code or comments have its name or its stem, at the beginning of a word or of a part of one."""
    named = f"{technique}|{STEMS[technique]}" if technique in STEMS else technique
    word = re.compile(rf"(?<![a-zA-Z])(?:{named})" if technique in STEMS else rf"\b_?{technique}\b", re.IGNORECASE)
    # each match has one of these; looking for them first is ten times as fast
    parts = re.findall(r"[a-z_]{3,}", re.sub(r"\w\?", "", named.lower()))
    return sum(
        any(part in text for part in parts) and bool(word.search(sources()[name])) for name, text in _lowered().items()
    )


def table(found: dict[str, float], recorded: dict[str, float]) -> str:
    budget = {f"lines of {room or 'the top level'}": lines for room, lines in BUDGETS.items()} | {"lines": 28_000}
    rows = [
        f"{name:<40}{value:>9,g}{recorded.get(name, 0):>10,g}{budget.get(name, ''):>8}" for name, value in found.items()
    ]
    return "\n".join([f"{'':<40}{'now':>9}{'recorded':>10}{'budget':>8}", *rows])


def test_figures_of_shape_only_sink() -> None:
    recorded: dict[str, float] = json.loads(RECORDED.read_text())
    found = figures()
    print(table(found, recorded))
    worse = {name: (value, recorded.get(name, 0)) for name, value in found.items() if value > recorded.get(name, 0)}
    assert not worse, (
        f"worse than recorded: {worse}; make it smaller, or record it with a reason (python -m tests.unit.test_ratchets)"
    )


def test_stems_are_of_techniques() -> None:
    assert STEMS.keys() <= {each.name for each in TECHNIQUES}


def test_lines_are_counted_without_prose() -> None:
    assert _size(
        '"""Of two lines,\nno code."""\n\nx = 1  # one\n\n\ndef f():\n    """No code."""\n    return (\n        x\n    )\n'
    ) == (5, 12)


if __name__ == "__main__":
    now = figures()
    print(table(now, json.loads(RECORDED.read_text()) if RECORDED.exists() else {}))
    RECORDED.write_text(json.dumps(now, indent=1) + "\n")
