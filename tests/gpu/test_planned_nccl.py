"""Commands and jobs whose ranks are pretended GPUs, over the transport's own code; their NCCL refuses host memory."""

from __future__ import annotations

import io
import itertools
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import Network, run_on_gpus
from job_files import write_job
from made_jobs import answers, spec_of
from models import tiny
from pretended_cuda import PretendedCuda

from kvr_mpi.prefill.verify import Finding, verify
from kvr_mpi.report.log import Log
from kvr_mpi.runtime.batch import run_job
from kvr_mpi.runtime.options import Environment, RunOptions
from kvr_mpi.setup import prepare
from kvr_mpi.setup.job_setup import Machine
from kvr_mpi.store.lock import this_process
from kvr_mpi.transport.base import FailedTogetherError
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.links import Skew, measure_skews
from kvr_mpi.transport.local import run_local
from kvr_mpi.transport.nccl import NcclTransport, open_nccl

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
COMPRESSED = ("compress.method=ada-snapkv", "compress.budget=32", "compress.window=8")
Runs = Callable[..., dict[str, tuple[int, ...]]]


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, count in enumerate((1, 30, 6)):
        (corpus / f"{number}.txt").write_text(f"Document {number}. " + "All that is written here says little. " * count)
    words = {"model": tiny_model_dir, "corpus": corpus, "output": tmp_path / "out"}
    return write_job(tmp_path, text=TEXT.replace("{{text}}", "TEXT").format(**words).replace("TEXT", "{text}"))


@pytest.fixture
def run_on(
    job: Path,
    tmp_path: Path,
    cache_dir: Path,
    gpus: PretendedCuda,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    """Run the job with some settings on so many pretended GPUs, each on a host of its own; 0: on one CPU."""
    environment, numbers, load = (
        Environment(Machine(cache_dir, cores=2, offline=True), this_process()),
        itertools.count(),
        prepare.load_on_all,
    )

    def load_there(world: Any, path: str, **arguments: Any) -> Any:
        return gpus.move(load(world, path, **arguments | {"device": "cpu", "kernels": "plain"}), _own())

    def open_there(world: Any, *arguments: Any, **more: Any) -> tuple[Any, str]:
        ranks = open_nccl(world, _own())
        warm_up(ranks, _own())
        return ranks, "transport: nccl"

    def run(size: int, *settings: str) -> dict[str, tuple[int, ...]]:
        output = tmp_path / f"out-{next(numbers)}"
        spec = spec_of(job, *settings, f"output.path={output}")

        def rank(world: Any) -> int:
            try:
                return run_job(spec, RunOptions(), environment, world, Log(world.rank, stream=io.StringIO()))
            except FailedTogetherError as error:
                raise error.cause or error from error

        with monkeypatch.context() as there:
            there.setattr("kvr_mpi.runtime.batch.own_device", lambda ranks, name: _own() if size else CPU)
            if size:
                there.setattr(prepare, "load_on_all", load_there)
                there.setattr("kvr_mpi.runtime.batch.open_transport", open_there)
                there.setattr(socket, "gethostname", lambda: threading.current_thread().name)
                found = run_on_gpus(size, network, lambda ranks: rank(ranks._control), timeout_s=400)
            else:
                found = run_local(1, rank)
        assert found == [0] * max(1, size)
        return answers(output)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_planned_job_over_nccl(size: int, gpus: PretendedCuda, run_on: Runs) -> None:
    gpus.watches = size > 2
    truth = run_on(0)
    assert run_on(size) == truth and len(truth) == 3
    assert gpus.faults == []


@pytest.mark.long
def test_groups_and_compression_send_nothing_that_nccl_refuses(gpus: PretendedCuda, run_on: Runs) -> None:
    """Other settings, each and by twos, are in `test_settings_on_gpus`."""
    gpus.watches = False
    found = run_on(2, "parallel.tensor_parallel=2", *COMPRESSED, "parallel.partition=even")
    assert found == run_on(0, *COMPRESSED)


@pytest.mark.slow
def test_verify_compares_on_the_host_what_ranks_computed_on_gpus(
    gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.watches = False
    monkeypatch.setattr("kvr_mpi.prefill.verify.NEW_TOKENS", 2)
    models = [gpus.move(tiny("llama-gqa"), torch.device("cuda", rank)) for rank in range(2)]

    def work(ranks: NcclTransport) -> list[Finding]:
        warm_up(ranks, _own())
        return list(verify(models[ranks.rank], ranks, [6]))

    findings, _ = run_on_gpus(2, network, work)
    assert len(findings) > 6 and all(each.holds for each in findings), findings


def test_clocks_of_hosts_are_compared(gpus: PretendedCuda, network: Network) -> None:
    def work(ranks: NcclTransport) -> dict[int, Skew]:
        part = ranks.split(ranks.rank % 2)  # ranks 0 and 2, whose numbers are others among them
        total = torch.ones(3)
        part.all_reduce(total)
        assert total.tolist() == [2.0] * 3
        return measure_skews(part, [1], lambda request, who: request.wait())

    skews, *_ = run_on_gpus(4, network, work)
    assert abs(skews[1].ahead_s) <= skews[1].error_s < 10


def _own() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
