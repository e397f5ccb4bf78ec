"""GPU tensors over MPI: passed directly when their stream is ready, or copied through host memory.

MPI does not follow CUDA streams. A send may start only after the stream has filled its tensor, and a receive may write
only after the stream has finished with that memory. Both are tested by querying events, so the rank keeps launching
kernels meanwhile. Copies run on separate streams, concurrently with the computation.

Messages are copied in pieces through a ring of pinned memory for each neighbor and direction. A piece waits until the
ring has room for it, and messages between two ranks keep their order. So that full rings cannot make ranks wait for
each other, a rank must receive messages from a neighbor in the order in which that neighbor sends them (`Forwarder`
announces them). Then the first piece that has not arrived always has room in both rings, and a received piece leaves
its ring as soon as it is on the device, whatever later ranks do.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvr_mpi.transport.base import Request

# Pause between polls of a rank that waits for a transfer.
PAUSE_S = 5e-5
# Pinned memory of a ring, at least the longest piece. Forwarders poll every millisecond, in which links move 50 MB.
RING_BYTES = 256 << 20
# Shorter pieces, such as those of decode steps, are pinned one by one, so that rings exist only between neighbors.
SMALL_BYTES = 1 << 20

Start = Callable[[torch.Tensor], Request]
# A point in a stream; None: nothing to wait for.
Mark = torch.cuda.Event | None


class _Ring:
    """Pinned memory that pieces take and give back in the same order."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._taken: deque[tuple[int, int]] = deque()  # bounds in bytes, oldest first

    def take(self, size: int) -> torch.Tensor | None:
        """Return memory (size,), or None if there is no room."""
        if size <= SMALL_BYTES:
            return _pinned(size)
        if self._memory is None:
            self._memory = _pinned(RING_BYTES)
        at, stop = self._taken[-1][1] if self._taken else 0, RING_BYTES
        if self._taken:
            oldest = self._taken[0][0]
            if at <= oldest:
                stop = oldest
            elif at + size > RING_BYTES:
                at, stop = 0, oldest
        if at + size > stop:
            return None
        self._taken.append((at, at + size))
        return self._memory[at : at + size]

    def give_back(self, size: int) -> None:
        if size > SMALL_BYTES:
            self._taken.popleft()


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a message.

    data : on the device.
    mark : the stream has filled `data`, or no longer uses it; later, the copy from or to the host is complete.
    host : what MPI reads or writes; `data` itself if MPI accepts it.
    """

    transfer: StagedTransfer
    data: torch.Tensor
    mark: Mark
    host: torch.Tensor
    request: Request | None = None


class _Lane:
    """The messages to or from one rank; their pieces pass each step in the order in which they were posted.

    stream : for copies; None: MPI accepts device memory (CUDA-aware).
    """

    def __init__(self, stream: torch.cuda.Stream | None, *, sends: bool) -> None:
        self._stream, self._ring = stream, _Ring()
        self._copies_first, self._copies_last = sends and stream is not None, not sends and stream is not None
        self._steps = self._place, self._start, self._receive, self._end
        self._queues = [deque[_Piece]() for _ in self._steps]

    def post(self, piece: _Piece) -> None:
        self._queues[0].append(piece)

    def progress(self) -> None:
        """Let all pieces pass the steps that they can pass now."""
        for step, queue, following in zip(self._steps, self._queues, (*self._queues[1:], None), strict=True):
            while queue and step(queue[0]):
                piece = queue.popleft()
                if following is not None:
                    following.append(piece)

    def _place(self, piece: _Piece) -> bool:
        if self._stream is not None:
            room = self._ring.take(piece.data.numel())
            if room is None:
                return False
            piece.host = room
        if self._copies_first:
            piece.mark = self._copy(piece.host, piece.data, piece.mark)
        return True

    def _start(self, piece: _Piece) -> bool:
        if not self._copies_last and not _is_passed(piece.mark):
            return False
        piece.request = piece.transfer.start(piece.host)
        return True

    def _receive(self, piece: _Piece) -> bool:
        assert piece.request is not None, "it is started"
        if not piece.request.test():
            return False
        if self._copies_last:
            piece.mark = self._copy(piece.data, piece.host, piece.mark)
        return True

    def _end(self, piece: _Piece) -> bool:
        if not _is_passed(piece.mark):
            return False
        if self._stream is not None:
            self._ring.give_back(piece.data.numel())
        piece.transfer.pieces -= 1
        return True

    def _copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark) -> Mark:
        stream = self._stream
        assert stream is not None, "there is a copy"
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return _mark()


class Staging:
    """One rank's path between device memory and the memory that MPI reads.

    direct : MPI accepts device memory (CUDA-aware); otherwise it is staged.
    """

    def __init__(self, device: torch.device, *, direct: bool) -> None:
        out, into = (None if direct else torch.cuda.Stream(device) for _ in range(2))
        self._sends = defaultdict[int, _Lane](lambda: _Lane(out, sends=True))
        self._receives = defaultdict[int, _Lane](lambda: _Lane(into, sends=False))
        self._lock = threading.Lock()  # the main thread and the forwarder's start transfers

    def send(self, pieces: Sequence[torch.Tensor], dest: int, start: Start, *, is_whole: bool = False) -> Request:
        """Send a message once its stream has filled it.

        pieces : of its bytes, on the device.
        start : starts to send a piece that MPI can read.
        is_whole : the tensor was received, not computed, so the send waits for no stream.
        """
        return self._post(self._sends[dest], pieces, start, None if is_whole else _mark())

    def receive(self, pieces: Sequence[torch.Tensor], source: int, start: Start) -> Request:
        """Receive a message into device memory; `start` starts to receive a piece into memory that MPI can write."""
        return self._post(self._receives[source], pieces, start, _mark())  # no earlier kernel uses the memory then

    def progress(self, lane: _Lane | None = None) -> None:
        """Progress one lane, by default all."""
        with self._lock:
            for each in (*self._sends.values(), *self._receives.values()) if lane is None else (lane,):
                each.progress()

    def _post(self, lane: _Lane, pieces: Sequence[torch.Tensor], start: Start, mark: Mark) -> Request:
        transfer = StagedTransfer(self, lane, start, len(pieces))
        with self._lock:
            for piece in pieces:
                lane.post(_Piece(transfer, piece, mark, host=piece))
            lane.progress()
        return transfer


@dataclass(slots=True, eq=False)
class StagedTransfer:
    """A message in a lane.

    pieces : number of pieces that have not ended.
    """

    staging: Staging
    lane: _Lane
    start: Start
    pieces: int

    def test(self) -> bool:
        """Progress the messages of this lane, and return whether this one is complete."""
        if self.pieces:
            self.staging.progress(self.lane)
        return not self.pieces

    def wait(self) -> None:
        while self.pieces:
            self.staging.progress()
            if self.pieces:
                time.sleep(PAUSE_S)


def _is_passed(mark: Mark) -> bool:
    return mark is None or mark.query()


def _mark() -> torch.cuda.Event:
    """Record an event in the rank's current stream."""
    mark = torch.cuda.Event()
    mark.record()
    return mark


def _pinned(size: int) -> torch.Tensor:
    """Allocate pinned host memory (size,), from torch's cache."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
