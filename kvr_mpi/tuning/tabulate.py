"""Creates a lookup table: slices for some lengths, measured on these ranks (section 4.2)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from kvr_mpi.costs.costmodel import chain_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.logs import RankLogger
from kvr_mpi.partition import Partition
from kvr_mpi.tuning.measure import Observation, RunSlices
from kvr_mpi.tuning.refit import Refit, fit, refit
from kvr_mpi.tuning.table import Provenance, Table, TableEntry, TableKey


def check_contexts(contexts: Sequence[int], ranks: int, max_tokens: int | None) -> list[int]:
    """Refuse lengths that the model or the ranks do not support (`ConfigError`); return the lengths, shortest first."""
    if ranks < 2:
        raise ConfigError("one rank has no slices to search; start more ranks: mpirun -n 2 kvr search ...")
    for tokens in contexts:
        if not 2 * ranks <= tokens <= (max_tokens or tokens):
            limit = f"{max_tokens} (the model's context)" if max_tokens else "what the model takes"
            raise ConfigError(f"--contexts {tokens}: expected from {2 * ranks} (two tokens per rank) to {limit}")
    return sorted(set(contexts))


def tabulate(
    contexts: Sequence[int], costs: Costs, key: TableKey, provenance: Provenance, run: RunSlices, logger: RankLogger
) -> Iterator[Table]:
    """Search all lengths, shortest first; rank 0 calls this within ``measure.leading``.

    The rates fitted for one length are the initial rates of the next. After every length this yields the table so far,
    so that it can be saved.
    """
    entries: list[TableEntry] = []
    everything: list[Observation] = []
    known = costs
    run(Partition.even(min(contexts), key.ranks))
    logger.info("one warm-up run")
    for tokens in contexts:
        found = refit(tokens, known, key.ranks, run, logger)
        everything += found.observations
        known = fit(known, found.observations)
        entry = _entry(found, provenance, noise_of(known, found.observations))
        entries.append(entry)
        logger.info(f"{tokens:,} tokens: {describe_entry(entry)}")
        yield Table(key=key, rates=fit(costs, everything), entries=tuple(entries))


def noise_of(costs: Costs, observations: Sequence[Observation]) -> float:
    """Relative root mean square deviation of measured from fitted times."""
    misses = [seen.ttft_s / chain_seconds(costs, seen.partition.lengths) - 1 for seen in observations]
    return math.sqrt(statistics.fmean(miss**2 for miss in misses))


def _entry(found: Refit, provenance: Provenance, noise: float) -> TableEntry:
    times = found.times_of(found.best)
    middle_s = statistics.median(times)
    return TableEntry(
        context_tokens=found.best.tokens,
        bounds_tokens=found.best.bounds,
        ttft_s=middle_s,
        predicted_ttft_s=found.forecasts_s[found.best],
        runs=found.runs,
        repetitions=len(times),
        spread_ratio=(max(times) - min(times)) / middle_s if len(times) > 1 else None,
        noise_ratio=noise,
        provenance=provenance,
    )


def describe_entry(entry: TableEntry) -> str:
    """Describe an entry and its origin."""
    return (
        f"{entry.partition} with {entry.ttft_s:.3f} s, predicted {entry.predicted_ttft_s:.3f} s "
        f"({100 * (entry.ttft_s / entry.predicted_ttft_s - 1):+.1f}%), after {counted(entry.runs, 'run')}"
    )
