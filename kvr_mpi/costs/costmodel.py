"""Forecasts the time to the first token of chains, whose segments are forwarded as they arrive, and of one process.

The rates come from `Workload` and `Hardware`, or are measured here. Other strategies, and the paper's own engine and
machine, are in a clone's ``benchmarks``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvr_mpi.costs.events import cut_through
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.costs.solve import equal_time
from kvr_mpi.errors import PartitionError
from kvr_mpi.partition import Partition

# Up to this many ranks, the search changes slices individually; for longer chains, only three shape parameters.
RANKS_MOVED_ALONE = 16
# Limit of a search (rounds x layers x segments on the links), about one second.
EVENTS_LOOKED_AT = 20_000_000

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def chain_seconds(costs: Costs, lengths: Sequence[float]) -> float:
    """Time to the first token of a chain with slices of these lengths in tokens."""
    return float(chains_seconds(costs, np.asarray([lengths], dtype=float))[0])


def chains_seconds(costs: Costs, splits: Array) -> Array:
    """Time to the first token of many splits at once, given as lengths in tokens (splits, ranks).

    Raises `PartitionError` if a slice is empty, or `costs.speeds` has the wrong number of ranks.
    """
    if splits.shape[1] == 0 or not (splits > 0).all():
        raise PartitionError(f"slice lengths {splits.tolist()}: every rank needs at least one token")
    if costs.speeds is not None and len(costs.speeds) != splits.shape[1]:
        raise PartitionError(f"costs have speeds for {len(costs.speeds)} ranks; expected {splits.shape[1]}")
    return cut_through(costs, splits)


def single_seconds(costs: Costs, tokens: float) -> float:
    """Time to the first token of one process, at nominal speed."""
    layer_s = tokens * costs.token_s + tokens**2 / 2 * costs.pair_s
    return costs.layers * max(layer_s, costs.launch_floor_s) + costs.head_s


def equal_time_lengths(costs: Costs, tokens: float, ranks: int, token_weight: float = 1.0) -> list[float]:
    """Slice lengths for which all ranks compute for the same time, without transfers (`equal_time`).

    A `token_weight` below 1 makes later slices shorter than with equal time; above 1, longer.
    """
    return equal_time(tokens, costs.rates(ranks, token_weight))


def best_split(costs: Costs, tokens: int, ranks: int, quantum: int = 64) -> tuple[Partition, float]:
    """Find the slices with the shortest time to the first token in the model; return them and their seconds.

    Starts from slices of equal time and descends in the event model, finally in steps of the quantum. Inner bounds are
    multiples of `quantum`, or of 1 for short prompts.
    """
    partition = Partition.by_ratio(tokens, search_split(costs, tokens, ranks), quantum)
    if 1 < ranks <= RANKS_MOVED_ALONE:
        step = quantum if tokens >= 4 * quantum * ranks else 1
        lengths = descend(
            lambda splits: chains_seconds(costs, splits),
            lambda lengths, _: exchanged(lengths, step),
            np.array(partition.lengths, dtype=float),
            rounds=50,
            smallest=1.0,
        )
        partition = Partition((0, *(round(bound) for bound in np.cumsum(lengths))))
    return partition, chain_seconds(costs, partition.lengths)


def search_split(costs: Costs, tokens: int, ranks: int) -> list[float]:
    """Return the unrounded slice lengths with the shortest time to the first token that the search finds."""
    if ranks == 1:
        return [float(tokens)]

    def seconds_of(splits: Array) -> Array:
        return chains_seconds(costs, splits)

    def shaped(shapes: Array) -> Array:
        return np.array([_shaped(costs, tokens, ranks, shape) for shape in shapes])

    starts = np.array([[0.0, 0.0, 0.0], [1.8, -0.1, 0.0], [10.0, 0.1, 0.0]])
    steps = np.diag([0.5, 0.1, 1.0])
    shape = starts[int(np.argmin([seconds_of(shaped(start[None]))[0] for start in starts]))]
    rounds = EVENTS_LOOKED_AT // (costs.layers * ranks * ranks)
    if rounds:
        shape = descend(
            lambda shapes: seconds_of(shaped(shapes)),
            lambda shape, scale: np.concatenate([shape + scale * steps, shape - scale * steps]),
            shape,
            rounds=min(40, rounds),
            smallest=1 / 32,
        )
    lengths = shaped(shape[None])[0]
    if ranks <= RANKS_MOVED_ALONE:
        lengths = descend(seconds_of, neighbors, lengths, rounds=200, smallest=1 / 256)
    return list(map(float, lengths))


def _shaped(costs: Costs, tokens: int, ranks: int, shape: Array) -> Array:
    """Modify slices of equal time by (log token weight, tilt, log factor of the last slice).

    If the link is the bottleneck, a longer last slice helps: the last rank's keys and values are never sent.
    """
    lengths = np.array(equal_time_lengths(costs, tokens, ranks, math.exp(min(shape[0], 10.0))))
    lengths *= np.maximum(1 + shape[1] * np.linspace(-1, 1, ranks), 0.01)
    lengths[-1] *= math.exp(min(shape[2], 10.0))
    lengths = np.maximum(lengths * tokens / lengths.sum(), min(1.0, tokens / ranks))
    return np.asarray(lengths * tokens / lengths.sum())


def exchanged(lengths: Array, step: float) -> Array:
    """Return the splits in which `step` tokens move from one slice to another."""
    ranks = len(lengths)
    givers, takers = np.nonzero(~np.eye(ranks, dtype=bool))
    moves = np.zeros((len(givers), ranks))
    rows = np.arange(len(givers))
    moves[rows, givers], moves[rows, takers] = -step, step
    found: Array = lengths + moves
    return found[(found >= 1).all(axis=1)]


def neighbors(lengths: Array, scale: float) -> Array:
    """Return the splits in which part of a mean slice moves between two slices, or between one and all others."""
    ranks = len(lengths)
    step = scale * lengths.sum() / ranks
    others = np.eye(ranks) - (1 - np.eye(ranks)) * lengths / (lengths.sum() - lengths[:, None])
    found: Array = lengths + np.concatenate([step * others, -step * others])
    return np.concatenate([exchanged(lengths, step), found[(found >= 1).all(axis=1)]])


def descend(
    seconds_of: Callable[[Array], Array],
    near: Callable[[Array, float], Array],
    start: Array,
    *,
    rounds: int,
    smallest: float,
) -> Array:
    """Move to the best neighbor while there is a better one; otherwise halve the step, down to the smallest."""
    best, best_s, scale = start, float(seconds_of(start[None])[0]), 1.0
    for _ in range(rounds):
        tried = near(best, scale)
        seconds = seconds_of(tried) if len(tried) else np.array([math.inf])
        found = int(np.argmin(seconds))
        if seconds[found] < best_s * (1 - 1e-9):
            best, best_s = tried[found], float(seconds[found])
        else:
            scale /= 2
            if scale < smallest:
                break
    return best
