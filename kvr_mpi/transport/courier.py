"""Transfers that go on while the rank computes, and segments that are passed on the moment they arrive.

MPI moves nothing by itself: a transfer posted before a long computation mostly runs after it, unless somebody
calls MPI in between. A `Courier` calls it from a thread, once a millisecond, and hands a received segment on to
the next rank without waiting for the computation to reach it (cut-through).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvr_mpi.transport.base import Request, Transport

if TYPE_CHECKING:
    import torch

POLL_S = 1e-3
# A waiting rank looks this often without pause, then leaves the core to whoever shares it.
SPINS = 200
PAUSE_S = 5e-5


class Parcel:
    """One transfer in a courier's care, and the one that passes it on, if it is to be passed on."""

    __slots__ = ("arrived", "dest", "onward", "received", "request", "tag", "tensor")

    def __init__(self, tensor: torch.Tensor, tag: int, dest: int | None = None) -> None:
        self.tensor, self.tag, self.dest = tensor, tag, dest
        self.request: Request | None = None  # None: to be sent when its turn comes
        self.received: Request | None = None  # for one that passes on: the request that has filled its tensor
        self.arrived = False
        self.onward: Parcel | None = None

    @property
    def through(self) -> bool:
        """Whether it has arrived and, if it is to, has gone on: its buffer is free."""
        return self.arrived and (self.dest is None or (self.onward is not None and self.onward.arrived))


class Courier:
    """Carries one prompt's segments over one rank; close it when the prompt is through.

    Parameters
    ----------
    transport : Transport
        The chain.
    forwards : bool
        Whether this rank passes segments on.
    on_gpu : bool
        Whether the tensors are on a GPU.
    """

    def __init__(self, transport: Transport, *, forwards: bool, on_gpu: bool = False) -> None:
        self._transport = transport
        self._pending: list[Parcel] = []
        # Where messages have no tags: those to come, by destination, in the order the other side receives them.
        self._turns: dict[int, deque[int]] = defaultdict(deque)
        self._early: dict[tuple[int, int], Parcel] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self.sent_bytes = 0
        # On one host the receiver's own wait moves the bytes of host memory; a thread would only take the core's time.
        needs_thread = forwards or on_gpu or transport.local_size < transport.size
        self._thread = threading.Thread(target=self._run, daemon=True, name="courier") if needs_thread else None
        if self._thread is not None:
            self._thread.start()

    def announce(self, dest: int, tag: int) -> None:
        """Say that a message will be sent, in the order in which `dest` receives from here."""
        if not self._transport.has_tags:
            with self._lock:
                self._turns[dest].append(tag)

    def send(self, tensor: torch.Tensor, dest: int, tag: int) -> Parcel:
        """Begin to send; the tensor must stay as it is until the parcel is done."""
        with self._lock:
            return self._send(Parcel(tensor, tag), dest)

    def receive(self, tensor: torch.Tensor, source: int, tag: int, forward_to: int | None = None) -> Parcel:
        """Begin to receive in place; what has arrived is sent on to `forward_to` at once, and so announced."""
        if forward_to is not None:
            self.announce(forward_to, tag)
        with self._lock:
            parcel = Parcel(tensor, tag, forward_to)
            parcel.request = self._transport.irecv(tensor, source, tag)
            self._pending.append(parcel)
            return parcel

    def has_arrived(self, parcel: Parcel) -> bool:
        """Say whether a parcel is here (or, if sent, gone), and help it along."""
        if not parcel.arrived:
            self._poll()
        return parcel.arrived

    def is_through(self, parcel: Parcel) -> bool:
        """Say whether a parcel's buffer is free, and help it along."""
        if not parcel.through:
            self._poll()
        return parcel.through

    def wait(self, parcel: Parcel) -> None:
        """Return when a parcel is here."""
        self._until(lambda: self.has_arrived(parcel))

    def wait_through(self, parcel: Parcel) -> None:
        """Return when a parcel's buffer is free."""
        self._until(lambda: self.is_through(parcel))

    def close(self) -> None:
        """Wait until everything is received and sent on, and end."""

        def idle() -> bool:
            self._poll()
            return not self._pending and not self._early

        self._until(idle)
        self.abandon()

    def abandon(self) -> None:
        """End without waiting, because the prompt failed."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _until(self, done: Callable[[], bool]) -> None:
        looks = 0
        while not done():
            looks += 1
            if looks > SPINS:
                time.sleep(PAUSE_S)

    def _send(self, parcel: Parcel, dest: int) -> Parcel:
        if self._transport.has_tags:
            self._hand_over(parcel, dest)
            return parcel
        self._early[dest, parcel.tag] = parcel
        turns = self._turns[dest]
        while turns and (dest, turns[0]) in self._early:
            self._hand_over(self._early.pop((dest, turns.popleft())), dest)
        return parcel

    def _hand_over(self, parcel: Parcel, dest: int) -> None:
        parcel.request = self._transport.isend(parcel.tensor, dest, parcel.tag, parcel.received)
        parcel.received = None
        self.sent_bytes += parcel.tensor.nbytes
        self._pending.append(parcel)

    def _poll(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            for parcel in [parcel for parcel in self._pending if parcel.request is not None and parcel.request.test()]:
                self._pending.remove(parcel)
                if parcel.dest is not None:
                    parcel.onward = Parcel(parcel.tensor, parcel.tag)
                    parcel.onward.received = parcel.request
                    self._send(parcel.onward, parcel.dest)
                parcel.request, parcel.arrived = None, True

    def _run(self) -> None:
        import torch

        with torch.inference_mode():  # set per thread, and the buffers it fills were made in it
            while not self._closed.wait(POLL_S):
                try:
                    self._poll()
                except BaseException as error:
                    self._failure = error  # raised where the rank waits
                    return
