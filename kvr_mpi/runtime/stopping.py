"""Stops a job in time: no new documents after a signal, or if they would miss the batch system's deadline.

Sits between the batch system and the loop over the documents. A rank that receives a signal increments a counter, which
all leaders read before they take a document, so one signalled rank is enough.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvr_mpi.logs import RankLogger
from kvr_mpi.runtime.work_queue import Slot
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.counters import Counters

# Signals of a batch system before and at the time limit: SLURM's --signal=USR2@..., Grid Engine's -notify and LSF's
# -wa USR2, then TERM, which PBS sends a few seconds before it kills a job.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

# Safety factor for predictions, and time to write results.
MARGIN = 1.25
WRITE_S = 15.0
LAST_S = 8.0  # answers in progress are abandoned this long before the deadline, since they would be lost anyway


class Stop:
    """Whether to continue; after `join`, signals on other ranks count as well.

    deadline_s : Unix time at which the batch system ends the job; `clock` returns the Unix time.
    """

    def __init__(self, deadline_s: float | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.deadline_s, self._clock = deadline_s, clock
        self.reason = ""  # why no more documents are started; empty while they are
        self.heard = False  # whether this rank has received a signal
        self._counters: Counters | None = None
        self._check: Callable[[], None] | None = None
        self._peers: Transport | None = None
        self._has_told = False

    def join(self, counters: Counters, check: Callable[[], None] | None = None, peers: Transport | None = None) -> None:
        """Exchange stop requests with the other ranks from now on.

        counters : the counters of `Slot`.
        check : raises an error if this job must not continue.
        peers : the ranks of this rank's tensor-parallel group, which must agree that time is up.
        """
        self._counters, self._check, self._peers = counters, check, peers

    def ask(self, reason: str) -> None:
        """Request to start no more documents; the first reason counts."""
        self.reason = self.reason or reason

    @property
    def is_over(self) -> bool:
        """Whether time is up even for answers in progress; if so, also request to stop."""
        left_s = LAST_S if self.deadline_s is None else self.deadline_s - self._clock()
        if left_s < LAST_S:
            self.ask(f"the time limit is near: {max(0.0, left_s):.0f} s left")
        return left_s < LAST_S

    @property
    def is_over_for_group(self) -> bool:
        """Whether time is up for the group, by its first rank's clock; all ranks of the group call this."""
        return self.is_over if self._peers is None else bool(share_json(self._peers, self.is_over))

    def has_time_for(self, seconds: float) -> bool:
        """Whether there is time for a document that takes so long; if not, also request to stop."""
        if self.reason or self.deadline_s is None:
            return not self.reason
        left_s = self.deadline_s - self._clock()
        if MARGIN * seconds + WRITE_S > left_s:
            self.ask(f"the time limit is near: {max(0.0, left_s):.0f} s left, the next document takes {seconds:.0f} s")
        return not self.reason

    def announce(self) -> None:
        """Announce a signal on this rank to the other ranks."""
        if self._check is not None:
            self._check()
        if self.heard and not self._has_told and self._counters is not None:
            self._has_told = True
            self._counters.add(Slot.STOP)

    def listen(self) -> None:
        """Request to stop if another rank has announced a signal."""
        if not self.reason and self._counters is not None and self._counters.read()[Slot.STOP]:
            self.ask("another rank was stopped")


@contextmanager
def stopped_by_signals(stop: Stop, logger: RankLogger, end: Callable[[str], None]) -> Iterator[None]:
    """Request to stop at the first of `STOP_SIGNALS`, and call `end` at the second.

    logger : told of the first signal.
    end : ends all ranks at once; receives a line with the reason.

    Both are used in a thread, since the signal may interrupt a log call, which is not reentrant.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if stop.heard:
            call, line = end, f"{name} while stopping: ending at once; finished documents are kept"
        else:
            call = logger.info
            line = (
                f"{name}: starting no more documents, and waiting for the prompts and answers in progress; a second "
                "signal ends the job at once, and keeps what is finished"
            )
        threading.Thread(target=call, args=(line,)).start()
        stop.heard = True
        stop.ask(f"stopped by {name}")

    if threading.current_thread() is not threading.main_thread():  # ranks as threads get no signals
        yield
        return
    before = {}
    try:
        for number in STOP_SIGNALS:
            before[number] = signal.signal(number, on_signal)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
