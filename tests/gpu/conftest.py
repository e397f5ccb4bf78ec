"""Pretended GPUs, a network of NCCL's kind between them, and jobs that run on them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import HostOnly, Network, installed
from models import save_tiny_model
from pretended_cuda import PretendedCuda, pretended

from kvr_mpi.model import choose_device
from kvr_mpi.runtime import batch, loading
from kvr_mpi.runtime.worker import ChainWorker
from kvr_mpi.transport import choose, mpi


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """Of two layers: every operation on a pretended GPU takes time."""
    return save_tiny_model(tmp_path_factory.mktemp("two-layers"), small_tokenizer, layers=2)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    """Eight of them, in the place of torch.cuda."""
    yield (made := pretended(monkeypatch))
    for memory in made.emptied:
        memory.resize_(0)


@pytest.fixture
def network(gpus: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> Network:
    """In the place of ``torch.distributed.ProcessGroupNCCL``."""
    return installed(monkeypatch, Network(gpus))


@pytest.fixture
def run_on_gpus_here(
    run_here: Any, gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """As `run_here`; of several ranks each has a GPU, on a host of its own, and between them there is NCCL only."""
    connect, load, prepare, work = mpi.connect, loading.load_model, batch.prepare, ChainWorker.run
    merge, devices = loading.merge_adapter, threading.local()

    def load_there(path: str, *, device_index: int, **arguments: Any) -> Any:
        devices.here = choose_device(arguments["device"], device_index)
        return load(path, **arguments | {"device": "cpu"})

    def merge_there(loaded: Any, adapter: Any) -> Any:  # before it moves: weights of a pretended GPU take no other data
        return gpus.move(merge(loaded, adapter), devices.here)

    def connect_there() -> HostOnly:
        world = connect()
        return HostOnly(world._hub, world.rank)

    def prepare_there(*given: Any) -> Any:
        network.at_work.add(threading.current_thread().name)
        setup = prepare(*given)
        network.at_work.remove(threading.current_thread().name)
        return setup

    def run_there(worker: ChainWorker) -> None:
        network.at_work.add(threading.current_thread().name)
        work(worker)

    def choose_there(*given: Any, decodes_together: bool = False, **options: Any) -> tuple[str, str]:
        monkeypatch.setattr(HostOnly, "stages", decodes_together)
        return "staged" if decodes_together else "nccl", "pretended"

    def launch(ranks: int, arguments: Sequence[str | Path], command: str = "run") -> Any:
        with monkeypatch.context() as there:
            if ranks > 1:
                there.setattr(torch.cuda, "is_available", lambda: True)
                there.setattr(choose, "choose", choose_there)
                there.setattr(loading, "load_model", load_there)
                there.setattr(loading, "merge_adapter", merge_there)
                there.setattr(socket, "gethostname", lambda: threading.current_thread().name)
                there.setattr(mpi, "connect", connect_there)
                there.setattr(batch, "prepare", prepare_there)
                there.setattr(ChainWorker, "run", run_there)
                network.at_work.clear()
            done = run_here(ranks, arguments, command)
        assert network.late == [], "pairs that were not warmed up"
        return done

    return launch
