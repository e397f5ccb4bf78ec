from __future__ import annotations

import json
import re
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from constants import TESTS
from models import prompt, tiny
from promises import keep_counts, keep_promises

from kvr_mpi.errors import TransportError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport import choose as choose_module
from kvr_mpi.transport import staging
from kvr_mpi.transport.base import FixedTag, Request
from kvr_mpi.transport.choose import _View, choose, open_transport, warm_up, warm_up_sums
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.mpi import connect, launched_size

PROGRAMS = TESTS / "programs"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(2, "auto", marks=pytest.mark.quick),
        pytest.param(3, "mpi", marks=pytest.mark.slow),
    ],
)
def test_ranks_keep_their_promises(mpirun: Any, ranks: int, name: str) -> None:
    run = mpirun(ranks, [sys.executable, PROGRAMS / "mpi_transport.py", name])
    assert run.returncode == 0 and json.loads(run.stdout) == {"size": ranks}, run.stderr


# What MPICH and Open MPI (4, 5) need to be told to copy through shared memory only.
WITHOUT_CMA = {
    "MPIR_CVAR_CH4_CMA_ENABLE": "0",
    "OMPI_MCA_smsc": "^cma,xpmem,knem",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


def test_messages_arrive_while_the_sender_computes_even_without_cma(mpirun: Any, tmp_path: Path) -> None:
    run = mpirun(2, [sys.executable, PROGRAMS / "quiet_sender.py", tmp_path / "came"], env=WITHOUT_CMA)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("what", "limit_s", "said"),
    [
        ("stopped", 2, "rank 2: rank 1 has not responded"),
        ("late", 20, ""),
        ("away", 2, r"rank [02]: .* of 3 has waited 2 s for gather \(tag 2, 4 bytes\) from rank 1, "),
    ],
)
def test_a_rank_that_hangs_ends_the_job_and_a_late_one_does_not(
    mpirun: Any, what: str, limit_s: int, said: str
) -> None:
    """A rank that stays away from a sum has a heartbeat all the same."""
    run = mpirun(3, [sys.executable, PROGRAMS / "hanging_rank.py", what, str(limit_s)], timeout_s=60)
    assert run.returncode == (69 if said else 0), run.stderr
    assert re.search(said, run.stderr)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_threads_keep_them_too(size: int) -> None:
    run_local(size, keep_promises)
    run_local(size, keep_counts)


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "8"}, 8),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({"SLURM_NTASKS": "8", "PMI_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"SLURM_NTASKS": "many"}, None),
    ],
)
def test_launched_size(environ: dict[str, str], size: int | None) -> None:
    found = launched_size(environ)
    assert (found and found[1]) == size


def test_alone_where_many_were_meant_is_refused() -> None:
    """This process is an MPI job of one; a launcher that says otherwise used another MPI."""
    with pytest.raises(TransportError, match=r"8 ranks were requested .*SLURM_NTASKS=8\).*srun --mpi=pmi2"):
        connect({"SLURM_NTASKS": "8"})
    assert connect({}).size == 1


def test_ranks_whose_mpi_allows_no_threads_are_refused(mpirun: Any) -> None:
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init_thread(MPI.THREAD_SERIALIZED)\n"
        "from kvr_mpi.errors import TransportError\n"
        "from kvr_mpi.transport.mpi import connect\n"
        "try: connect()\n"
        "except TransportError as error: raise SystemExit(0 if 'THREAD_SERIALIZED' in str(error) else 4)\n"
        "raise SystemExit(3)"
    )
    run = mpirun(2, [sys.executable, "-c", program])  # what ranks print as they end may be lost, their codes are not
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("most", [407, 200])
def test_tags_are_those_of_no_other_message_or_refused(most: int) -> None:
    """Three layers in 48 segments of a token each."""
    used, loaded = set[int](), tiny("llama-gqa")

    class FewTags(LocalTransport):
        tag_ub = most

        def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
            used.add(tag)
            return super().isend(tensor, dest, tag, received)

    def work(rank: LocalTransport) -> None:
        chain = FewTags(rank._hub, rank.rank)
        prefill_kvr(loaded, prompt(48), Partition.even(48, 2), chain, chunk_tokens=1)

    prepare_model(loaded.model, chain=True)
    if most == 200:
        with pytest.raises(TransportError, match="3 layers in 48 segments need message tags up to .*allows 200"):
            run_local(2, work)
    else:
        run_local(2, work)
        assert used and not used & {*FixedTag} and max(used) <= most


