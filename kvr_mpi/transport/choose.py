"""Choice of the transport for tensors, made once for all ranks from every rank's report.

GPU buffers are passed to MPI only if a job requests that: a library that claims to accept them may still crash or
deliver wrong data. A run uses only one GPU transport, since two can deadlock.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvr_mpi.errors import TransportError
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.transport.base import Transport, gather_json, share_json, together
from kvr_mpi.transport.mpi import MpiTransport, measure_needs_progress
from kvr_mpi.transport.mpi_query import cuda_support, loaded_libraries
from kvr_mpi.transport.nccl import open_nccl

if TYPE_CHECKING:
    import torch

TransportName = Literal["auto", "mpi", "staged", "nccl", "local"]
NAMES: tuple[TransportName, ...] = get_args(TransportName)

# torch's variables, of which the second is the older one.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
WARM_UP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _View:
    """One rank's report for the choice."""

    device: str  # "cpu" or "cuda"
    gpu: str  # host and PCI address of the GPU; empty on a CPU
    claims: bool | None  # whether MPI claims to accept GPU buffers
    claims_why: str
    has_nccl: bool


def open_transport(
    world: Transport,
    wanted: TransportName,
    device: torch.device,
    *,
    environ: Mapping[str, str] = os.environ,
    decodes_together: bool = False,
    logger: RankLogger = SILENT,
) -> tuple[Transport, str]:
    """Choose, open and warm up the transport for tensors; every rank calls this.

    world : all ranks, from `mpi.connect`.
    device : device of this rank's model.
    decodes_together : the ranks of a chain communicate in every layer of a decode step.

    Returns the transport, and a line with its name and the reason for the choice. Raises `TransportError` on all ranks,
    if the requested transport is impossible here; on the receiver, if a link corrupts data.
    """
    mine = _look(world, device, environ)
    views = [_View(**view) for view in share_json(world, gather_json(world, asdict(mine)))]
    how = {"in_processes": isinstance(world, MpiTransport), "decodes_together": decodes_together}
    name, why = together(world, lambda: choose(wanted, views, **how))
    transport = world
    if name == "nccl":
        transport = open_nccl(world, device)
    elif isinstance(world, MpiTransport):
        on_cpus = world.size > 1 and any(view.device == "cpu" for view in views)
        needs_progress = on_cpus and measure_needs_progress(world)
        transport = MpiTransport(world.comm, direct=name == "mpi", needs_progress=needs_progress, awaited=world.awaited)
        if needs_progress:
            why += "; in a background thread, since this MPI cannot copy from the memory of another process (CMA)"
    if device.type == "cuda" and name != "mpi":
        _expand_segments(environ)
    elif device.type == "cuda":  # a library that cannot do it crashes here, without an error
        logger.root.info(
            "passing GPU memory to MPI for the first time: if the job ends without another message, this MPI cannot do "
            "it; use parallel.transport = 'nccl' or 'staged'"
        )
    warm_up(transport, device)
    return transport, f"transport: {name}: {why}"


def _expand_segments(environ: Mapping[str, str]) -> None:
    """Let torch's allocator grow its segments on the GPU, so that prompts of many lengths do not fragment the memory.

    Not for CUDA-aware MPI, since other processes cannot open such memory (CUDA IPC). Users' own settings have priority.
    """
    import torch

    if torch.version.hip is None and not any(environ.get(name) for name in ALLOCATOR_SETTINGS):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def choose(
    wanted: TransportName, views: Sequence[_View], *, in_processes: bool, decodes_together: bool = False
) -> tuple[TransportName, str]:
    """Choose the transport; the result is the same on every rank.

    Raises `TransportError` if the requested transport is impossible here.
    """
    size, on_gpu = len(views), any(view.device == "cuda" for view in views)
    if wanted == "local" and in_processes and size > 1:
        raise TransportError(
            f"transport 'local' connects threads of one process, but {size} ranks were started; use 'auto' or 'mpi'"
        )
    if size == 1 and wanted in ("auto", "local"):
        return "local", "one rank, nothing to send"
    if not in_processes:
        return "local", f"{size} threads of one process"
    if wanted == "nccl":
        if decodes_together:
            raise TransportError(
                "transport 'nccl' is not used by ranks that decode together, since small sums in every layer would "
                "take longer than the layer; use 'auto' or 'staged', or a CUDA-aware 'mpi'"
            )
        _need_nccl(views)
        return "nccl", "as requested; control messages over MPI"
    if not on_gpu:
        return "mpi", "host memory, sent by MPI without a copy"
    if wanted == "staged":
        return "staged", "as requested; GPU memory is copied through pinned host memory"
    if wanted == "mpi":
        said = next((view.claims_why for view in views if not view.claims), views[0].claims_why)
        if not all(view.claims for view in views):
            raise TransportError(
                f"transport 'mpi' would pass GPU memory to MPI, but this MPI does not report support for it ({said}); "
                f"use 'nccl', 'staged' or 'auto', or load a CUDA-aware MPI"
            )
        return "mpi", f"as requested; MPI reports support for GPU memory ({said})"
    if decodes_together:
        return "staged", "through pinned host memory, since the ranks of a chain decode together"
    try:
        _need_nccl(views)
    except TransportError as error:
        return "staged", f"through pinned host memory, since {error}"
    return "nccl", "between GPUs; control messages over MPI"


