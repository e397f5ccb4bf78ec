"""NCCL's way, without its tags and with its order of messages, over gloo between CPUs: real processes, no GPU."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from kvr_mpi.errors import TransportError
from kvr_mpi.transport import Request, Transport
from kvr_mpi.transport.base import LAYERS_AHEAD
from kvr_mpi.transport.nccl import TIMEOUT, NcclTransport, meet

JOIN_S = 2.0


class _Work:
    """A transfer, which moves by itself but tells only those who wait for it.

    Its length travels before it, since gloo takes a message that is too short for a whole one.
    """

    def __init__(self, works: list[Any], length: torch.Tensor, data: torch.Tensor, peer: str) -> None:
        self._works, self._length, self._data, self._peer = works, length, data, peer
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def run(self) -> None:
        """Wait for the length, compare it, and wait for the message; in a thread of its own."""
        try:
            self._works[0].wait(TIMEOUT)
            if int(self._length) != self._data.numel():
                size = self._data.numel()
                raise TransportError(f"expected {size} bytes from {self._peer}, but received {int(self._length)}")
            self._works[1].wait(TIMEOUT)
        except Exception as error:  # raised where the rank waits
            self._failure = error if isinstance(error, TransportError) else TransportError(f"gloo: {error}")
        self._ended.set()

    def test(self) -> bool:
        if self._ended.is_set() and self._failure is not None:
            raise self._failure
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        self.test()


class _Waiter:
    """A thread that waits for one link's transfers of one direction, which end in the order they began."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gloo link")
        self._thread.start()

    def watch(self, work: _Work) -> _Work:
        self._works.put(work)
        return work

    def end(self) -> None:
        self._works.put(None)

    def join(self) -> None:
        """Wait for its end: a thread that lets go of a transfer while the interpreter ends brings the process down."""
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.run()


class _Groups:
    """One group for messages to higher ranks, one for those to lower ranks, as NCCL has them."""

    def __init__(self, control: Transport) -> None:
        self.rank, self.device_type, store = control.rank, "cpu", meet(control)
        self.up, self.down = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), control.rank, control.size, TIMEOUT)
            for name in ("up", "down")
        )
        self.waiters: dict[tuple[str, int], _Waiter] = defaultdict(_Waiter)
        self.end = weakref.finalize(self, _end, [self.up, self.down], self.waiters)

    def send(self, data: torch.Tensor, dest: int, tag: int, *, passed_on: bool) -> Request:
        group, length = self.up if dest > self.rank else self.down, torch.tensor([data.numel()])
        works = [group.send([part], dest, tag) for part in (length, data)]
        return self.waiters["to", dest].watch(_Work(works, length, data, f"rank {dest}"))

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Request:
        group, length = self.up if source < self.rank else self.down, torch.zeros(1, dtype=torch.int64)
        works = [group.recv([part], source, tag) for part in (length, data)]
        return self.waiters["from", source].watch(_Work(works, length, data, f"rank {source} (tag {tag})"))


def _end(groups: list[Any], waiters: dict[tuple[str, int], _Waiter]) -> None:
    for waiter in waiters.values():
        waiter.end()
    for waiter in waiters.values():
        waiter.join()
    for group in groups:
        group.shutdown()


class GlooTransport(NcclTransport):
    """Messages keep the order in which they are received, as NCCL's."""

    layers_ahead = LAYERS_AHEAD


def open_gloo(control: Transport) -> GlooTransport:
    return GlooTransport(control, _Groups(control), range(control.size))
