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
from test_one_gpu import model_of

from kvr_mpi.kv.buffers import LayerBuffers
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.mpi import MpiTransport
from kvr_mpi.transport.nccl import NcclTransport
from kvr_mpi.transport.staging import StagedReceive, Staging

GPU = torch.device("cuda", 3)


class Ended:
    """A request that says it has ended, whatever is the case."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Blind:
    """A transport whose receives are taken for ended at once."""

    def __init__(self, ranks: NcclTransport) -> None:
        self._ranks = ranks

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Ended:
        self._ranks.irecv(tensor, source, tag)
        return Ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


@pytest.mark.parametrize("is_blind", [False, True])
def test_a_chain_waits_for_what_it_needs_and_no_more_and_a_missing_wait_is_found(
    is_blind: bool, gpus: PretendedCuda, network: Network
) -> None:
    """A prompt on three ranks, the second of which passes on."""
    models = on_gpus(gpus, tiny("llama-gqa"), 3)

    def work(ranks: NcclTransport) -> None:
        warm_up(ranks, models[ranks.rank].device)
        for group in network.groups:
            group.forwards.clear()
        ranks.barrier()
        over: Any = Blind(ranks) if is_blind else ranks
        prefill_kvr(models[ranks.rank], prompt(48), Partition.even(48, 3), over)

    run_on_gpus(3, network, work)
    if is_blind:
        assert any("possible data race" in each for each in gpus.faults)
        return
    assert gpus.faults == [] and gpus.syncs_of_devices == [], "a device also waits for what NCCL still sends"
    beside = {group.rank: sum(group.forwards) for group in network.groups if group.name == "up"}
    assert beside == {0: 0, 1: 3, 2: 0}, "the second rank passes on a segment of each of three layers"


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_receive_waits_for_the_last_use_of_its_buffer(
    is_stale: bool, gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three ranks uses few buffers for six layers. An event from before its layers is a race.

    No host sees a transfer end before the last, since that would order them, too.
    """
    network.transfer_s, gpus.launch_s = 0.05, 1e-6
    monkeypatch.setattr("kvr_mpi.kv.cache.LAYERS_HELD", 1)
    models, now = on_gpus(gpus, model_of("llama-gqa", 6, torch.float32), 3), LayerBuffers._now
    if is_stale:
        monkeypatch.setattr(LayerBuffers, "_now", lambda self: vars(self).setdefault("stale", now(self)))

    def work(ranks: NcclTransport) -> None:
        warm_up(ranks, models[ranks.rank].device)
        prefill_kvr(models[ranks.rank], prompt(48), Partition.even(48, 3), ranks)

    run_on_gpus(3, network, work)
    assert any("possible data race" in each for each in gpus.faults) == is_stale, gpus.faults


class HostWaits:
    """A receive that the host waits for, too."""

    def __init__(self, gpus: PretendedCuda, request: Any) -> None:
        self.gpus, self.request, self.work = gpus, request, request._work

    def test(self) -> bool:
        return bool(self.request.test())

    def wait(self) -> None:
        self.request.wait()
        self.gpus.host_waits(self.work.end.until_s)


class OldOrder:
    """A transport whose receives are posted with their layer, behind all that is queued then."""

    layers_ahead = 0

    def __init__(self, gpus: PretendedCuda, ranks: NcclTransport) -> None:
        self._gpus, self._ranks = gpus, ranks

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> HostWaits:
        with torch.cuda.stream(self._gpus._defaults[tensor.device.index]):  # type: ignore[arg-type]
            return HostWaits(self._gpus, self._ranks.irecv(tensor, source, tag))

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
        return self._ranks.isend(tensor, dest, tag, None if received is None else received.request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def idle_s(gpus: PretendedCuda, network: Network, layers: int, *, is_old: bool) -> list[float]:
    """Seconds that the computing stream of each of three ranks has nothing to do within a prompt."""
    models = on_gpus(gpus, model_of("llama-gqa", layers, torch.float32), 3)

    def work(ranks: NcclTransport) -> float:
        warm_up(ranks, models[ranks.rank].device)
        stream: Any = torch.cuda.current_stream()
        before_s = stream.until_s - stream.busy_s
        over: Any = OldOrder(gpus, ranks) if is_old else ranks
        forwarder = Forwarder(over, device=stream.device)
        prefill_kvr(models[ranks.rank], prompt(48), Partition.even(48, 3), over, forwarder=forwarder)
        idle = stream.until_s - stream.busy_s - before_s
        forwarder.close()
        return float(idle)

    return run_on_gpus(3, network, work)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_receive_that_is_posted_early_stalls_no_layer(is_old: bool, gpus: PretendedCuda, network: Network) -> None:
    """With every layer more the old order has a stall more. Kernels take 20 us, launches 4, transfers 500."""
    gpus.watches, gpus.kernel_s, gpus.launch_s, network.transfer_s = False, 2e-5, 4e-6, 5e-4
    few, many = (idle_s(gpus, network, layers, is_old=is_old) for layers in (3, 7))
    first, *others = [(more - less) / 4 for more, less in zip(many, few, strict=True)]
    assert abs(first) < 1e-6, "it receives nothing"
    assert min(others) > 5e-5 if is_old else max(others) < 1e-6


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
        staging.send(computed.view(torch.uint8), send).wait()
        came = torch.zeros(8, device=GPU)
        StagedReceive(staging, came.view(torch.uint8), receive).wait()
        return (came + 1).cpu()


def test_staged_copies_wait_for_the_computation_and_it_for_them(gpus: PretendedCuda) -> None:
    torch.cuda.set_device(GPU)
    found = copied(gpus, Staging(GPU, direct=False))
    assert found.tolist() == [2.0 * value + 1 for value in range(8)] and gpus.faults == []


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


@torch.inference_mode()
def test_gpu_memory_is_handed_to_mpi_on_its_own_gpu(gpus: PretendedCuda) -> None:
    """Real MPI, from the forwarder's thread: a tensor is exported where its GPU is the current one, or not at all."""
    torch.cuda.set_device(GPU)
    ranks, tag = MpiTransport(MPI.COMM_SELF, "direct"), 1
    with OnDevices(gpus):
        sent, came = torch.arange(6.0, device=GPU), torch.zeros(6, device=GPU)
    last = torch.zeros_like(came)
    forwarder = Forwarder(ranks, forwards=True, device=GPU)
    forwarder.begin()
    passed, final = forwarder.receive(came, 0, tag, forward_to=0), forwarder.receive(last, 0, tag)
    forwarder.send(sent, 0, tag)
    thread, deadline = forwarder._thread, time.monotonic() + 20
    assert thread is not None
    while thread.is_alive() and not (passed.through and final.arrived) and time.monotonic() < deadline:
        time.sleep(1e-3)  # the thread does it alone
    forwarder.close()
    assert last.tolist() == sent.tolist() == came.tolist()


def test_times_are_the_gpus_own(gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host is done with telling a GPU, that has not done it yet: here every event is 1000 s after the last."""
    monkeypatch.setattr(Event, "elapsed_time", lambda self, later: 1e6 * (later.number - self.number))
    models = on_gpus(gpus, tiny("llama-gqa"), 2)

    def work(ranks: NcclTransport) -> list[float]:
        warm_up(ranks, models[ranks.rank].device)
        return prefill_kvr(models[ranks.rank], prompt(24), Partition((0, 14, 24)), ranks).layer_times_s

    first, _ = run_on_gpus(2, network, work)
    assert len(first) == 3 and first[0] == 0.0 and max(first) >= 2000
