from __future__ import annotations

import json
import sys
import threading
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
from kvr_mpi.transport.base import FixedTag, Request
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.mpi import connect, launched_size
from kvr_mpi.transport.staging import Staging

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
    with pytest.raises(TransportError, match=r"8 ranks were intended .*SLURM_NTASKS=8\).*srun --mpi=pmi2"):
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


def test_threads_start_each_staged_transfer_once_and_in_order() -> None:
    """A second thread asks for progress while the first one is about to start a transfer."""
    staging, started, inside = Staging(torch.device("cpu"), direct=True), list[int](), threading.Event()

    class Mark:
        threads = 0

        def query(self) -> bool:
            self.threads += 1
            if self.threads == 2:  # unless it waits for the first thread
                inside.set()
            if self.threads == 1:
                other.start()
                inside.wait(0.5)
            return True

    def start(data: torch.Tensor) -> Any:
        started.append(int(data))

    other = threading.Thread(target=staging.progress)
    staging.start_when(Mark(), start, torch.tensor(1))
    other.join()
    assert started == [1]
