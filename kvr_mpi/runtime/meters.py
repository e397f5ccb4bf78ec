"""Energy counters: RAPL (Linux powercap) for processors and memory, NVML for GPUs.

All ranks of a host read the same counters, and each counts an equal part of the host's energy.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.store.cost import NOT_READABLE, Cost

POWERCAP = Path("/sys/class/powercap")
# Zones that do not overlap: cores and graphics are part of a package, and ``psys`` contains the packages.
ZONES = ("package", "dram")


class Zone:
    """A powercap zone; its counter wraps around after a few minutes of full load."""

    def __init__(self, folder: Path) -> None:
        self.name = (folder / "name").read_text().strip()
        self._file, self._range = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
        self._last, self._sum = int(self._file.read_text()), 0

    def joules(self) -> float:
        """Joules since the counter was opened."""
        now = int(self._file.read_text())
        self._sum += now - self._last + (self._range if now < self._last else 0)
        self._last = now
        return self._sum / 1e6


class Gpu:
    """A GPU's counter, read through NVML (package nvidia-ml-py)."""

    def __init__(self, device: torch.device) -> None:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._nvml: Any = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self._first = self._count()

    def _count(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def joules(self) -> float:
        """Joules since the counter was opened."""
        return (self._count() - self._first) / 1e3


class Meters:
    """Time and energy that a rank has used since this object was created.

    device : this rank's device; the energy of a GPU is counted as well.
    ranks_here, rank_here : number of ranks on this host, which share its processors and GPUs, and this rank's index
        among them.
    powercap : folder with the RAPL counters.
    """

    def __init__(
        self, device: torch.device, ranks_here: int = 1, rank_here: int = 0, powercap: Path | None = None
    ) -> None:
        self._key, self._began_s = secrets.token_hex(8), time.monotonic()
        self._is_first = rank_here == 0
        self._answering_since_s: float | None = None
        self._gpus = min(1.0, torch.cuda.device_count() / ranks_here) if device.type == "cuda" else 0.0
        zones, why = _zones(powercap or POWERCAP)
        self._counters: list[tuple[Zone | Gpu, float]] = [(zone, 1 / ranks_here) for zone in zones]
        about = [f"RAPL: {', '.join(sorted({zone.name.split('-')[0] for zone in zones}))}"] if zones else []
        if device.type == "cuda":
            try:
                self._counters.append((Gpu(device), self._gpus))
                about.append("NVML: GPU")
            except Exception as error:  # the package is missing, or the driver lacks the counter
                self._counters, about = [], []
                why = f"the GPU's counter: {(str(error).splitlines() or [type(error).__name__])[0]}"
        self._about = "; ".join(about) or f"{NOT_READABLE}: {why}"

    def begin_answering(self) -> None:
        """Count from now on the time in which the job answers documents; only the first rank calls this."""
        self._answering_since_s = time.monotonic()

    def cost(self, rank_s: float = 0.0, threads: int = 1) -> Cost:
        """Return the cost so far; call this every minute, so that no counter wraps around twice in between.

        rank_s : rank seconds spent on documents.
        threads : threads of this rank.
        """
        now_s = time.monotonic()
        seconds = now_s - self._began_s
        return Cost(
            self._key,
            node_s=seconds if self._is_first else 0.0,
            gpu_s=seconds * self._gpus,
            core_s=seconds * threads,
            rank_s=rank_s,
            answering_s=0.0 if self._answering_since_s is None else now_s - self._answering_since_s,
            joules=self._joules(),
            meters=self._about,
        )

    def _joules(self) -> float | None:
        try:
            found = [part * counter.joules() for counter, part in self._counters]
        except Exception as error:  # without this counter the sum would be too small
            self._counters, self._about = [], f"{NOT_READABLE}: a counter failed: {error}"
            return None
        return sum(found) if found else None


def _zones(powercap: Path) -> tuple[list[Zone], str]:
    """Open the package and DRAM zones; without any, return the reason as well."""
    found, why = [], f"{powercap} has no RAPL zones"
    for folder in sorted(powercap.glob("intel-rapl:*")):  # also the name on AMD processors
        try:
            if (folder / "name").read_text().strip().startswith(ZONES):
                found.append(Zone(folder))
        except PermissionError:
            return [], f"{folder / 'energy_uj'} is for root only"
        except (OSError, ValueError) as error:
            return [], f"{folder}: {error}"
    return found, why