@pytest.mark.parametrize("by_next", [False, True])
def test_memory_and_tags_are_used_again_only_after_what_used_them_is_over(by_next: bool) -> None:
    """A layer's memory by the next one; tags by the prompt after the next."""
    ended, came = threading.Event(), torch.zeros(2)

    class Held:
        test, wait = ended.is_set, ended.wait

    class Slow(LocalTransport):
        def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Any:
            super().isend(tensor, dest, tag)
            return Held

    forwarder = Forwarder(Slow())
    forwarder.begin()
    passed = forwarder.receive(came, 0, 1, forward_to=0)
    forwarder.send(forwarder.announce(torch.ones(2), 0, 1))
    forwarder.wait(passed)
    assert came.tolist() == [1.0, 1.0] and not passed.through
    if by_next:
        forwarder.begin()
        assert not ended.is_set(), "one earlier prompt may be in flight"
    threading.Timer(0.05, ended.set).start()
    if by_next:
        forwarder.begin()
    else:
        forwarder.wait(passed, through=True)
    assert ended.is_set() and passed.through
    forwarder.close()


def test_a_message_that_does_not_come_ends_the_wait_and_is_named() -> None:
    """With the rank, the layer and the tag; without a deadline, this rank would wait for ever."""

    class Silent(LocalTransport):
        def __init__(self) -> None:
            super().__init__()
            self.rank, self.size, self.local_rank, self.local_size = 1, 3, 1, 3

    forwarder = Forwarder(Silent())
    forwarder.limit_s = 0.3
    forwarder.begin()
    late = forwarder.receive(torch.zeros(2), 0, 83, layer=5)
    for wait in (lambda: forwarder.wait(late), forwarder.settle):
        with pytest.raises(TransportError, match=r"rank 1 of 3 .* layer 5 \(tag 83, 8 bytes\) from rank 0") as caught:
            wait()
        assert caught.value.exit_code == 69
    forwarder.abandon()


