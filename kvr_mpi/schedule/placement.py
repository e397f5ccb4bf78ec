"""Placement of a corpus on ranks: which document runs on which chain, and when.

A document is a *moldable* task: its number of ranks is chosen before it starts. Chains of one length are aligned blocks
of ranks, and the longest chains run first, so that one communicator per length serves the whole job. `moldable` has the
algorithms and their sources. The schedule is deterministic: times are whole microseconds, so sums do not depend on
their order, and ties are broken by id.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvr_mpi.duration import duration_text
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.schedule.moldable import NEVER, Grid, Packing, chain_lengths, fixed_plans, lower_bound, moldable_plans

Order = Literal["longest", "shortest", "given"]

LATER = 1.02  # factor by which a batch may end later than necessary, in exchange for efficient chains, or none
# If a document fits on no chain, numbers of ranks are tried up to the job's ranks times two to this power.
MOST_DOUBLINGS = 10
DEALT = 100_000  # documents that are numbers of Python at a time


@dataclass(frozen=True, slots=True)
class Placement:
    """One document on ranks ``first_rank`` to ``first_rank + ranks - 1``, with the reason for this chain length."""

    id: str
    tokens: int
    first_rank: int
    ranks: int
    start_s: float
    end_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """The placement of a whole corpus.

    placements : in execution order: longest chains first, then in the order in which documents were given.
    does_not_fit : (id, tokens, reason) of documents that fit on no chain.
    lower_bound_s : no schedule ends sooner.
    fixed_s : (length, makespan) for all documents on chains of one length, if that is possible.
    """

    ranks: int
    placements: tuple[Placement, ...]
    does_not_fit: tuple[tuple[str, int, str], ...]
    makespan_s: float
    lower_bound_s: float
    fixed_s: tuple[tuple[int, float], ...]

    @property
    def data_parallel_s(self) -> float | None:
        """Makespan with one rank per document; None if a document does not fit on one."""
        return dict(self.fixed_s).get(1)

    @property
    def best_fixed(self) -> tuple[int, float] | None:
        """The best single chain length, and its makespan."""
        return min(self.fixed_s, key=lambda item: (item[1], item[0]), default=None)

    @property
    def chain_lengths(self) -> tuple[int, ...]:
        """Lengths in use, longest first."""
        return tuple(sorted({place.ranks for place in self.placements}, reverse=True))


@dataclass(frozen=True, slots=True)
class _Choice:
    """The chosen plan, and the alternatives that explain it.

    times : time of every document (row) for every chain length (column).
    shares : parallel efficiency, relative to the shortest chain on which the document fits; shape of `times`.
    limit : minimum efficiency of a chain length; 0 if all chosen lengths have it anyway.
    later : factor by which the batch would end later with that limit; None if the plan respects it.
    is_given : whether the job names the chain length.
    """

    plan: Packing
    times: Grid
    shares: npt.NDArray[np.float64]
    limit: float = 0.0
    later: float | None = None
    is_given: bool = False


def schedule(
    documents: Sequence[tuple[str, int]],
    ranks: int,
    seconds: SecondsOf,
    fits: Fits,
    *,
    min_efficiency: float = 0.0,
    length: int | None = None,
) -> Schedule:
    """Choose the chain length, ranks and start of every document so that the last one ends as early as possible.

    All documents run on one rank each if they fit and the batch then ends at most 2% later. Otherwise, a chain longer
    than a document's memory requires must have a parallel efficiency of at least `min_efficiency`, unless the batch
    would end more than 2% later without it, or later than with chains of one fixed length.

    documents : unique ids and tokens, in the order in which a chain takes them; a document of 0 tokens is only an error
        record and takes no time.
    seconds : maps (tokens, ranks) to the predicted time, from the first token of the prompt to the last of the answer.
    fits : whether (tokens, ranks) fits into memory; if it does, all shorter documents must fit as well.
    min_efficiency : between 0 (any chain that ends the batch sooner) and 1.
    length : run all documents on chains of this length, if that is possible (`Schedule.fixed_s` has it).

    Raises `ConfigError` if a predicted time is negative or not finite.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks: expected at least 1")
    lengths = chain_lengths(ranks, len(documents))
    by_id = sorted(documents)
    times = tabulate_times([tokens for _, tokens in by_id], lengths, seconds, fits)
    possible = [row < NEVER for row in times.min(axis=1, initial=NEVER).tolist()]
    reasons = _explain_misfits({by_id[row][1] for row, fine in enumerate(possible) if not fine}, ranks, fits)
    does_not_fit = tuple((name, tokens, reasons[tokens]) for name, tokens in by_id if tokens in reasons)
    by_id = [document for document, fine in zip(by_id, possible, strict=True) if fine]
    times = times[possible]
    fixed = fixed_plans(by_id, times, lengths, ranks)
    if length in fixed:
        choice = _Choice(fixed[length], times, np.ones(times.shape), is_given=True)
    else:
        choice = _choose(fixed, times, lengths, ranks, min_efficiency)
    order = {name: number for number, (name, _) in enumerate(documents)}
    assert len(order) == len(documents), "ids are unique"
    return Schedule(
        ranks=ranks,
        placements=_lay_out(by_id, order, choice, lengths),
        does_not_fit=does_not_fit,
        makespan_s=choice.plan.makespan / 1e6,
        lower_bound_s=lower_bound(times, np.array(lengths), ranks) / 1e6,
        fixed_s=tuple((length, plan.makespan / 1e6) for length, plan in sorted(fixed.items())),
    )


