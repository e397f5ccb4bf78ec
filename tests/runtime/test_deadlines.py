"""How long a rank waits for the others of its chain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny

from kvr_mpi.costs.solve import Rates
from kvr_mpi.runtime import chain_runner
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.transport.liveness import LIMIT_S
from kvr_mpi.transport.local import LocalTransport, run_local


@pytest.mark.parametrize("has_rates", [False, True])
def test_waits_for_a_rank_grow_with_the_work_of_the_wave(has_rates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a slow rank may take minutes; a GPU's may not."""
    monkeypatch.setattr(chain_runner, "ASSUMED_SPEED", {"cpu": 1e6, "cuda": 1e6})
    rates = [Rates(1e-3, 1e-8), Rates(2e-3, 1e-8)] if has_rates else []

    def limits(rank: LocalTransport, device: str = "cpu") -> list[float]:
        loaded = SimpleNamespace(
            device=torch.device("cpu"), shape=tiny("llama-gqa").shape, model=tiny("llama-gqa").model
        )
        setup: Any = SimpleNamespace(loaded=loaded, rates=rates, spec=SimpleNamespace(is_sharded=False))
        runner, found = ChainRunner(setup, rank, 0), list[float]()
        loaded.device = torch.device(device)
        assert runner.forwarder is not None
        for tokens in (10, 20_000, 20_000):
            runner.expect(SimpleNamespace(prompt=SimpleNamespace(tokens=tokens)))  # type: ignore[arg-type]
            found.append(runner.forwarder.limit_s)
        runner.end_wave()
        runner.expect(SimpleNamespace(prompt=SimpleNamespace(tokens=10)))  # type: ignore[arg-type]
        runner.forwarder.abandon()
        return [*found, runner.forwarder.limit_s]

    short, long, both, after = run_local(2, limits)[1]
    assert short == after == LIMIT_S < long < both and long > 20 * 10
    assert max(run_local(2, lambda rank: limits(rank, "cuda"))[0]) == chain_runner.MOST_GPU_WAIT_S
