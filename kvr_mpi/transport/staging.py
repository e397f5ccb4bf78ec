"""GPU tensors over MPI: passed directly when their stream is ready, or copied through host memory.

MPI does not follow CUDA streams. A send may start only after the stream has filled its tensor, and a receive may write
only after the stream has finished with that memory. Both are tested by querying events, so the rank keeps launching
kernels meanwhile. Copies run on separate streams, concurrently with the computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvr_mpi.transport.base import Request

# Pause between polls of a rank that waits for a transfer.
PAUSE_S = 5e-5

Start = Callable[[torch.Tensor], Request]
# A point in a stream; None: nothing to wait for.
Mark = torch.cuda.Event | None


class Staging:
    """One rank's path between device memory and the memory that MPI reads.

    direct : MPI accepts device memory (CUDA-aware); otherwise it is staged.
    """

    def __init__(self, device: torch.device, *, direct: bool) -> None:
        self.direct = direct
        self._waiting: list[StagedTransfer] = []
        self._lock = threading.Lock()  # the main thread and the forwarder's start transfers
        if not direct:
            self._out, self._into = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(
        self, data: torch.Tensor, start: Start, landed: torch.Tensor | None = None, *, is_whole: bool = False
    ) -> Request:
        """Wait for the stream that fills a tensor, copy it if staged, and send it.

        data : contiguous bytes on the device.
        start : starts to send a tensor that MPI can read.
        landed : the same bytes in host memory, if they were received there: sent without another copy.
        is_whole : the tensor was received, not computed, so the send waits for no stream.
        """
        if landed is not None:
            return start(landed)
        if self.direct:
            return self.start_when(None if is_whole else _mark(), start, data)
        host = _host_buffer(data)
        self._out.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(self._out):
            host.copy_(data, non_blocking=True)
            return self.start_when(_mark(), start, host, held=data)

    def receive(self, into: torch.Tensor, start: Start) -> StagedTransfer:
        """Receive into a device tensor; `start` starts to receive into a tensor that MPI can write."""
        free = _mark()  # after this, no earlier kernel uses the memory
        if self.direct:
            return self.start_when(free, start, into)
        host = _host_buffer(into)
        return StagedTransfer(self, free, start, host, into=into, request=start(host))

    def start_when(
        self, ready: Mark, start: Start, data: torch.Tensor, held: torch.Tensor | None = None
    ) -> StagedTransfer:
        """Start a transfer when an event has passed; testing any transfer starts all that are ready."""
        waiting = StagedTransfer(self, ready, start, data, held)
        with self._lock:
            self._waiting.append(waiting)
        self.progress()
        return waiting

    def progress(self) -> None:
        """Start the transfers whose events have passed, in order."""
        with self._lock:
            while self._waiting and _is_passed(self._waiting[0].ready):
                first = self._waiting.pop(0)
                first.request = first.start(first.data)

    def deliver(self, host: torch.Tensor, into: torch.Tensor, free: torch.cuda.Event) -> Mark:
        """Copy to the device after the event `free`; complete when the returned event has passed."""
        self._into.wait_event(free)
        with torch.cuda.stream(self._into):
            into.copy_(host, non_blocking=True)
            return _mark()


@dataclass(slots=True, eq=False)
class StagedTransfer:
    """A transfer that starts when an event has passed, or one that is received in host memory and then delivered.

    ready : before this, earlier kernels use the device memory.
    data : what MPI reads or writes.
    held : memory that must not be reused before `ready`.
    into : where a message received in host memory is delivered.
    """

    staging: Staging
    ready: Mark
    start: Start
    data: torch.Tensor
    held: torch.Tensor | None = None
    into: torch.Tensor | None = None
    request: Request | None = None
    whole: Mark = None  # passes when the message is on the device
    is_delivered: bool = False

    @property
    def landed(self) -> torch.Tensor | None:
        """The host memory that holds a received message; None if it was not received there."""
        return None if self.into is None else self.data

    def test(self) -> bool:
        """Progress the transfers, and return whether this one is complete."""
        self.staging.progress()
        if self.request is None or not self.request.test():
            return False
        if self.into is not None and self.ready is not None and not self.is_delivered:
            self.is_delivered, self.whole = True, self.staging.deliver(self.data, self.into, self.ready)
        return _is_passed(self.whole)

    def wait(self) -> None:
        while not self.test():
            time.sleep(PAUSE_S)


def _is_passed(mark: Mark) -> bool:
    return mark is None or mark.query()


def _mark() -> torch.cuda.Event:
    """Record an event in the rank's current stream."""
    mark = torch.cuda.Event()
    mark.record()
    return mark


def _host_buffer(data: torch.Tensor) -> torch.Tensor:
    """Allocate pinned host memory for a tensor's bytes, from torch's cache."""
    return torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
