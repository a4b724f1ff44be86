"""What this process takes of the machine, under the names that Prometheus' own clients give it.

What lives here: reading it where the system tells. What may not: the engine's numbers (exposition.py).
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from headrace.metrics import render_value

_STAT, _STATM, _DESCRIPTORS = Path("/proc/self/stat"), Path("/proc/self/statm"), Path("/proc/self/fd")


def render_process() -> str:
    """Of the front end alone; the engine's process is not in it. Without /proc only what every Unix knows."""
    lines = [
        *render_value("process_cpu_seconds_total", time.process_time(), "counter", "CPU seconds, of user and system"),
        *render_value("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0], "gauge", "open files at most"),
    ]
    if _STAT.exists():
        virtual, resident = (int(pages) * resource.getpagesize() for pages in _STATM.read_text().split()[:2])
        lines += render_value("process_virtual_memory_bytes", virtual, "gauge", "virtual memory")
        lines += render_value("process_resident_memory_bytes", resident, "gauge", "memory that is held")
        lines += render_value("process_open_fds", len(os.listdir(_DESCRIPTORS)), "gauge", "open files")
        lines += render_value("process_start_time_seconds", _started(), "gauge", "its start, in seconds since 1970")
    return "\n".join(lines) + "\n"


def _started() -> float:
    """The kernel counts from its own start, on a clock that never jumps."""
    ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
