"""Go downhill on a function that takes many points at once, so that a round of a hundred trials costs like a few.

Stands under the cost model's search for slices, whose function has kinks and no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def exchanged(lengths: Array, step: float) -> Array:
    """Make the splits in which one slice gives `step` tokens to another."""
    ranks = len(lengths)
    givers, takers = np.nonzero(~np.eye(ranks, dtype=bool))
    moves = np.zeros((len(givers), ranks))
    rows = np.arange(len(givers))
    moves[rows, givers], moves[rows, takers] = -step, step
    found: Array = lengths + moves
    return found[(found >= 1).all(axis=1)]


def neighbours(lengths: Array, scale: float) -> Array:
    """Make the splits in which a share of a mean slice moves from one slice to another, or to or from all others."""
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
    """Go to the best neighbour while there is a better one, else halve the scale, down to the smallest."""
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
