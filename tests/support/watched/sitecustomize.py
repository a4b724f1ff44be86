"""Which modules of Headrace a process runs code of, between two signals. Python imports this file by its name, at the
start of each process that has this folder in its PYTHONPATH.

What lives here: the profile hook. What may not: anything of Headrace.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

_MARK = f"{os.sep}headrace{os.sep}"
_files: set[str] | None = None  # while watching
_folder = Path(os.environ["WATCHED_TO"])


def _hook(frame, event, arg) -> None:
    if _files is not None:
        _files.add(frame.f_code.co_filename)


def _toggle(number, frame) -> None:
    """Begins; or ends, and writes down what it saw."""
    global _files
    seen, _files = _files, (set() if _files is None else None)
    names = (
        []
        if seen is None
        else [file.rpartition(_MARK)[2].removesuffix(".py").replace(os.sep, ".") for file in seen if _MARK in file]
    )
    written = _folder / f"{os.getpid()}.part"
    written.write_text(json.dumps(sorted(names)))
    written.rename(written.with_suffix(".json"))


signal.signal(signal.SIGUSR1, _toggle)
threading.setprofile(_hook)
sys.setprofile(_hook)
