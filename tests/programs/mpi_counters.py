"""Every rank draws numbers from shared counters until they are used up; rank 0 computes meanwhile and never answers."""

from __future__ import annotations

import json
import time

from kvr_mpi.transport import gather_json
from kvr_mpi.transport.counters import open_counters
from kvr_mpi.transport.mpi import connect

NUMBERS = 200

world = connect()
counters = open_counters(world, 3)
drawn = []
if world.rank == 0:  # it has one, however late its processor runs it again
    drawn.append(counters.add(1))
    counters.add(2, drawn[0])
world.barrier()
while (number := counters.add(1)) < NUMBERS:
    drawn.append(number)
    counters.add(2, number)
    if world.rank == 0:  # outside MPI for a while
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            sum(range(1000))
world.barrier()
everything = gather_json(world, [drawn, counters.read()])
counters.close()
if world.rank == 0:
    print(json.dumps(everything))