def _choose(
    fixed: dict[int, Packing], times: Grid, lengths: Sequence[int], ranks: int, min_efficiency: float
) -> _Choice:
    """Choose the plan that ends earliest, or one without chains, or an efficient one, that ends only slightly later."""
    soonest = min([*fixed.values(), *moldable_plans(times, lengths, ranks)], key=lambda plan: plan.cost)
    areas = times * np.array(lengths)
    shortest = (times < NEVER).argmax(axis=1)
    rows = np.arange(len(times))
    shares = areas[rows, shortest][:, None] / areas
    if 1 in fixed and fixed[1].makespan <= LATER * soonest.makespan:  # forecasts of chains are less accurate than that
        return _Choice(fixed[1], times, shares, min_efficiency)
    wasteful = (shares < min_efficiency) & (np.arange(len(lengths)) > shortest[:, None])
    if not (wasteful & (times < NEVER))[rows, soonest.columns].any():
        return _Choice(soonest, times, shares)
    thrifty = min(moldable_plans(np.where(wasteful, NEVER, times), lengths, ranks), key=lambda plan: plan.cost)
    if thrifty.makespan <= min([LATER * soonest.makespan, *(plan.makespan for plan in fixed.values())]):
        return _Choice(thrifty, times, shares, min_efficiency)
    return _Choice(soonest, times, shares, min_efficiency, later=thrifty.makespan / soonest.makespan)


def _explain_misfits(lengths: Iterable[int], ranks: int, fits: Fits) -> dict[int, str]:
    """Explain what documents of these lengths, which fit on no chain, would need."""
    reasons, power = dict[int, str](), 1
    for tokens in sorted(lengths):  # a longer document needs at least as many ranks
        while power <= MOST_DOUBLINGS and not fits(tokens, ranks << power):
            power += 1
        helps = power <= MOST_DOUBLINGS
        advice = f"use {ranks << power} ranks" if helps else "more ranks do not help: each rank needs more memory"
        chain = f"a chain of up to {counted(ranks, 'rank')}"
        reasons[tokens] = f"{tokens:,} tokens do not fit into the memory of {chain}; {advice}"
    return reasons


def _lay_out(
    documents: Sequence[tuple[str, int]], order: dict[str, int], choice: _Choice, lengths: Sequence[int]
) -> tuple[Placement, ...]:
    """Assign start times: longest chains first, and the given order within each block."""
    plan, times = choice.plan, choice.times
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
        reason = _reason(choice, row, lengths) if tokens else "unreadable; recorded as an error"
        placements.append(Placement(name, tokens, first, length, start / 1e6, end / 1e6, reason))
    return tuple(placements)


