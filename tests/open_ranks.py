"""Transports of test programs, by name: those that jobs may ask for, and NCCL's way over gloo."""

from __future__ import annotations

from typing import Any

import torch
from gloo import open_gloo

from kvr_mpi.transport import Transport
from kvr_mpi.transport.choose import open_transport, warm_up

CPU = torch.device("cpu")


def open_ranks(world: Transport, name: Any) -> Transport:
    """Connect every pair of ranks; all of them call this."""
    if name != "gloo":
        return open_transport(world, name, CPU, every_pair=True)[0]
    ranks = open_gloo(world)
    warm_up(ranks, CPU, every_pair=True)
    return ranks
