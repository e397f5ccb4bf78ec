"""The strategies: how each one cuts, runs, forecasts and verifies a prompt, and what it needs from a model.

The prefill runs them, and the cost model forecasts them. Jobs, ``first-token``, ``kvr verify``, ``kvr plan`` and
``forecast`` take their strategies from here: a new one is a table of routes (``routes``), and an entry in
`STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvr_mpi.costs.costmodel import chain_seconds, ring_seconds, single_seconds
from kvr_mpi.errors import ModelError
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.routes import relay, ring

if TYPE_CHECKING:  # imported when strategies run, since forecasts need no torch
    from typing import Unpack

    from kvr_mpi.costs.layer_costs import Costs
    from kvr_mpi.kv.route import MakeRoute, Route
    from kvr_mpi.model import LoadedModel
    from kvr_mpi.prefill.memory_budget import Footprint
    from kvr_mpi.prefill.one_prompt import Options, Prefill
    from kvr_mpi.transport import Transport

# The setting that lets jobs choose, and by how much another strategy must be forecast faster than a chain: forecasts
# are no more accurate than that, and a chain sends less at a time and holds less.
AUTO = "auto"
MARGIN = 0.03
# Chunk sizes that are tried, in this order, if whole slices do not fit.
CHUNK_SIZES = (4096, 2048, 1024, 512, 256, 128)
# Tokens of the prompt with which a strategy is verified for a model, and of its chunks.
CHECKED_TOKENS, CHECKED_CHUNK = 12, 2


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

    def prefill(
        self,
        loaded: LoadedModel,
        ids: Sequence[int],
        partition: Partition,
        chain: Transport,
        **options: Unpack[Options],
    ) -> Prefill:
        """Prefill a prompt; every rank of the chain calls this.

        Raises
        ------
        ModelError
            If the model does not support the strategy.
        """
        from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_single

        if why := self.misfit(loaded):
            raise ModelError(why)
        if self.make is None:
            return prefill_single(loaded.model, ids, loaded.device)
        return prefill_kvr(loaded, ids, partition, chain, make=self.make, strategy=self.name, **options)

    def misfit(self, loaded: LoadedModel) -> str | None:
        """Return why a model that runs in chains does not support this strategy; None if it does."""
        from kvr_mpi.model.attention_hook import takes

        if self.is_plain or self.in_order:
            return None
        if not loaded.attends_in_parts:
            why = "its attention cannot be computed in parts"
        elif self.stretches > 1 and loaded.shape.counts_cache:
            why = "its attention temperature depends on the length of the cache"
        elif self.stretches > 1 and not takes(loaded.model, "position_ids"):
            why = "it counts positions itself and accepts none"
        elif loaded.shape.has_states:
            why = "its recurrent layers need the state of the tokens before"
        else:
            return None
        return f"{loaded.shape.architecture}: {why}, so it runs as a chain (strategy = 'kvr') or single only"

    def check(self, loaded: LoadedModel, chunk_tokens: int | None = None) -> None:
        """Verify on a few tokens that the strategy gives this model's logits, in whole slices or in chunks.

        `check_chain` has already verified chains that compute whole slices.

        Raises
        ------
        ModelError
            If the strategy or the model does not support it, or the logits differ.
        """
        from kvr_mpi.prefill.exactness import error_share, why_not_the_same
        from kvr_mpi.prefill.one_prompt import prefill_whole
        from kvr_mpi.transport.local import run_local

        if self.is_plain or (self.in_order and chunk_tokens is None):
            return
        if chunk_tokens is not None and not self.in_order:
            raise ModelError(
                f"parallel.chunk_tokens = {chunk_tokens}: {self.name} cannot use chunks; use strategy = 'kvr'"
            )
        if why := self.misfit(loaded):
            raise ModelError(f"parallel.strategy = {self.name!r}: {why}")
        chunk = None if chunk_tokens is None else CHECKED_CHUNK
        tokens = min(CHECKED_TOKENS, loaded.shape.max_tokens or CHECKED_TOKENS)
        ids, cut = loaded.shape.sample_ids(tokens), self.cut_evenly(tokens, 3)

        def run() -> Iterator[tuple[str, float]]:
            ranks = run_local(
                3, lambda rank: self.prefill(loaded, ids, cut, rank, chunk_tokens=chunk).logits, loaded.device
            )
            (found,) = (logits for logits in ranks if logits is not None)
            how = "" if chunk_tokens is None else " in chunks"
            yield f"the logits of a {self.name}{how}", error_share(found, prefill_whole(loaded, ids).logits)

        if why := why_not_the_same(loaded, run, "those of one rank"):
            remedy = (
                "use strategy = 'kvr' for this model" if chunk_tokens is None else "leave parallel.chunk_tokens out"
            )
            raise ModelError(f"{loaded.shape.architecture}: on {tokens} tokens {why}; {remedy}")


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


def choose_chunks(
    asked: int | Literal["auto"],
    strategy: Strategy,
    footprint: Footprint | None,
    fits: Callable[[int | None], bool],
) -> int | None:
    """Choose the chunk size of a prompt's slices; None for whole slices.

    Parameters
    ----------
    asked : int or "auto"
        The job's setting; auto: whole slices if the prompt fits, else the largest of `CHUNK_SIZES` with which it fits.
    fits : callable
        Whether the prompt fits with chunks of a size, or (None) with whole slices, on otherwise empty ranks: a prompt's
        chunks must not depend on other prompts.
    """
    if not strategy.in_order or footprint is None:
        return None
    if asked != "auto":
        return asked
    if not footprint.takes_chunks or fits(None):
        return None
    return next((size for size in CHUNK_SIZES if fits(size)), None)


def fastest(seconds: Sequence[float]) -> int:
    """Return the first candidate, unless another is forecast to be faster by more than `MARGIN`."""
    best = min(range(len(seconds)), key=lambda number: seconds[number])
    return best if seconds[best] < (1 - MARGIN) * seconds[0] else 0
