"""Pretended GPUs, a network of NCCL's kind between them, and jobs that run on them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import Network, installed
from pretended_cuda import PretendedCuda, pretended

from kvr_mpi.setup import prepare
from kvr_mpi.transport import mpi
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.nccl import open_nccl


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    """Eight of them, in the place of torch.cuda."""
    return pretended(monkeypatch)


@pytest.fixture
def network(gpus: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> Network:
    """In the place of ``torch.distributed.ProcessGroupNCCL``."""
    return installed(monkeypatch, Network(gpus))


@pytest.fixture
def run_on_gpus_here(
    run_here: Any, gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, Sequence[str | Path]], Any]:
    """As `run_here`; of several ranks each has a GPU, on a host of its own."""
    connect, load = mpi.connect, prepare.load_on_all

    def own(*given: Any) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def connect_there() -> Any:
        world = connect()
        torch.cuda.set_device(world.rank)
        return world

    def load_there(world: Any, path: str, **arguments: Any) -> Any:
        return gpus.move(load(world, path, **arguments | {"device": "cpu", "kernels": "plain"}), own())

    def open_there(world: Any, *arguments: Any, **more: Any) -> tuple[Any, str]:
        ranks = open_nccl(world, own())
        warm_up(ranks, own())
        return ranks, "transport: nccl"

    def launch(ranks: int, arguments: Sequence[str | Path]) -> Any:
        with monkeypatch.context() as there:
            if ranks > 1:
                there.setattr(mpi, "connect", connect_there)
                there.setattr("kvr_mpi.runtime.batch.own_device", own)
                there.setattr("kvr_mpi.runtime.batch.open_transport", open_there)
                there.setattr(prepare, "load_on_all", load_there)
                there.setattr(socket, "gethostname", lambda: threading.current_thread().name)
            return run_here(ranks, arguments)

    return launch
