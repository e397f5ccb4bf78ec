"""Measures or looks up the rates of ranks and links that a job's plans and slices need."""

from __future__ import annotations

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
from kvr_mpi.tuning.measure import measure_costs
from kvr_mpi.tuning.table import Table


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
    spec: JobSpec, loaded: LoadedModel, world: Transport, chain: Transport, logger: RankLogger
) -> Table | None:
    """Find the lookup table; refuse one that does not fit."""
    parallel = spec.parallel
    if parallel.table is None or chain.size == 1:
        return None
    here, path = table_key(loaded, chain), Path(parallel.table)
    table = together(world, lambda: find_table(path, here))
    logger.info(f"slices from the table of {table.key.model.name} on {table.key.hardware}, {describe_range(table)}")
    return table
