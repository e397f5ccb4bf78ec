"""Creates a lookup table: slices for some lengths, measured on these ranks (section 4.2).

Stands between ``kvr search`` and a `Table`. Two methods: ``refit`` (a few instrumented runs a length) and ``grid``
(the paper's hierarchical grid search).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvr_mpi.costs.costmodel import chain_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.tuning.grid import grid_search
from kvr_mpi.tuning.measure import Observation, Run
from kvr_mpi.tuning.refit import Say, fit, refit, steady
from kvr_mpi.tuning.table import Entry, Key, Method, Provenance, Rates, Table

# The paper's grid takes as many runs as it needs; that many are allowed.
GRID_MAX_RUNS = 400
# Runs of the split that a grid ended with, and runs of each length that the rates are fitted to.
GRID_REPEATS, GRID_FITTED = 3, 8


@dataclass(frozen=True, slots=True)
class Wish:
    """What to search, and how."""

    contexts: Sequence[int]
    method: Method


@dataclass(slots=True)
class _Found:
    """The result for one length."""

    split: Partition
    predicted_s: float
    runs: int = 0
    times_s: list[float] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)


def check_contexts(contexts: Sequence[int], ranks: int, max_tokens: int | None) -> list[int]:
    """Refuse lengths that the model or the ranks do not support; return the lengths, shortest first.

    Raises
    ------
    ConfigError
    """
    if ranks < 2:
        raise ConfigError(f"{ranks} rank has no slices to search; start more ranks: mpirun -n 2 kvr search ...")
    for tokens in contexts:
        if not 2 * ranks <= tokens <= (max_tokens or tokens):
            limit = f"{max_tokens} (the model's context)" if max_tokens else "what the model takes"
            raise ConfigError(f"--contexts {tokens}: expected from {2 * ranks} (two tokens per rank) to {limit}")
    return sorted(set(contexts))


def tabulate(wish: Wish, costs: Costs, key: Key, provenance: Provenance, run: Run, say: Say) -> Iterator[Table]:
    """Search all lengths, shortest first; rank 0 calls this within ``measure.leading``.

    What one length tells of the rates is where the next one starts.

    Yields
    ------
    Table
        After every length: all that is known by then, so that it can be kept.
    """
    entries: list[Entry] = []
    everything: list[Observation] = []
    known = costs
    run(Partition.even(min(wish.contexts), key.ranks))
    say("one warm-up run")
    for tokens in wish.contexts:
        found = (_refit if wish.method == "refit" else _grid)(tokens, known, key.ranks, run, say)
        everything += found.observations
        known = fit(known, found.observations)
        entry = _entry(found, wish.method, provenance, noise_of(known, found.observations))
        entries.append(entry)
        say(f"{tokens} tokens: {describe(entry)}")
        yield Table(key=key, rates=Rates.of(fit(costs, everything)), entries=tuple(entries))


def _refit(tokens: int, costs: Costs, ranks: int, run: Run, say: Say) -> _Found:
    result = refit(tokens, costs, ranks, run, say, quantum=QUANTUM_TOKENS)
    return _Found(
        result.best, result.forecasts_s[result.best], result.runs, result.times_of(result.best), result.observations
    )


def _grid(tokens: int, costs: Costs, ranks: int, run: Run, say: Say) -> _Found:
    """Search as in the paper: from even slices, with strides from half a slice down to the quantum."""
    observations: list[Observation] = []
    runs = 0

    def measure(split: Partition) -> float:
        nonlocal runs
        seen, took = steady(split, chain_seconds(costs, split.lengths), run, say)
        runs += took
        observations.append(seen)
        return seen.ttft_s

    quantum = QUANTUM_TOKENS if tokens >= 4 * QUANTUM_TOKENS * ranks else 1
    stride = quantum
    while 8 * stride * ranks <= tokens:  # two strides are about half an even slice
        stride *= 2
    start = Partition.by_ratio(tokens, [1.0] * ranks, quantum)
    search = grid_search(start, measure, stride=stride, quantum=quantum, max_runs=GRID_MAX_RUNS)
    say(f"{tokens} tokens: grid of {len(search.tried)} splits from {start}, strides {stride} to {quantum}")
    predicted_s = chain_seconds(fit(costs, _fastest(observations)), search.best.lengths)
    times_s = [search.best_s, *(measure(search.best) for _ in range(GRID_REPEATS - 1))]
    return _Found(search.best, predicted_s, runs, times_s, _fastest(observations))


def _fastest(observations: Sequence[Observation]) -> list[Observation]:
    """Select the fastest runs; others would only slow the fit down."""
    return sorted(observations, key=lambda seen: seen.ttft_s)[:GRID_FITTED]


def noise_of(costs: Costs, observations: Sequence[Observation]) -> float:
    """Relative root mean square deviation of measured from fitted times."""
    misses = [seen.ttft_s / chain_seconds(costs, seen.partition.lengths) - 1 for seen in observations]
    return math.sqrt(statistics.fmean(miss**2 for miss in misses))


def _entry(found: _Found, method: Method, provenance: Provenance, noise: float) -> Entry:
    times = found.times_s
    middle_s = statistics.median(times)
    return Entry(
        context_tokens=found.split.tokens,
        bounds_tokens=found.split.bounds,
        ttft_s=middle_s,
        predicted_ttft_s=found.predicted_s,
        runs=found.runs,
        repetitions=len(times),
        spread_ratio=(max(times) - min(times)) / middle_s if len(times) > 1 else None,
        noise_ratio=noise,
        method=method,
        provenance=provenance,
    )


def describe(entry: Entry) -> str:
    """Describe an entry and its origin."""
    return (
        f"{entry.partition} with {entry.ttft_s:.3f} s, predicted {entry.predicted_ttft_s:.3f} s "
        f"({100 * (entry.ttft_s / entry.predicted_ttft_s - 1):+.1f} %), after {counted(entry.runs, 'run')}"
    )
