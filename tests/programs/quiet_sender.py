"""Run under mpirun with 2 ranks: a message arrives while its sender makes no MPI calls. Exit code 3 if it does not.

python quiet_sender.py FILE

The receiver creates FILE.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.mpi import connect

MOST_S = 30
file = Path(sys.argv[1])
world, _ = open_transport(connect(), "auto", torch.device("cpu"))
forwarder = Forwarder(world)
forwarder.begin()
came = True
if world.rank == 0:
    forwarder.send(forwarder.announce(torch.ones(1 << 20), 1, 100))
    end_s = time.monotonic() + MOST_S
    while not (came := file.exists()) and time.monotonic() < end_s:
        time.sleep(0.01)
else:
    forwarder.wait(forwarder.receive(torch.zeros(1 << 20), 0, 100))
    file.touch()
forwarder.close()
sys.exit(0 if came else 3)
