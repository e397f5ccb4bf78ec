"""Limits that control groups (cgroups, of a SLURM job or a container) set for this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def enclosing_groups(controller: str, own: Path = OWN_GROUPS, root: Path = GROUPS) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of this process's group and of those around it; the limits of all of them apply."""
    if not own.exists():
        return
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            yield (1 if controllers else 2), group
            group = group.parent


def cpu_quota(own: Path = OWN_GROUPS, root: Path = GROUPS) -> int | None:
    """Return the CPU quota in cores, rounded up; None without one.

    A quota limits CPU time (``docker run --cpus``, limits of Kubernetes), not the cores in the affinity mask. With more
    threads than that, the kernel stops all of them for a part of each period.
    """
    quotas = [
        quota
        for version, group in enclosing_groups("cpu", own, root)
        if (quota := _quota_of(group, version)) is not None
    ]
    return min(quotas, default=None)


def usable_cores(own: Path = OWN_GROUPS, root: Path = GROUPS) -> int:
    """Return the number of cores that this process may use, by its affinity mask and its CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, cpu_quota(own, root) or cores)


def _quota_of(group: Path, version: int) -> int | None:
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return max(1, -(-int(quota) // int(period))) if quota.isdigit() else None  # "max" or -1: no quota
    except (OSError, ValueError, ZeroDivisionError):
        return None
