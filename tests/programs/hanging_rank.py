"""Run under mpirun with 3 ranks: one of them is stopped while the others wait for it. They end the job with code 69.

python hanging_rank.py SECONDS: without a sign of life; 0: no rank is stopped, and rank 1 is late by a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.liveness import heartbeat
from kvr_mpi.transport.mpi import connect

limit_s = float(sys.argv[1])
world = connect()


def end(error: TransportError) -> None:
    print(f"rank {world.rank}: {error}", file=sys.stderr, flush=True)
    world.abort(error.exit_code)


with heartbeat(world, end, limit_s=limit_s or 20.0, beat_s=0.05):
    world.barrier()
    if world.rank == 1:
        if limit_s:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.0)
    world.barrier()
