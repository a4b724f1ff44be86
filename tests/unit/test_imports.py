"""Who may import whom: the rooms' rules, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.rooms import PACKAGE, below, modules

# The nouns: everyone may import them.
NOUNS = {
    "config",
    "errors",
    "request",
    "spec",
    "sites",
    "clock",
    "techniques",
    "cost",
    "observe",
    "processes",
    "torch_environment",
    "cache_home",
    "kernel_launcher",
    "portability",
}

# room or module → what it may import besides the nouns and its own room. The longest matching name counts.
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    "__init__": {"engine.llm"},
    "__main__": {"cli"},
    "cli": {"flags", "commands"},
    "commands": {"flags", "server", "engine", "bench", "planner", "worker", "models", "kernels", "quantize"},
    "commands.serve": {"flags", "server", "engine", "parallel.node"},
    "commands.completion": {"cli", "flags"},  # all commands' parsers
    "bench": {"engine", "scheduler", "cache", "worker", "models", "layers", "kernels", "quant", "planner.workload"},
    "bench.experts": {"engine", "worker", "quantize.texts", "parallel.placement", "parallel.balance"},
    "bench.startup_child": {"flags", "engine"},  # it starts as commands do
    "server": {"engine"},
    "engine": {"models.source", "models.files", "scheduler", "cache", "speculative", "disagg"},
    "engine.core": {"scheduler", "cache", "speculative", "lora.registry"},
    "engine.client": {"models.source", "lora.registry"},
    "engine.loop": {"lora.registry", "scheduler.explain"},
    "engine.executor": set(),
    "engine.assembly": {
        "worker",
        "parallel.device",
        "parallel.leader",
        "parallel.ranks",
        "models.source",
        "models.files",
        "models.families",
        "lora",
        "scheduler",
        "cache",
        "disagg.hand_over",
        "speculative.settings",
    },
    "planner": {
        "disagg",
        "engine.core",
        "engine.executor",
        "engine.resolve",
        "engine.routing",
        "scheduler",
        "cache",
        "models",
        "speculative.ahead",
        "speculative.length",
        "speculative.settings",
        "parallel.shares",
    },
    "planner.workload": set(),
    # the engine's own rules; not at import
    "planner.pricing": {
        "engine.executor",
        "engine.resolve",
        "models",
        "parallel.context",
        "parallel.placement",
        "parallel.shares",
        "parallel.stages",
        "worker.memory",
        "worker.settings",
    },
    "scheduler": {"cache", "speculative.length"},
    "lora": {"engine.executor", "scheduler.events", "models", "layers", "kernels", "parallel.shares"},
    "speculative": set(),
    "cache": set(),
    "disagg": {"engine.executor", "scheduler", "cache"},
    "worker": {
        "disagg.staging",
        "engine.executor",
        "models",
        "layers",
        "kernels",
        "quant",
        "quantize.at_load",
        "speculative",
        "lora",
        "parallel.context",
        "parallel.group",
        "parallel.pipeline",
        "parallel.placement",
        "parallel.shares",
        "parallel.stages",
    },
    "parallel": {"engine.executor", "engine.resolve", "worker", "models", "kernels.build", "kernels.sums"},
    "parallel.node": {"engine.resolve"},
    "parallel.balance": set(),
    "parallel.context": {"speculative.settings"},
    "parallel.placement": {"parallel.balance"},
    "parallel.shares": set(),
    "parallel.stages": {"speculative.settings"},
    "parallel.pipeline": {"parallel.group"},
    "parallel.group": {"kernels.sums"},
    "models": {"layers", "kernels", "quant", "parallel.group", "parallel.shares", "parallel.stages"},
    "layers": {"kernels", "quant", "parallel.group"},
    "quant": {"kernels"},
    "quantize": {"quant", "models", "layers", "kernels", "engine.tokenizer"},
    "kernels": set(),
    "cost": set(),
}
PURE_NOUNS = (
    "config",
    "errors",
    "request",
    "spec",
    "sites",
    "clock",
    "cost",
)  # these import nouns only

# Third-party modules by room: so that the engine runs on a bare GPU machine.
CORE = {"torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "gguf"}
THIRD_PARTY: dict[str, set[str]] = {
    "": set(),
    "flags": {"yaml"},
    "kernel_launcher": {"triton"},
    "cost": {"numpy"},
    "cost.popularity": {"msgspec"},
    "cost.stored": {"msgspec"},
    "parallel.placement": {"msgspec"},
    "speculative": set(),
    "speculative.lookup": {"numpy"},
    "commands": set(),
    "commands.completion": {"argcomplete"},
    "commands.doctor": {"torch"},
    "commands.quantize": {"torch"},
    "bench": CORE,
    "bench.experts": {"numpy"},
    "bench.load": {"httptools", "msgspec"},
    "observe": set(),
    "observe.report": {"matplotlib"},
    "server": {"httptools", "uvloop", "msgspec"},
    "planner": {"numpy"},
    "planner.runs": {"msgspec"},
    "planner.against": {"numpy", "msgspec"},
    "engine": {"tokenizers", "jinja2", "llguidance", "numpy"},
    "engine.core": set(),
    "engine.executor": set(),
    "engine.connection": {"msgspec"},
    "processes": {"msgspec"},
    "parallel": {"torch"},
    "parallel.context": {"speculative.settings"},
    "parallel.on_ray": {"ray"},
    "parallel.shares": set(),
    "parallel.stages": {"speculative.settings"},
    "worker": CORE,
    "lora": {"torch", "numpy"},
    "models": CORE,
    "models.hub": {"huggingface_hub"},
    "models.hub_cache": {"huggingface_hub"},
    "layers": CORE,
    "kernels": CORE,
    "quant": CORE,
    "quantize": {"torch"},
    "quantize.gguf_file": {"torch", "gguf"},
}


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """(module, what it imports) for the whole package."""
    return tuple((name, target) for name, path in modules() for target in imported(name, path))


def imported(name: str, path: Path) -> Iterator[str]:
    """Absolute names that a file imports anywhere, what stands under ``if TYPE_CHECKING`` left out."""
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from_names(name, path, node)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, and their handlers and cases, but for what stands under ``if TYPE_CHECKING``; expressions are not
    gone into."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr) and not _is_type_checking(node):
            yield node
            yield from statements(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        "TYPE_CHECKING" in (getattr(each, "id", None), getattr(each, "attr", None)) for each in ast.walk(node.test)
    )


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


def test_rooms_import_downwards_only() -> None:
    broken = []
    for name, target in imports():
        allowed = longest(MAY_IMPORT, name) | NOUNS | {name.partition(".")[0]}
        inner = target.removeprefix("headrace").lstrip(".")
        if target.startswith("headrace") and inner and not any(below(inner, each) for each in allowed):
            broken.append(f"{name} imports {target}")
    assert not broken


def test_the_package_knows_nothing_of_the_laboratory() -> None:
    assert not [f"{name} imports {target}" for name, target in imports() if below(target, "lab")]


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
    front = ("headrace.engine.llm", "headrace.engine.connection", "headrace.engine.output", "headrace.engine.tokenizer")
    assert not [
        (name, target) for name, target in imports() if name in ("engine.core", "engine.executor") and target in front
    ]
