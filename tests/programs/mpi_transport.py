"""Run under mpirun with 2 ranks or more: what every transport promises. Prints one JSON line, or fails.

python mpi_transport.py auto|mpi
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from promises import keep_counts, keep_promises

from kvr_mpi.errors import TransportError
from kvr_mpi.transport import mpi, on_root
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.mpi import connect

WORK_S = 0.4
mpi.CHUNK_BYTES = 1000  # so that small messages travel in pieces, as large ones do
world, _ = open_transport(connect(), sys.argv[1], torch.device("cpu"))
keep_promises(world)
keep_counts(world)
# Those that wait leave their cores to the one that works: an engine beside them may have it (`bench.rivals`).
began_s = time.process_time()
on_root(world, lambda: time.sleep(WORK_S))
assert time.process_time() - began_s < WORK_S / 4, "a rank that waits spins"
with pytest.raises(TransportError):
    world.isend(torch.zeros(4, 4).t(), (world.rank + 1) % world.size, 0)
if world.rank == 0:
    print(json.dumps({"size": world.size}))
