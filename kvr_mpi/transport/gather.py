"""Every rank's tensor on every rank, sent straight from each to each: one step, for what is small and urgent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvr_mpi.topology import others_after, others_before

if TYPE_CHECKING:
    import torch

    from kvr_mpi.transport.base import Transport

# Below what every MPI allows; nothing else of these ranks has it.
TAG = 32_001


def all_gather(transport: Transport, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's contiguous tensor, in rank order; all have the same shape, and every rank calls this."""
    import torch

    rank, size = transport.rank, transport.size
    found = [tensor if each == rank else torch.empty_like(tensor) for each in range(size)]
    requests = [transport.irecv(found[source], source, TAG) for source in others_before(rank, size)]
    requests += [transport.isend(tensor, dest, TAG) for dest in others_after(rank, size)]
    for request in requests:
        request.wait()
    return found
