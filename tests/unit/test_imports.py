"""Who may import whom: the rooms' rules, read from the source, and the torch-free part imported with torch blocked."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

import headrace.errors

PACKAGE = Path(headrace.errors.__file__).parent

# The nouns: everyone may import them.
NOUNS = {
    "config", "errors", "request", "sampling_params", "spec", "clock", "metrics", "techniques", "cost", "torch_environment",
    "head_start", "process_tree", "garbage", "logs", "scratch", "cache_home", "builders", "kernel_launcher",
}

# room or module → what it may import besides the nouns and its own room. The longest matching name counts.
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    "__init__": {"engine.llm"},
    "__main__": {"cli"},
    "cli": {"flags", "commands"},
    "flags": {"foreign_flags"},
    "head_start": {"worker.driver"},
    "commands": {"flags", "server", "engine", "bench", "planner", "worker", "models", "kernels"},
    "bench": {"engine", "scheduler", "cache", "worker", "models", "layers", "kernels", "quant"},
    "bench.startup_child": {"flags", "engine"},  # it starts as commands do
    "bench.simulated": {"planner", "models"},
    "bench.capacity": {"planner"},
    "bench.overload": {"planner"},
    "bench.policies": {"planner"},
    "bench.policies_served": {"planner", "models", "worker"},
    "bench.policy_cases": {"planner"},
    "bench.truth": {"planner", "engine", "models", "worker"},
    "bench.truth_judge": {"planner"},
    "bench.truth_loads": {"planner"},
    "bench.truth_run": {"planner", "engine"},
    "bench.masks": {"engine", "cache", "models", "scheduler", "sequence"},  # it asks for masks as the core does
    "server": {"engine"},
    "engine": {"models.source", "scheduler", "cache", "sequence"},
    "engine.core": {"scheduler", "cache", "sequence"},
    "engine.executor": set(),
    "engine.assembly": {"worker", "trace", "models.source", "scheduler", "cache", "sequence"},
    "planner": {
        "engine.core", "engine.executor", "engine.resolve", "scheduler", "cache", "models",
        "bench.workload", "bench.traces", "bench.arrivals", "bench.statistics",
    },
    "planner.placement": {"engine.executor", "models", "worker.memory", "worker.settings"},  # the engine's own rules; not at import
    "sequence": {"cache"},
    "scheduler": {"cache", "sequence"},
    "cache": set(),
    "worker": {"engine.executor", "models", "layers", "kernels", "quant"},
    "models": {"layers", "kernels", "quant"},
    "layers": {"kernels", "quant"},
    "quant": {"kernels"},
    "kernels": {"layers.inputs"},  # the tensors of one step: frozen data, as a noun
    "cost": set(),
}
PURE_NOUNS = ("config", "errors", "request", "sampling_params", "spec", "clock", "cost")  # these import nouns only

# Third-party modules by room: so that the engine runs on a bare GPU machine.
CORE = {"torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "gguf"}
THIRD_PARTY: dict[str, set[str]] = {
    "": set(),
    "flags": {"yaml"},
    "head_start": {"triton"},
    "kernel_launcher": {"triton"},
    "cost": {"numpy"},
    "commands": set(),
    "commands.doctor": {"torch"},
    "bench": CORE | {"matplotlib"},
    "bench.rival_llama_cpp": {"llama_cpp"},  # what it measures
    "server": {"uvicorn", "uvloop", "msgspec"},
    "planner": {"numpy"},
    "engine": {"tokenizers", "jinja2", "llguidance", "numpy"},
    "engine.core": set(),
    "engine.executor": set(),
    "engine.process": {"msgspec"},
    "worker": CORE,
    "models": CORE,
    "models.hub": {"huggingface_hub"},
    "models.hub_resume": {"huggingface_hub"},
    "layers": CORE,
    "kernels": CORE,
    "quant": CORE,
}

TORCH_FREE = (
    "request", "sampling_params", "sequence", "spec", "clock", "config", "errors", "metrics", "trace", "techniques", "flags", "cli",
    "cost", "scheduler", "cache", "server", "planner",
    "engine.core", "engine.executor", "engine.tokenizer", "engine.output", "engine.client", "models.families", "models.source",
)  # fmt: skip
WEB_FREE = tuple(name for name in TORCH_FREE if name != "server")
BARE = ("engine.llm", "worker", "models", "layers", "quant", "kernels.cpu", "bench.table")  # what a bare GPU machine runs

BLOCKED_IMPORTS = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked here")

sys.meta_path.insert(0, Blocker())
failed = 0
for name in NAMES:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed = 1
        print(f"{name}: {error}")
sys.exit(failed)
"""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module by its name below ``headrace``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """(module, what it imports) for the whole package."""
    return tuple((name, target) for name, path in modules() for target in imported(name, path))


