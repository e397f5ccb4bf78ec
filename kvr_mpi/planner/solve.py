"""The equal-time split in closed form: no search, no table, within a few per cent of the best.

Stands between the measured `Rates` and the `Partition`. KV-Runahead (section 4.2) searches a grid on the
machine for this; the closed form needs two numbers per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvr_mpi.errors import PartitionError


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank takes for one layer.

    token_s : seconds for a token's projections and MLP.
    pair_s : seconds for one query attending to one key.
    """

    token_s: float
    pair_s: float

    def __post_init__(self) -> None:
        """Refuse rates no machine has."""
        for name, value in (("token_s", self.token_s), ("pair_s", self.pair_s)):
            if not (math.isfinite(value) and value >= 0):
                raise PartitionError(f"rates.{name} = {value}: expected a finite number of seconds, not negative")
        if self.token_s + self.pair_s == 0:
            raise PartitionError("rates: token_s and pair_s are both 0; expected measured seconds")

    def seconds(self, tokens: float, before: float) -> float:
        """Time of one layer for a slice of `tokens` behind `before` tokens."""
        return tokens * (self.token_s + self.pair_s * (before + tokens / 2))

    def tokens_in(self, seconds: float, before: float) -> float:
        """Longest slice behind `before` tokens that takes no more than `seconds`: the inverse of `seconds`."""
        linear = self.token_s + self.pair_s * before
        # The positive root of pair/2 c^2 + linear c = seconds, in the form that does not cancel for small pair_s.
        return 2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.pair_s * seconds))


def equal_time(tokens: int, rates: Sequence[Rates]) -> list[float]:
    """Slice lengths for which every rank computes equally long.

    Solves c_i (a_i + b_i (P_i + c_i / 2)) = t with the c_i adding up to the prompt, P_i the tokens before
    slice i, by bisection over t: the later a rank, the longer the prefix it attends to, the shorter its slice.

    Parameters
    ----------
    tokens : int
        Length of the prompt.
    rates : sequence of Rates
        One for each rank, so that a slower rank gets less.

    Returns
    -------
    list of float
        Lengths that add up to `tokens`; round them with ``Partition.by_ratio``.
    """
    low, high = 0.0, max(rate.seconds(tokens, tokens) for rate in rates)
    lengths: list[float] = []
    for _ in range(100):
        middle = (low + high) / 2
        lengths, before = [], 0.0
        for rate in rates:
            lengths.append(rate.tokens_in(middle, before))
            before += lengths[-1]
        low, high = (low, middle) if before > tokens else (middle, high)
    total = sum(lengths)
    return [length * tokens / total for length in lengths]
