"""The protocol every transport keeps, and the few collective steps built on it.

Tensors travel point to point, as bytes, from contiguous buffers. Control messages are JSON: nothing on the
wire is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvr_mpi.errors import EXIT_BUG, KvrError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Request(Protocol):
    """A transfer under way."""

    def test(self) -> bool:
        """Say whether it has ended, and help it along."""

    def wait(self) -> None:
        """Return when it has ended."""


class Transport(Protocol):
    """What ranks need of each other.

    ``isend`` must not be given a buffer that changes before its request ends; ``irecv`` fills its buffer in
    place. Messages of one source, destination and tag arrive in the order they were sent.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 to ``size - 1``."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def local_rank(self) -> int:
        """This rank's number among those on its host."""

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """Begin to send a contiguous tensor's bytes."""

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Begin to receive into a contiguous tensor; the message must have its size."""

    def barrier(self) -> None:
        """Return when all ranks are here."""

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Give every rank the root's bytes."""

    def gather(self, data: bytes, root: int = 0) -> list[bytes]:
        """Give the root every rank's bytes, in rank order; the others get an empty list."""

    def split(self, color: int) -> Transport:
        """Make a transport among the ranks of the same color, in rank order."""

    def abort(self, exit_code: int) -> None:
        """End all ranks of the job with this exit code, whatever they are doing."""


class RootFailedError(KvrError):
    """Rank 0 failed and has said why; the others end with its exit code and say nothing."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("rank 0 failed")
        self.exit_code = exit_code


def share_json(transport: Transport, value: Any, root: int = 0) -> Any:
    """Give every rank the root's value."""
    data = json.dumps(value).encode() if transport.rank == root else b""
    return json.loads(transport.broadcast(data, root))


def gather_json(transport: Transport, value: Any, root: int = 0) -> list[Any]:
    """Give the root every rank's value, in rank order; the others get an empty list."""
    return [json.loads(data) for data in transport.gather(json.dumps(value).encode(), root)]


def on_root(transport: Transport, work: Callable[[], T]) -> T | None:
    """Do something on rank 0 only, and fail together if it fails.

    Returns
    -------
    T or None
        The result on rank 0, None elsewhere.

    Raises
    ------
    RootFailedError
        On the other ranks, when rank 0 raised; rank 0 raises its own error.
    """
    result: T | None = None
    failure: BaseException | None = None
    if transport.rank == 0:
        try:
            result = work()
        except Exception as error:
            failure = error
    code = 0 if failure is None else getattr(failure, "exit_code", EXIT_BUG)
    code = share_json(transport, code)
    if failure is not None:
        raise failure
    if code:
        raise RootFailedError(code)
    return result
