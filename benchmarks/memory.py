"""How much memory this process holds on its device, and has held at most."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far, so that the next one belongs to what comes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        ctypes.CDLL(None).malloc_trim(0)  # what was freed but kept for later would count as held
        CLEAR.write_text("5")  # resets the kernel's high-water mark of this process


def held_bytes(device: torch.device) -> int:
    """Bytes held now: on a GPU by tensors, on a CPU by the whole process; 0 if unknown."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Most bytes held since `reset_peak`: on a GPU by tensors, on a CPU by the whole process; 0 if unknown."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    if not STATUS.exists():
        return 0
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return int(fields.get(name, "0 kB").split()[0]) * 1024
