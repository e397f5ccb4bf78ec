"""Facts of ranks as the doctor would gather them, invented, and what is asked of every finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvr_mpi.doctor.facts import DeviceFacts, RankFacts
from kvr_mpi.doctor.findings import Finding
from kvr_mpi.transport.mpi_query import MpiFacts

MPI = MpiFacts("MPICH 5.0.2", "5.0", "THREAD_MULTIPLE", False, "MPIX_GPU_query_support says no")
GPU = DeviceFacts(built="13.0", driver=True, count=2, index=0, name="H200", uuid="a")


def place(rank: int, host: str = "node1", **more: Any) -> RankFacts:
    base = RankFacts(rank, host, DeviceFacts(), MPI, "4.1.2")
    return replace(base, **more)


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    assert (finding.status == "ok") == (not finding.remedy), "who complains says what to do, and nobody else"
    return finding
