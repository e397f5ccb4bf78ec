"""All-reduce and all-gather built from point-to-point messages. NCCL has its own all-reduce, and is used for no gather.

Small tensors are sent from every rank to every other, which takes the time of one message; each rank sums them in rank
order. Larger tensors use a ring: a reduce-scatter followed by an all-gather (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009), which sends 2 (p - 1) / p of the tensor over every link.
Both methods sum each element in one order, so the result is bitwise equal on all ranks, which may base decisions on
it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from kvr_mpi.errors import TransportError
from kvr_mpi.topology import following, others_after, others_before, preceding
from kvr_mpi.transport.base import FixedTag

if TYPE_CHECKING:
    import torch

    from kvr_mpi.transport.base import Transport

# Up to this size, a message takes about as long as an empty one.
SMALL_BYTES = 64 << 10


def all_gather(transport: Transport, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's contiguous tensor in rank order; every rank calls this with a tensor of the same shape."""
    import torch

    assert not transport.in_streams, "sends and receives at the same time can deadlock there"
    rank, size = transport.rank, transport.size
    found = [tensor if each == rank else torch.empty_like(tensor) for each in range(size)]
    requests = [transport.irecv(found[source], source, FixedTag.GATHER) for source in others_before(rank, size)]
    requests += [transport.isend(tensor, dest, FixedTag.GATHER) for dest in others_after(rank, size)]
    for request in requests:
        request.wait()
    return found


def all_reduce(transport: Transport, tensor: torch.Tensor) -> None:
    """Replace a contiguous tensor by its sum over all ranks; every rank calls this (`in_float32`)."""

    def reduce(total: torch.Tensor) -> None:
        if transport.size == 1:
            return
        if total.nbytes <= SMALL_BYTES:
            everyone = all_gather(transport, total)
            total.copy_(sum(everyone[1:], start=everyone[0].clone()))
        else:
            _sum_round_a_ring(transport, total)

    in_float32(tensor, reduce)


def in_float32(tensor: torch.Tensor, reduce: Callable[[torch.Tensor], None]) -> None:
    """Sum a contiguous tensor with `reduce`, which gets its elements (elements,), half precision in float32.

    Raises `TransportError` if the tensor is not contiguous.
    """
    import torch

    if not tensor.is_contiguous():
        raise TransportError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous and cannot be reduced in place"
        )
    if not tensor.numel():
        return
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    total = (tensor.float() if is_half else tensor).view(-1)
    reduce(total)
    if is_half:
        tensor.copy_(total.view(tensor.shape))


def _sum_round_a_ring(transport: Transport, total: torch.Tensor) -> None:
    rank, size = transport.rank, transport.size
    parts = list(total.tensor_split(size))
    after, before = following(rank, size), preceding(rank, size)
    incoming = parts[0].new_empty(parts[0].shape)  # the longest
    # Reduce-scatter, starting with this rank's own part; it ends with the complete sum of the next rank's part.
    turns = [rank, *others_before(rank, size)]
    for mine, theirs in pairwise(turns):
        came = incoming[: parts[theirs].numel()]
        _exchange(transport, parts[mine], after, came, before)
        parts[theirs] += came
    turns = [after, *others_before(after, size)]
    for mine, theirs in pairwise(turns):
        _exchange(transport, parts[mine], after, parts[theirs], before)


def _exchange(transport: Transport, sent: torch.Tensor, dest: int, received: torch.Tensor, source: int) -> None:
    """Send and receive at the same time; skip empty parts."""
    requests = [transport.irecv(received, source, FixedTag.SUM)] if received.numel() else []
    requests += [transport.isend(sent, dest, FixedTag.SUM)] if sent.numel() else []
    for request in requests:
        request.wait()
