"""Every setting of a job on pretended GPUs, whose NCCL refuses host memory: one CPU's answers, or the same refusal.

Two ranks are two GPUs, each on a host of its own. On a machine with a GPU, two threads share it.
"""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_together import TOGETHER, Bench, check, prepare_places
from pretended_cuda import PretendedCuda
from settings_by_twos import SETTINGS

from kvr_mpi.cli.run import run
from kvr_mpi.setup import prepare
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.nccl import open_nccl

# The jobs that show all pairs take minutes; one of them is run where tests may not take hours.
FEW = 1


def own() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> Any:
    return prepare_places(tmp_path_factory.mktemp("together"), small_vocabulary_dir)


@pytest.fixture
def bench(prepared: Any, run_here: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Jobs of one rank run on a CPU, all others on GPUs."""
    folder, base, places, truths = prepared
    if torch.cuda.is_available():

        def launch_on_one(ranks: int, arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
            done: subprocess.CompletedProcess[str] = run_here(
                ranks, [*arguments, "--set", f"model.device={'cpu' if ranks == 1 else 'cuda'}"]
            )
            return done

        return Bench(folder, launch_on_one, monkeypatch, base, places, truths)
    gpus: PretendedCuda = request.getfixturevalue("gpus")
    request.getfixturevalue("network")
    gpus.watches = False
    load = prepare.load_on_all

    def load_there(world: Any, path: str, **arguments: Any) -> Any:
        return gpus.move(load(world, path, **arguments | {"device": "cpu", "kernels": "plain"}), own())

    def open_there(world: Any, *arguments: Any, **more: Any) -> tuple[Any, str]:
        ranks = open_nccl(world, own())
        warm_up(ranks, own())
        return ranks, "transport: nccl"

    def launch(ranks: int, arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        if ranks == 1:
            done: subprocess.CompletedProcess[str] = run_here(ranks, arguments)
            return done
        mine = threading.local()

        def rank(world: LocalTransport) -> int:
            mine.world = world
            torch.cuda.set_device(world.rank)
            return int(run.main([str(word) for word in arguments], standalone_mode=False))

        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as there, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            there.setattr("kvr_mpi.transport.mpi.connect", lambda: mine.world)
            there.setattr("kvr_mpi.runtime.batch.own_device", lambda world, name: own())
            there.setattr("kvr_mpi.runtime.batch.open_transport", open_there)
            there.setattr(prepare, "load_on_all", load_there)
            there.setattr(socket, "gethostname", lambda: threading.current_thread().name)
            codes = run_local(ranks, rank)
        return subprocess.CompletedProcess(list(arguments), max(codes), out.getvalue(), err.getvalue())

    return Bench(folder, launch, monkeypatch, base, places, truths)


def skip_samples(names: Sequence[str]) -> None:
    if "samples" in names and torch.cuda.is_available():
        pytest.skip("a GPU draws other random numbers than a CPU")


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_on_gpus(name: str, bench: Bench) -> None:
    skip_samples([name])
    check(bench, [name])


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=pytest.mark.slow if number < FEW else pytest.mark.long)
        for number, names in enumerate(TOGETHER)
    ],
    ids="+".join,
)
def test_settings_together_on_gpus(names: tuple[str, ...], bench: Bench) -> None:
    skip_samples(names)
    check(bench, names)
