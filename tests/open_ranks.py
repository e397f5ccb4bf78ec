"""Transports of test programs, by name: those that jobs may ask for, and NCCL's way over gloo.

Gloo is without tags and keeps NCCL's order of messages, between CPUs: real processes, no GPU.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from kvr_mpi.errors import TransportError
from kvr_mpi.transport import Request, Transport
from kvr_mpi.transport.base import LAYERS_AHEAD
from kvr_mpi.transport.choose import open_transport, warm_up
from kvr_mpi.transport.collectives import all_reduce
from kvr_mpi.transport.nccl import TIMEOUT, NcclTransport, meet

CPU = torch.device("cpu")


class _Work:
    """A transfer, which moves by itself but tells only those who wait for it."""

    def __init__(self, whole: Future[None]) -> None:
        self._whole = whole

    def test(self) -> bool:
        return self._whole.done() and self._whole.result() is None

    def wait(self) -> None:
        self._whole.result()


def _wait_for(works: list[Any], length: torch.Tensor, data: torch.Tensor, peer: str) -> None:
    """Wait for a length and a message; gloo takes a message that is too short for a whole one."""
    try:
        works[0].wait(TIMEOUT)
        if int(length) == data.numel():
            works[1].wait(TIMEOUT)
    except Exception as error:
        raise TransportError(f"gloo: {error}") from error
    if int(length) != data.numel():
        raise TransportError(f"expected {data.numel()} bytes from {peer}, but received {int(length)}")


class _Groups:
    """One group for messages to higher ranks, one for those to lower ranks, as NCCL has them."""

    def __init__(self, control: Transport) -> None:
        self.rank, self.device_type, store = control.rank, "cpu", meet(control)
        self.up, self.down = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), control.rank, control.size, TIMEOUT)
            for name in ("up", "down")
        )
        # A thread waits for one link's transfers of one direction, which end in the order they began.
        self.waiters: dict[tuple[str, int], ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1))
        self.end = weakref.finalize(self, _end, [self.up, self.down], self.waiters)

    def send(self, data: torch.Tensor, dest: int, received: Request | None) -> Request:
        group, length = self.up if dest > self.rank else self.down, torch.tensor([data.numel()])
        works = [group.send([part], dest, 0) for part in (length, data)]
        return _Work(self.waiters["to", dest].submit(_wait_for, works, length, data, f"rank {dest}"))

    def receive(self, data: torch.Tensor, source: int) -> Request:
        group, length = self.up if source < self.rank else self.down, torch.zeros(1, dtype=torch.int64)
        works = [group.recv([part], source, 0) for part in (length, data)]
        return _Work(self.waiters["from", source].submit(_wait_for, works, length, data, f"rank {source}"))


def _end(groups: list[Any], waiters: dict[tuple[str, int], ThreadPoolExecutor]) -> None:
    """End the threads: one that lets go of a transfer while the interpreter ends brings the process down."""
    for waiter in waiters.values():
        waiter.shutdown()
    for group in groups:
        group.shutdown()


class GlooTransport(NcclTransport):
    """Messages keep the order in which they are received, as NCCL's."""

    layers_ahead = LAYERS_AHEAD
    in_streams = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        all_reduce(self, tensor)


def open_ranks(world: Transport, name: Any) -> Transport:
    """Connect every pair of ranks; all of them call this."""
    if name != "gloo":
        return open_transport(world, name, CPU, every_pair=True)[0]
    ranks = GlooTransport(world, _Groups(world), range(world.size))
    warm_up(ranks, CPU, every_pair=True)
    return ranks
