"""The equal-time split in closed form, within a few per cent of the best split.

KV-Runahead (section 4.2) finds its splits by a grid search on the machine; the closed form needs only two measured
rates per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Costs per layer of one rank; not both are 0.

    token_s : seconds for a token's projections and MLP.
    pair_s : seconds for one query attending to one key.
    """

    token_s: float
    pair_s: float

    def seconds(self, tokens: float, before: float) -> float:
        """Time of one layer for a slice of `tokens` after `before` tokens."""
        return tokens * (self.token_s + self.pair_s * (before + tokens / 2))

    def tokens_in(self, seconds: float, before: float) -> float:
        """Longest slice after `before` tokens that takes at most `seconds`."""
        linear = self.token_s + self.pair_s * before
        # The positive root of pair c^2 / 2 + linear c = seconds, in the form that does not cancel for small pair_s.
        return 2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.pair_s * seconds))


def equal_time(tokens: float, rates: Sequence[Rates]) -> list[float]:
    """Return slice lengths for which all ranks compute for the same time; fast for a thousand ranks.

    Solves c_i (a_i + b_i (P_i + c_i / 2)) = t for slice lengths c_i that add up to the prompt, with P_i tokens before
    slice i: later ranks attend to a longer prefix and get shorter slices. The sum of the lengths grows with t by a
    power between 1/2 and 1, so a few secant steps in logarithms find t. ``Partition.by_ratio`` rounds the lengths.

    tokens : length of the prompt.
    rates : of each rank; a slower rank gets a shorter slice.
    """

    def lengths_in(seconds: float) -> list[float]:
        lengths, before = [], 0.0
        for rate in rates:
            lengths.append(rate.tokens_in(seconds, before))
            before += lengths[-1]
        return lengths

    seconds, power = rates[0].seconds(tokens, 0) / len(rates), 0.75
    last: tuple[float, float] | None = None
    lengths = lengths_in(seconds)
    for _ in range(50):
        miss = math.log(sum(lengths) / tokens)
        if abs(miss) < 1e-12:
            break
        if last is not None and last[0] != math.log(seconds):
            power = min(1.0, max(0.5, (miss - last[1]) / (math.log(seconds) - last[0])))
        last = math.log(seconds), miss
        seconds *= math.exp(-miss / power)
        lengths = lengths_in(seconds)
    total = sum(lengths)
    return [length * tokens / total for length in lengths]