@pytest.mark.parametrize("direct", [False, True])
def test_threads_start_each_piece_once_and_in_order(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread asks for progress while the first one is about to start a piece."""
    started, inside = list[int](), threading.Event()

    class Mark:
        threads = 0

        def query(self) -> bool:
            Mark.threads += 1
            if Mark.threads == 2:  # unless it waits for the first thread
                inside.set()
            if Mark.threads == 1:
                other.start()
                inside.wait(0.5)
            return True

        def record(self) -> None:
            return

    class Sent:
        def __init__(self, piece: torch.Tensor) -> None:
            started.append(int(piece))

        def test(self) -> bool:
            return True

        wait = test

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_event=lambda mark: None))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(staging, "_pinned", partial(torch.empty, dtype=torch.uint8))
    stages = staging.Staging(torch.device("cpu"), direct=direct)
    other = threading.Thread(target=stages.progress)
    sent = stages.send([torch.tensor([number], dtype=torch.uint8) for number in range(3)], 1, Sent)
    other.join()
    assert started == [0, 1, 2] and sent.test()


def test_messages_that_are_longer_than_their_rings_cross_over_mpi(mpirun: Any) -> None:
    run = mpirun(4, [sys.executable, PROGRAMS / "staged_ranks.py"], timeout_s=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("size", "most"), [(64, 2), (63, 3)])
def test_links_are_connected_in_few_rounds(size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank connects to one other at a time, while both wait for each other: 0.3 to 1 s each over NCCL."""
    monkeypatch.setattr(choose_module, "WARM_UP_BYTES", 64)

    class Connecting(LocalTransport):
        def __init__(self, hub: Any, rank: int) -> None:
            super().__init__(hub, rank)
            self.met: list[tuple[int, int]] = []

        def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
            self.met.append((self.rank, dest))
            return super().isend(tensor, dest, tag, received)

        def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
            self.met.append((source, self.rank))
            return super().irecv(tensor, source, tag)

    def work(rank: LocalTransport) -> list[tuple[int, int]]:
        mine = Connecting(rank._hub, rank.rank)
        warm_up(mine, torch.device("cpu"))
        return mine.met

    waiting, ended = run_local(size, work), [0] * size
    assert len({pair for met in waiting for pair in met}) == 2 * size
    while any(waiting):  # in each round, all pairs connect of which both ranks have come to it
        first = [met[0] if met else None for met in waiting]
        ready = [pair for rank, pair in enumerate(first) if pair and rank == pair[0] and first[pair[1]] == pair]
        assert ready, "no rank can go on"
        for one, other in ready:
            ended[one] = ended[other] = max(ended[one], ended[other]) + 1
            del waiting[one][0], waiting[other][0]
    assert max(ended) <= 2 * most, "each pair connects in both directions"


# Which transport is chosen, and why


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
        ("mpi", gpus("a", "a"), "mpi", "reports support for GPU memory"),
        ("staged", gpus("a", "a"), "staged", "as requested"),
        ("nccl", gpus("a", "b"), "nccl", "as requested"),
        ("nccl", cpus(2), None, "rank 0 has its model on the CPU; use 'auto' or 'mpi'"),
        ("nccl", [*gpus("a"), *cpus(1)], None, "rank 1 has its model on the CPU"),
        ("nccl", gpus("a", "b", "a"), None, r"ranks \[0, 2\] share one GPU.*\(a\).*use 'staged'"),
        ("nccl", gpus("a", "b", nccl=False), None, "built without NCCL"),
        ("mpi", [*gpus("a"), *gpus("b", claims=None)], None, "not report support for it.*'staged' or 'auto'"),
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


def test_ranks_that_decode_together_do_not_use_nccl() -> None:
    """Two or three small messages in every layer: by MPI, through the host or from GPU memory."""
    views, how = gpus("a", "b"), {"in_processes": True, "decodes_together": True}
    assert [choose(wanted, views, **how)[0] for wanted in ("auto", "staged", "mpi")] == ["staged", "staged", "mpi"]
    assert choose("auto", cpus(2), **how)[0] == "mpi" and choose("auto", views[:1], **how)[0] == "local"
    with pytest.raises(TransportError, match="use 'auto' or 'staged'"):
        choose("nccl", views, **how)


def test_threads_are_warmed_up_and_a_link_that_changes_data_is_found() -> None:
    class Garbling(LocalTransport):
        def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
            return super().isend(tensor.roll(1) if dest == 2 else tensor, dest, tag)

    def work(rank: LocalTransport, transport: type[LocalTransport] = LocalTransport) -> str:
        mine = transport(rank._hub, rank.rank)
        return open_transport(mine, "auto", torch.device("cpu"))[1]

    assert run_local(3, work) == ["transport: local: 3 threads of one process"] * 3
    with pytest.raises(TransportError, match="from rank [01] to rank 2 delivers wrong data|another rank failed"):
        run_local(3, lambda rank: work(rank, Garbling))
    with pytest.raises(TransportError, match="all-reduce over 3 ranks delivers wrong data|another rank failed"):
        run_local(3, lambda rank: warm_up_sums(Garbling(rank._hub, rank.rank), torch.device("cpu")))
