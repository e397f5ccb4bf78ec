"""A rolling cache on a chain over NCCL: what is moved in a layer's memory, and what comes there. No GPU has run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_nccl import Network, run_on_gpus
from models import prompt, tiny
from pretended_cuda import PretendedCuda
from test_nccl import on_gpus

from kvr_mpi.kv import rolling_relay
from kvr_mpi.kv.clock import Clock
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.rolling_chain import prefill_rolling_chain
from kvr_mpi.prefill.self_check import error_share
from kvr_mpi.prefill.streaming import prefill_streaming
from kvr_mpi.transport.base import Request
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.torchdist import TorchDistTransport

RANKS, STEPS, ROLLING = 3, 4, Rolling(16, 5)
IDS = prompt(RANKS * STEPS * ROLLING.step_tokens)


class Hasty:
    """A transport whose receives do not wait for what the rank computes, and so for rows that are moved away."""

    def __init__(self, ranks: TorchDistTransport) -> None:
        self._ranks = ranks

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        with torch.cuda.stream(torch.cuda.Stream(tensor.device)):
            return self._ranks.irecv(tensor, source, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def logits_of(gpus: PretendedCuda, network: Network, *, is_hasty: bool) -> torch.Tensor:
    models = on_gpus(gpus, tiny("mistral-window"), RANKS)

    def work(ranks: TorchDistTransport) -> torch.Tensor | None:
        warm_up(ranks, models[ranks.rank].device)
        chain: Any = Hasty(ranks) if is_hasty else ranks
        cut = Partition.even(len(IDS), RANKS)
        logits = prefill_rolling_chain(models[ranks.rank], IDS, ROLLING, cut, chain).logits
        return None if logits is None else logits.cpu()

    *_, logits = run_on_gpus(RANKS, network, work)
    assert logits is not None
    return logits


@pytest.mark.parametrize("kept", [1000, 0])
def test_nothing_waits_for_the_gpu_within_a_rolling_chain(
    kept: int, gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept moves, and what comes is put where it was, in the order of one stream; unless waits are many."""
    waits, catch_up = list[Clock](), Clock.catch_up

    def counted(clock: Clock) -> None:
        waits.append(clock)
        catch_up(clock)

    monkeypatch.setattr(Clock, "catch_up", counted)
    monkeypatch.setattr(rolling_relay, "WAITS_KEPT", kept)
    found = logits_of(gpus, network, is_hasty=False)
    assert gpus.faults == [] and bool(waits) is (kept == 0)
    loaded = tiny("mistral-window")
    prepare_model(loaded.model, chain=True)
    assert error_share(found, prefill_streaming(loaded, IDS, ROLLING)[0]) < 1e-4


def test_a_receive_that_overtakes_a_move_is_found(gpus: PretendedCuda, network: Network) -> None:
    logits_of(gpus, network, is_hasty=True)
    assert any("possible data race" in each for each in gpus.faults)