def imported(name: str, path: Path) -> Iterator[str]:
    """Absolute names that a file imports anywhere, what stands under ``if TYPE_CHECKING`` left out."""
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from_names(name, path, node)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, but for what stands under ``if TYPE_CHECKING``; imports are statements, so expressions are not gone into."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr) and not _is_type_checking(node):
            yield node
            yield from _nodes(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _from_names(name: str, path: Path, node: ast.ImportFrom) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        parts = ["headrace", *name.split(".")]
        keep = len(parts) - node.level + (path.name == "__init__.py")
        base = ".".join([*parts[:keep], *filter(None, [node.module])])
    # `from headrace.engine import core` names a module; `from headrace.engine.core import X` does not.
    for alias in node.names:
        inner = PACKAGE.joinpath(*base.split(".")[1:], alias.name)
        is_module = base.startswith("headrace") and (inner.is_dir() or inner.with_suffix(".py").is_file())
        yield f"{base}.{alias.name}" if is_module else base


def longest(table: dict[str, set[str]], name: str) -> set[str]:
    """The entry of a module, or of the nearest room around it."""
    parts = name.split(".")
    return next(table[key] for end in range(len(parts), -1, -1) if (key := ".".join(parts[:end])) in table)


def below(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def test_rooms_import_downwards_only() -> None:
    broken = []
    for name, target in imports():
        allowed = longest(MAY_IMPORT, name) | NOUNS | {name.partition(".")[0]}
        inner = target.removeprefix("headrace").lstrip(".")
        if target.startswith("headrace") and inner and not any(below(inner, each) for each in allowed):
            broken.append(f"{name} imports {target}")
    assert not broken


def test_nouns_import_nouns_only() -> None:
    broken = [
        f"{name} imports {target}"
        for name, target in imports()
        if any(below(name, noun) for noun in PURE_NOUNS)
        and target.startswith("headrace.")
        and not any(below(target.removeprefix("headrace."), noun) for noun in NOUNS)
    ]
    assert not broken


def test_third_party_modules_stay_in_their_rooms() -> None:
    broken = []
    for name, target in imports():
        top = target.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "headrace" and top not in longest(THIRD_PARTY, name):
            broken.append(f"{name} imports {top}")
    assert not broken


def test_the_loop_knows_nothing_of_its_front() -> None:
    """engine.core sees the executor's protocol, never who asks (llm, process, output) or what text is."""
    front = ("headrace.engine.llm", "headrace.engine.process", "headrace.engine.output", "headrace.engine.tokenizer")
    assert not [(name, target) for name, target in imports() if name in ("engine.core", "engine.executor") and target in front]


BLOCKED = {
    "without torch": (TORCH_FREE, ("torch", "triton", "transformers")),
    "without torch and the web stack": (WEB_FREE, ("torch", "fastapi", "starlette", "uvicorn", "pydantic", "httpx", "yaml")),
    "with torch alone": (BARE, ("msgspec", "uvicorn", "uvloop", "llguidance", "transformers", "matplotlib")),
}


@cache
def fresh_imports() -> dict[str, subprocess.CompletedProcess[str]]:
    """Each of BLOCKED in an interpreter of its own, two at a time."""

    def run(case: str) -> subprocess.CompletedProcess[str]:
        rooms, blocked = BLOCKED[case]
        names = [f"headrace.{name}" for name, _ in modules() if any(below(name, room) for room in rooms)]
        script = f"BLOCKED = {blocked!r}\nNAMES = {names!r}\n{BLOCKED_IMPORTS}"
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(BLOCKED, pool.map(run, BLOCKED), strict=True))


@pytest.mark.parametrize("case", BLOCKED)
def test_imports_with_modules_blocked(case: str) -> None:
    """Also what is imported indirectly counts: a fresh interpreter in which the import itself fails."""
    done = fresh_imports()[case]
    assert done.returncode == 0, done.stdout + done.stderr
