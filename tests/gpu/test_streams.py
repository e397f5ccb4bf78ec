"""Which stream waits for what, told to torch's own CUDA sanitizer by stand-ins."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fake_nccl import Network, run_on_gpus
from models import prompt, tiny
from mpi4py import MPI
from pretended_cuda import Event, OnDevices, PretendedCuda
from test_nccl import on_gpus

from kvr_mpi.kv.clock import Clock
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport.base import Request
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.mpi import MpiTransport
from kvr_mpi.transport.nccl import NcclTransport
from kvr_mpi.transport.staging import StagedReceive, StagedSend, Staging

GPU = torch.device("cuda", 3)


class Ended:
    """A request that says it has ended, whatever is the case."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Faulty:
    """A transport with a fault put back: ``blind``, ``computed`` or ``received``."""

    def __init__(self, ranks: NcclTransport, fault: str) -> None:
        self._ranks, self._fault = ranks, fault

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        if self._fault == "computed":  # what is computed leaves without waiting for its stream
            received = received or Ended()
        elif self._fault == "received":  # what is passed on waits for what is computed meanwhile
            received = None
        return self._ranks.isend(tensor, dest, tag, received)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        request = self._ranks.irecv(tensor, source, tag)
        return Ended() if self._fault == "blind" else request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def prefill_on(gpus: PretendedCuda, network: Network, fault: str) -> None:
    """A prompt on three ranks, the second of which passes on."""
    models = on_gpus(gpus, tiny("llama-gqa"), 3)

    def work(ranks: NcclTransport) -> None:
        warm_up(ranks, models[ranks.rank].device)
        for group in network.groups:
            group.forwards.clear()
        ranks.barrier()
        chain: Any = Faulty(ranks, fault)
        prefill_kvr(models[ranks.rank], prompt(48), Partition.even(48, 3), chain)

    run_on_gpus(3, network, work)


def sends_beside(network: Network) -> list[int]:
    """Of each rank, how many messages to higher ranks left beside the computation."""
    return [sum(group.forwards) for group in sorted(network.groups, key=lambda each: each.rank) if group.number == 0]


def test_a_chain_waits_for_what_it_needs_and_no_more(gpus: PretendedCuda, network: Network) -> None:
    prefill_on(gpus, network, "")
    assert gpus.faults == [] and gpus.syncs_of_devices == [], "a device also waits for what NCCL still sends"
    assert sends_beside(network) == [0, 3, 0], "the second rank passes on a segment of each of three layers"


def test_a_forward_behind_the_computation_is_found(gpus: PretendedCuda, network: Network) -> None:
    prefill_on(gpus, network, "received")
    assert sends_beside(network) == [0, 0, 0]


@pytest.mark.parametrize("fault", ["blind", "computed"])
def test_the_sanitizer_finds_a_missing_wait(fault: str, gpus: PretendedCuda, network: Network) -> None:
    prefill_on(gpus, network, fault)
    assert any("possible data race" in each for each in gpus.faults)


def test_a_wait_for_the_stream_of_nccl_is_found(gpus: PretendedCuda, network: Network) -> None:
    def work(ranks: NcclTransport) -> None:
        warm_up(ranks, torch.device("cuda", ranks.rank))
        if ranks.rank == 0:
            data = torch.zeros(4, dtype=torch.uint8, device="cuda:0")
            ranks._groups.up.send([data], 1, 0).wait()  # nobody receives it yet

    run_on_gpus(2, network, work)
    assert gpus.faults == ["rank 0 lets its stream wait for NCCL's"]


def copied(gpus: PretendedCuda, staging: Staging) -> torch.Tensor:
    """Send what is computed to oneself by way of host memory, and compute with what came."""
    with OnDevices(gpus):
        mail: list[torch.Tensor] = []

        def send(data: torch.Tensor) -> Ended:
            mail.append(data.clone())
            return Ended()

        def receive(data: torch.Tensor) -> Ended:
            data.copy_(mail.pop())
            return Ended()

        computed = torch.arange(8.0, device=GPU) * 2
        StagedSend(staging, computed.view(torch.uint8), send).wait()
        came = torch.zeros(8, device=GPU)
        StagedReceive(staging, came.view(torch.uint8), receive).wait()
        return (came + 1).cpu()


