"""Bandwidth of handing keys and values on, against a plain mpi4py ping of the same size in the same run.

mpirun -n 2 python -m benchmarks handoff [--mib 16] [--rounds 41] [--transport mpi] [--json FILE]

Each round sends one message there and one back in every way, in turn: a plain Send and Recv of a numpy buffer, our
transport, and our transport in the care of a forwarder without and with its thread. Buffers are made once.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from benchmarks.options import make_parser
from kvr_mpi.transport import Transport
from kvr_mpi.transport.choose import NAMES, open_transport
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.mpi import connect


def plain(buffers: tuple[torch.Tensor, torch.Tensor], rank: int) -> Callable[[], None]:
    """Make a ping of mpi4py."""
    out, into = (buffer.numpy() for buffer in buffers)

    def ping() -> None:
        for source in (0, 1):
            if rank == source:
                MPI.COMM_WORLD.Send([out, MPI.BYTE], 1 - source)
            else:
                MPI.COMM_WORLD.Recv([into, MPI.BYTE], source)

    return ping


def bare(world: Transport, buffers: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """Make a ping of our transport."""
    out, into = buffers

    def ping() -> None:
        receive = world.irecv(into, 1 - world.rank, 1)
        if world.rank == 0:
            world.isend(out, 1, 1).wait()
        receive.wait()
        if world.rank == 1:
            world.isend(out, 0, 1).wait()

    return ping


def carried(world: Transport, buffers: tuple[torch.Tensor, torch.Tensor], *, thread: bool) -> Callable[[], None]:
    """Make a ping of our transport by a forwarder, with or without its thread."""
    out, into = buffers

    def ping() -> None:
        forwarder = Forwarder(world, forwards=thread)
        forwarder.announce(1 - world.rank, 2)
        receive = forwarder.receive(into, 1 - world.rank, 2)
        if world.rank == 0:
            forwarder.wait(forwarder.send(out, 1, 2))
        forwarder.wait(receive)
        if world.rank == 1:
            forwarder.wait(forwarder.send(out, 0, 2))
        forwarder.close()

    return ping


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("handoff", __doc__)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--transport", choices=NAMES, default="auto")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    world, reason = open_transport(connect(), wanted.transport, torch.device("cpu"))
    if world.size != 2:
        raise SystemExit("start two ranks: mpirun -n 2 python -m benchmarks handoff")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    size = wanted.mib << 20
    buffers = torch.full((size,), world.rank, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    ways = {
        "plain mpi4py": plain(buffers, world.rank),
        "transport": bare(world, buffers),
        "forwarder": carried(world, buffers, thread=False),
        "forwarder with its thread": carried(world, buffers, thread=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(wanted.rounds + 2):
        for name, ping in ways.items():
            world.barrier()
            began = time.perf_counter()
            ping()
            if turn > 1:  # two rounds warm up
                seconds[name].append((time.perf_counter() - began) / 2)
    assert bool((buffers[1] == 1 - world.rank).all())
    if world.rank:
        return
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    print(reason)
    rows = []
    for name, one_way_s in middle.items():
        ratios = [mine / other for mine, other in zip(seconds["plain mpi4py"], seconds[name], strict=True)]
        rows.append({"way": name, "gigabytes_per_s": size / one_way_s / 1e9, "over_plain": float(np.median(ratios))})
        print(f"{name:24} {rows[-1]['gigabytes_per_s']:7.2f} GB/s  {rows[-1]['over_plain']:5.2f} of a plain ping")
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(rows, indent=1) + "\n")
