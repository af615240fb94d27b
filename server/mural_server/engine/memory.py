"""How much memory this process may still take, and how little of it malloc should give back."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def available_bytes() -> int:
    """Free memory of the machine, or what the container's limit leaves if that is less."""
    machine = next(
        int(line.split()[1]) * 1024
        for line in _MEMINFO.read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    return min([machine, *(_left(*paths) for paths in _CGROUPS if all(p.exists() for p in paths))])


def _left(limit_file: Path, usage_file: Path) -> int:
    limit = limit_file.read_text().strip()
    if limit == "max":
        return 1 << 62
    return max(0, int(limit) - int(usage_file.read_text()))


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Let glibc keep large freed buffers: activations of every step would be page-faulted anew."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 256 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def readable(num_bytes: int) -> str:
    """``num_bytes`` for a log line."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
