"""Properties of the loaded MPI: version, thread level, support for GPU buffers.

Functions that import ``mpi4py.MPI`` may call MPI_Init. ``python -m kvr_mpi.transport.mpi_query`` does not: it prints
the library's version even where MPI_Init would abort.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")
GPU_KINDS = {"CUDA": 0, "HIP": 2}  # MPIX_GPU_SUPPORT_CUDA and so on of MPICH
CRAY_GPU = "MPICH_GPU_SUPPORT_ENABLED"


@dataclass(frozen=True, slots=True)
class MpiFacts:
    """Properties of one process's MPI; `cuda` is None if GPU support cannot be queried."""

    library: str
    standard: str
    thread_level: str
    cuda: bool | None
    cuda_why: str


def describe_mpi(environ: Mapping[str, str]) -> MpiFacts | None:
    """Query the MPI that mpi4py loads; None without MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    cuda, why = cuda_support(loaded_libraries(), environ)
    return MpiFacts(library_version(), ".".join(map(str, MPI.Get_version())), thread_level(), cuda, why)


def library_version() -> str:
    """Return the MPI library's name and version."""
    from mpi4py import MPI

    first = MPI.Get_library_version().split(",")[0].split("\n")[0].strip(" \x00")
    return " ".join(first.replace("Version:", "").split())


def thread_level() -> str:
    """Return the name of MPI's thread level: ``THREAD_MULTIPLE`` and so on."""
    from mpi4py import MPI

    names = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
    return {getattr(MPI, name): name for name in names}[MPI.Query_thread()]


def loaded_libraries() -> list[str]:
    """List the libraries of MPI and HIP loaded in this process, including those loaded with RTLD_LOCAL."""
    if not MAPS.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(("libmpi", "libamdhip64")))


def cuda_support(libraries: Sequence[str], environ: Mapping[str, str]) -> tuple[bool | None, str]:
    """Return whether MPI claims to accept GPU buffers, and the source of the claim."""
    layers = [name for path in libraries if (name := Path(path).name).startswith(("libmpi_gtl_cuda", "libmpi_gtl_hsa"))]
    if (cray := environ.get(CRAY_GPU)) == "1" or (cray == "0" and not layers):
        return bool(layers), f"{CRAY_GPU}={cray}, {layers[0] if layers else 'no GPU transport layer (GTL) is'} loaded"
    if environ.get("I_MPI_OFFLOAD", "") not in ("", "0"):
        return True, f"I_MPI_OFFLOAD={environ['I_MPI_OFFLOAD']}"
    for path in libraries:
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
        answer = _ask(library)
        if answer is not None:
            return answer
    return None, f"{', '.join(Path(path).name for path in libraries) or 'no libmpi found'}: no query function"


def _ask(library: Any) -> tuple[bool, str] | None:
    if hasattr(library, "MPIX_GPU_query_support"):
        found = {kind: ctypes.c_int(0) for kind in GPU_KINDS}
        if not any(
            library.MPIX_GPU_query_support(ctypes.c_int(GPU_KINDS[kind]), ctypes.byref(supported))
            for kind, supported in found.items()
        ):
            kinds = [kind for kind, supported in found.items() if supported.value]
            return bool(kinds), f"MPIX_GPU_query_support returns {', '.join(kinds) or 'no'}"
    queries = [name for kind in ("cuda", "rocm") if hasattr(library, name := f"MPIX_Query_{kind}_support")]
    if not queries:
        return None
    yes = next((name for name in queries if getattr(library, name)() == 1), None)
    return yes is not None, f"{yes or queries[0]} returns {'yes' if yes else 'no'}"


if __name__ == "__main__":
    import mpi4py

    mpi4py.rc.initialize = False
    print(library_version())
