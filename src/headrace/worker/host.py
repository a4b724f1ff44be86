"""What this machine offers one process: cores, memory, instructions. Linux's own files are asked; elsewhere the
portable answer is taken.

What lives here: reading the host. What may not: deciding anything (settings.py, memory.py), torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from headrace.cost.profile import cpu_identity
from headrace.portability import open_cpus, process_status, system_text

_CGROUPS = Path("/sys/fs/cgroup")
_FAST_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86 with tiles, ARM


def physical_cores() -> tuple[int, str]:
    """Cores this process may compute on, hyper-threads of one core counted once, and where the number comes from."""
    cpus = open_cpus()
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {system_text(topology.format(cpu)) or str(cpu) for cpu in cpus}
    quota = _cpu_quota()
    if quota is not None and quota < len(siblings):
        return max(1, int(quota)), f"the control group allows {quota:g} CPUs"
    return len(siblings), f"{len(siblings)} physical cores ({len(cpus)} logical CPUs) are open to this process"


def available_memory() -> int:
    """Bytes that can still be taken: what the kernel calls available, or what the control group leaves if that is
    less."""
    meminfo = dict(line.split(":", 1) for line in system_text("/proc/meminfo").splitlines())
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = int(meminfo["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in meminfo else installed
    return min([free, *_cgroup_room()])


def process_memory() -> int:
    """Bytes of its own that this process holds now (not files that others can share)."""
    status = process_status()
    return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap") if name in status)


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    return not _FAST_BF16.isdisjoint(cpu_identity(threads=0).features)


def _cgroup_folders() -> Iterator[Path]:
    """This process's control group (version 2) and the groups around it."""
    for line in system_text("/proc/self/cgroup").splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            folder = _CGROUPS / path.lstrip("/")
            while folder != _CGROUPS.parent:
                yield folder
                folder = folder.parent


def _cpu_quota() -> float | None:
    quotas = []
    for folder in _cgroup_folders():
        words = (system_text(folder / "cpu.max") or "max").split()
        if words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    old = system_text(_CGROUPS / "cpu" / "cpu.cfs_quota_us")
    period = system_text(_CGROUPS / "cpu" / "cpu.cfs_period_us")
    if old and period and int(old) > 0:
        quotas.append(int(old) / int(period))
    return min(quotas, default=None)


def _cgroup_room() -> Iterator[int]:
    """Limit minus use of each control group that has a limit."""
    pairs = [(folder / "memory.max", folder / "memory.current") for folder in _cgroup_folders()]
    pairs.append((_CGROUPS / "memory" / "memory.limit_in_bytes", _CGROUPS / "memory" / "memory.usage_in_bytes"))
    for limit_file, used_file in pairs:
        limit, used = system_text(limit_file), system_text(used_file)
        if limit and limit != "max" and used:
            yield max(0, int(limit) - int(used))
