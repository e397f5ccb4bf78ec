"""Deadlines for waiting on other ranks, so that a rank that hangs ends the job instead of using up its allocation.

A launcher notices ranks that die, but not ranks that are stopped, or whose host or file system no longer responds. So
each rank sends a heartbeat to the next rank of a ring. A rank whose GPU hangs still sends heartbeats; the deadlines of
`Forwarder` detect it. So that other ranks of a sum or gather do not wait for it either, the thread of the heartbeat
also checks how long its own rank has waited for a message (`Awaited`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvr_mpi.errors import TransportError
from kvr_mpi.topology import following, preceding
from kvr_mpi.transport.base import FailedTogetherError, Transport, describe_wait
from kvr_mpi.transport.mpi import MpiTransport

# Seconds without a sign of life after which a rank counts as hung.
LIMIT_S = 600.0
BEAT_S = 5.0
# A longer interval between two polls means that this process was stopped itself, or that its host was suspended.
LONGEST_GAP_S = 10.0
ALIVE, GOODBYE = 1, 0


class Patience:
    """Time waited, without the time in which this process did not run."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s, self.waited_s = limit_s, 0.0
        self._polled_s = time.monotonic()

    def is_over(self) -> bool:
        """Poll: whether the limit has been exceeded."""
        now_s = time.monotonic()
        self.waited_s += min(now_s - self._polled_s, LONGEST_GAP_S)
        self._polled_s = now_s
        return self.waited_s > self.limit_s


class _Heartbeat:
    """The heartbeats that this rank sends to the next rank, and receives from the previous one."""

    def __init__(
        self, world: MpiTransport, end: Callable[[TransportError], object], limit_s: float, beat_s: float
    ) -> None:
        self._comm, self._awaited = world.comm.Dup(), world.awaited
        self._end, self._limit_s, self._beat_s = end, limit_s, beat_s
        self._message, self._waiting = world.awaited.message, Patience(limit_s)
        self._is_left, self._with_others = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def leave(self, *, with_others: bool) -> None:
        """Stop; `with_others`: wait until the previous rank leaves, too, so that no message is left behind."""
        self._with_others = with_others
        self._is_left.set()
        self._thread.join()

    def _run(self) -> None:
        import numpy as np

        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        to, source = following(rank, size), preceding(rank, size)
        patience, word, is_watched, says_goodbye = Patience(self._limit_s), np.zeros(1, np.int8), True, False
        sent: Any = None
        received: Any = self._comm.Irecv(word, source)
        while is_watched or not says_goodbye or not sent.Test():
            if self._is_left.wait(self._beat_s):
                if not self._with_others:
                    return
                time.sleep(self._beat_s / 100)
            if not says_goodbye and (sent is None or sent.Test()):
                says_goodbye = self._is_left.is_set()
                sent = self._comm.Isend(np.full(1, GOODBYE if says_goodbye else ALIVE, np.int8), to)
            self._check_message()
            while is_watched and received.Test():
                patience, is_watched = Patience(self._limit_s), int(word[0]) == ALIVE
                if is_watched:
                    received = self._comm.Irecv(word, source)
            if is_watched and patience.is_over():
                self._end(
                    TransportError(
                        f"rank {source} has not responded for {patience.waited_s:.0f} s: its process is "
                        f"stopped, or its host does not respond; check that host, and run the job again with --resume. "
                        f"KVR_PEER_TIMEOUT changes this limit"
                    )
                )
                return

    def _check_message(self) -> None:
        """End the job if this rank has waited too long for a message."""
        if (message := self._awaited.message) is not self._message:
            self._message, self._waiting = message, Patience(self._limit_s)
        elif message is not None and self._waiting.is_over():
            what = f"{message.describe()} (KVR_PEER_TIMEOUT changes this limit)"
            self._end(TransportError(describe_wait(message.ranks, self._waiting.waited_s, what)))


@contextmanager
def heartbeat(
    world: Transport, end: Callable[[TransportError], object], *, limit_s: float = LIMIT_S, beat_s: float = BEAT_S
) -> Iterator[None]:
    """Within the block, check that the previous rank is alive, and all waits for messages; every rank calls this.

    end : ends all ranks; called in a thread, with an error that names the rank.
    """
    if not isinstance(world, MpiTransport) or world.size == 1:
        yield
        return
    beats, with_others = _Heartbeat(world, end, limit_s, min(beat_s, limit_s / 10)), False
    try:
        yield
        with_others = True
    except FailedTogetherError:  # raised on all ranks
        with_others = True
        raise
    finally:
        beats.leave(with_others=with_others)
