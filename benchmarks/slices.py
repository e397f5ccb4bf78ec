"""Hold a table against the machine: a sweep of splits around every entry, and lengths between the entries.

All splits of a length are run one after the other, and that several times over (interleaved), so that what disturbs
one disturbs all. With ``--grid``, the sweep includes the slices that the paper's grid search finds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.grid import best_of, search_grid
from benchmarks.options import make_parser
from kvr_mpi.cli.launch import load_everywhere, open_links, run_guarded
from kvr_mpi.cli.options import DEFAULT_MODEL, parse_numbers
from kvr_mpi.costs.costmodel import chain_seconds
from kvr_mpi.errors import counted
from kvr_mpi.logs import RankLogger
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.transport import together
from kvr_mpi.transport.mpi import connect
from kvr_mpi.tuning.cores import pinned
from kvr_mpi.tuning.identity import table_key
from kvr_mpi.tuning.lookup import choose_slices, find_table, interpolate
from kvr_mpi.tuning.measure import RunSlices, follow_measurements, leading
from kvr_mpi.tuning.table import Table

STEP_TOKENS, REACH = 64, 4
REGRET_ALLOWED, FORECAST_ALLOWED = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Regret:
    """What the table's slices take, against the best of the sweep and against even ones; medians."""

    context_tokens: int
    chosen: Partition
    chosen_s: float
    best: Partition
    best_s: float
    even_s: float

    @property
    def ratio(self) -> float:
        """What is lost to the best, relative; 0 if nothing is better."""
        return self.chosen_s / self.best_s - 1

    @property
    def holds(self) -> bool:
        """Whether the table's slices are as good as they should be, and even ones are worse."""
        return self.ratio <= REGRET_ALLOWED and self.even_s > self.chosen_s


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a length that was not searched takes, against what the table says."""

    context_tokens: int
    split: Partition
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted, less 1."""
        return self.measured_s / self.predicted_s - 1

    @property
    def holds(self) -> bool:
        """Whether it is as near as it should be."""
        return abs(self.ratio) <= FORECAST_ALLOWED


def check_table(
    table: Table, contexts: Sequence[int], run: RunSlices, trials: int, logger: RankLogger, *, with_grid: bool = False
) -> bool:
    """Check the entries for some lengths and the lengths between them; say what holds, and return whether all does."""
    findings: list[Regret | Forecast] = []
    for tokens in contexts:
        more = []
        if with_grid:
            tried = search_grid(tokens, table.key.ranks, lambda split: run(split).ttft_s)
            more = [best_of(tried)]
            logger.info(
                f"the paper's grid search of {tokens} tokens finds {more[0]} after {counted(len(tried), 'run')}"
            )
        regret = sweep(table, tokens, run, trials, more)
        findings.append(regret)
        logger.info(
            f"{_word(regret.holds)}: {tokens} tokens: {regret.chosen} takes {regret.chosen_s:.3f} s, the best of the "
            f"sweep {regret.best} {regret.best_s:.3f} s ({100 * regret.ratio:+.1f}%, allowed "
            f"{100 * REGRET_ALLOWED:.0f}%); even slices {100 * (regret.even_s / regret.chosen_s - 1):+.1f}%"
        )
    for below, above in pairwise(sorted(contexts)):
        tokens = (below + above) // 2 // QUANTUM_TOKENS * QUANTUM_TOKENS
        if below < tokens < above:
            forecast = _forecast(table, tokens, run, trials)
            findings.append(forecast)
            logger.info(
                f"{_word(forecast.holds)}: {tokens} tokens, not in the table: {forecast.split} takes "
                f"{forecast.measured_s:.3f} s, forecast {forecast.predicted_s:.3f} s ({100 * forecast.ratio:+.1f}%, "
                f"allowed {100 * FORECAST_ALLOWED:.0f}%)"
            )
    holding = sum(finding.holds for finding in findings)
    logger.info(f"{holding} of {len(findings)} hold, median of {counted(trials, 'trial')}")
    return holding == len(findings)


def sweep(table: Table, tokens: int, run: RunSlices, trials: int, more: Sequence[Partition] = ()) -> Regret:
    """Run the table's slices, all splits around them in steps of 64 tokens, even ones, and more, interleaved.

    With more than two ranks one bound is moved at a time.
    """
    chosen, even = choose_slices(table, tokens, table.key.ranks), Partition.even(tokens, table.key.ranks)
    splits = list(dict.fromkeys([chosen, *_around(chosen), even, *more]))
    times: dict[Partition, list[float]] = {split: [] for split in splits}
    for _ in range(trials):
        for split in splits:
            times[split].append(run(split).ttft_s)
    medians = {split: statistics.median(seconds) for split, seconds in times.items()}
    best = min(splits, key=lambda split: medians[split])
    return Regret(tokens, chosen, medians[chosen], best, medians[best], medians[even])


def _forecast(table: Table, tokens: int, run: RunSlices, trials: int) -> Forecast:
    split = choose_slices(table, tokens, table.key.ranks)
    ratios = {
        entry.context_tokens: (entry.ttft_s / chain_seconds(table.rates, entry.partition.lengths),)
        for entry in table.entries
    }
    (ratio,) = interpolate(ratios, tokens)  # of measured to modeled time
    times = [run(split).ttft_s for _ in range(trials)]
    return Forecast(tokens, split, chain_seconds(table.rates, split.lengths) * ratio, statistics.median(times))


def _around(split: Partition) -> list[Partition]:
    """Move every inner bound by some steps to both sides, if no slice becomes empty."""
    found = []
    for inner in range(1, split.size):
        for step in range(-REACH, REACH + 1):
            bounds = list(split.bounds)
            bounds[inner] += step * STEP_TOKENS
            if all(a < b for a, b in pairwise(bounds)):
                found.append(Partition(tuple(bounds)))
    return found


def _word(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def main(arguments: Sequence[str]) -> int:
    """Check a table on the ranks that it is for; the exit code is 0 only if all of it holds."""
    parser = make_parser("slices", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--table", type=Path, default=Path("tables"), help="a file of kvr search, or a folder of them")
    parser.add_argument("--contexts", help="prompt lengths in tokens; default: all of the table")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--grid", action="store_true", help="search by the paper's grid, too (many runs)")
    wanted = parser.parse_args(arguments)
    world = connect()

    def work() -> int:
        logger = RankLogger(world.rank)
        loaded = load_everywhere(world, wanted.model, wanted.dtype, "auto")
        chain = open_links(world, loaded, "auto", logger)
        loaded = check_chain(loaded)
        with pinned(chain):
            key = table_key(loaded, chain)
            table = together(world, lambda: find_table(wanted.table, key))
            if world.rank:
                follow_measurements(loaded, chain)
                return 0
            lengths = [entry.context_tokens for entry in table.entries]
            if wanted.contexts is not None:
                lengths = parse_numbers("--contexts", wanted.contexts)
            with leading(loaded, chain) as run:
                return 0 if check_table(table, lengths, run, wanted.trials, logger.root, with_grid=wanted.grid) else 1

    return run_guarded(world, work)
