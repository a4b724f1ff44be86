"""Work of a benchmark in a process of its own: a job goes in as JSON, the result comes out as JSON.

What lives here: both ends of that, an engine's config on the way, and the account an engine gives of itself. What may
not: any measuring.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.errors import HeadraceError
from headrace.observe.report import write_json

SHAPES = Path(__file__).parent / "shapes"
LARGE_SHAPES = Path(__file__).parent / "large_shapes"  # of models for several devices, which the table leaves out
LONGEST = 16384  # positions: what the longest row of the table needs and some; a model with fewer keeps its own

_Part = TypeVar("_Part")


def known_shapes() -> list[str]:
    """Models whose shapes come with the package."""
    return sorted(path.name for path in SHAPES.iterdir())


def config_for(model: str, config: EngineConfig) -> EngineConfig:
    """The engine of one model: random weights unless said otherwise, strict kernels whatever is said."""
    shapes = [folder / model for folder in (SHAPES, LARGE_SHAPES) if (folder / model).is_dir()]
    path = shapes[0] if shapes and not Path(model).exists() else Path(model)
    given = config.model
    chosen = replace(
        given,
        model=str(path) if path.exists() else model,
        load_format="dummy" if given.load_format == "auto" else given.load_format,
        max_model_len=given.max_model_len or _longest(path),
    )
    return replace(config, model=chosen, device=replace(config.device, strict_kernels=True))


def _longest(folder: Path) -> int | None:
    try:
        positions = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError):
        return None  # the engine knows other ways to find a model, and says what is wrong with this one
    return min(LONGEST, positions) if isinstance(positions, int) else None


def flags_of(config: EngineConfig, flags: Sequence[str]) -> list[str]:
    """What ``config_for`` chose, as flags of a command, with the user's own between them."""
    model = config.model
    longest = ["--max-model-len", str(model.max_model_len)] if model.max_model_len else []
    return [str(model.model), "--load-format", model.load_format, *longest, *flags, "--strict-kernels"]


def run_child(
    module: str,
    config: EngineConfig,
    job: Mapping[str, Any],
    *,
    before: Sequence[str] = (),
    timeout: float | None = None,
) -> tuple[dict[str, Any], int | str]:
    """The result that ``python -m MODULE JOB.json`` left (empty where it left none), and its exit status or that it
    took too long.

    ``before``: a program around it. The child's stdout is dropped, its stderr is this process's.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, result = Path(folder) / "job.json", Path(folder) / "result.json"
        write_json(path, {**job, "config": asdict(config), "result": str(result)})
        command = [*before, sys.executable, "-m", module, str(path)]
        try:
            status: int | str = subprocess.run(
                command, check=False, stdout=subprocess.DEVNULL, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"{timeout:g} s and no end"
        return json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}, status


def child_main(work: Callable[[EngineConfig, Mapping[str, Any]], None]) -> int:
    """The other end: ``work(config, job)`` writes ``job["result"]``; what goes wrong on purpose is one line."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        work(config_of(job["config"]), job)
    except HeadraceError as error:
        print(f"headrace: {error.message}", file=sys.stderr)
        return 1
    return 0


def config_of(entry: Mapping[str, Mapping[str, Any]]) -> EngineConfig:
    """A config from what ``asdict`` and JSON made of it."""

    def part(kind: type[_Part], name: str) -> _Part:
        return kind(
            **{field: tuple(value) if isinstance(value, list) else value for field, value in entry[name].items()}
        )

    return EngineConfig(
        model=part(ModelConfig, "model"),
        cache=part(CacheConfig, "cache"),
        scheduler=part(SchedulerConfig, "scheduler"),
        device=part(DeviceConfig, "device"),
    )


def device_name(config: EngineConfig) -> str:
    """ "cpu", or the card with what tells it from its siblings, and the CUDA torch was built with."""
    import torch

    from headrace.worker.profile import identity_here
    from headrace.worker.settings import device_kind

    if device_kind(config.device.device) == "cpu":
        return "cpu"
    card = identity_here("cuda")
    return f"{card.name} ({', '.join(card.features)}), CUDA {torch.version.cuda}"


def account_of(engine: Any) -> dict[str, Any]:
    """What an Engine says about itself: shape, choices, kernels."""
    info = engine.info
    decisions = [{"name": each.name, "value": str(each.value), "reason": each.reason} for each in info.decisions]
    return {
        "model": info.model,
        "dtype": info.dtype,
        "config": dict(engine.source.config),
        "memory": dict(info.memory),
        "kernels": [each for each in decisions if _is_kernel(each["name"])],
        "decisions": [each for each in decisions if not _is_kernel(each["name"])],
    }


def _is_kernel(name: str) -> bool:
    return name.startswith("kernel ") and name != "kernel cache"
