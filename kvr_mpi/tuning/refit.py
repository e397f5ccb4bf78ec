"""The best slices in at most four runs: measure, fit the rates, solve in the cost model, measure again.

The paper measures a grid of splits. This measures what every rank did in one split and fits the rates to that, so that
the cost model can predict all other splits. The fit is a maximum a posteriori estimate: one run does not determine all
rates, so each rate has a prior around its previous value. The prior is tight for the ranks' speeds, which mostly differ
by noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvr_mpi.costs.costmodel import best_split, chain_seconds, equal_time_lengths
from kvr_mpi.costs.events import busy_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import DataError, counted
from kvr_mpi.logs import RankLogger
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.tuning.measure import Observation, RunSlices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Maximum number of runs; after ENOUGH_RUNS the search ends once the fit suggests a split that has been run.
MAX_RUNS, ENOUGH_RUNS = 4, 3
# A run that takes this many times its prediction, or has invalid times, is repeated, up to MAX_HICCUPS runs.
ABSURD_RATIO, MAX_HICCUPS = 3.0, 3
# Standard deviations of the priors, in logarithms.
TOKEN_SD, PAIR_SD, LAYER_SD, COPY_SD, LINK_SD = 0.15, 0.15, 1.0, 1.0, 0.3
SPEED_SD, DRIFT_SD = 0.02, 0.03
DRIFT_FREEDOM, REWEIGHTINGS = 3.0, 3
# Standard deviations of measured times, of a rank and of the chain, in addition to their common drift in a run.
BUSY_SD, TTFT_SD = 0.01, 0.02
# Assumed relative error of the cost model when it is weighed against measured times.
MODEL_SD = 0.02
# The fit ends when a step improves it by less than this ratio.
FIT_TOLERANCE = 1e-6
RATES = 5  # parameters before those of ranks and runs


@dataclass(slots=True)
class Refit:
    """The result of a search of one length.

    forecasts_s : time predicted for each split before its first run.
    runs : number of runs, including repeated ones.
    """

    best: Partition
    costs: Costs
    observations: list[Observation] = field(default_factory=list)
    forecasts_s: dict[Partition, float] = field(default_factory=dict)
    runs: int = 0

    def run(self, split: Partition, predicted_s: float, run: RunSlices, logger: RankLogger) -> Observation:
        """Run a split, repeated if it was disturbed, and record it."""
        seen, runs = steady(split, predicted_s, run, logger)
        self.runs += runs
        self.observations.append(seen)
        self.forecasts_s.setdefault(split, predicted_s)
        return seen

    def times_of(self, split: Partition) -> list[float]:
        return [seen.ttft_s for seen in self.observations if seen.partition == split]


def refit(tokens: int, costs: Costs, ranks: int, run: RunSlices, logger: RankLogger) -> Refit:
    """Find the slices for one length, from an initial estimate of the rates, which need not be accurate."""
    split = Partition.by_ratio(tokens, equal_time_lengths(costs, tokens, ranks), QUANTUM_TOKENS)
    predicted_s = chain_seconds(costs, split.lengths)
    result = Refit(split, costs)
    logger.info(f"{tokens:,} tokens: equal-time split {split}, predicted {predicted_s:.3f} s")
    while len(result.observations) < MAX_RUNS:
        seen = result.run(split, predicted_s, run, logger)
        result.costs = fit(costs, result.observations)
        waited = max(seen.wait_s) / seen.ttft_s
        logger.info(
            f"  run {len(result.observations)}: {split} took {seen.ttft_s:.3f} s (predicted {predicted_s:.3f} s, "
            f"{100 * (seen.ttft_s / predicted_s - 1):+.1f}%); busy {_list(seen.busy_s)} s, "
            f"longest wait {100 * waited:.1f}%"
        )
        split, predicted_s = best_split(result.costs, tokens, ranks, quantum=QUANTUM_TOKENS)
        if split in result.forecasts_s and len(result.observations) >= ENOUGH_RUNS:
            logger.info(f"  the fitted rates suggest {split}, predicted {predicted_s:.3f} s, already measured")
            break
    result.best = _choose(result)
    return result


def fit(start: Costs, observations: Sequence[Observation]) -> Costs:
    """Fit rates to observations, with the initial rates as prior.

    Parameters are logarithms: tokens, pairs, a layer's overhead, copies, the link, each rank's speed, and for each
    run a drift common to all its times (clock frequency, other jobs), which is discarded. Drifts have a Student
    distribution, fitted by reweighting, so that a disturbed run has little influence.
    """
    start = _fillable(start)
    rates = RATES + observations[0].partition.size
    drifts = len(observations)
    deviations = np.array(
        [TOKEN_SD, PAIR_SD, LAYER_SD, COPY_SD, LINK_SD] + [SPEED_SD] * (rates - RATES) + [DRIFT_SD] * drifts
    )
    found: Array = np.zeros(len(deviations))
    for _ in range(REWEIGHTINGS):
        found = _solve(start, observations, found, deviations)
        unlikely = (found[rates:] / DRIFT_SD) ** 2
        deviations[rates:] = DRIFT_SD * np.sqrt((DRIFT_FREEDOM + unlikely) / (DRIFT_FREEDOM + 1))
    return _scaled(start, found[:rates])


def _solve(start: Costs, observations: Sequence[Observation], theta: Array, deviations: Array) -> Array:
    """Minimize the squared residuals and the deviation from the prior."""
    from scipy.optimize import least_squares

    weights = 1 / deviations
    solved = least_squares(
        lambda tried: np.concatenate([_misses(start, observations, tried), tried * weights]),
        theta,
        jac=lambda tried: np.concatenate([_slopes(start, observations, tried), np.diag(weights)]),
        x_scale=deviations,
        ftol=FIT_TOLERANCE,
    )
    return np.asarray(solved.x)


def _logs(costs: Costs, observations: Sequence[Observation]) -> tuple[Array, Array]:
    """Logarithms of the modeled times of every rank (runs, ranks) and chain (runs,)."""
    busy = np.log([busy_seconds(costs, seen.partition.lengths) for seen in observations])
    return busy, np.log([chain_seconds(costs, seen.partition.lengths) for seen in observations])


def _in_deviations(busy: Array, chains: Array) -> Array:
    return np.concatenate([busy / BUSY_SD, chains[:, None] / TTFT_SD], axis=1).ravel()


def _misses(start: Costs, observations: Sequence[Observation], theta: Array) -> Array:
    """Residuals in standard deviations, for each run: one per rank, and one for the chain."""
    rates, drifts = np.split(theta, [RATES + observations[0].partition.size])
    busy, chains = _logs(_scaled(start, rates), observations)
    seen_busy = np.log([np.maximum(seen.busy_s, 1e-9) for seen in observations])
    seen_chains = np.log([seen.ttft_s for seen in observations])
    return _in_deviations(busy + drifts[:, None] - seen_busy, chains + drifts - seen_chains)


def _slopes(start: Costs, observations: Sequence[Observation], theta: Array) -> Array:
    """Return the derivatives of `_misses` with respect to every parameter."""
    ranks = observations[0].partition.size
    rates = theta[: RATES + ranks]
    busy, chains = _logs(_scaled(start, rates), observations)
    columns, small = [], 1e-4
    for at in range(len(rates)):
        costs = _scaled(start, rates + small * (np.arange(len(rates)) == at))
        if at < RATES:
            moved_busy, moved_chains = _logs(costs, observations)
        else:  # ignore the effect of one rank's speed on the chain, which saves a run of the model per rank
            moved_busy = np.log([busy_seconds(costs, seen.partition.lengths) for seen in observations])
            moved_chains = chains
        columns.append(_in_deviations(moved_busy - busy, moved_chains - chains) / small)
    for only in np.eye(len(observations)):
        columns.append(_in_deviations(np.tile(only[:, None], ranks), only))
    return np.stack(columns, axis=1)


def _fillable(costs: Costs) -> Costs:
    """Replace zeros by small values, so that multiplicative factors can change them."""
    token_s = costs.token_s
    return replace(
        costs,
        pair_s=max(costs.pair_s, 1e-7 * token_s),
        layer_s=max(costs.layer_s, 0.1 * costs.launch_floor_s, token_s),
        copy_token_s=max(costs.copy_token_s, costs.kv_bytes / costs.link_bytes_per_s, 1e-4 * token_s),
    )


def _scaled(costs: Costs, factors: Array) -> Costs:
    """Apply logarithmic factors to tokens, pairs, layers, copies, the link, and each rank's speed."""
    token, pair, layer, copy, link, *speeds = map(float, np.exp(np.clip(factors, -5, 5)))
    nominal = costs.speeds or (1.0,) * len(speeds)
    return replace(
        costs,
        qkv_token_s=costs.qkv_token_s * token,
        rest_token_s=costs.rest_token_s * token,
        pair_s=costs.pair_s * pair,
        layer_s=costs.layer_s * layer,
        copy_token_s=costs.copy_token_s * copy,
        link_bytes_per_s=costs.link_bytes_per_s * link,
        speeds=tuple(speed * factor for speed, factor in zip(nominal, speeds, strict=True)),
    )


