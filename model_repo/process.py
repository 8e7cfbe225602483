"""Owns how a shard's process uses its machine: threads and the allocator; must not know what is computed."""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

THREADS_VARIABLE = "KJTSERVE_SHARD_THREADS"
"""Threads of one shard process; wins over ``OMP_NUM_THREADS``."""

MALLOC_KEEP_BYTES = 64 << 20
"""Freed memory up to this size stays mapped, so that the next answer finds its pages there."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def shard_threads(environ: Mapping[str, str], *, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Threads that a shard may compute with.

    ``KJTSERVE_SHARD_THREADS``, else ``OMP_NUM_THREADS``, else the CPUs of the process: those it may run on, capped by
    its cgroup's quota.

    Raises:
        ValueError: A variable is set to something else than a positive number.
    """
    for name in (THREADS_VARIABLE, "OMP_NUM_THREADS"):
        text = environ.get(name)
        if text:
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{name} is {text!r}; it must be a number of threads, 1 or more")
            return int(text)
    return min(len(os.sched_getaffinity(0)), _cgroup_cpus(cgroup))


def _cgroup_cpus(cgroup: Path) -> int:
    """Whole CPUs in the cgroup's quota (v2 ``cpu.max``, else v1 ``cpu.cfs_*``); without one, more than any machine has."""
    unlimited = 1 << 20
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return unlimited
    if not (quota.isdecimal() and period.isdecimal() and int(period) > 0):
        return unlimited
    return max(1, int(quota) // int(period))


def keep_freed_memory() -> bool:
    """Tell glibc to keep ``MALLOC_KEEP_BYTES`` of freed memory instead of handing it back after each answer.

    An answer of several megabytes is otherwise mapped anew for every request, and its page faults cost more than the
    gather: 65,536 rows of 128 floats took 26 ms in the shard without this, 9 ms with it. Returns whether the C library took the settings (others than glibc have no ``mallopt``).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MALLOC_KEEP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, MALLOC_KEEP_BYTES))