def _reason(choice: _Choice, row: int, lengths: Sequence[int]) -> str:
    """Explain why a document got its chain length."""
    times, shares, column = choice.times[row], choice.shares[row], int(choice.plan.columns[row])
    possible = np.flatnonzero(times < NEVER)
    if column not in possible:
        return "shorter than the chain: runs on its last rank"
    if choice.is_given:
        return "as parallel.ranks_per_chain says"
    if column == possible[0]:
        if column:
            return "does not fit on fewer ranks"
        longer = int(possible[1]) if len(possible) > 1 else 0
        if longer and shares[longer] < choice.limit and choice.later is None:
            return f"a chain of {lengths[longer]} would have an efficiency of only {100 * shares[longer]:.0f}%"
        return "more ranks would not help"
    below = int(possible[possible < column][-1])
    took, before, whole = (duration_text(int(t) / 1e6) for t in (times[column], times[below], choice.plan.makespan))
    late = f"; the whole batch takes {whole}" if times[below] > choice.plan.makespan else ""
    faster = f"{took} instead of {before} on {counted(lengths[below], 'rank')}{late}"
    if times[column] >= times[below]:
        faster = f"as slow as on {counted(lengths[below], 'rank')}, but without delay for the batch"
    reason = f"{faster}; efficiency {100 * shares[column]:.0f}%"
    if choice.later is not None and shares[column] < choice.limit:
        reason += f", but without such chains the batch would take {100 * (choice.later - 1):.0f}% longer"
    return reason


def order_key(order: Order, work: int) -> int:
    """Return the key that sorts documents into the order in which a chain takes them.

    Lengths are compared only to a factor of two. Similar documents stay in the order of the corpus, which is faster to
    read.
    """
    return {"longest": -work.bit_length(), "shortest": work.bit_length(), "given": 0}[order]


def deal(works: npt.NDArray[np.int64], chains: int) -> npt.NDArray[np.int32]:
    """Assign documents to chains, the longest first, each to the chain with the least work; return their chains.

    works : work of each document, at least 1.
    """
    found = np.zeros(len(works), np.int32)
    if chains == 1:
        return found
    loads = [(0, chain) for chain in range(chains)]
    order = np.argsort(-works, kind="stable")
    for start in range(0, len(order), DEALT):
        some = order[start : start + DEALT]
        for number, work in zip(some.tolist(), works[some].tolist(), strict=True):
            load, chain = loads[0]
            found[number] = chain
            heapq.heapreplace(loads, (load + work, chain))
    return found


SecondsOf = Callable[[int, int], float]
Fits = Callable[[int, int], bool]

# Costs are computed at this many lengths per octave and interpolated with parabolas, since attention is quadratic.
SAMPLES_PER_OCTAVE = 4


def sampled(seconds: SecondsOf) -> SecondsOf:
    """Evaluate an expensive smooth function at a few lengths only, and interpolate with parabolas."""
    known: dict[tuple[int, int], float] = {}

    def at(tokens: int, ranks: int) -> float:
        if (tokens, ranks) not in known:
            known[tokens, ranks] = seconds(tokens, ranks)
        return known[tokens, ranks]

    def between(tokens: int, ranks: int) -> float:
        step = 1 << max(0, tokens.bit_length() - SAMPLES_PER_OCTAVE.bit_length())
        below = tokens // step * step
        if below == tokens or below < ranks:  # prompts with fewer tokens than ranks run differently
            return at(tokens, ranks)
        low, middle, high = at(below, ranks), at(below + step, ranks), at(below + 2 * step, ranks)
        along = (tokens - below) / step
        return low + along * (middle - low) + along * (along - 1) / 2 * (high - 2 * middle + low)

    return between


def tabulate_times(tokens: Sequence[int], lengths: Sequence[int], seconds: SecondsOf, fits: Fits) -> Grid:
    """Microseconds of every document (row) for every chain length (column); `NEVER` where it is impossible."""
    distinct = sorted(set(tokens))
    rows = {count: row for row, count in enumerate(distinct)}
    table = np.full((len(distinct), len(lengths)), NEVER, dtype=np.int64)
    for column, length in enumerate(lengths):
        # Find the longest document that fits; all shorter ones fit, too.
        fitting = bisect_left(distinct, True, key=lambda count: not fits(count, length))
        for row, count in enumerate(distinct[:fitting]):
            if count >= length:
                found = seconds(count, length)
                if not (math.isfinite(found) and found >= 0):
                    raise ConfigError(
                        f"predicted time of {count:,} tokens on {counted(length, 'rank')} is {found} s; expected a "
                        f"finite number of at least 0: check the rates or the hardware profile"
                    )
                table[row, column] = min(max(1, round(found * 1e6)), NEVER - 1)
            elif count == 0 and length == 1:  # only an error record
                table[row, column] = 1
    return table[[rows[count] for count in tokens]]
