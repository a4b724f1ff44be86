"""What Linux offers and other systems do not, and what is done without it.

What lives here: small stand-ins, and the list of what is missing here. What may not: decisions of one room; processes
(processes/tree.py).
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path


def open_cpus() -> list[int]:
    """The CPUs that this process may run on; all of them where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def shared_file(num_bytes: int) -> int:
    """A descriptor of ``num_bytes`` zeros that processes can share, without a name. In memory, or in a file whose
    blocks are allocated here: whoever writes to a page of one on a full disk is killed."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("headrace")
        os.ftruncate(fd, num_bytes)
        return fd
    with tempfile.TemporaryFile() as file:
        file.write(bytes(num_bytes))
        file.flush()
        return os.dup(file.fileno())


def read_ahead(fd: int) -> None:
    """Asks the system to have a file in memory soon; nothing where it cannot be asked."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def system_text(path: str | Path) -> str:
    """What a file of the kernel's (/proc, /sys) holds; empty where there is none."""
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def process_status() -> dict[str, str]:
    """What the kernel says of this process, by name; empty where it does not tell."""
    return dict(line.split(":", 1) for line in system_text("/proc/self/status").splitlines() if ":" in line)


def address_space() -> int | None:
    """Bytes of it that this process has; None where the system does not tell."""
    size = process_status().get("VmSize")
    return None if size is None else int(size.split()[0]) * 1024


def limit(kind: int, value: int) -> bool:
    """Lowers one of ``resource``'s limits, never above the hard one. False where the system does not take it (macOS:
    address space)."""
    _, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    except (ValueError, OSError):
        return False
    return True


def missing() -> list[str]:
    """What this system does not offer, each with what follows; empty on Linux."""
    told = bool(process_status())
    lines = {
        "all CPUs count, also those that this process may not use": not hasattr(os, "sched_getaffinity"),
        "free memory is taken to be what is installed, and what a process holds is not told": not told,
        "templates and grammars are bounded in time, not in memory": not told,
        "a process whose parent is killed ends within a second": not told,
    }
    return [line for line, holds in lines.items() if holds]


def ignore_terminal() -> None:
    """Ctrl-C and a terminal that closes reach every process of its group; when a child ends is its parent's to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
