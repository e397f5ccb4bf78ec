"""Scheduling of moldable documents on aligned blocks of ranks: chain lengths and positions.

Arrays for `schedule`: documents are rows in the order of their ids, chain lengths are columns in ascending order, and
times are whole microseconds.

- Lengths by a deadline d: each document gets the length with the least rank time among those that finish it within d
  (the canonical allotment of Turek, Wolf and Yu, SPAA 1992; Mounié, Rapine and Trystram, SIAM J. Comput. 37(2),
  2007). Several d are tried.
- Lengths by ascent: starting from the best of these, and from the cheapest lengths, the document that ends last
  repeatedly gets a longer chain (similar to Turek, Wolf and Yu, and to Belkhale and Banerjee, ICPP 1990).
- Blocks: longest chains first, then longest documents first, each on the block that is free first (LPT; Graham, SIAM
  J. Appl. Math. 17(2), 1969). If lengths divide one another, blocks are nested, so all ranks of a block become free at
  the same time and none idles before the end: the makespan is at most the mean load plus one document. With one
  document per rank or fewer, lengths in between waste less than that idling.
- The lower bound is the smallest d for which the canonical allotment's area fits into d x ranks (Ludwig and Tiwari,
  SODA 1994).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvr_mpi.topology import Topology, divides

# Total number of documents placed over all trials; minimum and maximum number of trials of each kind.
TRIAL_DOCUMENTS, MIN_TRIALS, MAX_TRIALS = 100_000, 6, 200
# With at most this many documents per rank, chains may also have lengths that do not divide the number of ranks: powers
# of two times 5/4, 6/4, 7/4 and 8/4, up to the longest chain that is forecast quickly.
FEW_PER_RANK, QUARTERS, LONGEST_BETWEEN = 4, (5, 6, 7, 8), 64
# Time of an impossible chain length: two years in microseconds, so that multiplication by many ranks does not exceed 64
# bits.
NEVER = 1 << 46

Grid = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packing:
    """Index of each document's chain length and block, and the row of the document that ends last."""

    columns: Grid
    blocks: Grid
    makespan: int
    area: int
    last: int

    @property
    def cost(self) -> tuple[int, int, int]:
        """The objective: makespan, then rank time, then number of chain lengths."""
        return self.makespan, self.area, len(np.unique(self.columns))


