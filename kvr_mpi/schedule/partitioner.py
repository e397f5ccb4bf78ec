"""Cuts prompts over the ranks of a chain: evenly, into slices of equal time, or by a lookup table.

Stands between the job, with what was measured or looked up for it, and the strategies, which take any `Partition`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.topology import Rotation
from kvr_mpi.tuning.lookup import choose_slices, describe_range, is_outside
from kvr_mpi.tuning.table import Table


@dataclass
class Partitioner:
    """Chooses the slices of one chain's prompts.

    size : ranks of the chain.
    rates : of these, if slices are to take equal time; else they are even.
    table : if the job names one.
    say : for a line of text.
    """

    size: int
    rates: Sequence[Rates]
    table: Table | None
    say: Callable[[str], None]
    _has_warned: bool = field(default=False, init=False)

    def cut(self, tokens: int, decode_rank: int, before: int) -> Partition:
        """Cut so many tokens that follow `before` known tokens.

        Parameters
        ----------
        decode_rank : int
            The rank of the chain that has the last slice; the one after it, cyclically, has the first.
        """
        if self.table is not None:
            self._warn_outside(self.table, tokens)
            return choose_slices(self.table, tokens, self.size)
        if self.rates:
            first = Rotation.ending_at(self.size, decode_rank).first
            # Every token also attends to the known ones, which adds the same cost to each.
            rates = [Rates(rate.token_s + rate.pair_s * before, rate.pair_s) for rate in self.rates]
            return Partition.by_ratio(tokens, equal_time(tokens, [*rates[first:], *rates[:first]]), QUANTUM_TOKENS)
        return Partition.even(tokens, self.size)

    def _warn_outside(self, table: Table, tokens: int) -> None:
        """Log once that prompts are outside the range of the table."""
        if not self._has_warned and is_outside(table, tokens, self.size):
            self._has_warned = True
            self.say(
                f"warning: the table was searched for {describe_range(table)}; a prompt of {tokens} tokens on "
                f"{self.size} ranks is outside this range: such prompts are cut by the fitted rates of the table"
            )
