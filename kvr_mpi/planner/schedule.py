"""Which documents on which chains, and when: a corpus of moldable tasks on identical ranks.

Stands between the cost model, which says how long a document takes on a chain of a length, and the batch. A document
is a *moldable* task: the number of its ranks is chosen before it starts. Chains are aligned blocks of nested lengths
that divide the number of ranks, as in a buddy allocator, so that one communicator for each block serves the whole job.

`packing` says how lengths and places are chosen, and after whom; the best plan of one fixed length is taken if none of
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
import numpy.typing as npt

from kvr_mpi.errors import ConfigError
from kvr_mpi.planner.packing import NEVER, Plan, Table, bounds, fixed_plans, moldable_plans

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
        """Lengths in use, longest first; each divides those before it, and the ranks."""
        return tuple(sorted({place.ranks for place in self.placements}, reverse=True))


def schedule(documents: Sequence[tuple[str, int]], ranks: int, seconds: Seconds, fits: Fits) -> Schedule:
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

    Raises
    ------
    ConfigError
        If a predicted time is no number of seconds.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks: expected at least 1")
    lengths = [length for length in range(1, ranks + 1) if ranks % length == 0]
    by_id = sorted(documents)
    times = _times([tokens for _, tokens in by_id], lengths, seconds, fits)
    possible = [row < NEVER for row in times.min(axis=1, initial=NEVER).tolist()]
    misfits = tuple(
        (name, tokens, _misfit(tokens, ranks, fits))
        for (name, tokens), fine in zip(by_id, possible, strict=True)
        if not fine
    )
    by_id = [document for document, fine in zip(by_id, possible, strict=True) if fine]
    times = times[possible]
    fixed = fixed_plans(by_id, times, lengths, ranks)
    plans = [*fixed.values(), *moldable_plans(times, lengths, ranks)]
    if not plans:
        raise ConfigError(f"the documents need chain lengths that do not divide one another on {ranks} ranks; use 2^n")
    plan = min(plans, key=lambda plan: plan.cost)
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


def _times(tokens: Sequence[int], lengths: Sequence[int], seconds: Seconds, fits: Fits) -> Table:
    """Microseconds of every document (row) on every chain length (column), `NEVER` where it is not possible."""
    distinct, rows = np.unique(np.array(tokens, dtype=np.int64), return_inverse=True)
    table = np.full((len(distinct), len(lengths)), NEVER, dtype=np.int64)
    for column, length in enumerate(lengths):
        low, high = 0, len(distinct)  # documents that fit are the shortest ones: find where they end
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(int(distinct[middle]), length) else (low, middle)
        first = int(np.searchsorted(distinct, length))
        if first < low:
            found = _seconds_at(distinct[first:low], length, seconds)
            table[first:low, column] = np.clip(np.round(1e6 * found), 1, NEVER - 1)
        if length == 1 and first and low:  # no tokens: a record to write
            table[0, column] = 1
    return table[rows.reshape(-1)]


def _seconds_at(counts: Table, length: int, seconds: Seconds) -> npt.NDArray[np.float64]:
    """Ask for the times of prompts of so many tokens, ascending; if they are many, lay parabolas between samples."""
    steps = 1 << np.maximum(0, np.frexp(counts)[1] - SAMPLES_PER_OCTAVE.bit_length())
    below = counts // steps * steps
    between = (steps > 1) & (below >= length)
    around = below[between] + steps[between] * np.arange(3)[:, None]
    samples = np.unique(np.concatenate([around.ravel(), counts[~between]]))
    if len(samples) >= len(counts):
        return np.array([_ask(seconds, int(count), length) for count in counts])
    known = np.array([_ask(seconds, int(count), length) for count in samples])
    low, middle, high = known[np.searchsorted(samples, around)]
    along = (counts - below)[between] / steps[between]
    found = known[np.minimum(np.searchsorted(samples, counts), len(samples) - 1)]
    found[between] = low + along * (middle - low) + along * (along - 1) / 2 * (high - 2 * middle + low)
    return found


def _ask(seconds: Seconds, tokens: int, length: int) -> float:
    found = seconds(tokens, length)
    if not (math.isfinite(found) and found >= 0):
        raise ConfigError(
            f"predicted time of {tokens} tokens on {length} rank(s) is {found} s; expected a finite number, not "
            f"negative: look at the rates or the hardware profile it comes from"
        )
    return found


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
