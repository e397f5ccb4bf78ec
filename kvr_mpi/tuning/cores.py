"""Pinning of ranks to cores, for fair comparisons."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvr_mpi.cgroups import cpu_quota
from kvr_mpi.topology import cores_per_rank, share_of_cores
from kvr_mpi.transport import Transport, gather_json, share_json


@contextmanager
def pinned(transport: Transport) -> Iterator[int]:
    """Pin this rank to its share of the host's cores (to one core, in turn, if there are fewer cores than ranks)."""
    everything = sorted(os.sched_getaffinity(0))
    ours = _share_of(everything, transport)
    # Worker threads inherit the affinity of the thread that creates them: create them while it includes all cores.
    torch.set_num_threads(len(everything))
    torch.ones(256, 256) @ torch.ones(256, 256)
    os.sched_setaffinity(0, ours)
    quota = cpu_quota()
    threads = len(ours) if quota is None else min(len(ours), cores_per_rank(quota, transport.local_size))
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        os.sched_setaffinity(0, everything)


def _share_of(cores: Sequence[int], transport: Transport) -> list[int]:
    """Return the cores of this rank: those the launcher bound it to, or its share of all ranks' cores."""
    same_for_all = gather_json(transport, [transport.local_size, list(cores)])
    shared = share_json(transport, all(item == same_for_all[0] for item in same_for_all))
    if not shared:
        return list(cores)
    return share_of_cores(cores, transport.local_rank, transport.local_size)
