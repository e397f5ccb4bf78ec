"""Which documents on which chains, and when: a corpus of moldable tasks on identical ranks.

Stands between the cost model, which says how long a document takes on a chain of a length, and the batch. A document
is a *moldable* task: the number of its ranks is chosen before it starts. Chains of one length are aligned blocks of
ranks, those of all lengths are run longest first, so that one communicator for each length serves the whole job.

`moldable` says how lengths and places are chosen, and after whom; the best plan of one fixed length is taken if none of
mixed lengths is better.

Every rank computes the same schedule: time is counted in whole microseconds, so that sums do not depend on their
order, and ties are broken by id.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvr_mpi.errors import ConfigError
from kvr_mpi.schedule.moldable import NEVER, Plan, Table, bounds, chain_lengths, fixed_plans, moldable_plans

Seconds = Callable[[int, int], float]
Fits = Callable[[int, int], bool]

# Costs are asked for at this many lengths an octave; between them a parabola is laid, as attention's work is one.
SAMPLES_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True)
class Placement:
    """One document on ranks ``first_rank`` to ``first_rank + ranks - 1``, and why on so many."""

    id: str
    tokens: int
    first_rank: int
    ranks: int
    start_s: float
    end_s: float
    reason: str

    def has(self, rank: int) -> bool:
        """Say whether a rank takes part."""
        return self.first_rank <= rank < self.first_rank + self.ranks


@dataclass(frozen=True, slots=True)
class Schedule:
    """A corpus on ranks.

    placements : in an order all ranks can follow: longest chains first, then as the corpus has them.
    misfits : (id, tokens, reason) of documents that fit on no chain.
    lower_bound_s : no schedule ends sooner; `area_bound_s` (least rank time over the ranks) and `longest_bound_s` (the
        longest document on its fastest chain) are weaker.
    fixed_s : (length, makespan) of running all documents on chains of one length, where that is possible.
    """

    ranks: int
    placements: tuple[Placement, ...]
    misfits: tuple[tuple[str, int, str], ...]
    makespan_s: float
    lower_bound_s: float
    area_bound_s: float
    longest_bound_s: float
    fixed_s: tuple[tuple[int, float], ...]

    @property
    def data_parallel_s(self) -> float | None:
        """Makespan of one rank for each document; None if a document does not fit on one."""
        return dict(self.fixed_s).get(1)

    @property
    def best_fixed(self) -> tuple[int, float] | None:
        """The best single chain length, and its makespan."""
        return min(self.fixed_s, key=lambda item: (item[1], item[0]), default=None)

    @property
    def chain_lengths(self) -> tuple[int, ...]:
        """Lengths in use, longest first."""
        return tuple(sorted({place.ranks for place in self.placements}, reverse=True))


def schedule(
    documents: Sequence[tuple[str, int]], ranks: int, seconds: Seconds, fits: Fits, *, smooth: bool = True
) -> Schedule:
    """Choose chain, place and time of every document so that the last one ends soon.

    Parameters
    ----------
    documents : sequence of (str, int)
        Unique ids and tokens; a document of 0 tokens is a record to write and takes no time.
    ranks : int
    seconds : callable
        Predicted time of (tokens, ranks), from the first token of the prompt to the last of the answer.
    fits : callable
        Whether (tokens, ranks) has the memory it needs; if so, then any shorter document has it, too.
    smooth : bool
        Whether `seconds` is smooth in tokens, and may be asked at a few lengths only; else at every document's.

    Raises
    ------
    ConfigError
        If a predicted time is no number of seconds.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks: expected at least 1")
    lengths = chain_lengths(ranks, len(documents))
    by_id = sorted(documents)
    times = _times([tokens for _, tokens in by_id], lengths, sampled(seconds) if smooth else seconds, fits)
    possible = [row < NEVER for row in times.min(axis=1, initial=NEVER).tolist()]
    misfits = tuple(
        (name, tokens, _misfit(tokens, ranks, fits))
        for (name, tokens), fine in zip(by_id, possible, strict=True)
        if not fine
    )
    by_id = [document for document, fine in zip(by_id, possible, strict=True) if fine]
    times = times[possible]
    fixed = fixed_plans(by_id, times, lengths, ranks)
    plan = min([*fixed.values(), *moldable_plans(times, lengths, ranks)], key=lambda plan: plan.cost)
    order = {name: number for number, (name, _) in enumerate(documents)}
    assert len(order) == len(documents), "ids are unique"
    area, longest, lower = bounds(times, np.array(lengths), ranks)
    return Schedule(
        ranks=ranks,
        placements=_lay_out(by_id, order, plan, times, lengths),
        misfits=misfits,
        makespan_s=plan.makespan / 1e6,
        lower_bound_s=lower / 1e6,
        area_bound_s=area / 1e6,
        longest_bound_s=longest / 1e6,
        fixed_s=tuple((length, plan.makespan / 1e6) for length, plan in sorted(fixed.items())),
    )


