"""How a chain computes a prompt: the strategy, slices and chunks that are fastest and fit into its ranks' memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvr_mpi.compress.planned_drop import PlannedDrop
from kvr_mpi.kv.route import Route
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.registry import KVR, Strategy, choose_chunks
from kvr_mpi.schedule.partitioner import Partitioner
from kvr_mpi.schedule.strategy_choice import Choice, choose_strategies
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.setup.rates import Say
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport

# A slice below this is not worth a rank of its own.
LEAST_SLICE_TOKENS = 64


class SlicePlanner:
    """Chooses strategy, slices and chunks for the prompts of one chain.

    Every rank of the chain makes one at the same time, since forecasts are compared then; later each may use it alone.

    Parameters
    ----------
    setup : JobSetup
    chain : Transport
        The ranks that share prompts.
    ranks : slice
        The chain's, among those of the job.
    say : callable
        For a line of text.
    """

    def __init__(self, setup: JobSetup, chain: Transport, ranks: slice, say: Say) -> None:
        self._setup, self._spec, self._size = setup, setup.spec, chain.size
        self._free_bytes = setup.free_bytes[ranks]
        self._partitioner = Partitioner(self._spec.parallel, chain, setup.rates[ranks], setup.table, say)
        # On one rank there is nothing to choose: whatever hands keys and values on is a chain of one.
        self._strategy = setup.strategies[0] if chain.size > 1 or setup.strategies[0].is_plain else KVR
        self._choices = self._choose(chain, ranks, say) if chain.size > 1 and len(setup.strategies) > 1 else {}
        self._chosen: dict[tuple[int, int, int, PlannedDrop | None], Strategy] = {}

    @property
    def is_plain(self) -> bool:
        """Whether prompts are prefilled by plain transformers."""
        return self._strategy.is_plain

    def is_too_short(self, tokens: int) -> bool:
        """Whether so many tokens are too few for a slice on every rank."""
        return tokens < LEAST_SLICE_TOKENS * self._size

    def choose_strategy(self, tokens: int, known: int, new_tokens: int, drop: PlannedDrop | None = None) -> Strategy:
        """Say what runs a prompt: the fastest that fits on an empty chain, or else what may fit in chunks."""
        if known not in self._choices:
            return self._strategy
        key = tokens, known, new_tokens, drop
        if key not in self._chosen:
            order, free, last = self._choices[known].order(tokens - known), min(self._free_bytes), self._size - 1
            fitting = (
                one
                for one in order
                if max(self.needs(one.routes(self.cut(one, tokens, known, last), known), last, new_tokens, drop))
                <= free
            )
            self._chosen[key] = next(fitting, next((one for one in order if one.takes_chunks), order[0]))
        return self._chosen[key]

    def cut(self, strategy: Strategy, tokens: int, known: int, decode_rank: int) -> Partition:
        """Cut a prompt for the chain with this rank of it last; its first `known` tokens are not computed again."""
        if not strategy.has_cuts:
            return strategy.cut_evenly(tokens, self._size, known)
        return self._partitioner.cut(tokens - known, decode_rank, known).after(known)

    def chunk_tokens(
        self, strategy: Strategy, partition: Partition, known: int, new_tokens: int, drop: PlannedDrop | None = None
    ) -> int | None:
        """Say in chunks of how many tokens slices are computed, on an otherwise empty chain; None: at once."""

        def fits(chunk_tokens: int | None) -> bool:
            routes = strategy.routes(partition, known, chunk_tokens)
            return max(self.needs(routes, self._size - 1, new_tokens, drop)) <= min(self._free_bytes)

        return choose_chunks(self._spec.parallel.chunk_tokens, strategy, self._setup.footprint, fits)

    def needs(
        self, routes: Sequence[Route], decode_rank: int, new_tokens: int, drop: PlannedDrop | None = None
    ) -> list[int]:
        """Bytes each rank of the chain takes for a prompt while it is prefilled."""
        assert self._setup.footprint is not None
        size, needs = self._size, [0] * self._size
        for route in routes:
            rotation = Rotation.bringing(size, route.decode_position, decode_rank)
            needs[rotation.rank_of(route.position)] = self._setup.footprint.route_bytes(
                route, reserve_tokens=new_tokens, is_spread=self._spec.is_spread, drop=drop
            )
        return needs

    def _choose(self, chain: Transport, ranks: slice, say: Say) -> dict[int, Choice]:
        """Work out which strategy is fastest for every length, after each of the prefixes that are known."""
        setup, size = self._setup, self._size
        costs = setup.chain_costs(ranks)
        shortest, longest, choices = LEAST_SLICE_TOKENS * size, setup.longest_tokens, {}
        if setup.table is not None and setup.table.key.ranks == size:  # beyond its lengths, as at their ends
            lengths = [entry.context_tokens for entry in setup.table.entries]
            shortest, longest = max(shortest, lengths[0]), min(longest, lengths[-1])
        for known in dict.fromkeys([0, *(prefix.tokens for prefix in setup.prefixes)]):

            def forecast(strategy: Strategy, known: int, tokens: int) -> float:
                if strategy.has_cuts:
                    partition = self._partitioner.propose(tokens, size - 1, known).after(known)
                else:
                    partition = strategy.cut_evenly(tokens + known, size, known)
                return strategy.seconds(costs, partition, known)

            seconds = [partial(forecast, one, known) for one in setup.strategies]
            choices[known] = choose_strategies(chain, setup.strategies, seconds, shortest, longest - known)
        if ranks.start == 0 and chain.rank == 0:
            say(next(reversed(choices.values())).describe(size))
        return choices
