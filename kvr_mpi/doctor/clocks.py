"""Clocks of the hosts against rank 0's: log lines, deadlines and file times are compared across hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from kvr_mpi.doctor.deadlines import wait_for
from kvr_mpi.doctor.facts import RankFacts, group_hosts
from kvr_mpi.doctor.findings import Finding, ok, warn
from kvr_mpi.transport import Transport

TAG = 7201
ROUNDS = 10
TIMEOUT_S = 20.0
MAX_SKEW_S = 1.0


def first_on_each_host(facts: Sequence[RankFacts]) -> list[int]:
    """Return one rank of every host but rank 0's."""
    return [ranks[0].rank for ranks in list(group_hosts(facts).values())[1:]]


def measure_skews(transport: Transport, ranks: Sequence[int]) -> dict[int, float]:
    """Estimate, on rank 0, how far each rank's clock is ahead, in seconds; every rank calls it.

    The shortest of some round trips counts: the answer was given in its middle, to half its length.

    Raises
    ------
    SilentError
    """
    if transport.rank in ranks:
        _tell_time(transport, TIMEOUT_S * (1 + len(ranks)))
    return {rank: _ask_time(transport, rank) for rank in ranks} if transport.rank == 0 else {}


def check_clocks(skews_s: Mapping[int, float], facts: Sequence[RankFacts]) -> list[Finding]:
    """Judge the skews."""
    if not skews_s:
        return [ok("clocks", "one host, one clock")]
    rank = max(skews_s, key=lambda rank: abs(skews_s[rank]))
    skew_s, host = skews_s[rank], next(one.host for one in facts if one.rank == rank)
    text = f"{host} is {abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} {facts[0].host}, the largest skew"
    if abs(skew_s) <= MAX_SKEW_S:
        return [ok("clocks", text)]
    return [warn("clocks", text, "have the administrators look at chrony or ntpd; until then read times with care")]


def _ask_time(transport: Transport, rank: int) -> float:
    answer, question = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    best_s, skew_s = float("inf"), 0.0
    for _ in range(ROUNDS):
        before = time.time()
        receive, send = transport.irecv(answer, rank, TAG), transport.isend(question, rank, TAG)
        wait_for(receive, TIMEOUT_S, f"the time of rank {rank}")
        after = time.time()
        wait_for(send, TIMEOUT_S)
        if after - before < best_s:
            best_s, skew_s = after - before, float(answer[0]) - (before + after) / 2
    return skew_s


def _tell_time(transport: Transport, patience_s: float) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    for number in range(ROUNDS):
        wait_for(transport.irecv(question, 0, TAG), patience_s, "rank 0", asleep=number == 0)
        wait_for(transport.isend(torch.tensor([time.time()], dtype=torch.float64), 0, TAG), TIMEOUT_S)
