"""Placements of heads that only research needs: exhaustive searches, and FairKV's objective (eq. 4) taken literally."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvr_mpi.fairkv.placement import (
    HeadPiece,
    LayerPlacement,
    Loads,
    place_with_equal_copies,
    spill_over,
)

# From (loads, ranks, copies, limit) to a placement of a layer's heads in which no rank exceeds the limit; None if it
# finds none.
Fit = Callable[[Sequence[float], int, int, float], LayerPlacement | None]
# The bisection ends within this share of the mean load.
PRECISION = 1e-4


def place_with_copies(
    loads: Sequence[float], ranks: int, copies: int, fits: Sequence[Fit] = (spill_over,)
) -> LayerPlacement:
    """Split heads in any proportion with a limited number of copies; jobs have as many as they need.

    The largest load is minimized by bisection, and is never larger than with even splits.

    Parameters
    ----------
    fits : sequence of callable
        Tried in order, each with a bisection.
    """
    mean, best = float(sum(loads)) / ranks, place_with_equal_copies(loads, ranks, copies)
    for fit in fits:
        found = fit(loads, ranks, copies, mean * (1 + 1e-9))
        if found is not None:
            return min(best, found, key=lambda one: one.heaviest)
        low, high = mean, best.heaviest
        while high - low > PRECISION * mean:
            middle = (low + high) / 2
            found = fit(loads, ranks, copies, middle)
            if found is None:
                low = middle
            else:
                best, high = min(best, found, key=lambda one: one.heaviest), middle
    return best


def place_best_with_copies(loads: Sequence[float], ranks: int, copies: int) -> LayerPlacement:
    """Try every way to group heads that share ranks, too, which takes some milliseconds for 8 heads."""
    return place_with_copies(loads, ranks, copies, (spill_over, _group))


def place_by_total(loads: Loads, ranks: int) -> list[LayerPlacement]:
    """Place all layers' heads by eq. 4 alone: the most that any rank has of all layers together.

    For comparison: a layer may end up on few ranks, with the others waiting (see `sync_efficiency`).
    """
    totals = np.zeros(ranks)
    pieces: list[list[HeadPiece]] = [[] for _ in range(len(loads))]
    for layer, head in sorted(np.ndindex(loads.shape), key=lambda place: -loads[place]):
        rank = int(totals.argmin())
        totals[rank] += loads[layer, head]
        pieces[layer].append(HeadPiece(head, rank, float(loads[layer, head])))
    return [LayerPlacement(ranks, tuple(each)) for each in pieces]


def total_efficiency(placed: Sequence[LayerPlacement]) -> float:
    """Efficiency as the paper has it (eq. 5): mean over maximum of what ranks have of all layers together."""
    totals = np.sum([layer.loads for layer in placed], axis=0)
    return float(totals.mean() / totals.max())


def load_ratio(placed: Sequence[LayerPlacement], other: Sequence[LayerPlacement]) -> float:
    """How many times the other's critical path this one's is shorter: a ratio of loads, not a speed-up."""
    return sum(layer.heaviest for layer in other) / sum(layer.heaviest for layer in placed)


def _group(loads: Sequence[float], ranks: int, copies: int, limit: float) -> LayerPlacement | None:
    """Place heads in groups that share ranks, so that no rank has more than `limit`; None if there is no way.

    A group that takes n ranks takes n - 1 copies: its heads are laid end to end and cut where a rank is full.
    """
    order = sorted(range(len(loads)), key=lambda head: -loads[head])
    groups: list[list[int]] = []
    sums: list[float] = []

    def go_on(at: int) -> bool:
        taken = [max(1, math.ceil(each / limit - 1e-9)) for each in sums]
        if sum(taken) > ranks or sum(taken) - len(taken) > copies:
            return False
        if at == len(order):
            return True
        head, seen = order[at], set[float]()
        for number in range(len(groups)):
            if sums[number] not in seen:  # groups of the same sum are alike
                seen.add(sums[number])
                groups[number].append(head)
                sums[number] += loads[head]
                if go_on(at + 1):
                    return True
                groups[number].pop()
                sums[number] -= loads[head]
        groups.append([head])
        sums.append(float(loads[head]))
        if go_on(at + 1):
            return True
        groups.pop()
        sums.pop()
        return False

    if not go_on(0):
        return None
    pieces, rank, tiny = [], 0, 1e-9 * limit
    for members in groups:
        room = limit
        for head in members:
            rest = float(loads[head])
            while rest > tiny or loads[head] <= tiny:
                if room <= tiny:
                    rank, room = rank + 1, limit
                part = min(rest, room)
                pieces.append(HeadPiece(head, rank, part))
                rest, room = rest - part, room - part
                if loads[head] <= tiny:
                    break
        rank += 1
    return LayerPlacement(ranks, tuple(pieces))
