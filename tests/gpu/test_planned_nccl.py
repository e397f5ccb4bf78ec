"""A planned job from its documents to its answers, its ranks on pretended GPUs, over the transport's own code."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import Network, run_on_gpus
from job_files import write_job
from made_jobs import answers, spec_of
from pretended_cuda import PretendedCuda

from kvr_mpi.report.log import Log
from kvr_mpi.runtime.batch import run_job
from kvr_mpi.runtime.options import Environment, RunOptions
from kvr_mpi.setup import prepare
from kvr_mpi.setup.job_setup import Machine
from kvr_mpi.store.lock import this_process
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.local import run_local
from kvr_mpi.transport.nccl import NcclTransport

CPU = torch.device("cpu")
TEXT = """
[model]
path = "{model}"
dtype = "float32"
[documents]
path = "{corpus}"
[prompt]
template = "Summarise: {{text}} Summary:"
[generation]
max_new_tokens = 4
[output]
path = "{output}"
"""


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, count in enumerate((1, 30, 6)):
        (corpus / f"{number}.txt").write_text(f"Document {number}. " + "All that is written here says little. " * count)
    words = {"model": tiny_model_dir, "corpus": corpus, "output": tmp_path / "out"}
    return write_job(tmp_path, text=TEXT.replace("{{text}}", "TEXT").format(**words).replace("TEXT", "{text}"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_planned_job_over_nccl(
    size: int,
    job: Path,
    tmp_path: Path,
    cache_dir: Path,
    gpus: PretendedCuda,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus.watches = size > 2
    environment = Environment(Machine(cache_dir, cores=2, offline=True), this_process())

    def run(spec: Any, world: Any) -> int:
        return run_job(spec, RunOptions(), environment, world, Log(world.rank, world.size, io.StringIO()))

    monkeypatch.setattr("kvr_mpi.runtime.batch.choose_device", lambda name, rank: CPU)
    assert run_local(1, lambda rank: run(spec_of(job, f"output.path={tmp_path / 'alone'}"), rank)) == [0]
    load = prepare.load_on_all

    def load_there(world: Any, path: str, **arguments: Any) -> Any:
        return gpus.move(load(world, path, **arguments | {"device": "cpu", "kernels": "plain"}), _own())

    def open_there(world: Any, *arguments: Any, **more: Any) -> tuple[Any, str]:
        ranks = NcclTransport(world, _own())
        warm_up(ranks, _own())
        return ranks, "transport: nccl"

    monkeypatch.setattr(prepare, "load_on_all", load_there)
    monkeypatch.setattr("kvr_mpi.runtime.batch.open_transport", open_there)
    monkeypatch.setattr("kvr_mpi.runtime.batch.choose_device", lambda name, rank: _own())
    spec = spec_of(job, "parallel.min_efficiency=0")
    assert run_on_gpus(size, network, lambda ranks: run(spec, ranks._control), timeout_s=400) == [0] * size
    assert answers(tmp_path / "out") == answers(tmp_path / "alone") and len(answers(tmp_path / "out")) == 3
    assert gpus.faults == []


def _own() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
