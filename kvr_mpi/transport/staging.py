"""GPU tensors over MPI: passed directly when their stream is ready, or copied through host memory.

MPI does not follow CUDA streams. A send may start only after the stream has filled its tensor, and a receive may write
only after the stream has finished with that memory. Both are tested by querying events, so the rank keeps launching
kernels meanwhile. Copies run on separate streams, concurrently with the computation.

Staging also works for host tensors, which is only useful in tests.
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
# A point in a stream; None on the CPU, where calls are synchronous.
Mark = torch.cuda.Event | None


class Staging:
    """One rank's path between device memory and the memory that MPI reads.

    direct : MPI accepts device memory (CUDA-aware); otherwise it is staged.
    """

    def __init__(self, device: torch.device, *, direct: bool) -> None:
        self.direct = direct
        self._waiting: list[_Start] = []
        self._lock = threading.Lock()  # the main thread and the forwarder's start transfers
        self._is_gpu = device.type == "cuda"
        if self._is_gpu:
            self._out, self._into = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(
        self, data: torch.Tensor, start: Start, landed: torch.Tensor | None = None, *, is_whole: bool = False
    ) -> Request:
        """Wait for the stream that fills a tensor, copy it if staged, and send it.

        Parameters
        ----------
        data : Tensor
            Contiguous bytes on the device.
        start : callable
            Starts to send a tensor that MPI can read.
        landed : Tensor or None
            The same bytes in host memory, if they were received there: sent without another copy.
        is_whole : bool
            The tensor was received, not computed, so the send waits for no stream.
        """
        if landed is not None:
            return start(landed)
        if self.direct:
            return self.start_when(None if is_whole else self.mark(), start, data)
        host, ready = self.fetch(data)
        return self.start_when(ready, start, host, held=data)

    def start_when(self, ready: Mark, start: Start, data: torch.Tensor, held: torch.Tensor | None = None) -> Request:
        """Start a transfer when an event has passed; testing any transfer starts all that are ready.

        `held` is memory that must not be reused before the event.
        """
        waiting = _Start(self, ready, start, data, held)
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

    def mark(self) -> Mark:
        """Record an event in the rank's current stream."""
        if not self._is_gpu:
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def host_buffer(self, data: torch.Tensor) -> torch.Tensor:
        """Allocate pinned host memory for a tensor's bytes, from torch's cache."""
        return torch.empty(data.numel(), dtype=torch.uint8, pin_memory=self._is_gpu)

    def fetch(self, data: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Copy a tensor to the host after the current stream's work; complete when the returned event has passed."""
        host = self.host_buffer(data)
        if not self._is_gpu:
            return host.copy_(data), None
        self._out.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(self._out):
            host.copy_(data, non_blocking=True)
            return host, self.mark()

    def deliver(self, host: torch.Tensor, into: torch.Tensor, free: Mark) -> Mark:
        """Copy to the device after the event `free`; complete when the returned event has passed."""
        if free is None:
            into.copy_(host)
            return None
        self._into.wait_event(free)
        with torch.cuda.stream(self._into):
            into.copy_(host, non_blocking=True)
            return self.mark()


@dataclass(slots=True, eq=False)
class _Start:
    """A transfer that starts when its event has passed."""

    staging: Staging
    ready: Mark
    start: Start
    data: torch.Tensor
    held: torch.Tensor | None
    request: Request | None = None

    def test(self) -> bool:
        """Return whether the transfer is complete."""
        self.staging.progress()
        return self.request is not None and self.request.test()

    def wait(self) -> None:
        """Wait until the transfer is complete."""
        _until(self.test)


class StagedReceive:
    """Receives into a device tensor, through host memory if staged.

    ``landed`` is the host buffer of the message; None if it is received directly.
    """

    def __init__(self, staging: Staging, into: torch.Tensor, start: Start) -> None:
        self._staging, self._into = staging, into
        self._free = staging.mark()  # after this, no earlier kernel uses the memory
        self._is_delivered, self._whole = False, self._free  # `_whole` passes when the message is on the device
        self.landed: torch.Tensor | None = None
        if staging.direct:
            self._request = staging.start_when(self._free, start, into)
        else:
            self.landed = staging.host_buffer(into)
            self._request = start(self.landed)

    def test(self) -> bool:
        """Progress the transfers, and return whether this one has arrived."""
        self._staging.progress()
        if not self._request.test():
            return False
        if self.landed is None:
            return True
        if not self._is_delivered:
            self._is_delivered, self._whole = True, self._staging.deliver(self.landed, self._into, self._free)
        return _is_passed(self._whole)

    def wait(self) -> None:
        """Wait until the message has arrived."""
        _until(self.test)


def _is_passed(mark: Mark) -> bool:
    return mark is None or mark.query()


def _until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(PAUSE_S)
