"""Counters that all ranks of a job can read and increment one-sidedly.

They are in an RMA window of rank 0's memory. Adding returns the previous value atomically, so two ranks never get the
same number; this is how chains take documents without a coordinator.
"""

from __future__ import annotations

import threading
from typing import Any

from kvr_mpi.transport.base import Transport
from kvr_mpi.transport.local import LocalCounters, LocalTransport
from kvr_mpi.transport.mpi import MpiTransport

# Between hosts, some MPIs progress one-sided calls only while the target is inside MPI, so rank 0 calls MPI this often.
LOOK_IN_S = 0.002


class MpiCounters:
    """Counters in an MPI window on rank 0, with their own communicator.

    looks_in : a thread on rank 0 calls MPI regularly, so that calls from other hosts progress while rank 0 computes.
    """

    def __init__(self, comm: Any, count: int, *, looks_in: bool) -> None:
        import numpy as np
        from mpi4py import MPI

        self._comm = comm.Dup()
        here = self._comm.Get_rank() == 0
        self._window = MPI.Win.Allocate(8 * count if here else 0, 8, comm=self._comm)
        if here:
            memory: Any = self._window.tomemory()
            np.frombuffer(memory, np.int64)[:] = 0
        self._comm.Barrier()
        self._window.Lock_all()
        self._count = count
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_in, name="counters", daemon=True)
        if here and looks_in:
            self._thread.start()

    def add(self, slot: int, amount: int = 1) -> int:
        """Add to a counter atomically, and return its previous value."""
        import numpy as np
        from mpi4py import MPI

        given, before = np.array([amount], np.int64), np.empty(1, np.int64)
        self._window.Fetch_and_op(given, before, 0, slot, MPI.SUM)
        self._window.Flush(0)
        return int(before[0])

    def read(self) -> list[int]:
        """Return all counters, each as of some moment during the call."""
        import numpy as np
        from mpi4py import MPI

        found = np.empty(self._count, np.int64)
        self._window.Get_accumulate(np.zeros(self._count, np.int64), found, 0, op=MPI.NO_OP)
        self._window.Flush(0)
        return [int(value) for value in found]

    def close(self) -> None:
        """Wait for all ranks and free the window."""
        self._window.Unlock_all()
        self._comm.Barrier()
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._window.Free()
        self._comm.Free()

    def _look_in(self) -> None:
        while not self._ended.wait(LOOK_IN_S):
            self._comm.Iprobe()


Counters = LocalCounters | MpiCounters


def open_counters(world: Transport, count: int) -> Counters:
    """Create `count` counters, initially 0, on a transport from `mpi.connect`; every rank calls this."""
    if isinstance(world, LocalTransport):
        return LocalCounters(world, count)
    assert isinstance(world, MpiTransport), "counters are MPI's"
    return MpiCounters(world.comm, count, looks_in=world.local_size < world.size)
