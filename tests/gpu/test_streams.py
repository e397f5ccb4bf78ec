"""Which stream waits for what, told to torch's own CUDA sanitizer by stand-ins."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import Network, run_on_gpus
from made_runs import HEADER, record
from models import prompt, tiny
from mpi4py import MPI
from pretended_cuda import Event, GpuTensor, OnDevices, PretendedCuda
from test_nccl import on_gpus
from test_one_gpu import model_of

from kvr_mpi.kv.pool import LayerBuffers
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.store.folder import survey
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.mpi import MpiTransport
from kvr_mpi.transport.nccl import NcclTransport

GPU = torch.device("cuda", 3)


class Ended:
    """A request that says it has ended, whatever is the case."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Blind(NcclTransport):
    """A transport whose receives are taken for ended at once."""

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Ended:
        super().irecv(tensor, source, tag)
        return Ended()


def run_chain(
    gpus: PretendedCuda,
    network: Network,
    layers: int,
    kind: type[NcclTransport] = NcclTransport,
    **how: Any,
) -> list[float]:
    """Run a prompt on three ranks, the second of which passes on; returns how many kernels a layer has on each."""
    models = on_gpus(gpus, model_of("llama-gqa", layers, torch.float32), 3)

    def work(ranks: NcclTransport) -> float:
        stream: Any = torch.cuda.current_stream()
        warm_up(ranks, stream.device)
        for group in network.groups:
            group.forwards.clear()
        ranks.barrier()
        before, chain = stream.behind, kind(ranks._control, ranks._groups, ranks._members)
        prefill_kvr(models[ranks.rank], prompt(48), Partition.even(48, 3), chain, **how)
        return float(stream.behind - before) / layers

    return run_on_gpus(3, network, work)


