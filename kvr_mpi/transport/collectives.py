"""All-reduce and all-gather built from messages, for every transport.

What is small goes from every rank to every other: one message's time; each sums what came, in the order of ranks. What
is larger goes round a ring: each rank sums one part of the tensor as it comes, then the sums go round (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): 2 (p - 1) / p of the tensor over
every link. Either way a part is summed in one order everywhere, so that all ranks end with the same bits: they may
decide by them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvr_mpi.errors import TransportError
from kvr_mpi.topology import following, others_after, others_before, preceding
from kvr_mpi.transport.base import FixedTag

if TYPE_CHECKING:
    import torch

    from kvr_mpi.transport.base import Transport

# Up to here a message takes as long as an empty one, roughly.
SMALL_BYTES = 64 << 10


def all_gather(transport: Transport, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's contiguous tensor in rank order; all have the same shape. Every rank calls this."""
    import torch

    rank, size = transport.rank, transport.size
    found = [tensor if each == rank else torch.empty_like(tensor) for each in range(size)]
    requests = [transport.irecv(found[source], source, FixedTag.GATHER) for source in others_before(rank, size)]
    requests += [transport.isend(tensor, dest, FixedTag.GATHER) for dest in others_after(rank, size)]
    for request in requests:
        request.wait()
    return found


def all_reduce(transport: Transport, tensor: torch.Tensor) -> None:
    """Replace a contiguous tensor by its sum over all ranks; every rank calls this.

    Half precision is summed in float32.

    Raises
    ------
    TransportError
        If the tensor is not contiguous.
    """
    import torch

    if not tensor.is_contiguous():
        raise TransportError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous and cannot be summed in place")
    if transport.size == 1 or not tensor.numel():
        return
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    total = (tensor.float() if is_half else tensor).view(-1)
    if total.nbytes <= SMALL_BYTES:
        everyone = all_gather(transport, total)
        total.copy_(sum(everyone[1:], start=everyone[0].clone()))
    else:
        _sum_round_a_ring(transport, total)
    if is_half:
        tensor.copy_(total.view(tensor.shape))


def _sum_round_a_ring(transport: Transport, total: torch.Tensor) -> None:
    rank, size = transport.rank, transport.size
    parts = list(total.tensor_split(size))
    after, before = following(rank, size), preceding(rank, size)
    incoming = parts[0].new_empty(parts[0].shape)  # the longest
    # Each rank's own part first: when all have gone round, the next rank's part is whole here.
    turns = [rank, *others_before(rank, size)]
    for mine, theirs in pairwise(turns):
        came = incoming[: parts[theirs].numel()]
        _exchange(transport, parts[mine], after, came, before)
        parts[theirs] += came
    turns = [after, *others_before(after, size)]
    for mine, theirs in pairwise(turns):
        _exchange(transport, parts[mine], after, parts[theirs], before)


def _exchange(transport: Transport, sent: torch.Tensor, dest: int, received: torch.Tensor, source: int) -> None:
    """Send and receive at once; empty parts are not sent."""
    requests = [transport.irecv(received, source, FixedTag.SUM)] if received.numel() else []
    requests += [transport.isend(sent, dest, FixedTag.SUM)] if sent.numel() else []
    for request in requests:
        request.wait()