def sampled(seconds: Seconds) -> Seconds:
    """Ask a costly function, smooth in tokens, at a few lengths only, and lay parabolas between them."""
    known: dict[tuple[int, int], float] = {}

    def at(tokens: int, ranks: int) -> float:
        if (tokens, ranks) not in known:
            known[tokens, ranks] = seconds(tokens, ranks)
        return known[tokens, ranks]

    def between(tokens: int, ranks: int) -> float:
        step = 1 << max(0, tokens.bit_length() - SAMPLES_PER_OCTAVE.bit_length())
        below = tokens // step * step
        if below == tokens or below < ranks:  # there may be another regime below one token a rank
            return at(tokens, ranks)
        low, middle, high = at(below, ranks), at(below + step, ranks), at(below + 2 * step, ranks)
        along = (tokens - below) / step
        return low + along * (middle - low) + along * (along - 1) / 2 * (high - 2 * middle + low)

    return between


def _times(tokens: Sequence[int], lengths: Sequence[int], seconds: Seconds, fits: Fits) -> Table:
    """Microseconds of every document (row) on every chain length (column), `NEVER` where it is not possible."""
    distinct = sorted(set(tokens))
    rows = {count: row for row, count in enumerate(distinct)}
    table = np.full((len(distinct), len(lengths)), NEVER, dtype=np.int64)
    for column, length in enumerate(lengths):
        low, high = 0, len(distinct)  # documents that fit are the shortest ones: find where they end
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(distinct[middle], length) else (low, middle)
        for row, count in enumerate(distinct[:low]):
            if count >= length:
                table[row, column] = _microseconds(seconds(count, length), count, length)
            elif count == 0 and length == 1:  # a record to write
                table[row, column] = 1
    return table[[rows[count] for count in tokens]]


def _microseconds(found: float, tokens: int, length: int) -> int:
    if not (math.isfinite(found) and found >= 0):
        raise ConfigError(
            f"predicted time of {tokens} tokens on {length} rank(s) is {found} s; expected a finite number, not "
            f"negative: look at the rates or the hardware profile it comes from"
        )
    return min(max(1, round(found * 1e6)), NEVER - 1)


def _misfit(tokens: int, ranks: int, fits: Fits) -> str:
    """Say what would do for a document that fits on no chain."""
    enough = next((more for more in (ranks << power for power in range(1, 11)) if fits(tokens, more)), None)
    advice = f"start {enough} ranks" if enough else "no number of ranks would do: it needs more memory on each"
    return f"{tokens} tokens do not fit into the memory of a chain of up to {ranks} rank(s); {advice}"


def _lay_out(
    documents: Sequence[tuple[str, int]],
    order: dict[str, int],
    plan: Plan,
    times: Table,
    lengths: Sequence[int],
) -> tuple[Placement, ...]:
    """Say when: longest chains first; on one block documents of one length follow each other as the corpus has them."""
    free: dict[int, int] = {}
    placements = []
    rows = sorted(range(len(documents)), key=lambda row: (-plan.columns[row], order[documents[row][0]]))
    for row in rows:
        name, tokens = documents[row]
        column = int(plan.columns[row])
        length = lengths[column]
        first = int(plan.blocks[row]) * length
        start = max(free.get(rank, 0) for rank in range(first, first + length))
        end = start + int(times[row, column] if times[row, column] < NEVER else times[row, 0])
        free.update(dict.fromkeys(range(first, first + length), end))
        reason = _reason(times[row], column, lengths, plan.makespan) if tokens else "only an error to record"
        placements.append(Placement(name, tokens, first, length, start / 1e6, end / 1e6, reason))
    return tuple(placements)


def _reason(times: Table, column: int, lengths: Sequence[int], makespan: int) -> str:
    """Why a document got this chain length."""
    possible = np.flatnonzero(times < NEVER)
    shortest = int(possible[0])
    if column not in possible:
        return "shorter than the chain: its last rank does it"
    if column == shortest:
        return "a longer chain would not end the batch sooner" if column == 0 else "does not fit on fewer ranks"
    below = int(possible[possible < column][-1])
    took, before = int(times[column]) / 1e6, int(times[below]) / 1e6
    share = times[shortest] * lengths[shortest] / (times[column] * lengths[column])
    late = " (longer than the whole batch)" if times[below] > makespan else ""
    return f"{took:.1f} s instead of {before:.1f} s on {lengths[below]}{late}; {100 * share:.0f} % efficient"


def deal(todo: Sequence[tuple[str, int]], chains: int) -> list[set[str]]:
    """Share documents (id, characters) among chains: the longest first, each to the chain with least to do."""
    shares: list[set[str]] = [set() for _ in range(chains)]
    loads = [(0, chain) for chain in range(chains)]
    for name, chars in sorted(todo, key=lambda item: (-item[1], item[0])):
        load, chain = heapq.heappop(loads)
        shares[chain].add(name)
        heapq.heappush(loads, (load + max(1, chars), chain))
    return shares
