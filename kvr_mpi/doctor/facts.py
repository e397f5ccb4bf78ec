"""Facts about each rank's machine, which rank 0 gathers and checks."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvr_mpi.model.devices import NVIDIA_DRIVER, find_unusable_gpu
from kvr_mpi.transport.mpi_query import MpiFacts, describe_mpi


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The GPU that a rank would use."""

    torch: str = ""  # its version
    built: str = ""  # CUDA version of this torch build; empty: none
    driver: bool = False  # the machine has an NVIDIA driver
    unusable: str = ""  # why jobs cannot use the GPU, with torch's reason
    remedy: str = ""  # what to do about that
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    allocator: str = ""  # PYTORCH_CUDA_ALLOC_CONF
    count: int = 0
    index: int | None = None
    name: str = ""
    uuid: str = ""
    error: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0  # before this program allocates any


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's host, device and MPI."""

    rank: int
    host: str
    device: DeviceFacts
    mpi: MpiFacts | None
    mpi4py: str = ""  # its version


def look_at_rank(rank: int, gpu: int, environ: Mapping[str, str], with_mpi: bool) -> RankFacts:
    """Collect the facts of this process and its host.

    gpu : index of the GPU that a job would use, among those visible to this rank.
    with_mpi : False if calling MPI would end the process.
    """
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        device=look_at_device(gpu, environ),
        mpi=describe_mpi(environ) if with_mpi else None,
        mpi4py=importlib.metadata.version("mpi4py"),
    )


def look_at_device(gpu: int, environ: Mapping[str, str]) -> DeviceFacts:
    """Collect the facts of a GPU."""
    import torch

    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = gpu if count else None
        properties = None if index is None else torch.cuda.get_device_properties(index)
        unusable = find_unusable_gpu(environ)
        free, total = (0, 0) if index is None else torch.cuda.mem_get_info(index)
    except Exception as error:  # of torch, or of a driver
        return DeviceFacts(visible=visible, error=f"{type(error).__name__}: {error}")
    return DeviceFacts(
        torch=torch.__version__,
        built=torch.version.cuda or "",
        driver=NVIDIA_DRIVER.exists(),
        unusable="" if unusable is None else unusable.reason,
        remedy="" if unusable is None else unusable.remedy,
        visible=visible,
        allocator=environ.get("PYTORCH_CUDA_ALLOC_CONF") or environ.get("PYTORCH_ALLOC_CONF", ""),
        count=count,
        index=index,
        name=properties.name if properties else "",
        uuid=str(getattr(properties, "uuid", "")),
        capability=(properties.major, properties.minor) if properties else (0, 0),
        total_bytes=total,
        free_bytes=free,
    )


def group_ranks(facts: Sequence[RankFacts], key: Callable[[RankFacts], str]) -> dict[str, list[RankFacts]]:
    """Group ranks by a property, in the order of each group's first rank."""
    groups: dict[str, list[RankFacts]] = {}
    for one in facts:
        groups.setdefault(key(one), []).append(one)
    return groups
