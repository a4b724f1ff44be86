"""The process that runs a user's moderation function: what it does wrong, or how long it takes, is nobody else's problem.

What lives here: finding the function, and the loop (frame in, call, frame out). What may not: limits of time (hook.py ends this process).

Started as ``python -m headrace.server.moderation.worker MODULE:FUNCTION FOLDER…``; ends with its stdin. The folders hold models: code
is never taken from there. What the function prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.engine.template_frames import encode_frame, read_frame
from headrace.portability import ignore_terminal
from headrace.process_tree import end_with_parent

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


def answer(hook: Hook, body: bytes) -> dict[str, Any]:
    """{"text", "prompt", "final"} → {"bad"} or {"error": class name}: an exception's text may hold what was judged."""
    try:
        return {"bad": call(hook, json.loads(body))}
    except BaseException as error:  # SystemExit, too: ending the process is not the function's to decide
        if os.environ.get("HEADRACE_LOG_LEVEL") == "debug":
            traceback.print_exc()
        return {"error": type(error).__name__}


def main() -> None:
    end_with_parent()
    ignore_terminal()
    channel_in, channel_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the function may read and print what it likes
    os.dup2(2, 1)
    try:
        hook = find_hook(sys.argv[1], sys.argv[2:])
        channel_out.write(encode_frame({"ready": True}))
    except NotFoundThere as error:
        channel_out.write(encode_frame({"error": str(error)}))
        return
    except BaseException as error:
        channel_out.write(encode_frame({"error": f"it cannot be imported ({type(error).__name__}: {error})"[:500]}))
        return
    finally:
        channel_out.flush()
    while (frame := read_frame(channel_in)) is not None:
        channel_out.write(encode_frame(answer(hook, frame)))
        channel_out.flush()


if __name__ == "__main__":
    main()
