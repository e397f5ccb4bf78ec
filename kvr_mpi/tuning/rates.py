"""Measures or looks up the rates of ranks and links that a job's plans and slices need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.job import JobSpec
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.transport import Transport, together
from kvr_mpi.tuning.identity import table_key
from kvr_mpi.tuning.lookup import describe_range, find_table
from kvr_mpi.tuning.measure import measure_costs, measure_rates
from kvr_mpi.tuning.table import Table

SAME_RATES_WITHIN = 1.5  # rates that differ by a larger factor come from another machine or other software
SLICES_LOSE = 0.05  # slices that take longer than the best ones by this fraction are worth another search


def measured_costs(loaded: LoadedModel, world: Transport, logger: RankLogger) -> Costs:
    """Measure ranks and links."""
    logger.info("measuring ranks and links for the plan")
    costs = measure_costs(loaded, world)
    logger.info(
        f"measured links: {costs.link_bytes_per_s / 1e9:.2f} GB/s, {costs.link_latency_s * 1e6:.0f} us; decoding: "
        f"{1e3 * costs.step_s:.1f} ms per token"
    )
    return costs


def describe_rates(rates: Sequence[Rates], tokens: int) -> str:
    """Describe a rank's speed and the slices of a prompt in one line."""
    lengths = equal_time(tokens, rates)
    return (
        f"measured per layer: {rates[0].token_s * 1e6:.1f} us per token, {rates[0].pair_s * 1e9:.2f} ns per query-key "
        f"pair; slices of equal time for {tokens} tokens: {Partition.by_ratio(tokens, lengths, QUANTUM_TOKENS)}"
    )


def table_of(
    spec: JobSpec, loaded: LoadedModel, world: Transport, lane: Transport, chain: Transport, logger: RankLogger
) -> Table | None:
    """Find the lookup table; refuse one that does not fit, and warn if it is outdated."""
    parallel = spec.parallel
    if parallel.table is None or chain.size == 1:
        return None
    here, path = table_key(loaded, chain), Path(parallel.table)
    table = together(world, lambda: find_table(path, here))
    logger.info(f"slices from the table of {table.key.model.name} on {table.key.hardware}, {describe_range(table)}")
    rates = measure_rates(loaded, lane)[lane.rank - chain.rank :][: chain.size]
    if (drift := describe_drift(table, rates)) is not None:
        logger.warning(f"{drift}; search again: kvr search")
    return table


def describe_drift(table: Table, rates: Sequence[Rates]) -> str | None:
    """Describe how ranks differ from those that a table was measured on; None if the difference is negligible.

    Processor names are unreliable in virtual machines, and do not identify kernels, so current `rates` are compared.
    """
    costs, longest = table.rates, table.entries[-1]
    tokens = longest.context_tokens
    then = costs.rates(len(rates))
    old, new = (_slices_s(equal_time(tokens, each), rates) for each in (then, rates))
    faster, loss = _slices_s(equal_time(tokens, then), then) / old, old / new - 1
    if max(faster, 1 / faster) < SAME_RATES_WITHIN and loss < SLICES_LOSE:
        return None
    measured = f"the table was measured on {longest.provenance.date[:10]}"
    times = f"{faster:.1f} times as fast" if faster >= 1 else f"{1 / faster:.1f} times as slow"
    text = f"{measured}; now ranks are {times} (other kernels, versions or processors)"
    if loss >= SLICES_LOSE:
        text += f", and slices by its rates take {100 * loss:.0f} % longer than necessary at {tokens} tokens"
    return text


def _slices_s(lengths: Sequence[float], rates: Sequence[Rates]) -> float:
    """Seconds of one layer on the slowest rank."""
    starts = [math.fsum(lengths[:place]) for place in range(len(lengths))]
    return max(rate.seconds(length, start) for rate, length, start in zip(rates, lengths, starts, strict=True))
