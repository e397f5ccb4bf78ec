"""Commands and jobs whose ranks are pretended GPUs, over the transport's own code; their NCCL refuses host memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import Network, run_on_gpus
from jobs_together import within_limit
from made_jobs import answers, with_settings
from models import tiny
from pretended_cuda import PretendedCuda

from kvr_mpi.prefill.verify import Finding, verify
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.links import Skew, measure_skews
from kvr_mpi.transport.nccl import NcclTransport

COMPRESSED = ("compress.method=ada-snapkv", "compress.budget=32", "compress.window=8")
Runs = Callable[..., dict[str, tuple[int, ...]]]


@pytest.fixture
def run_on(job: Path, tmp_path: Path, run_on_gpus_here: Any) -> Runs:
    """Run the job with some settings on so many pretended GPUs; 1: on one CPU."""
    numbers = itertools.count()

    def run(size: int, *settings: str) -> dict[str, tuple[int, ...]]:
        output = tmp_path / f"out-{next(numbers)}"
        words = with_settings(*settings, f"output.path={output}")
        done = within_limit(lambda: run_on_gpus_here(size, [job, *words]))
        assert done.returncode == 0, done.stderr
        return answers(output)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_planned_job_over_nccl(size: int, gpus: PretendedCuda, run_on: Runs) -> None:
    gpus.watches = size > 2
    truth = run_on(1)
    assert run_on(size, "parallel.partition=equal_time") == truth and len(truth) == 5
    assert gpus.faults == []


@pytest.mark.long
def test_groups_and_compression_send_nothing_that_nccl_refuses(gpus: PretendedCuda, run_on: Runs) -> None:
    """Other settings, each and by twos, are in `test_settings_on_gpus`."""
    gpus.watches = False
    found = run_on(2, "parallel.tensor_parallel=2", *COMPRESSED)
    assert found == run_on(1, *COMPRESSED)


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
