"""Which transport is chosen, and why; what is impossible is refused before anything hangs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from made_jobs import with_settings

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.choose import _View, choose, open_transport
from kvr_mpi.transport.local import LocalTransport, run_local


def cpus(ranks: int) -> list[_View]:
    return [_View("cpu", "", None, "", False)] * ranks


def gpus(*names: str, claims: bool | None = True, nccl: bool = True) -> list[_View]:
    return [_View("cuda", name, claims, "MPIX_Query_cuda_support says so", nccl) for name in names]


@pytest.mark.parametrize(
    ("wanted", "views", "chosen", "reason"),
    [
        ("auto", cpus(4), "mpi", "without a copy"),
        ("mpi", cpus(2), "mpi", "without a copy"),
        ("staged", cpus(2), "staged", "only adds a copy"),
        ("auto", cpus(1), "local", "one rank"),
        ("local", cpus(1), "local", "one rank"),
        ("auto", gpus("a", "b"), "nccl", "between GPUs"),
        ("auto", gpus("a", "b", claims=False), "nccl", "between GPUs"),
        ("auto", gpus("a", "b", claims=None, nccl=False), "staged", "built without NCCL"),
        ("auto", gpus("a", "a"), "staged", r"ranks \[0, 1\] share one GPU"),
        ("mpi", gpus("a", "b"), "mpi", "claims to support GPU memory"),
        ("mpi", gpus("a", "a"), "mpi", "claims to support GPU memory"),
        ("staged", gpus("a", "a"), "staged", "as requested"),
        ("nccl", gpus("a", "b"), "nccl", "as requested"),
    ],
)
def test_the_choice_and_its_reason(wanted: Any, views: list[_View], chosen: str, reason: str) -> None:
    name, why = choose(wanted, views, in_processes=True)
    assert name == chosen
    assert re.search(reason, why), why


@pytest.mark.parametrize(
    ("wanted", "views", "message"),
    [
        ("nccl", cpus(2), "the model of rank 0 is on the CPU; use 'auto' or 'mpi'"),
        ("nccl", [*gpus("a"), *cpus(1)], "the model of rank 1 is on the CPU"),
        ("nccl", gpus("a", "b", "a"), r"ranks \[0, 2\] share one GPU.*\(a\).*use 'staged'"),
        ("nccl", gpus("a", "b", nccl=False), "built without NCCL"),
        ("mpi", gpus("a", "b", claims=False), "does not claim to support that .*use 'nccl', 'staged' or 'auto'"),
        ("mpi", [*gpus("a"), *gpus("b", claims=None)], "does not claim to support that"),
        ("local", cpus(3), "3 ranks were started; use 'auto' or 'mpi'"),
    ],
)
def test_what_is_impossible_is_refused(wanted: Any, views: list[_View], message: str) -> None:
    with pytest.raises(TransportError, match=message) as caught:
        choose(wanted, views, in_processes=True)
    assert caught.value.exit_code == 69


def test_threads_are_warmed_up_and_a_link_that_changes_data_is_found() -> None:
    class Garbling(LocalTransport):
        def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
            return super().isend(tensor.roll(1) if dest == 2 else tensor, dest, tag)

    def work(rank: LocalTransport, transport: type[LocalTransport] = LocalTransport) -> str:
        mine = transport(rank._hub, rank.rank)
        return open_transport(mine, "auto", torch.device("cpu"), every_pair=True)[1]

    assert run_local(3, work) == ["transport: local: 3 threads of one process"] * 3
    with pytest.raises(TransportError, match="from rank 0 to rank 2 delivers other data|another rank failed"):
        run_local(3, lambda rank: work(rank, Garbling))


@pytest.mark.slow
def test_a_job_says_what_it_chose(mpirun: Any, kvr: Path, tiny_model_dir: Path) -> None:
    options = ["verify", *with_settings(f"model.path={tiny_model_dir}"), "--lengths", "16,40"]
    run = mpirun(2, [kvr, *options, *with_settings("parallel.transport=staged")])
    assert run.returncode == 0 and (run.stderr + run.stdout).count("transport: staged: as requested") == 1, run.stderr
    refused = mpirun(2, [kvr, *options, *with_settings("parallel.transport=nccl")])
    assert refused.returncode == 69
    assert "the model of rank 0 is on the CPU" in refused.stderr + refused.stdout
