"""Search the slices on the machine itself: the paper's hierarchical grid (section 4.2, Fig. 6).

Stands between a first guess (``solve``) and a `Partition` that was measured. With two ranks it is the paper's
binary search for the one bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvr_mpi.partition import Partition


@dataclass(slots=True)
class Search:
    """A search's result and everything it measured."""

    best: Partition
    best_s: float
    tried: dict[Partition, float] = field(default_factory=dict)


def grid_search(
    start: Partition, measure: Callable[[Partition], float], *, stride: int, quantum: int = 64, max_runs: int = 40
) -> Search:
    """Move each inner bound by a stride while that helps, then halve the stride, down to the quantum.

    Parameters
    ----------
    start : Partition
        The first guess.
    measure : callable
        Seconds to the first token of a partition; called once for each.
    stride, quantum : int
        First and last step in tokens.
    max_runs : int
        Measurements allowed.
    """
    search = Search(start, measure(start))
    search.tried[start] = search.best_s
    while stride >= quantum:
        improved = False
        for inner in range(1, start.size):
            for step in (-stride, stride):
                candidate = _moved(search.best, inner, step)
                if candidate is None or candidate in search.tried or len(search.tried) >= max_runs:
                    continue
                seconds = search.tried[candidate] = measure(candidate)
                if seconds < search.best_s:
                    search.best, search.best_s, improved = candidate, seconds, True
        if not improved:
            stride //= 2
    return search


def interpolate(ratios: dict[int, tuple[float, ...]], tokens: int) -> tuple[float, ...]:
    """Ratios for a prompt between two that were searched (KVR-P, section 4.2); beyond them, those of the nearest.

    Parameters
    ----------
    ratios : dict of int to tuple of float
        Searched prompt lengths, each with its ranks' shares.
    """
    below = max((length for length in ratios if length <= tokens), default=min(ratios))
    above = min((length for length in ratios if length >= tokens), default=max(ratios))
    if below >= above:
        return ratios[below]
    weight = (tokens - below) / (above - below)
    return tuple(a + (b - a) * weight for a, b in zip(ratios[below], ratios[above], strict=True))


def _moved(partition: Partition, inner: int, step: int) -> Partition | None:
    bounds = list(partition.bounds)
    bounds[inner] += step
    if bounds[inner - 1] < bounds[inner] < bounds[inner + 1]:
        return Partition(tuple(bounds))
    return None
