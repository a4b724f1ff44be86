"""The process that runs a user's moderation function: what it does wrong, or how long it takes, does not touch
the server.

What lives here: finding the function, and calling it. What may not: limits of time (watch.py ends this process).

Started as ``python -m headrace.server.moderation.worker``; ends with its stdin. The opening frame names folders that
hold models: code is never taken from there. What the function prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.processes.sandbox import answer_lines
from headrace.processes.tree import end_with_parent

Hook = Callable[..., Any]


class NotFoundThere(Exception):
    """The function cannot be had; the text says why, with the remedy."""


def find_hook(spec: str, model_folders: Sequence[str]) -> Hook:
    """``module:function``: a module on the import path (the working folder is on it), or the path of a .py file."""
    name, _, function = spec.rpartition(":")
    if not name or not function:
        raise NotFoundThere("write it as module:function, or as path/to/file.py:function")
    found = getattr(_load(name, model_folders), function, None)
    if not callable(found):
        raise NotFoundThere(f"{name} has no function {function}")
    return found  # type: ignore[no-any-return]  # whatever can be called


def _load(name: str, model_folders: Sequence[str]) -> ModuleType:
    is_file = name.endswith(".py")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name) if is_file else importlib.util.find_spec(name)
    if spec is None or spec.loader is None or (is_file and not Path(name).is_file()):
        raise NotFoundThere(f"there is no {name}")
    origin = Path(spec.origin or ".").resolve()
    if any(origin.is_relative_to(Path(folder).resolve()) for folder in model_folders):
        raise NotFoundThere("it lies in a model's folder, from which no code is taken; move it elsewhere")
    if not is_file:
        return importlib.import_module(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(hook: Hook, frame: dict[str, Any]) -> bool:
    result = hook(frame["text"], prompt=frame["prompt"], final=frame["final"])
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return bool(result)


async def _awaited(result: Any) -> Any:
    return await result


class Judge:
    """Answers {"spec", "folders"}, the opening, with {"ready"} or {"error": why not}; then {"text", "prompt", "final"}
    with {"bad"} or {"error": class name}: an exception's text may hold what was judged.
    """

    _hook: Hook

    def __call__(self, body: bytes) -> dict[str, Any]:
        frame = json.loads(body)
        try:  # BaseException below is SystemExit, too: ending the process is not the function's to decide
            if "spec" not in frame:
                return {"bad": call(self._hook, frame)}
            self._hook = find_hook(frame["spec"], frame["folders"])
            return {"ready": True}
        except NotFoundThere as error:
            return {"error": str(error)}
        except BaseException as error:
            if "spec" in frame:
                return {"error": f"it cannot be imported ({type(error).__name__}: {error})"[:500]}
            if os.environ.get("HEADRACE_LOG_LEVEL") == "debug":
                traceback.print_exc()
            return {"error": type(error).__name__}


if __name__ == "__main__":
    end_with_parent()
    answer_lines(Judge())
