"""Cuts prompts over the ranks of a chain: evenly, into slices of equal time, or by a lookup table.

Sits between the job, with its measured rates or lookup table, and the strategies, which accept any `Partition`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.errors import Say
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.topology import Rotation
from kvr_mpi.tuning.lookup import choose_slices, describe_range, is_outside
from kvr_mpi.tuning.table import Table


@dataclass
class Partitioner:
    """Chooses the slices of one chain's prompts.

    size : number of ranks of the chain.
    rates : rates of these ranks, for slices of equal time; empty: even slices.
    table : the lookup table that the job names.
    say : logs a line.
    """

    size: int
    rates: Sequence[Rates]
    table: Table | None
    say: Say
    _has_warned: bool = field(default=False, init=False)

    def cut(self, tokens: int, decode_rank: int, before: int) -> Partition:
        """Cut `tokens` tokens that follow `before` known ones.

        Parameters
        ----------
        decode_rank : int
            The rank of the chain that has the last slice; the next rank, cyclically, has the first.
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
