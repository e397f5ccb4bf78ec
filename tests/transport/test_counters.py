"""Counters: whoever adds is told what was there before, and no two are told the same."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from constants import TESTS

from kvr_mpi.transport.counters import open_counters
from kvr_mpi.transport.local import LocalTransport, run_local


def test_threads_draw_every_number_once() -> None:
    def work(rank: LocalTransport) -> tuple[list[int], list[int]]:
        counters, drawn = open_counters(rank, 2), []
        while (number := counters.add(0)) < 100:
            drawn.append(number)
            counters.add(1, number)
        rank.barrier()
        return drawn, counters.read()

    results = run_local(3, work)
    assert sorted(number for drawn, _ in results for number in drawn) == list(range(100))
    assert all(found == [103, sum(range(100))] for _, found in results)


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_draw_every_number_once(ranks: int, mpirun: Any) -> None:
    run = mpirun(ranks, [sys.executable, TESTS / "programs" / "mpi_counters.py"])
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert sorted(number for drawn, _ in found for number in drawn) == list(range(200))
    assert all(counts == [0, 200 + ranks, sum(range(200))] for _, counts in found)
    assert sum(len(drawn) > 0 for drawn, _ in found) > 1
