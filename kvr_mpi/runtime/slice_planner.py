"""Chooses the fastest strategy, slices and chunks that fit into memory, for each prompt on a chain."""

from __future__ import annotations

from collections.abc import Sequence

from kvr_mpi.compress.planned_drop import PlannedDrop
from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.errors import Say
from kvr_mpi.kv.route import Route
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.prefill.registry import KVR, Strategy, choose_chunks, fastest
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.topology import Rotation
from kvr_mpi.tuning.lookup import choose_slices, describe_range, is_outside
from kvr_mpi.tuning.table import Table

# Shorter slices are not worth a rank.
LEAST_SLICE_TOKENS = 64
# Forecasts limit a prompt's length to LONGEST_TOKENS, and round it down to NEAR_BITS significant bits.
LONGEST_TOKENS, NEAR_BITS = 1 << 20, 6


class SlicePlanner:
    """Chooses strategy, slices and chunks for the prompts of one chain.

    Only the leader of a chain uses it; the other ranks receive plans.

    Parameters
    ----------
    setup : JobSetup
    size : int
        Ranks of the chain.
    ranks : slice
        The ranks of this chain within the job.
    say : callable
        Logs a line.
    """

    def __init__(self, setup: JobSetup, size: int, ranks: slice, say: Say) -> None:
        self._setup, self._spec, self._size, self._ranks = setup, setup.spec, size, ranks
        self._free_bytes = setup.free_bytes[ranks]
        self._rates, self._say, self._has_warned = setup.rates[ranks], say, False
        # On one rank, all strategies but plain transformers do the same.
        alone = setup.strategies[0] if setup.strategies[0].is_plain else KVR
        self._strategies = setup.strategies if size > 1 else (alone,)
        self._forecasts: dict[tuple[int, int], list[float]] = {}
        self._chosen: dict[tuple[int, int, int, PlannedDrop | None], Strategy] = {}

    @property
    def is_plain(self) -> bool:
        """Whether plain transformers prefills the prompts."""
        return self._strategies[0].is_plain

    def is_too_short(self, tokens: int) -> bool:
        """Whether a prompt is too short for a slice on every rank."""
        return tokens < LEAST_SLICE_TOKENS * self._size

    def choose_strategy(self, tokens: int, known: int, new_tokens: int, drop: PlannedDrop | None = None) -> Strategy:
        """Choose the fastest strategy that fits on an empty chain; if none fits, one that supports chunks."""
        if len(self._strategies) == 1:
            return self._strategies[0]
        key = tokens, known, new_tokens, drop
        if key not in self._chosen:
            first = self._strategies[fastest(self._forecast(tokens, known))]
            order = [first, *(one for one in self._strategies if one is not first)]
            free, last = min(self._free_bytes), self._size - 1
            fitting = (
                one
                for one in order
                if max(self.needs(one.routes(self.cut(one, tokens, known, last), known), last, new_tokens, drop))
                <= free
            )
            self._chosen[key] = next(fitting, next((one for one in order if one.in_order), order[0]))
        return self._chosen[key]

    def describe_choice(self) -> str | None:
        """Describe the forecast for the longest prompt in one line; None if there is only one strategy."""
        if len(self._strategies) == 1:
            return None
        known = self._setup.prefixes[-1].tokens if self._setup.prefixes else 0
        longest = self._clamp(self._setup.longest_tokens - known)
        seconds = self._forecast(longest + known, known)
        times = ", ".join(f"{one.name} {each:.3g} s" for one, each in zip(self._strategies, seconds, strict=True))
        chosen = self._strategies[fastest(seconds)].name
        return f"strategy = 'auto', on chains of {self._size} ranks: {chosen} (forecast for {longest} tokens: {times})"

    def _clamp(self, tokens: int) -> int:
        """Limit a prompt's length to the range of the lookup table."""
        table, shortest, longest = self._setup.table, 1, LONGEST_TOKENS
        if table is not None and table.key.ranks == self._size:
            lengths = [entry.context_tokens for entry in table.entries]
            shortest, longest = lengths[0], min(longest, lengths[-1])
        return min(max(tokens, shortest), longest)

    def _forecast(self, tokens: int, known: int) -> list[float]:
        """Predict each strategy's seconds for a prompt of about `tokens` tokens, of which the first `known` exist."""
        step = 1 << max(0, tokens.bit_length() - NEAR_BITS)
        near = self._clamp(max(self._size, (tokens - known) // step * step))
        if (near, known) not in self._forecasts:
            costs, last = self._setup.chain_costs(self._ranks), self._size - 1
            self._forecasts[near, known] = [
                one.seconds(costs, self.cut(one, near + known, known, last), known) for one in self._strategies
            ]
        return self._forecasts[near, known]

    def cut(self, strategy: Strategy, tokens: int, known: int, decode_rank: int) -> Partition:
        """Cut a prompt by the job's table, into slices of equal time by the ranks' rates, or evenly.

        Parameters
        ----------
        known : int
            Number of first tokens that are not computed again; the first slice includes them.
        decode_rank : int
            The rank of the chain that has the last slice; the next rank, cyclically, has the first.
        """
        if not strategy.in_order:
            return strategy.cut_evenly(tokens, self._size, known)
        table, new = self._setup.table, tokens - known
        if table is not None:
            self._warn_outside(table, new)
            return choose_slices(table, new, self._size).after(known)
        if not self._rates:
            return Partition.even(new, self._size).after(known)
        first = Rotation.ending_at(self._size, decode_rank).first
        # Every token also attends to the known ones, which adds the same cost to each.
        rates = [Rates(rate.token_s + rate.pair_s * known, rate.pair_s) for rate in self._rates]
        lengths = equal_time(new, [*rates[first:], *rates[:first]])
        return Partition.by_ratio(new, lengths, QUANTUM_TOKENS).after(known)

    def _warn_outside(self, table: Table, tokens: int) -> None:
        """Log once that prompts are outside the range of the table."""
        if not self._has_warned and is_outside(table, tokens, self._size):
            self._has_warned = True
            self._say(
                f"warning: the table was searched for {describe_range(table)}; a prompt of {tokens} tokens on "
                f"{self._size} ranks is outside this range: slices of such prompts come from the fitted rates of "
                "the table"
            )

    def chunk_tokens(
        self, strategy: Strategy, partition: Partition, known: int, new_tokens: int, drop: PlannedDrop | None = None
    ) -> int | None:
        """Choose the chunk size in tokens for an otherwise empty chain; None for whole slices."""

        def fits(chunk_tokens: int | None) -> bool:
            routes = strategy.routes(partition, known, chunk_tokens)
            return max(self.needs(routes, self._size - 1, new_tokens, drop)) <= min(self._free_bytes)

        return choose_chunks(self._spec.chunk_tokens, strategy, self._setup.footprint, fits)

    def needs(
        self, routes: Sequence[Route], decode_rank: int, new_tokens: int, drop: PlannedDrop | None = None
    ) -> list[int]:
        """Bytes that each rank of the chain needs during prefill."""
        assert self._setup.footprint is not None
        size, needs = self._size, [0] * self._size
        for route in routes:
            rotation = Rotation.bringing(size, route.decode_position, decode_rank)
            needs[rotation.rank_of(route.position)] = self._setup.footprint.route_bytes(
                route, reserve_tokens=new_tokens, is_spread=self._spec.is_spread, drop=drop
            )
        return needs