def _need_nccl(views: Sequence[_View]) -> None:
    without = [rank for rank, view in enumerate(views) if view.device != "cuda"]
    if without:
        raise TransportError(
            f"transport 'nccl' requires GPU memory, but rank {without[0]} has its model on the CPU; use 'auto' or 'mpi'"
        )
    if not all(view.has_nccl for view in views):
        raise TransportError("transport 'nccl': this torch was built without NCCL; use 'staged' or 'auto'")
    gpu, ranks = Counter(view.gpu for view in views).most_common(1)[0]
    if ranks > 1:
        sharing = [rank for rank, view in enumerate(views) if view.gpu == gpu]
        raise TransportError(
            f"transport 'nccl': ranks {sharing} share one GPU, or have partitions (MIG) of one ({gpu}), which NCCL "
            f"does not allow; start one rank per GPU, or use 'staged'"
        )


def warm_up(transport: Transport, device: torch.device) -> None:
    """Send a message over every link and verify it, so that connections exist before the first prompt.

    Links connect neighbors in a ring, in both directions: the decode rank changes from prompt to prompt, so the last
    rank also sends to the first, and measurements need answers. NCCL connects each direction of a pair while both
    ranks wait (0.3 to 1 s), possibly for pending transfers, so all even ranks connect to the next rank at the same
    time, then all odd ranks.

    Raises `TransportError` if a link corrupts data.
    """
    import torch

    size = transport.size
    even, odd = ([(low, low + 1) for low in range(first, size - 1, 2)] for first in (0, 1))
    ring = [*even, *odd, *([(0, size - 1)] if size > 2 else [])]
    pairs = [two for low, high in ring for two in ((low, high), (high, low))]
    sent = (torch.arange(WARM_UP_BYTES if pairs else 0) % 251).to(torch.uint8).to(device)
    for one, other in pairs:
        if transport.rank == one:
            transport.isend(sent, other, 0).wait()
        elif transport.rank == other:
            found = torch.zeros_like(sent)
            transport.irecv(found, one, 0).wait()
            _check(found, sent, f"the link from rank {one} to rank {other}")


def warm_up_sums(transport: Transport, device: torch.device) -> None:
    """Connect all ranks for sums; raise `TransportError` if one is wrong."""
    import torch

    for elements in (1, WARM_UP_BYTES // 4):  # over MPI, a rank sends a small tensor to all others, a large one to one
        part = torch.arange(elements, dtype=torch.float32, device=device) % 251
        total = part + transport.rank
        transport.all_reduce(total)
        _check(total, (part + (transport.size - 1) / 2) * transport.size, f"an all-reduce over {transport.size} ranks")


def _check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    import torch

    if not torch.equal(found, expected):
        raise TransportError(f"{what} delivers wrong data; test the links with kvr doctor, or try another transport")


def _look(world: Transport, device: torch.device, environ: Mapping[str, str]) -> _View:
    if device.type != "cuda":
        return _View(device.type, "", None, "", False)
    import socket

    import torch

    claims, why = cuda_support(loaded_libraries(), environ) if isinstance(world, MpiTransport) else (None, "no MPI")
    board: Any = torch.cuda.get_device_properties(device)  # NCCL treats MIG partitions as one GPU
    place = f"{board.pci_domain_id:04x}:{board.pci_bus_id:02x}:{board.pci_device_id:02x}"
    return _View("cuda", f"{socket.gethostname()} {place}", claims, why, torch.distributed.is_nccl_available())
