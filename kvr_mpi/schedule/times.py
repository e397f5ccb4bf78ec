"""The time of every document on every chain length, from as few forecasts as possible.

Stands between a forecast, which may take milliseconds for one figure, and the scheduling, which wants them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvr_mpi.errors import ConfigError
from kvr_mpi.schedule.moldable import NEVER, Table

Seconds = Callable[[int, int], float]
Fits = Callable[[int, int], bool]

# Costs are computed at this many lengths per octave, and interpolated by parabolas, since attention is quadratic.
SAMPLES_PER_OCTAVE = 4


def sampled(seconds: Seconds) -> Seconds:
    """Evaluate an expensive smooth function of the tokens at a few lengths only, and interpolate by parabolas."""
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


def tabulate_times(tokens: Sequence[int], lengths: Sequence[int], seconds: Seconds, fits: Fits) -> Table:
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
            f"predicted time of {tokens} tokens on {length} rank(s) is {found} s; expected a finite number of at least "
            f"0: check the rates or the hardware profile"
        )
    return min(max(1, round(found * 1e6)), NEVER - 1)
