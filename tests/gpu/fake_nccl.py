"""What NCCL is like to a transport that uses it, among threads: enough of it to hang where NCCL would.

Messages of a pair go by order. The first call over a pair, in each direction, makes a connection, and blocks until the
other side makes the matching call.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

from kvr_mpi.transport.base import Request
from kvr_mpi.transport.local import LocalTransport

TIMEOUT_S = 20.0


class Connections:
    """The connections of all ranks, by (source, destination)."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._barriers: dict[tuple[int, int], threading.Barrier] = {}
        self._made: set[tuple[int, int, int]] = set()

    def make(self, source: int, dest: int, rank: int) -> None:
        """Connect a pair in one direction, once; each side waits for the other."""
        with self._lock:
            if (source, dest, rank) in self._made:
                return
            self._made.add((source, dest, rank))
            barrier = self._barriers.setdefault((source, dest), threading.Barrier(2))
        try:
            barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"rank {rank} waits for a connection {source} -> {dest} that nobody makes") from None


class FakeNccl:
    """A rank's transport."""

    has_tags = False

    def __init__(self, local: LocalTransport, connections: Connections, members: tuple[int, ...] | None = None) -> None:
        self._local, self._connections = local, connections
        self._members = tuple(range(local.size)) if members is None else members
        self.rank, self.size = local.rank, local.size
        self._sent, self._received = Counter[int](), Counter[int]()  # by peer: messages go by their number

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        """Connect, then send."""
        self._connections.make(self._members[self.rank], self._members[dest], self._members[self.rank])
        self._sent[dest] += 1
        return self._local.isend(tensor, dest, self._sent[dest])

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Connect, then receive."""
        self._connections.make(self._members[source], self._members[self.rank], self._members[self.rank])
        self._received[source] += 1
        return self._local.irecv(tensor, source, self._received[source])

    def split(self, color: int) -> FakeNccl:
        """Keep the connections."""
        part = self._local.split(color)
        everyone = part._exchange(str(self._members[self.rank]).encode())
        return FakeNccl(part, self._connections, tuple(int(one) for one in everyone))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)
