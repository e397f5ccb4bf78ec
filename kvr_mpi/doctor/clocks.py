"""Clocks of the hosts against rank 0's: log lines, deadlines and file times are compared across hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvr_mpi.doctor.deadlines import wait_for
from kvr_mpi.doctor.facts import RankFacts, group_hosts
from kvr_mpi.doctor.findings import Finding, ok, warn
from kvr_mpi.transport import Request, Transport, clocks

TIMEOUT_S = 20.0
MAX_SKEW_S = 1.0


def first_on_each_host(facts: Sequence[RankFacts]) -> list[int]:
    """Return one rank of every host but rank 0's."""
    return [ranks[0].rank for ranks in list(group_hosts(facts).values())[1:]]


def measure_skews(transport: Transport, ranks: Sequence[int]) -> dict[int, float]:
    """Estimate, on rank 0, how far each rank's clock is ahead, in seconds; every rank calls it.

    Raises
    ------
    SilentError
    """
    has_begun = False

    def wait(request: Request, who: str) -> None:
        nonlocal has_begun
        is_first, has_begun = not has_begun and transport.rank != 0, True  # others may be asked before
        wait_for(request, TIMEOUT_S * (1 + len(ranks) if who == "rank 0" else 1), who, asleep=is_first)

    return {rank: skew.ahead_s for rank, skew in clocks.measure_skews(transport, ranks, wait).items()}


def check_clocks(skews_s: Mapping[int, float], facts: Sequence[RankFacts]) -> list[Finding]:
    """Judge the skews."""
    if not skews_s:
        return [ok("clocks", "one host, one clock")]
    rank = max(skews_s, key=lambda rank: abs(skews_s[rank]))
    skew_s, host = skews_s[rank], next(one.host for one in facts if one.rank == rank)
    text = f"{host} is {abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} {facts[0].host}, the largest skew"
    if abs(skew_s) <= MAX_SKEW_S:
        return [ok("clocks", text)]
    return [
        warn(
            "clocks",
            text,
            "ask the administrators to check chrony or ntpd; until then, times from different hosts cannot be compared",
        )
    ]
