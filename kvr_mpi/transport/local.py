"""Ranks as threads of one process: for one rank without MPI, for self-checks and tests."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.base import Request
from kvr_mpi.transport.collectives import all_reduce

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class _Hub:
    """State shared by the threads of one group: mailboxes, a barrier, and a board for collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived = threading.Condition()
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.barrier = threading.Barrier(size)
        self.board: list[bytes] = [b""] * size
        self.groups: dict[tuple[int, ...], _Hub] = {}
        self.counts: list[int] = []
        self.failed = False

    def fail(self) -> None:
        with self.arrived:
            self.failed = True
            self.arrived.notify_all()
        self.barrier.abort()
        for hub in self.groups.values():
            hub.fail()


@dataclass(slots=True, eq=False)
class _Message:
    """A receive, done when its message is in the mailbox; or a send, done at once."""

    hub: _Hub
    key: tuple[int, int, int]  # source, dest, tag
    tensor: torch.Tensor
    done: bool = False

    def test(self) -> bool:
        with self.hub.arrived:
            if not self.done and self.hub.mail[self.key]:
                message, (source, dest, tag) = self.hub.mail[self.key].popleft(), self.key
                if message.nbytes != self.tensor.nbytes:
                    raise TransportError(
                        f"rank {dest} expected {self.tensor.nbytes} bytes from rank {source} (tag {tag}), but received "
                        f"{message.nbytes}"
                    )
                self.tensor.copy_(message.view(self.tensor.shape))
                self.done = True
            elif not self.done and self.hub.failed:
                raise TransportError("another rank failed while this one was waiting for its message")
        return self.done

    def wait(self) -> None:
        with self.hub.arrived:
            while not self.test():
                self.hub.arrived.wait()


class LocalTransport:
    """The transport of one thread of a `_Hub`; ``LocalTransport()`` is a job of one rank."""

    tag_ub = 2**31 - 1
    in_streams = False
    needs_progress = False

    def __init__(self, hub: _Hub | None = None, rank: int = 0) -> None:
        self._hub = hub or _Hub(1)
        self.rank, self.size = rank, self._hub.size
        self.local_rank, self.local_size = rank, self.size

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        """Copy the tensor into the mailbox of `dest`."""
        key = (self.rank, dest, tag)
        with self._hub.arrived:
            self._hub.mail[key].append(tensor.clone())
            self._hub.arrived.notify_all()
        return _Message(self._hub, key, tensor, done=True)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Receive into `tensor` when the request is tested or waited for."""
        return _Message(self._hub, (source, self.rank, tag), tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        all_reduce(self, tensor)

    def barrier(self) -> None:
        try:
            self._hub.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise TransportError("another rank failed while this one was waiting for it") from error

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        return self._exchange(data)[root]

    def gather(self, data: bytes) -> list[bytes]:
        everything = self._exchange(data)
        return everything if self.rank == 0 else []

    def split(self, color: int) -> LocalTransport:
        colors = [int(data) for data in self._exchange(str(color).encode())]
        members = tuple(rank for rank in range(self.size) if colors[rank] == color)
        with self._hub.arrived:
            hub = self._hub.groups.setdefault(members, _Hub(len(members)))
        return LocalTransport(hub, members.index(self.rank))

    def abort(self, exit_code: int) -> None:
        """Wake all other threads with an error."""
        self._hub.fail()

    def _exchange(self, data: bytes) -> list[bytes]:
        self._hub.board[self.rank] = data
        self.barrier()
        everything = list(self._hub.board)
        self.barrier()
        return everything


class LocalCounters:
    """Counters shared by the threads of a group, initially 0; every thread creates them."""

    def __init__(self, transport: LocalTransport, count: int) -> None:
        hub = transport._hub
        transport.barrier()
        if transport.rank == 0:
            hub.counts = [0] * count
        transport.barrier()
        self._lock, self._counts = hub.arrived, hub.counts

    def add(self, slot: int, amount: int = 1) -> int:
        """Add to a counter atomically, and return its previous value."""
        with self._lock:
            self._counts[slot] += amount
            return self._counts[slot] - amount

    def read(self) -> list[int]:
        with self._lock:
            return list(self._counts)

    def close(self) -> None:
        """Do nothing."""


def run_local(size: int, work: Callable[[LocalTransport], T], device: torch.device | None = None) -> list[T]:
    """Run `work` on `size` threads, one per rank, and return their results in rank order.

    device : device of their tensors; PyTorch's current GPU is per thread, and is set to it.

    Raises the first error of a rank; the other ranks are woken, so that they do not hang.
    """
    hub = _Hub(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            if device is not None and device.type == "cuda":
                import torch

                torch.cuda.set_device(device)
            results[rank] = work(LocalTransport(hub, rank))
        except BaseException as error:
            errors.append(error)
            hub.fail()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class PretendedChain(LocalTransport):
    """The second rank of a simulated chain; all messages of its first rank have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank, self.local_size = 1, 2, 1, 2

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Fill the buffer with zeros; denormals in uninitialized memory would distort timings."""
        return _Message(self._hub, (source, self.rank, tag), tensor.zero_(), done=True)
