"""The transport protocol, and collective operations built on it.

Tensors are sent point to point, as the bytes of contiguous buffers. Control messages are JSON; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvr_mpi.disk import named_error
from kvr_mpi.errors import EXIT_BUG, EXIT_CONFIG, ConfigError, KvrError, TransportError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

SAME_FILES = "check that all nodes see the same files and the same installation"


class FixedTag(IntEnum):
    """Reserved tags; those of prompts start after them (`FIRST_PROMPT_TAG`)."""

    SHARED_HEADS = 1
    GATHER = 2
    SUM = 3
    LINK = 5
    CLOCK = 6


FIRST_PROMPT_TAG = 16


class Request(Protocol):
    """A transfer in progress."""

    def test(self) -> bool:
        """Progress the transfer, and return whether it is complete."""

    def wait(self) -> None:
        """Wait until the transfer is complete; on a transport with `in_streams`, only the current stream waits."""


class Transport(Protocol):
    """Communication between the ranks of a job.

    The buffer of ``isend`` must not change before the request completes; ``irecv`` fills its buffer in place. Messages
    with the same source, destination and tag arrive in the order they were sent.

    tag_ub : the largest tag; MPI guarantees 32,767.
    in_streams : transfers are work in streams of the GPU, which wait for each other without the host. Tags are not read
        then: all messages with the same source and destination must be received in the order they were sent.
    needs_progress : a message to a rank on the same host waits for its sender's next call, as others always do.
    rank : from 0 to ``size - 1``.
    local_rank, local_size : this rank's index among those on its host, and their number.
    """

    tag_ub: int
    in_streams: bool
    needs_progress: bool
    rank: int
    size: int
    local_rank: int
    local_size: int

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        """Start to send a contiguous tensor's bytes.

        received : for a forwarded tensor: the receive of it, or of a longer one that ends with it; it is complete,
            unless the transport is `in_streams`. The send does not wait for this rank's computation.
        """

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Start to receive into a contiguous tensor, which must have the message's size."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks, bitwise equal on all of them.

        No other messages may be in flight between these ranks. Half precision is summed in float32, except that NCCL
        sums bfloat16 as it is.
        """

    def barrier(self) -> None:
        """Wait for all ranks."""

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return the root's bytes on every rank."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes on rank 0, in rank order; an empty list on the others."""

    def split(self, color: int) -> Transport:
        """Make a transport for the ranks with the same color, in rank order."""

    def abort(self, exit_code: int) -> None:
        """End all ranks of the job immediately with this exit code."""


class FailedTogetherError(KvrError):
    """A step failed on some rank; this error is raised on all ranks, which exit with the same code.

    cause : the error, on the one rank that reports it; None on the others.
    """

    def __init__(self, exit_code: int, cause: Exception | None) -> None:
        super().__init__(str(cause or "another rank failed"))
        self.exit_code, self.cause = exit_code, cause


def describe_wait(ranks: Transport, waited_s: float, what: str) -> str:
    """Say what a rank has waited for in vain, and what to do."""
    return (
        f"rank {ranks.rank} of {ranks.size} has waited {waited_s:.0f} s for {what}; the logs of both ranks and kvr "
        f"doctor may show the reason. Finished documents are kept: --resume continues"
    )


def describe_message(what: str, tag: int, nbytes: int, peer: int, *, receives: bool) -> str:
    """Name a message that another rank does not send, or does not receive."""
    verb, side = ("from", "has not sent it") if receives else ("to", "does not receive it")
    message = f"{what} (tag {tag}, {nbytes:,} bytes) {verb} rank {peer}"
    return f"{message}, which {side}: it, a rank that it waits for, or the link hangs"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes (bytes,), without a copy.

    Raises `TransportError` if the tensor is not contiguous, so that its bytes are not in the order of its elements.
    """
    import torch

    if not tensor.is_contiguous():
        raise TransportError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous and cannot be sent in place")
    return tensor.view(-1).view(torch.uint8)


def share_json(transport: Transport, value: Any, root: int = 0) -> Any:
    """Return the root's value on every rank."""
    return json.loads(transport.broadcast(json.dumps(value).encode() if transport.rank == root else b"", root))


def gather_json(transport: Transport, value: Any) -> list[Any]:
    """Return every rank's value on rank 0, in rank order; an empty list on the others."""
    return [json.loads(data) for data in transport.gather(json.dumps(value).encode())]


def together(transport: Transport, work: Callable[[], T]) -> T:
    """Call a function on every rank, and fail on all ranks if it fails on any.

    `work` must not wait for other ranks.

    Raises `FailedTogetherError` on all ranks, with the cause on the first rank that failed.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = named_error(error)
    code = 0 if failure is None else getattr(failure, "exit_code", EXIT_BUG)
    codes: list[int] = share_json(transport, gather_json(transport, code))
    first = next((rank for rank, code in enumerate(codes) if code), None)
    if first is not None:
        raise FailedTogetherError(codes[first], failure if transport.rank == first else None) from failure
    return result


def check_alike(transport: Transport, values: Mapping[str, str], remedy: str = SAME_FILES) -> None:
    """Fail on all ranks if a value differs between ranks; every rank calls this. The error contains the value's name.

    remedy : what to do if a value differs.

    Raises `FailedTogetherError` on all ranks, with a `ConfigError` on rank 0 that names the rank and both values.
    """
    everyone = gather_json(transport, dict(values))
    first = everyone[0] if everyone else {}
    different = (
        f"{name} is {theirs.get(name, '')[:80]!r} on rank {rank} and {mine[:80]!r} on rank 0; expected the same on all "
        f"ranks: {remedy}"
        for rank, theirs in enumerate(everyone)
        for name, mine in first.items()
        if theirs.get(name) != mine
    )
    failure = share_json(transport, next(different, None))
    if failure is not None:
        raise FailedTogetherError(EXIT_CONFIG, ConfigError(failure) if transport.rank == 0 else None)


def host_by_host(transport: Transport, work: Callable[[], T]) -> T:
    """Call a function on the first rank of each host, and then on the others, which can use its cached results.

    Raises `FailedTogetherError` as in `together`.
    """
    first = together(transport, lambda: work() if transport.local_rank == 0 else None)
    return together(transport, lambda: work() if first is None else first)


def on_root(transport: Transport, work: Callable[[], T]) -> T | None:
    """Call a function on rank 0 and return its result there, None elsewhere; fail on all ranks if it fails."""
    return together(transport, lambda: work() if transport.rank == 0 else None)