def chain_lengths(ranks: int, documents: int) -> list[int]:
    """Possible chain lengths, ascending: divisors of the number of ranks, and some in between for few documents."""
    found = {length for length in range(1, ranks + 1) if divides(length, ranks)}
    if documents <= FEW_PER_RANK * ranks:
        powers = range(min(ranks, LONGEST_BETWEEN).bit_length())
        between = {(quarter << power) // 4 for power in powers for quarter in QUARTERS}
        found |= {length for length in between if length <= min(ranks, LONGEST_BETWEEN)}
    return sorted(found)


def pack(times: Grid, columns: Grid, lengths: Sequence[int], ranks: int) -> Packing:
    """Place documents on the block that is free first: longest chains first, then longest documents.

    If a length does not divide the number of ranks, the remaining ranks only take part in shorter chains.
    """
    rows = np.arange(len(columns))
    took = times[rows, columns]
    by_time = np.argsort(-took, kind="stable")  # rows are in the order of ids, which breaks ties
    blocks = np.zeros(len(columns), dtype=np.int64)
    free, last = np.zeros(ranks, dtype=np.int64), np.full(ranks, -1)
    for column in sorted(set(columns.tolist()), reverse=True):
        length = lengths[column]
        count = Topology(ranks, length).chains
        heap = list(zip(free[: count * length].reshape(count, length).max(axis=1).tolist(), range(count), strict=True))
        heapq.heapify(heap)
        mine = by_time[columns[by_time] == column]
        ends: dict[int, tuple[int, int]] = {}
        for row, time in zip(mine.tolist(), took[mine].tolist(), strict=True):
            at, block = heap[0]
            heapq.heapreplace(heap, (at + time, block))
            blocks[row] = block
            ends[block] = at + time, row
        for block, (end, row) in ends.items():
            free[block * length : (block + 1) * length] = end
            last[block * length : (block + 1) * length] = row
    makespan = int(free.max())
    area = int((took * np.array(lengths)[columns]).sum())
    return Packing(columns, blocks, makespan, area, int(last[int(free.argmax())]))


def fixed_plans(
    documents: Sequence[tuple[str, int]], times: Grid, lengths: Sequence[int], ranks: int
) -> dict[int, Packing]:
    """Plans with chains of one length, for each that divides `ranks`; a shorter prompt runs on the last rank alone."""
    plans = {}
    for column, length in enumerate(lengths):
        if not divides(length, ranks):
            continue
        short = np.array([tokens < length for _, tokens in documents], dtype=bool)
        took = np.where(short, times[:, 0], times[:, column])
        if (took < NEVER).all():
            table = np.full_like(times, NEVER)
            table[:, column] = took
            plans[length] = pack(table, np.full(len(took), column), lengths, ranks)
    return plans


def moldable_plans(times: Grid, lengths: Sequence[int], ranks: int) -> list[Packing]:
    """Find two good plans with mixed lengths: from the best deadline, and from the cheapest lengths."""
    if not len(times):
        return []
    trials = min(MAX_TRIALS, max(MIN_TRIALS, TRIAL_DOCUMENTS // len(times)))
    areas = _areas(times, np.array(lengths))
    deadlines = _deadlines(times, areas, ranks, trials)
    found = [pack(times, _allot(times, areas, deadline), lengths, ranks) for deadline in deadlines]
    best = min(found, key=lambda plan: plan.cost)
    cheapest = pack(times, areas.argmin(axis=1), lengths, ranks)
    return [_climb(start, times, lengths, ranks, trials) for start in (best, cheapest)]


def _areas(times: Grid, lengths: Grid) -> Grid:
    """Rank time of every document for every chain length."""
    areas: Grid = np.where(times < NEVER, times * lengths, NEVER * int(lengths[-1]))
    return areas


def _allot(times: Grid, areas: Grid, deadline: int) -> Grid:
    """Choose for each document the cheapest length that meets the deadline, or the fastest if none does."""
    in_time = times <= deadline
    cheapest = np.where(in_time, areas, np.iinfo(np.int64).max).argmin(axis=1)
    columns: Grid = np.where(in_time.any(axis=1), cheapest, times.argmin(axis=1))
    return columns


def _deadlines(times: Grid, areas: Grid, ranks: int, count: int) -> list[int]:
    """Deadlines at which the choice of a chain length can change."""
    target = max(int(areas.min(axis=1).sum()) // ranks, int(times.min(axis=1).max()))
    worth = np.unique(times[(times >= target // 32) & (times <= 2 * target)])
    if len(worth) > count:
        worth = worth[np.linspace(0, len(worth) - 1, count).astype(np.int64)]
    return [*worth.tolist(), 2 * target]


def _climb(plan: Packing, times: Grid, lengths: Sequence[int], ranks: int, steps: int) -> Packing:
    """Repeatedly move the document that ends last to a longer, faster chain; return the best plan found."""
    best = plan
    for _ in range(steps):
        faster = np.flatnonzero(times[plan.last] < times[plan.last, plan.columns[plan.last]])
        longer = faster[faster > plan.columns[plan.last]]
        if not len(longer):
            break
        columns = plan.columns.copy()
        columns[plan.last] = longer[0]
        plan = pack(times, columns, lengths, ranks)
        best = min(best, plan, key=lambda plan: plan.cost)
    return best


def lower_bound(times: Grid, lengths: Grid, ranks: int) -> int:
    """Return the smallest deadline whose allotment is feasible."""
    if not len(times):
        return 0
    areas = _areas(times, lengths)

    def feasible(deadline: int) -> bool:
        least = np.where(times <= deadline, areas, NEVER * int(lengths[-1])).min(axis=1)
        return int(least.sum()) <= deadline * ranks

    low = int(times.min(axis=1).max())  # every document can end within this
    high = max(-(-int(areas.min(axis=1).sum()) // ranks), int(times[times < NEVER].max()))  # permits all lengths
    return low + bisect_left(range(low, high), True, key=feasible)
