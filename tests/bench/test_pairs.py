"""Ratios of pairs: what is said of them, how long they are measured, and that a drift does not change them."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.pairs import Patience, drift_of, measure_pairs, ratio_of, ratios_of
from kvr_mpi.transport.local import LocalTransport, run_local


def itself(seconds: float) -> float:
    return seconds


class DriftingMachine:
    """Ways of known speed on a machine that gets slower with every run, and is noisy."""

    def __init__(self, noise: float, drift: float, **speeds: float) -> None:
        self.noise, self.drift, self.speeds, self.ran = noise, drift, speeds, list[str]()
        self.random = random.Random(7)

    def measure(self, name: str) -> float:
        self.ran.append(name)
        slower = 1.0 + self.drift * len(self.ran)
        return self.speeds[name] * slower * (1.0 + self.random.uniform(-self.noise, self.noise))


def measured(machine: DriftingMachine, patience: Patience, *others: str) -> dict[str, list[float]]:
    def rank(world: LocalTransport) -> dict[str, list[tuple[float, float]]]:
        return measure_pairs(world, "ours", others, machine.measure, itself, patience)

    return {name: ratios_of(runs, itself) for name, runs in run_local(1, rank)[0].items()}


def test_a_drift_hides_in_seconds_and_not_in_ratios() -> None:
    machine = DriftingMachine(0.01, 0.02, ours=1.0, other=1.05)
    ratio = ratio_of(measured(machine, Patience(20), "other")["other"])
    assert ratio.is_told and ratio.low <= 1.05 <= ratio.high and ratio.median == pytest.approx(1.05, abs=0.02)
    ours = [1.0 + 0.02 * number for number, name in enumerate(machine.ran) if name == "ours"]
    assert "this machine drifts" in (drift_of(ours) or "")


def test_the_same_is_never_said_to_be_faster() -> None:
    told = 0
    for seed in range(40):
        machine = DriftingMachine(0.2, 0.0, ours=1.0, other=1.0)
        machine.random.seed(seed)
        ratio = ratio_of(measured(machine, Patience(8), "other")["other"])
        told += ratio.is_told
        assert ratio.is_told == (not ratio.describe().startswith("the same")), ratio
    assert told <= 6, "of 40 pairs of equal ways two are expected, by chance"


def test_ranks_measure_the_same_pairs_though_one_has_the_clock() -> None:
    """Every rank calls the same ways in the same order, whatever its own clock says."""
    orders: dict[int, list[str]] = {0: [], 1: [], 2: []}
    ticks = itertools.count(1)

    def rank(world: LocalTransport) -> int:
        def measure(name: str) -> float:
            orders[world.rank].append(name)
            return 1.0 + 0.01 * len(orders[world.rank]) + 0 * next(ticks)

        return len(measure_pairs(world, "ours", ["a", "b"], measure, itself, Patience(400, time_limit_s=0.02))["a"])

    assert len(set(run_local(3, rank))) == 1 and orders[0] == orders[1] == orders[2]
