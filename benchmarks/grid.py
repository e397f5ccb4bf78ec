"""Search for slices by measurement: the paper's hierarchical grid (section 4.2, Fig. 6).

It starts from even slices and uses only measured times of whole prompts, so it needs many runs; ``kvr search`` needs
a few.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from kvr_mpi.partition import QUANTUM_TOKENS, Partition

# The first grid extends this many strides to both sides; finer grids extend one stride around the best point so far.
FIRST_REACH = 2
# Maximum number of runs, more than a search usually needs.
MOST_RUNS = 400


def search_grid(tokens: int, ranks: int, measure: Callable[[Partition], float]) -> dict[Partition, float]:
    """Search from even slices, with strides from half a slice down to the quantum; return all that was measured."""
    quantum = QUANTUM_TOKENS if tokens >= 4 * QUANTUM_TOKENS * ranks else 1
    stride = quantum
    while 8 * stride * ranks <= tokens:  # two strides are about half an even slice
        stride *= 2
    start = Partition.by_ratio(tokens, [1.0] * ranks, quantum)
    return grid_search(start, measure, stride=stride, quantum=quantum, max_runs=MOST_RUNS)


def grid_search(
    start: Partition, measure: Callable[[Partition], float], *, stride: int, quantum: int, max_runs: int
) -> dict[Partition, float]:
    """Scan a grid of inner bounds, then finer grids around the best point, down to the quantum.

    As in Fig. 6: after each level the search is limited to the cells around the best point and the stride is halved.
    With two ranks there is one bound, and this is the paper's binary search. The grid of a level has 3^(p-1) points
    (the first one 5^(p-1)); if `max_runs` does not allow that many, one bound is moved at a time. If the best point is
    on the edge of the first grid, that grid is centred on it and scanned again.

    start : the first guess, in the middle of the first grid.
    measure : seconds to the first token of a partition; called once for each.
    stride, quantum : first and last step in tokens.
    max_runs : maximum number of measurements, all of which are returned.
    """
    tried = {start: measure(start)}
    reach = FIRST_REACH
    while stride >= quantum:
        center = best_of(tried)
        for candidate in _grid(tried, stride, reach, max_runs - len(tried)):
            if candidate not in tried and len(tried) < max_runs:
                tried[candidate] = measure(candidate)
        moved = max(abs(a - b) for a, b in zip(center.bounds, best_of(tried).bounds, strict=True))
        if moved < FIRST_REACH * stride:
            stride, reach = stride // 2, 1
    return tried


def best_of(tried: Mapping[Partition, float]) -> Partition:
    """Return the fastest partition; of equally fast ones, the one measured first."""
    return min(tried, key=tried.__getitem__)


def _grid(tried: Mapping[Partition, float], stride: int, reach: int, runs: int) -> Iterator[Partition]:
    """Yield the points of one level: the whole grid around the best point, or one bound moved after the other."""
    inner = best_of(tried).size - 1
    steps = sorted(range(-reach * stride, reach * stride + 1, stride), key=abs)
    if len(steps) ** inner <= max(runs, len(steps)):
        center = best_of(tried)
        moves = itertools.product(steps, repeat=inner)
        yield from filter(None, (_moved(center, move) for move in moves))
        return
    for bound in range(inner):
        center = best_of(tried)
        for step in steps:
            candidate = _moved(center, [step if at == bound else 0 for at in range(inner)])
            if candidate is not None:
                yield candidate


def _moved(partition: Partition, steps: list[int] | tuple[int, ...]) -> Partition | None:
    """Move the inner bounds; None if a slice would become empty."""
    inner = [bound + step for bound, step in zip(partition.bounds[1:-1], steps, strict=True)]
    bounds = (0, *inner, partition.tokens)
    return Partition(bounds) if all(a < b for a, b in itertools.pairwise(bounds)) else None
