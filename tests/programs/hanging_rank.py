"""Run under mpirun with 3 ranks: the others wait for rank 1, and end the job with code 69 if it hangs.

python hanging_rank.py WHAT SECONDS: rank 1 is ``stopped``, is ``late`` by a second, or stays ``away`` from a sum, while
its heartbeat goes on; the deadline.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.liveness import heartbeat
from kvr_mpi.transport.mpi import connect

what, limit_s = sys.argv[1], float(sys.argv[2])
world = connect()


def end(error: TransportError) -> None:
    print(f"rank {world.rank}: {error}", file=sys.stderr, flush=True)
    world.abort(error.exit_code)


with heartbeat(world, end, limit_s=limit_s, beat_s=0.05):
    world.barrier()
    if world.rank == 1:
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60.0 if what == "away" else 1.0)
    if what == "away":
        world.all_reduce(torch.ones(1))
    world.barrier()
