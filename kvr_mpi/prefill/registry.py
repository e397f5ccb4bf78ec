"""The strategies: how each one cuts, runs, forecasts and verifies a prompt, and what it needs from a model.

The prefill runs them, and the cost model forecasts them. Jobs, ``kvr verify``, ``kvr plan``, and the
benchmarks ``first-token`` and ``forecast`` take their strategies from here: a new one is a table of routes
(``routes``), and an entry in `STRATEGIES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvr_mpi.costs.costmodel import chain_seconds, ring_seconds, single_seconds
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.routes import relay, ring

if TYPE_CHECKING:  # forecasts need no torch
    from kvr_mpi.costs.layer_costs import Costs
    from kvr_mpi.kv.route import MakeRoute, Route
    from kvr_mpi.model import LoadedModel

# The setting that lets jobs choose, and the margin by which another strategy's forecast must beat a chain's: forecasts
# are no more accurate than that, and a chain sends less at a time and holds less.
AUTO = "auto"
MARGIN = 0.03

# Forecasts the seconds to the first token from costs and the slice lengths in order.
Forecast = Callable[["Costs", Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to prefill a prompt.

    name : in jobs, records, tables and plots.
    make : makes its routes; None: plain transformers on one rank.
    forecast : its time to the first token.
    stretches : slices of each rank.
    in_order : each rank's tokens follow those of the rank before. Then slices are tuned (otherwise they are even), can
        be computed in chunks, and attention need not be computed in parts.
    """

    name: str
    make: MakeRoute | None
    forecast: Forecast
    stretches: int = 1
    in_order: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether one rank runs it alone, with plain transformers."""
        return self.make is None

    def cut_evenly(self, tokens: int, ranks: int, known: int = 0) -> Partition:
        """Cut a prompt into slices of the same length, after the known tokens."""
        return Partition.even(tokens - known, self.stretches * ranks).after(known)

    def routes(self, partition: Partition, known: int = 0, chunk_tokens: int | None = None) -> list[Route]:
        """Make the route of every position, first slice first."""
        assert self.make is not None, self.name
        positions = range(partition.size // self.stretches)
        return [self.make(partition, position, known, chunk_tokens=chunk_tokens) for position in positions]

    def seconds(self, costs: Costs, partition: Partition, known: int = 0) -> float:
        """Forecast the time to the first token in a job; the first `known` tokens are not computed."""
        first, *others = partition.lengths
        return self.forecast(costs.after(known), [first - known, *others])

    def misfit(self, loaded: LoadedModel) -> str | None:
        """Return why a model that runs in chains does not support this strategy; None if it does."""
        if self.is_plain or self.in_order:
            return None
        if not loaded.attends_in_parts:
            why = "its attention cannot be computed in parts"
        elif self.stretches > 1 and loaded.shape.counts_cache:
            why = "its attention temperature depends on the length of the cache"
        elif self.stretches > 1 and "position_ids" not in inspect.signature(loaded.model.forward).parameters:
            why = "it counts positions itself and accepts none"
        elif loaded.shape.has_states:
            why = "its recurrent layers need the state of the tokens before"
        else:
            return None
        return f"{loaded.shape.architecture}: {why}, so it runs as a chain (strategy = 'kvr') or single only"


def _single(costs: Costs, lengths: Sequence[float]) -> float:
    return single_seconds(costs, sum(lengths))


def _ring(costs: Costs, lengths: Sequence[float]) -> float:
    return ring_seconds(costs, sum(lengths), len(lengths) // 2, saves_last_layer=True)


STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("single", None, _single),
        Strategy("ring", ring, _ring, stretches=2),
        Strategy("kvr", relay, chain_seconds, in_order=True),
    )
}
KVR = STRATEGIES["kvr"]
# What a job can ask for.
JOB_STRATEGIES = (AUTO, *STRATEGIES)


def candidates(name: str) -> list[Strategy]:
    """List the strategies that may run a job's prompts, chains first."""
    if name != AUTO:
        return [STRATEGIES[name]]
    found = (one for one in STRATEGIES.values() if not one.is_plain)
    return sorted(found, key=lambda one: one is not KVR)


def fastest(seconds: Sequence[float]) -> int:
    """Return the first candidate, unless another is forecast to be faster by more than `MARGIN`."""
    best = min(range(len(seconds)), key=lambda number: seconds[number])
    return best if seconds[best] < (1 - MARGIN) * seconds[0] else 0
