"""The paper's grid search, and ratios between lengths."""

from __future__ import annotations

import pytest

from kvr_mpi.partition import Partition
from kvr_mpi.tuning.grid import grid_search, interpolate


def test_grid_search_finds_the_valley() -> None:
    def cost(partition: Partition) -> float:
        return sum((bound - best) ** 2 for bound, best in zip(partition.bounds[1:-1], (700, 1300), strict=True))

    search = grid_search(Partition.even(2048, 3), cost, stride=256, quantum=4, max_runs=200)
    assert search.best.bounds == (0, 699, 1301, 2048) or abs(search.best.bounds[1] - 700) < 4
    assert abs(search.best.bounds[2] - 1300) < 4
    assert search.best_s == min(search.tried.values()) == cost(search.best)


def test_grid_search_keeps_slices_and_the_budget() -> None:
    search = grid_search(Partition((0, 1, 2, 3)), lambda partition: 1.0, stride=64, quantum=1, max_runs=5)
    assert len(search.tried) <= 5 and search.best == Partition((0, 1, 2, 3))


def test_interpolation_of_ratios() -> None:
    searched = {1000: (0.5, 0.5), 3000: (0.7, 0.3)}
    assert interpolate(searched, 2000) == pytest.approx((0.6, 0.4))
    assert interpolate(searched, 1000) == (0.5, 0.5)
    assert interpolate(searched, 500) == (0.5, 0.5)
    assert interpolate(searched, 9000) == (0.7, 0.3)
