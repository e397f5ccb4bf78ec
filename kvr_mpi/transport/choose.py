"""Choice of the transport for tensors, made once for all ranks from what every rank reports.

GPU memory is handed to MPI only where a job asks for that by name: a library that says it takes GPU buffers may still
crash or deliver something else. Two GPU transports in one run can deadlock; there is always one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvr_mpi.errors import TransportError
from kvr_mpi.topology import following, others_after, preceding
from kvr_mpi.transport.base import Transport, gather_json, share_json, together
from kvr_mpi.transport.mpi import Handing, MpiTransport
from kvr_mpi.transport.mpi_query import cuda_support, loaded_libraries
from kvr_mpi.transport.nccl import NcclTransport, open_nccl

if TYPE_CHECKING:
    import torch

Name = Literal["auto", "mpi", "staged", "nccl", "local"]
NAMES: tuple[Name, ...] = get_args(Name)

WARM_UP_BYTES = 1 << 20
# Streams that torch has for NCCL on a GPU; each pair of ranks takes one for each direction, and from there on two pairs
# have one stream: a receive of the one would hold up a send of the other, which may wait for it.
NCCL_STREAMS = 32
# NCCL's own variable, from 2.30 on. Where ranks take turns on a GPU, a transfer waits for the other rank's turn.
SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True, slots=True)
class _View:
    """What one rank reports for the choice."""

    device: str  # "cpu" or "cuda"
    gpu: str  # the host, and the GPU's place on its bus; empty on a CPU
    claims: bool | None  # whether MPI says it takes GPU buffers
    claims_why: str
    has_nccl: bool
    shares: bool = False  # whether NCCL was told to let ranks share a GPU


def open_transport(
    world: Transport,
    wanted: Name,
    device: torch.device,
    *,
    environ: Mapping[str, str] = os.environ,
    every_pair: bool = False,
) -> tuple[Transport, str]:
    """Choose, open and warm up the transport for tensors; every rank calls this.

    Parameters
    ----------
    world : Transport
        All ranks, as they met.
    device : torch.device
        Where this rank's model is.
    every_pair : bool
        See `warm_up`.

    Returns
    -------
    (Transport, str)
        And one line that says what was chosen, and why.

    Raises
    ------
    TransportError
        On all ranks, if what is wanted is impossible here, or a link delivers something else than was sent.
    """
    mine = _look(world, device, environ)
    views = [_View(**view) for view in share_json(world, gather_json(world, asdict(mine)))]
    name, why = together(world, lambda: choose(wanted, views, in_processes=isinstance(world, MpiTransport)))
    transport = world
    if name == "nccl":
        transport = open_nccl(world, device)
    elif isinstance(world, MpiTransport):
        handing: Handing = "staged" if name == "staged" else "direct" if mine.device == "cuda" else "host"
        transport = MpiTransport(world.comm, handing)
    warm_up(transport, device, every_pair=every_pair)
    return transport, f"transport: {name}: {why}"


def choose(wanted: Name, views: Sequence[_View], *, in_processes: bool) -> tuple[Name, str]:
    """Choose the transport; the result is the same on every rank.

    Raises
    ------
    TransportError
        If what is wanted is impossible here.
    """
    size, on_gpu = len(views), any(view.device == "cuda" for view in views)
    if wanted == "local" and in_processes and size > 1:
        raise TransportError(
            f"transport 'local' joins threads of one process, but {size} ranks were started; use 'auto' or 'mpi'"
        )
    if size == 1 and wanted in ("auto", "local"):
        return "local", "one rank, so nothing is sent"
    if not in_processes:
        return "local", f"{size} threads of one process"
    if wanted == "nccl":
        _need_nccl(views)
        return "nccl", "as requested; control messages over MPI"
    if wanted == "staged" and not on_gpu:
        return "staged", "as requested; the model is on the CPU, so this only adds a copy through a second buffer"
    if not on_gpu:
        return "mpi", "host memory, sent by MPI without a copy"
    if wanted == "staged":
        return "staged", "as requested; GPU memory is copied through pinned host memory"
    if wanted == "mpi":
        said = next((view.claims_why for view in views if not view.claims), views[0].claims_why)
        if not all(view.claims for view in views):
            raise TransportError(
                f"transport 'mpi' would pass GPU memory to MPI, but this MPI does not claim to support that ({said}); "
                f"use 'nccl', 'staged' or 'auto', or load a CUDA-aware MPI"
            )
        return "mpi", f"as requested; MPI claims to support GPU memory ({said}), which `kvr doctor` tries"
    try:
        _need_nccl(views)
    except TransportError as error:
        return "staged", f"through pinned host memory, since {error}"
    return "nccl", "between GPUs; control messages over MPI"


def _need_nccl(views: Sequence[_View]) -> None:
    without = [rank for rank, view in enumerate(views) if view.device != "cuda"]
    if without:
        raise TransportError(
            f"transport 'nccl' moves GPU memory, but the model of rank {without[0]} is on the CPU; use 'auto' or 'mpi'"
        )
    if not all(view.has_nccl for view in views):
        raise TransportError("transport 'nccl': this torch was built without NCCL; use 'staged' or 'auto'")
    gpu, ranks = Counter(view.gpu for view in views).most_common(1)[0]
    if ranks > 1 and not all(view.shares for view in views):
        sharing = [rank for rank, view in enumerate(views) if view.gpu == gpu]
        raise TransportError(
            f"transport 'nccl': ranks {sharing} share one GPU, or have partitions (MIG) of one ({gpu}), which NCCL "
            f"does not allow; start one rank per GPU, use 'staged', or set {SHARES}=1 for NCCL 2.30 or newer"
        )


def warm_up(transport: Transport, device: torch.device, *, every_pair: bool = False) -> None:
    """Send a message over every link, so that connections exist before the first prompt, and verify it.

    Links are those between neighbours in a ring, both ways: prompts end at another rank each time, so that the last
    rank sends to the first, and whoever measures is answered. With `every_pair` they are those between all ranks. They
    are taken one after the other, in the same order by all ranks: NCCL connects a pair, and each direction of it, while
    both wait.

    Raises
    ------
    TransportError
        If what arrives is not what was sent, or NCCL is to link more pairs than torch has streams for.
    """
    import torch

    size = transport.size
    if every_pair and isinstance(transport, NcclTransport) and 2 * (size - 1) > NCCL_STREAMS:
        raise TransportError(
            f"transport 'nccl': {size} ranks that all send to each other take {2 * (size - 1)} streams of each GPU, "
            f"and torch has {NCCL_STREAMS}: use at most {NCCL_STREAMS // 2 + 1} ranks per chain, decode.mode = "
            f"'data-parallel', or parallel.transport = 'staged'"
        )
    pairs = [(one, other) for one in range(size) for other in others_after(one, size)]
    if not every_pair:
        pairs = [(one, other) for one, other in pairs if other in (following(one, size), preceding(one, size))]
    sent = (torch.arange(WARM_UP_BYTES if pairs else 0) % 251).to(torch.uint8).to(device)
    for one, other in pairs:
        if transport.rank == one:
            transport.isend(sent, other, 0).wait()
        elif transport.rank == other:
            found = torch.zeros_like(sent)
            transport.irecv(found, one, 0).wait()
            if not torch.equal(found, sent):
                raise TransportError(
                    f"the link from rank {one} to rank {other} delivers other data than were sent; `kvr doctor` tests "
                    f"the links; another transport may work"
                )


def _look(world: Transport, device: torch.device, environ: Mapping[str, str]) -> _View:
    if device.type != "cuda":
        return _View(device.type, "", None, "", False)
    import socket

    import torch

    claims, why = cuda_support(loaded_libraries(), environ) if isinstance(world, MpiTransport) else (None, "no MPI")
    board: Any = torch.cuda.get_device_properties(device)  # partitions (MIG) of one are one to NCCL
    place = f"{board.pci_domain_id:04x}:{board.pci_bus_id:02x}:{board.pci_device_id:02x}"
    has_nccl, shares = torch.distributed.is_nccl_available(), environ.get(SHARES) == "1"
    return _View("cuda", f"{socket.gethostname()} {place}", claims, why, has_nccl, shares)