def test_staged_copies_wait_for_the_computation_and_it_for_them(gpus: PretendedCuda) -> None:
    torch.cuda.set_device(GPU)
    found = copied(gpus, Staging(GPU, direct=False))
    assert found.tolist() == [2.0 * value + 1 for value in range(8)] and gpus.faults == []


def test_a_mark_on_another_gpus_stream_orders_nothing(gpus: PretendedCuda) -> None:
    """A thread that does not say which GPU is its own marks a stream of the first."""
    copied(gpus, Staging(GPU, direct=False))
    assert any("possible data race" in each for each in gpus.faults)


@pytest.mark.parametrize("first", ["cpu", "cuda:3"])
def test_gpu_memory_is_staged_beside_host_memory(first: str, gpus: PretendedCuda) -> None:
    """Whichever is sent first: real MPI is handed host memory only."""
    torch.cuda.set_device(GPU)
    ranks = MpiTransport(MPI.COMM_SELF, "staged")
    for device in (first, "cuda:3", "cpu"):
        with OnDevices(gpus):
            sent, came = torch.arange(6.0, device=device), torch.zeros(6, device=device)
            requests = [ranks.irecv(came, 0, 1), ranks.isend(sent, 0, 1)]
            for request in requests:
                request.wait()
        assert came.tolist() == sent.tolist()
    assert gpus.faults == []


@pytest.mark.parametrize("is_told", [True, False])
@torch.inference_mode()
def test_gpu_memory_is_handed_to_mpi_on_its_own_gpu(gpus: PretendedCuda, is_told: bool) -> None:
    """Real MPI, from the forwarder's thread: a tensor is exported where its GPU is the current one, or not at all."""
    torch.cuda.set_device(GPU)
    ranks, tag = MpiTransport(MPI.COMM_SELF, "direct"), 1 + is_told
    with OnDevices(gpus):
        sent, came = torch.arange(6.0, device=GPU), torch.zeros(6, device=GPU)
    last = torch.zeros_like(came)
    forwarder = Forwarder(ranks, forwards=True, device=GPU if is_told else None)
    forwarder.begin()
    passed, final = forwarder.receive(came, 0, tag, forward_to=0), forwarder.receive(last, 0, tag)
    forwarder.send(sent, 0, tag)
    thread, deadline = forwarder._thread, time.monotonic() + 20
    assert thread is not None
    while thread.is_alive() and not (passed.through and final.arrived) and time.monotonic() < deadline:
        time.sleep(1e-3)  # the thread does it alone
    if is_told:
        forwarder.close()
        assert last.tolist() == sent.tolist() == came.tolist()
    else:
        with pytest.raises(BufferError, match="different CUDA device"):
            forwarder.close()
        ranks.isend(sent, 0, tag).wait()
        assert final.request is not None
        final.request.wait()  # the receive that is left


@pytest.mark.parametrize("is_told", [True, False])
def test_times_are_the_gpus_own(
    is_told: bool, gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host is done with telling a GPU, that has not done it yet: here every event is 1000 s after the last."""
    monkeypatch.setattr(Event, "elapsed_time", lambda self, later: 1e6 * (later.number - self.number))
    if not is_told:
        monkeypatch.setattr("kvr_mpi.kv.transfers.Clock", lambda device: Clock(None))
    models = on_gpus(gpus, tiny("llama-gqa"), 2)

    def work(ranks: NcclTransport) -> list[float]:
        warm_up(ranks, models[ranks.rank].device)
        return prefill_kvr(models[ranks.rank], prompt(24), Partition((0, 14, 24)), ranks).layer_times_s

    first, _ = run_on_gpus(2, network, work)
    assert len(first) == 3 and first[0] == 0.0
    assert (max(first) >= 2000) is is_told


def test_a_thread_has_the_first_gpu_until_it_says_another(gpus: PretendedCuda) -> None:
    """As CUDA has it; a block of another stream ends where it began."""
    torch.cuda.set_device(GPU)
    seen: list[int] = []

    def work(rank: LocalTransport) -> None:
        seen.append(torch.cuda.current_device())
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            seen.append(torch.cuda.current_device())
        seen.append(torch.cuda.current_device())

    run_local(1, work)
    run_local(1, work, GPU)
    assert seen == [0, 3, 0, 3, 3, 3]
