"""The paper's grid search."""

from __future__ import annotations

import itertools

from kvr_mpi.partition import Partition
from kvr_mpi.tuning.grid import best_of, grid_search


def test_the_grid_finds_the_papers_optimum() -> None:
    # Fig. 6 (a): 16k on two GPUs, [0, 9728, 16384].
    start = Partition.even(16384, 2)
    tried = grid_search(start, lambda split: abs(split.bounds[1] - 9728), stride=2048, quantum=256)
    assert best_of(tried).bounds == (0, 9728, 16384)
    assert len(tried) <= 5 + 2 * 3, "a binary search: two new splits for each halving"


def test_the_grid_is_scanned_level_by_level() -> None:
    # Fig. 6 (b-d): 96 over three, strides 8, 4, 2, 1 and so on, to [0, 28, 70, 96].
    order: list[Partition] = []

    def measure(split: Partition) -> float:
        order.append(split)
        one, other = split.bounds[1] - 28, split.bounds[2] - 70
        return one * one + other * other + one * other  # a valley across: one bound at a time goes astray more easily

    tried = grid_search(Partition((0, 32, 64, 96)), measure, stride=8, quantum=1, max_runs=200)
    assert best_of(tried).bounds == (0, 28, 70, 96)
    assert order == list(tried), "nothing is measured twice"
    coarse = list(itertools.takewhile(lambda split: all(bound % 8 == 0 for bound in split.bounds), order))
    assert len(coarse) == 24, "the first level is a grid of 5 x 5, less the one in which a slice is empty"
    assert len(order) <= 24 + 3 * 8


def test_long_chains_move_one_bound_at_a_time() -> None:
    target = Partition.by_ratio(4096, [8, 7, 6, 5, 4, 3, 2, 1]).bounds

    def seconds(split: Partition) -> float:
        return float(sum((a - b) ** 2 for a, b in zip(split.bounds, target, strict=True)))

    tried = grid_search(Partition.even(4096, 8), seconds, stride=128, quantum=16, max_runs=250)
    assert len(tried) <= 250
    assert max(abs(a - b) for a, b in zip(best_of(tried).bounds, target, strict=True)) <= 32
