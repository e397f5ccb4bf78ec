"""Two ranks send each other some bytes in turn; rank 0 writes what it found as JSON to a file.

python mpi_link_speed.py FILE BYTES
"""

import json
import socket
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
data = np.zeros(int(sys.argv[2]), np.uint8)
seconds = []
for source in (0, 1):
    world.Barrier()
    began = time.perf_counter()
    if world.rank == source:
        world.Send([data, MPI.BYTE], 1 - source)
    else:
        world.Recv([data, MPI.BYTE], source)
    world.Barrier()
    seconds.append(time.perf_counter() - began)
found = {
    "names": world.gather(socket.gethostname()),
    "on_this_host": world.Split_type(MPI.COMM_TYPE_SHARED).size,
    "seconds": seconds,
}
if world.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
