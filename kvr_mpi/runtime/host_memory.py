"""Measures a process's free memory on its device, and configures the C heap."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import torch

from kvr_mpi.cgroups import GROUPS, OWN_GROUPS, enclosing_groups
from kvr_mpi.transport import Transport, gather_json, share_json

MEMINFO = Path("/proc/meminfo")
NO_LIMIT = 1 << 60  # cgroup version 1 writes "no limit" as a huge number
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt


TRIM_S = 60.0  # seconds between two returns of unused heap memory to the system


def keep_heap() -> None:
    """Make glibc keep freed memory for the next tensors, instead of returning it to the system each time.

    Activations are allocated and freed in every layer, and the system clears each page that it hands out. That took 5
    to 8 % of a prefill of 2k to 8k tokens in a fresh process on one core. Later in a process, glibc itself keeps more
    memory, but only up to 32 MB per tensor, which the activations of a slice of 6000 tokens exceed.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version"):
        library.malloc_trim(0)  # return memory left from loading
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


class HeapTrimmer:
    """Returns free memory of the C heap to the system from time to time.

    Without this, a rank grew by 30 MB over 20,000 tiny documents. A call takes a few hundredths of a second.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        self._trimmed_s = float("-inf")  # the first call trims what loading and measuring have left

    def trim(self) -> None:
        """Trim the heap, at most once a minute."""
        if self._trim is not None and time.monotonic() - self._trimmed_s > TRIM_S:
            self._trim(0)
            self._trimmed_s = time.monotonic()


def ranks_on_device(world: Transport, device: torch.device) -> int:
    """Count the ranks that share this rank's memory, on its GPU or host; every rank calls this.

    GPUs are compared by their unique ids, since a launcher may show each rank only one GPU, always with index 0.
    """
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    everyone: list[str | None] = share_json(world, gather_json(world, own))
    return world.local_size if own is None else everyone.count(own)


def free_bytes(device: torch.device, sharers: int) -> int:
    """Bytes that each of `sharers` processes on a device may still allocate; CPU memory is limited by cgroups."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused) // sharers
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024
    return min(available or sys.maxsize, _group_room() or sys.maxsize) // sharers


def _group_room(own: Path = OWN_GROUPS, root: Path = GROUPS) -> int | None:
    """Return the bytes that the cgroups (of a SLURM job or container) leave; None without a limit."""
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache ")
    new = ("memory.max", "memory.current", "file ")
    groups = enclosing_groups("memory", own, root)
    return min(
        (room for version, group in groups for room in _room_in(group, *(old if version == 1 else new))), default=None
    )


def _room_in(group: Path, limit: str, used: str, cache: str) -> list[int]:
    try:
        most = (group / limit).read_text().strip()
        if not most.isdigit() or int(most) >= NO_LIMIT:
            return []
        lines = (group / "memory.stat").read_text().splitlines()
        files = sum(int(line.removeprefix(cache)) for line in lines if line.startswith(cache))  # reclaimable page cache
        return [max(0, int(most) - int((group / used).read_text()) + files)]
    except (OSError, ValueError):
        return []
