"""Ways held against each other on a machine that drifts: in pairs, back to back, as ratios with an interval.

A machine that others use, or that heats up, is 20 to 60% slower some minutes later. The two runs of a pair see the
same machine; which of them goes first alternates, so that neither always runs on the warmer one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.stats import bootstrap

from kvr_mpi.errors import counted
from kvr_mpi.transport import Transport, share_json

CONFIDENCE = 0.95
# The bootstrap interval of fewer ratios' median is too narrow: of three it holds the true one 3 times in 4.
LEAST_PAIRS = 5
RESAMPLES = 4000
# A process that is started anew has its memory elsewhere, and keeps to another pace all along: over six starts of one
# line the medians of ratios had standard deviations of 1 and 2.5%, where a start's own interval was 1% wide.
STARTS_DIFFER = 0.03
# From its first to its last third, a way's own time may change by this share before it is said.
DRIFT = 0.1

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to measure.

    pairs : at least so many of each, unless the time is over.
    until : then until an interval reaches no further from its median than this share of it; None for no more.
    time_limit_s : begin no pair after so many seconds, but the first of each; None for no limit.
    """

    pairs: int
    until: float | None = None
    time_limit_s: float | None = None

    def share(self, gone_s: float, parts: int) -> Patience:
        """Give the next of so many parts its share of the time that is left."""
        limit_s = None if self.time_limit_s is None else max(0.0, self.time_limit_s - gone_s) / parts
        return replace(self, time_limit_s=limit_s)

    def is_content(self, ratios: Sequence[float]) -> bool:
        if len(ratios) < max(self.pairs, 0 if self.until is None else LEAST_PAIRS):
            return False
        return self.until is None or ratio_of(ratios).reach <= self.until


@dataclass(frozen=True, slots=True)
class Ratio:
    """What one way takes, as a multiple of another's time: median of pairs, and a 95% bootstrap interval of it."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def reach(self) -> float:
        """How far the interval reaches from the median, as a share of it."""
        return max(self.high - self.median, self.median - self.low) / self.median

    def of_any_start(self) -> Ratio:
        """Widen the interval by what another start of the same processes may change (`STARTS_DIFFER`)."""
        return replace(self, low=self.low * (1 - STARTS_DIFFER), high=self.high * (1 + STARTS_DIFFER))

    @property
    def is_told(self) -> bool:
        """Whether these pairs say which of the two is faster."""
        return self.pairs >= LEAST_PAIRS and not self.low <= 1.0 <= self.high

    def describe(self) -> str:
        """Return the ratio for a table; where the pairs do not tell the ways apart, that instead of it."""
        if self.pairs < LEAST_PAIRS:
            return f"{self.median:.2f} of {counted(self.pairs, 'pair')}"
        if not self.is_told:
            return f"the same ({self.low:.2f} to {self.high:.2f})"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """Sum ratios up; of the same ones always the same is said.

    Raises
    ------
    ValueError
        If there is none.
    """
    values = np.array(ratios, dtype=np.float64)
    if not values.size:
        raise ValueError("no ratio to sum up")
    middle = float(np.median(values))
    if np.ptp(values) == 0:
        return Ratio(middle, middle, middle, values.size)
    found = bootstrap(
        (values,),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Ratio(middle, float(found.low), float(found.high), values.size)


def measure_pairs(
    world: Transport,
    ours: str,
    others: Sequence[str],
    measure: Callable[[str], R],
    seconds: Callable[[R], float],
    patience: Patience,
) -> dict[str, list[tuple[R, R]]]:
    """Run every other way beside ours, pair after pair, until enough is known of each; every rank calls this.

    Parameters
    ----------
    ours : str
        What the others are compared with; alone, it is run as often as there would be pairs.
    measure : callable
        Runs a way by its name; every rank calls it, and is given the same.
    seconds : callable
        The time of a run.

    Returns
    -------
    dict
        For each other way its runs and ours, (theirs, ours), in order; for ours alone its runs, twice.
    """
    found: dict[str, list[tuple[R, R]]] = {name: [] for name in others or [ours]}
    began = time.monotonic()
    while True:
        todo = [name for name, runs in found.items() if not patience.is_content(ratios_of(runs, seconds))]
        if not todo:
            return found
        for name in todo:
            late = patience.time_limit_s is not None and time.monotonic() - began > patience.time_limit_s
            if share_json(world, late) and all(found.values()):
                return found
            if name == ours:
                run = measure(ours)
                found[name].append((run, run))
            elif len(found[name]) % 2:
                mine = measure(ours)
                found[name].append((measure(name), mine))
            else:
                theirs = measure(name)
                found[name].append((theirs, measure(ours)))


def ratios_of(runs: Sequence[tuple[R, R]], seconds: Callable[[R], float]) -> list[float]:
    """Divide the other's time by ours, pair by pair."""
    return [seconds(theirs) / seconds(mine) for theirs, mine in runs]


def drift_of(times: Sequence[float]) -> str | None:
    """Say that a way's own time changed while it was measured; None if it did not, or too few times are known."""
    third = len(times) // 3
    if third < 2:
        return None
    first, last = statistics.median(times[:third]), statistics.median(times[-third:])
    if abs(last / first - 1) <= DRIFT:
        return None
    return (
        f"took {first:.2f} s at the beginning and {last:.2f} s at the end: the speed of this machine drifts. The "
        f"ratios of pairs are still valid, but do not compare seconds measured at different times"
    )
