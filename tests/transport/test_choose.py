"""Which transport is chosen, and why; what is impossible is refused before anything hangs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.choose import _View, choose, open_transport, warm_up_sums
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
        ("staged", cpus(2), "mpi", "without a copy"),
        ("auto", cpus(1), "local", "one rank"),
        ("local", cpus(1), "local", "one rank"),
        ("auto", gpus("a", "b", claims=False), "nccl", "between GPUs"),
        ("auto", gpus("a", "b", claims=None, nccl=False), "staged", "built without NCCL"),
        ("auto", gpus("a", "a"), "staged", r"ranks \[0, 1\] share one GPU"),
        ("mpi", gpus("a", "a"), "mpi", "claims to support GPU memory"),
        ("staged", gpus("a", "a"), "staged", "as requested"),
        ("nccl", gpus("a", "b"), "nccl", "as requested"),
        ("nccl", cpus(2), None, "the model of rank 0 is on the CPU; use 'auto' or 'mpi'"),
        ("nccl", [*gpus("a"), *cpus(1)], None, "the model of rank 1 is on the CPU"),
        ("nccl", gpus("a", "b", "a"), None, r"ranks \[0, 2\] share one GPU.*\(a\).*use 'staged'"),
        ("nccl", gpus("a", "b", nccl=False), None, "built without NCCL"),
        ("mpi", [*gpus("a"), *gpus("b", claims=None)], None, "not claim to support.*use 'nccl', 'staged' or 'auto'"),
        ("local", cpus(3), None, "3 ranks were started; use 'auto' or 'mpi'"),
    ],
)
def test_the_choice_and_its_reason(wanted: Any, views: list[_View], chosen: str | None, reason: str) -> None:
    if chosen is None:
        with pytest.raises(TransportError, match=reason) as caught:
            choose(wanted, views, in_processes=True)
        assert caught.value.exit_code == 69
    else:
        name, why = choose(wanted, views, in_processes=True)
        assert name == chosen and re.search(reason, why), why


def test_threads_are_warmed_up_and_a_link_that_changes_data_is_found() -> None:
    class Garbling(LocalTransport):
        def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
            return super().isend(tensor.roll(1) if dest == 2 else tensor, dest, tag)

    def work(rank: LocalTransport, transport: type[LocalTransport] = LocalTransport) -> str:
        mine = transport(rank._hub, rank.rank)
        return open_transport(mine, "auto", torch.device("cpu"), every_pair=True)[1]

    assert run_local(3, work) == ["transport: local: 3 threads of one process"] * 3
    with pytest.raises(TransportError, match="from rank 0 to rank 2 delivers wrong data|another rank failed"):
        run_local(3, lambda rank: work(rank, Garbling))
    with pytest.raises(TransportError, match="all-reduce over 3 ranks delivers wrong data|another rank failed"):
        run_local(3, lambda rank: warm_up_sums(Garbling(rank._hub, rank.rank), torch.device("cpu")))