@pytest.fixture
def unseen(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """No host sees a transfer of a prompt end before the last, since that would order them, too."""
    begin, close = Forwarder.begin, Forwarder.close

    def begin_blind(forwarder: Forwarder) -> int:
        network.blind.add(forwarder.transport.rank)
        return begin(forwarder)

    def close_seeing(forwarder: Forwarder) -> None:
        network.blind.discard(forwarder.transport.rank)
        close(forwarder)

    monkeypatch.setattr(Forwarder, "begin", begin_blind)
    monkeypatch.setattr(Forwarder, "close", close_seeing)


@pytest.mark.parametrize("is_blind", [False, True])
def test_a_chain_waits_for_what_it_needs_and_no_more_and_a_missing_wait_is_found(
    is_blind: bool, gpus: PretendedCuda, network: Network
) -> None:
    run_chain(gpus, network, 3, Blind if is_blind else NcclTransport)
    if is_blind:
        assert any("possible data race" in each for each in gpus.faults)
        return
    assert gpus.faults == [] and gpus.syncs_of_devices == [], "a device also waits for what NCCL still sends"
    beside = {group.rank: sum(group.forwards) for group in network.groups if group.name == "up"}
    assert beside == {0: 0, 1: 3, 2: 0}, "the second rank passes on a segment of each of three layers"


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("is_stale", [False, True])
def test_a_receive_waits_for_the_last_use_of_its_buffer(
    is_stale: bool, gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three ranks uses few buffers for six layers. An event from before its layers is a race."""
    now = LayerBuffers._now
    monkeypatch.setattr("kvr_mpi.kv.chain.LAYERS_HELD", 1)
    if is_stale:
        monkeypatch.setattr(LayerBuffers, "_now", lambda self: vars(self).setdefault("stale", now(self)))
    run_chain(gpus, network, 6)
    assert any("possible data race" in each for each in gpus.faults) == is_stale, gpus.faults


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_receive_is_posted_a_layer_before_it_is_needed(
    is_late: bool, gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no kernel of the layer before its own, or the computation would stand still in every layer."""
    gpus.watches = False
    if is_late:
        monkeypatch.setattr("kvr_mpi.kv.chain.FEW_AHEAD", 0)
        monkeypatch.setattr(LayerBuffers, "_now", lambda self: None)
    kernels = run_chain(gpus, network, 7)
    for rank in (1, 2):
        later = network.ahead[rank][rank:]  # those of the first layer are posted with it
        assert (min(later) < kernels[rank]) == is_late


@pytest.mark.parametrize("how", [{}, {"is_sharded": True}])
def test_more_layers_take_no_more_waits_of_the_host_and_no_more_streams(
    how: dict[str, Any], gpus: PretendedCuda, network: Network
) -> None:
    """What lies in more streams than a GPU has hardware queues (8) may wait for what it does not depend on."""
    gpus.watches, waits = False, list[dict[str, int]]()
    for layers in (3, 6):
        gpus.waits.clear(), gpus.streams.clear()
        run_chain(gpus, network, layers, **how)
        waits.append(dict(gpus.waits))
        assert max(gpus.streams.values()) <= 7
    assert waits[0] == waits[1]


@pytest.mark.parametrize("first", ["cpu", "cuda:3"])
def test_gpu_memory_is_staged_beside_host_memory(first: str, gpus: PretendedCuda) -> None:
    """Whichever is sent first: real MPI is handed host memory only."""
    torch.cuda.set_device(GPU)
    ranks = MpiTransport(MPI.COMM_SELF)
    for device in (first, "cuda:3", "cpu"):
        with OnDevices(gpus):
            sent, came = torch.arange(6.0, device=device), torch.zeros(6, device=device)
            requests = [ranks.irecv(came, 0, 1), ranks.isend(sent, 0, 1)]
            for request in requests:
                request.wait()
        assert came.tolist() == sent.tolist()
    assert gpus.faults == []


@torch.inference_mode()
@pytest.mark.parametrize("direct", [False, True])
def test_gpu_memory_is_handed_to_mpi_on_its_own_gpu(
    direct: bool, gpus: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real MPI, from the forwarder's thread: a tensor is exported where its GPU is the current one, or not at all."""
    torch.cuda.set_device(GPU)
    ranks, tag = MpiTransport(MPI.COMM_SELF, direct=direct), 1
    unpinned = partial(torch.empty, dtype=torch.uint8)
    monkeypatch.setattr("kvr_mpi.transport.staging._pinned", unpinned)
    with OnDevices(gpus):
        sent, came = torch.arange(6.0, device=GPU), torch.zeros(6, device=GPU)
        last = torch.zeros(4, device=GPU)
    forwarder = Forwarder(ranks, device=GPU)
    forwarder.begin()
    own = forwarder.announce(sent, 0, tag)
    passed, final = forwarder.receive(came, 0, tag, forward_to=0, forward_from=2), forwarder.receive(last, 0, tag)
    forwarder.send(own)
    thread, deadline = forwarder._thread, time.monotonic() + 20
    assert thread is not None
    while thread.is_alive() and not (passed.through and final.arrived) and time.monotonic() < deadline:
        time.sleep(1e-3)  # the thread does it alone
    forwarder.close()
    assert came.tolist() == sent.tolist() and last.tolist() == sent.tolist()[2:]


def test_times_are_the_gpus_own(gpus: PretendedCuda, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host is done with telling a GPU, that has not done it yet: here an event is 1000 s after the last."""
    monkeypatch.setattr(Event, "elapsed_time", lambda self, later: 1e6 * (later.id - self.id))
    models = on_gpus(gpus, tiny("llama-gqa"), 2)

    def work(ranks: NcclTransport) -> list[float]:
        warm_up(ranks, models[ranks.rank].device)
        return prefill_kvr(models[ranks.rank], prompt(24), Partition((0, 14, 24)), ranks).layer_times_s

    first, _ = run_on_gpus(2, network, work)
    assert len(first) == 3 and first[0] == 0.0 and max(first) >= 2000


# Keys and values stored while a GPU computes


def test_layers_are_copied_in_the_order_of_the_stream_and_waited_for_where_they_are_written(
    gpus: PretendedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that computes goes on at once; the one that writes says which GPU it waits for."""
    copies, waits = list[bool](), list[tuple[str, int]]()
    launch, synchronize = gpus.launch, Event.synchronize

    def noted(func: Any, device: torch.device, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], GpuTensor):
            copies.append(len(args) > 2 and args[2])
        return launch(func, device, args, kwargs)

    def waited(event: Event) -> None:
        waits.append((threading.current_thread().name, torch.cuda.current_device()))
        synchronize(event)

    monkeypatch.setattr(gpus, "launch", noted)
    monkeypatch.setattr(Event, "synchronize", waited)
    torch.cuda.set_device(GPU)
    writer = ResultWriter(tmp_path, 0, HEADER)
    rows = [gpus.put(torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(at)), GPU) for at in range(4)]
    with OnDevices(gpus), writer.writing_piece(record("a"), CachedTokens((7, 8, 9, 5), (1, 3))) as document:
        for layer in (tuple(rows[:2]), None, tuple(rows[2:])):
            document.add_layer(layer)
    writer.close()
    assert copies == [True] * 4 and waits == [("kvr-results-0", 3)] * 2 and not gpus.faults
    assert len(survey(tmp_path).volumes) == 1
