"""Refit on a machine we know the truth about: the cost model with other rates, unequal ranks, and noise."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from made_logs import logger_to
from made_tables import COSTS

from benchmarks.grid import best_of, grid_search
from benchmarks.paper_model import costs_on_paper, paper_hardware
from kvr_mpi.costs.costmodel import best_split, chain_seconds
from kvr_mpi.costs.events import busy_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import DataError
from kvr_mpi.logs import SILENT
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.tuning.measure import Observation
from kvr_mpi.tuning.refit import MAX_RUNS, fit, refit, steady

LLAMA = costs_on_paper("Llama 7B", paper_hardware()).costs


class Machine:
    """Rates somewhere around the known ones, ranks that differ by 2%, and runs that differ by 3%."""

    def __init__(self, known: Costs, ranks: int, seed: int, noise: float = 0.03) -> None:
        self.random, self.noise, self.runs = np.random.default_rng(seed), noise, 0
        self.truth = replace(
            known,
            qkv_token_s=known.qkv_token_s * self.by(0.15),
            rest_token_s=known.rest_token_s * self.by(0.15),
            pair_s=known.pair_s * self.by(0.15),
            layer_s=known.layer_s * self.by(0.3),
            copy_token_s=known.copy_token_s * self.by(0.3),
            link_bytes_per_s=known.link_bytes_per_s * self.by(0.2),
            speeds=tuple(self.by(0.02) for _ in range(ranks)),
        )

    def by(self, deviation: float) -> float:
        return float(np.exp(deviation * self.random.standard_normal()))

    def run(self, split: Partition) -> Observation:
        self.runs += 1
        drift = self.by(self.noise)
        busy = tuple(float(time) * drift * self.by(self.noise / 3) for time in busy_seconds(self.truth, split.lengths))
        ttft_s = chain_seconds(self.truth, split.lengths) * drift * self.by(self.noise / 3)
        return Observation(split, ttft_s, busy, tuple(max(0.0, ttft_s - time) for time in busy))

    def regret(self, split: Partition) -> float:
        best_s = best_split(self.truth, split.tokens, split.size, quantum=QUANTUM_TOKENS)[1]
        return chain_seconds(self.truth, split.lengths) / best_s - 1


@pytest.mark.parametrize(
    ("known", "tokens", "ranks"),
    [(LLAMA, 16384, 2), (COSTS, 4096, 2), pytest.param(COSTS, 4096, 4, marks=pytest.mark.long)],
)
def test_refit_ends_within_a_percent_of_the_best(known: Costs, tokens: int, ranks: int) -> None:
    """A drift that ranks share is not taken for the split's."""
    regrets, even = [], []
    for seed in range(7):
        machine = Machine(known, ranks, seed)
        found = refit(tokens, known, ranks, machine.run, SILENT)
        assert machine.runs == found.runs <= MAX_RUNS
        assert found.times_of(found.best), "what it ends with was run"
        regrets.append(machine.regret(found.best))
        even.append(machine.regret(Partition.even(tokens, ranks)))
    assert statistics.median(regrets) < 0.01 and max(regrets) < 0.04
    assert statistics.median(even) > 0.1


def test_without_noise_the_fit_forecasts_other_splits() -> None:
    machine = Machine(COSTS, 4, 3, noise=0.0)
    splits = [Partition.by_ratio(4096, ratios) for ratios in ([4, 3, 2, 1], [1, 1, 1, 1], [5, 4, 3, 3])]
    before, fitted = COSTS, fit(COSTS, [machine.run(split) for split in splits])
    for ratios in ([3, 2, 2, 2], [2, 2, 1, 1]):
        lengths = Partition.by_ratio(4096, ratios).lengths
        truth_s = chain_seconds(machine.truth, lengths)
        assert chain_seconds(fitted, lengths) == pytest.approx(truth_s, rel=0.01)
        assert abs(chain_seconds(before, lengths) / truth_s - 1) > 0.02
    # Busy times are those of the event model: a chain that never waits takes as long as its last rank is busy.
    costs = replace(COSTS, launch_floor_s=0.0, link_bytes_per_s=1e15, link_latency_s=0.0)
    for lengths in ((16, 4096), (16, 16, 4096)):
        assert busy_seconds(costs, lengths)[-1] == pytest.approx(chain_seconds(costs, lengths), rel=0.01)


def test_a_disturbed_run_does_not_spoil_the_fit() -> None:
    machine = Machine(COSTS, 2, 3, noise=0.003)
    splits = [Partition.by_ratio(4096, ratios) for ratios in ([4, 3], [5, 3], [1, 1], [4, 3])]
    seen = [machine.run(split) for split in splits]
    slow = replace(seen[0], ttft_s=1.5 * seen[0].ttft_s, busy_s=tuple(1.5 * time for time in seen[0].busy_s))
    lengths = Partition.by_ratio(4096, [3, 2]).lengths
    truth_s = chain_seconds(machine.truth, lengths)
    assert chain_seconds(fit(COSTS, [slow, *seen[1:]]), lengths) == pytest.approx(truth_s, rel=0.02)


def test_times_that_are_none_end_it_and_what_is_slow_again_and_again_is_believed() -> None:
    split, said = Partition((0, 50, 100)), list[str]()
    bad = Observation(split, 1.0, (math.nan, 1.0), (0.0, 0.0))
    with pytest.raises(DataError, match=r"50\+50: 3 runs gave no valid times .*clocks"):
        steady(split, 1.0, lambda _: bad, logger_to(said))
    for times, kept, runs in (([9.0, 7.0, 8.0], 7.0, 3), ([math.nan, 1e6, 1.0], 1.0, 3), ([2.0, 1.0], 2.0, 1)):
        left = iter(times)
        seen = steady(
            split, 1.0, lambda _, left=left: Observation(split, next(left), (1.0, 1.0), (0.0, 0.0)), logger_to(said)
        )
        assert (seen[0].ttft_s, seen[1]) == (kept, runs)
    assert any("consistently slow" in line for line in said)


def test_the_grid_is_scanned_level_by_level() -> None:
    """Fig. 6 (b-d): 96 over three, strides 8, 4, 2, 1 and so on, to [0, 28, 70, 96]."""
    order: list[Partition] = []

    def measure(split: Partition) -> float:
        order.append(split)
        one, other = split.bounds[1] - 28, split.bounds[2] - 70
        return one * one + other * other + one * other  # a valley across: one bound at a time goes astray more easily

    tried = grid_search(Partition((0, 32, 64, 96)), measure, stride=8, quantum=1, max_runs=200)
    assert best_of(tried).bounds == (0, 28, 70, 96)
    assert order == list(tried), "nothing is measured twice"
    coarse = list(itertools.takewhile(lambda split: all(bound % 8 == 0 for bound in split.bounds), order))
    assert len(coarse) == 24, "the first level is a grid of 5 x 5, less the one in which a slice is empty"
    assert len(order) <= 24 + 3 * 8
