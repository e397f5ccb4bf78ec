"""How far the ranks' clocks are apart: by round trips, the answer being given in their middle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvr_mpi.transport.base import FixedTag, Request, Transport

ROUNDS = 10

# How to wait for a message, and for whose; it may give up.
Wait = Callable[[Request, str], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Skew:
    """How far a rank's clock is ahead of rank 0's.

    error_s : it is right to so many seconds: half of the shortest round trip.
    """

    ahead_s: float
    error_s: float


def measure_skews(transport: Transport, ranks: Sequence[int], wait: Wait, clock: Clock = time.time) -> dict[int, Skew]:
    """Estimate, on rank 0, how far the clocks of some ranks are ahead; every rank calls it.

    Of some round trips the shortest counts. `clock` is what each rank reads.
    """
    if transport.rank in ranks:
        _tell_time(transport, wait, clock)
    return {rank: _ask_time(transport, rank, wait, clock) for rank in ranks} if transport.rank == 0 else {}


def _ask_time(transport: Transport, rank: int, wait: Wait, clock: Clock) -> Skew:
    import torch

    answer, question = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    best = Skew(0.0, float("inf"))
    for _ in range(ROUNDS):
        before = clock()
        receive, send = transport.irecv(answer, rank, FixedTag.CLOCK), transport.isend(question, rank, FixedTag.CLOCK)
        wait(receive, f"the time of rank {rank}")
        after = clock()
        wait(send, "a message")
        if (after - before) / 2 < best.error_s:
            best = Skew(float(answer[0]) - (before + after) / 2, (after - before) / 2)
    return best


def _tell_time(transport: Transport, wait: Wait, clock: Clock) -> None:
    import torch

    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        wait(transport.irecv(question, 0, FixedTag.CLOCK), "rank 0")
        wait(transport.isend(torch.tensor([clock()], dtype=torch.float64), 0, FixedTag.CLOCK), "a message")
