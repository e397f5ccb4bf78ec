"""Placements of heads that only research needs: exhaustive searches, and FairKV's objective (eq. 4) taken literally."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kvr_mpi.compress.placement import (
    LayerPlacement,
    Loads,
    Piece,
    place_best_effort,
    place_in_proportion,
    place_with_equal_copies,
    spill_over,
    split_evenly,
)
from kvr_mpi.errors import ConfigError

# Algorithm 1 lists every way to copy heads; beyond so many heads and copies that is no longer done.
MAX_BACKTRACKED = 16


def place_best(loads: Sequence[float], ranks: int) -> LayerPlacement:
    """Place whole heads as well as can be (branch and bound): as long as that takes, which is short for 8 heads."""
    return _search(split_evenly(loads, [1] * len(loads)), ranks, place_best_effort(loads, ranks))


def place_best_with_equal_copies(
    loads: Sequence[float], ranks: int, copies: int, max_replicas: int | None = None
) -> LayerPlacement:
    """Try every way to copy heads and split each evenly (algorithm 1), each placed as well as can be.

    Raises
    ------
    ConfigError
        If there are too many ways.
    """
    best = place_with_equal_copies(loads, ranks, copies, max_replicas)
    if len(loads) + copies > MAX_BACKTRACKED:
        raise ConfigError(f"{len(loads)} heads and {copies} copies are too many to try every way")
    for counts in backtrack(len(loads), copies, min(max_replicas or ranks, ranks)):
        best = _search(split_evenly(loads, counts), ranks, best)
    return best


def place_best_in_proportion(
    loads: Sequence[float], ranks: int, copies: int, max_replicas: int | None = None
) -> LayerPlacement:
    """Copy heads and split each in any proportion, with every way to group heads that share ranks.

    It takes some milliseconds for 8 heads.
    """
    return place_in_proportion(loads, ranks, copies, max_replicas, (spill_over, _group))


def backtrack(heads: int, copies: int, most: int) -> Iterator[list[int]]:
    """List every way to split heads into no more than so many pieces (FairKV, algorithm 1): pieces of each head."""

    def go_on(counts: list[int], left: int) -> Iterator[list[int]]:
        if len(counts) == heads:
            yield list(counts)
            return
        for more in range(min(left, most - 1) + 1):
            yield from go_on([*counts, 1 + more], left - more)

    yield from go_on([], copies)


def place_by_total(loads: Loads, ranks: int) -> list[LayerPlacement]:
    """Place all layers' heads by eq. 4 alone: the most that any rank has of all layers together.

    For comparison: a layer may end up on few ranks, with the others waiting (see `sync_efficiency`).
    """
    totals = np.zeros(ranks)
    pieces: list[list[Piece]] = [[] for _ in range(len(loads))]
    for layer, head in sorted(np.ndindex(loads.shape), key=lambda place: -loads[place]):
        rank = int(totals.argmin())
        totals[rank] += loads[layer, head]
        pieces[layer].append(Piece(head, rank, float(loads[layer, head])))
    return [LayerPlacement(ranks, tuple(each)) for each in pieces]


def total_efficiency(placed: Sequence[LayerPlacement]) -> float:
    """Efficiency as the paper has it (eq. 5): mean over maximum of what ranks have of all layers together."""
    totals = np.sum([layer.loads for layer in placed], axis=0)
    return float(totals.mean() / totals.max())


def load_ratio(placed: Sequence[LayerPlacement], other: Sequence[LayerPlacement]) -> float:
    """How many times the other's critical path this one's is shorter: a ratio of loads, not a speed-up."""
    return sum(layer.heaviest for layer in other) / sum(layer.heaviest for layer in placed)


def _search(items: Sequence[tuple[float, int]], ranks: int, best: LayerPlacement) -> LayerPlacement:
    """Branch and bound over all ways to place pieces; returns `best` if none is better."""
    total = sum(load for load, _ in items)
    bound = max(total / ranks, items[0][0])
    if len(items) > ranks:
        bound = max(bound, items[ranks - 1][0] + items[ranks][0])
    found, limit = best, best.heaviest
    loads, heads = [0.0] * ranks, [set[int]() for _ in range(ranks)]
    chosen: list[Piece] = []

    def go_on(at: int) -> None:
        nonlocal found, limit
        if limit <= bound * (1 + 1e-12):
            return
        if at == len(items):
            found, limit = LayerPlacement(ranks, tuple(chosen)), max(loads)
            return
        load, head = items[at]
        seen_empty = False
        for rank in sorted(range(ranks), key=loads.__getitem__):
            if head in heads[rank] or loads[rank] + load >= limit * (1 - 1e-12):
                continue
            if not heads[rank]:  # ranks that have nothing are alike
                if seen_empty:
                    continue
                seen_empty = True
            before = loads[rank]
            loads[rank] += load
            heads[rank].add(head)
            chosen.append(Piece(head, rank, load))
            go_on(at + 1)
            chosen.pop()
            heads[rank].discard(head)
            loads[rank] = before

    if bound < limit * (1 - 1e-12):
        go_on(0)
    return found


def _group(loads: Sequence[float], ranks: int, copies: int, most: int, limit: float) -> LayerPlacement | None:
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
                pieces.append(Piece(head, rank, part))
                rest, room = rest - part, room - part
                if loads[head] <= tiny:
                    break
        rank += 1
    placed = LayerPlacement(ranks, tuple(pieces))
    per_head = [sum(piece.head == head for piece in pieces) for head in range(len(loads))]
    return placed if max(per_head) <= most else None
