"""How many compilers run at a time: what cores and memory allow."""

from __future__ import annotations

import os
from pathlib import Path

from .messages import BuildError

# Peak memory of one compiler with room to spare: the largest file (module.cpp) takes 0.4 GiB.
GIB_PER_JOB = 1.0
GIB_FOR_THE_REST = 1.0


def usable_cores() -> int:
    """Cores that this process may use: affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def available_gib() -> float:
    """Memory that is free to use, in GiB: the machine's, and that of the control group."""
    gib = float("inf")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                gib = int(line.split()[1]) / 2**20
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            gib = min(gib, (int(limit) - used) / 2**30)
    except (OSError, ValueError):
        pass
    return gib


def job_count(cores: int | None = None, gib: float | None = None) -> int:
    """Compilers to run at a time: MAX_JOBS if set, else the least of cores and memory."""
    asked_for = os.environ.get("MAX_JOBS")
    if asked_for:
        if not asked_for.isdigit() or int(asked_for) < 1:
            raise BuildError(f"MAX_JOBS must be a whole number from 1, got {asked_for!r}")
        return int(asked_for)
    cores = usable_cores() if cores is None else cores
    gib = available_gib() if gib is None else gib
    by_memory = (gib - GIB_FOR_THE_REST) / GIB_PER_JOB
    return max(1, cores if by_memory >= cores else int(by_memory))