def steady(split: Partition, predicted_s: float, run: RunSlices, logger: RankLogger) -> tuple[Observation, int]:
    """Run a split; repeat invalid or absurd measurements; return the shortest valid one, and the number of runs.

    Raises `DataError` if there is none.
    """
    numbers: list[Observation] = []
    for runs in range(1, MAX_HICCUPS + 1):
        seen = run(split)
        if all(math.isfinite(time) and time > 0 for time in (seen.ttft_s, *seen.busy_s)):
            if seen.ttft_s < ABSURD_RATIO * predicted_s:
                return seen, runs
            numbers.append(seen)
        again = "again" if runs < MAX_HICCUPS else "gave up"
        logger.info(
            f"  {split} took {seen.ttft_s} s (busy {_list(seen.busy_s)} s), predicted {predicted_s:.3f} s: {again}"
        )
    if not numbers:
        raise DataError(
            f"{split}: {MAX_HICCUPS} runs gave no valid times (the last: {seen.ttft_s} s, busy {_list(seen.busy_s)} "
            f"s); expected positive seconds: check the clocks of the hosts (chrony, ntpd), and search again"
        )
    logger.info(f"  {split} is consistently slow: using the fastest of {counted(len(numbers), 'run')}")
    return min(numbers, key=lambda seen: seen.ttft_s), MAX_HICCUPS


def _choose(result: Refit) -> Partition:
    """Choose the split with the best combination of measured and modeled time, since both have errors."""

    def expected_of(split: Partition) -> float:
        times = result.times_of(split)
        predicted = math.log(chain_seconds(result.costs, split.lengths))
        miss = float(np.mean(np.log(times))) - predicted
        # Weigh the mean of n runs (standard deviation DRIFT_SD each) against the model (MODEL_SD). A larger miss
        # indicates a disturbed run, and gets less weight.
        weight = MODEL_SD**2 / (MODEL_SD**2 + DRIFT_SD**2 / len(times) + miss**2)
        return predicted + weight * miss

    return min(result.forecasts_s, key=expected_of)


def _list(seconds: Sequence[float]) -> str:
    shown = [f"{second:.3f}" for second in seconds]
    return " ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-2:]])
