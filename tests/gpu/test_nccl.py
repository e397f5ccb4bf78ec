"""The way over NCCL, on a group that hangs where NCCL would."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from chains import greedy, single
from fake_nccl import MULTIPROCESSORS, Network, run_on_gpus
from models import prompt, tiny
from pretended_cuda import CPU, PretendedCuda

from benchmarks import links
from kvr_mpi.errors import TransportError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import continued
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.runtime.chain_runner import MOST_GPU_WAIT_S
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.links import MeasuredLink, Skew, measure_links, measure_skews
from kvr_mpi.transport.nccl import NcclTransport
from kvr_mpi.tuning.measure import observe

NEW_TOKENS = 2


def on_gpus(gpus: PretendedCuda, loaded: LoadedModel, size: int) -> list[LoadedModel]:
    """The model of each rank, on its GPU."""
    prepare_model(loaded.model, chain=True)
    return [gpus.move(loaded, torch.device("cuda", rank)) for rank in range(size)]


@torch.inference_mode()
def greedy_there(loaded: LoadedModel, prefill: Prefill) -> list[int]:
    return continued(loaded.model, prefill, NEW_TOKENS).tokens


def prompts_on(chain: NcclTransport, loaded: LoadedModel, ids: list[int]) -> list[list[int]]:
    """Prompts that end at each rank in turn, one after the other without a barrier; chains of some ranks.

    As in planned jobs the latter use the connections that are there.
    """
    warm_up(chain, loaded.device)
    forwarder = Forwarder(chain, device=loaded.device)
    found = []
    cut = Partition.even(len(ids), chain.size)
    for last in range(chain.size):
        options: Any = {"reserve_tokens": NEW_TOKENS, "last": last, "forwarder": forwarder}
        found.append(prefill_kvr(loaded, ids, cut, chain, **options))
    forwarder.close()
    for some in (chain.split(chain.rank // 2), chain.split(chain.rank)):
        warm_up(some, loaded.device)
        cut, last = Partition.even(len(ids), some.size), some.size - 1
        found.append(prefill_kvr(loaded, ids, cut, some, last=last, reserve_tokens=NEW_TOKENS))
    return [greedy_there(loaded, each) for each in found if each.logits is not None]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.long)])
def test_chains_over_nccl(size: int, gpus: PretendedCuda, network: Network) -> None:
    loaded, ids = tiny("llama-gqa"), prompt(48)
    truth = greedy(loaded.model, single(loaded, ids), NEW_TOKENS)
    models = on_gpus(gpus, loaded, size)
    ranks = run_on_gpus(size, network, lambda chain: prompts_on(chain, models[chain.rank], ids))
    found = [tokens for rank in ranks for tokens in rank]
    assert found == [truth] * (size + -(-size // 2) + size)
    assert gpus.faults == [] and gpus.syncs_of_devices == []
    assert max(network.most_held.values()) <= MULTIPROCESSORS // 2
    gc.collect()
    ended = [group.ended for group in network.groups if not group.name.startswith("sum")]
    assert ended == ["shut down"] * (2 * size)


def test_links_and_a_prompt_are_measured_and_clocks_compared(gpus: PretendedCuda, network: Network) -> None:
    """Links of GPU memory; and of host memory, which goes over the control channel."""
    models = on_gpus(gpus, tiny("llama-gqa"), 3)

    def work(ranks: NcclTransport) -> tuple[list[MeasuredLink | None], tuple[float, ...], dict[int, Skew]]:
        warm_up(ranks, torch.device("cuda", ranks.rank))
        links = [measure_links(ranks, device) for device in (torch.device("cuda", ranks.rank), CPU)]
        busy_s = observe(models[ranks.rank], ranks, Partition((0, 30, 50, 60))).busy_s
        total = torch.ones(2)
        ranks.all_reduce(total)
        assert total.tolist() == [3.0, 3.0]
        part = ranks.split(ranks.rank % 2)  # ranks 0 and 2, whose numbers are others among them
        skews = measure_skews(part, [1], lambda request, who: request.wait()) if part.size == 2 else {}
        return links, busy_s, skews

    first, second, (last, *_) = run_on_gpus(3, network, work)
    assert last == [None, None] and all(busy > 0 for busy in first[1])
    for link in (*first[0], *second[0]):
        assert link is not None and link.latency_s >= 0 and link.bytes_per_s > 0 and link.intact
    assert abs(first[2][1].ahead_s) <= first[2][1].error_s < 10


def test_every_link_is_measured_by_the_size_of_a_message(
    gpus: PretendedCuda, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `slurm/kvr_gpu.sh` does."""
    file, sizes = tmp_path / "links.json", (links.SIZES[0], 1 << 20)
    assert (links.SIZES[0], links.SIZES[-1]) == (1 << 16, 1 << 28)
    monkeypatch.setattr(links, "open_transport", lambda ranks, *given: (ranks, "pretended"))

    def work(ranks: NcclTransport) -> None:
        warm_up(ranks, torch.device("cuda", ranks.rank))
        own = {"connect": lambda: ranks, "own_device": lambda *given: torch.device("cuda", ranks.rank)}
        main = FunctionType(links.main.__code__, vars(links) | own)
        main(["--sizes", ",".join(map(str, sizes)), "--repeats", "1", "--json", str(file)])

    run_on_gpus(3, network, work)
    found = [(row["bytes"], row["from_rank"]) for row in json.loads(file.read_text())["links"]]
    assert found == [(size, rank) for size in sizes for rank in (0, 1)]


def test_bfloat16_is_summed_as_it_is(gpus: PretendedCuda, network: Network) -> None:
    """Half the traffic of float32; float16 could overflow."""

    def work(ranks: NcclTransport) -> list[list[float]]:
        ranks.barrier()
        totals = []
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            total = gpus.put(
                torch.full((1, 3), 40_000.0 if dtype == torch.float32 else 2.0), torch.device("cuda", ranks.rank)
            )
            total = total.to(dtype)
            ranks.all_reduce(total)
            totals.append(total.flatten().tolist())
        return totals

    assert run_on_gpus(2, network, work) == [[[4.0] * 3, [4.0] * 3, [80_000.0] * 3]] * 2
    assert {*network.summed} == {(torch.bfloat16, 6), (torch.float32, 12)}
    assert {group.name.startswith("sum") for group in network.groups} == {True, False}
    for group in network.groups:  # messages run ahead of the computation, which waits for sums in any case
        is_sum = group.name.startswith("sum")
        assert group.options.is_high_priority_stream != is_sum
        assert group.options._timeout.total_seconds() > MOST_GPU_WAIT_S


def test_a_failed_transfer_is_not_taken_for_one_that_has_ended(gpus: PretendedCuda, network: Network) -> None:
    """Here of another length: a receive gets what was sent first, whatever its tag. Only an exception says so."""

    def work(ranks: NcclTransport) -> None:
        warm_up(ranks, torch.device("cuda", ranks.rank))
        data = [torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", ranks.rank)) for size in (3, 5)]
        if ranks.rank == 0:
            requests = [ranks.isend(each, 1, tag) for tag, each in enumerate(data)]
        else:
            requests = [ranks.irecv(data[tag], 0, tag) for tag in (1, 0)]
        try:
            for request in requests:
                request.wait()
        except TransportError:  # aborting one group after another can hang: MPI_Abort has to come first
            assert not [group.name for group in network.groups if group.ended]
            raise

    with pytest.raises(TransportError, match="NCCL: 3 bytes are sent and 5 received; the rank at the other end"):
        run_on_gpus(2, network, work)


def test_a_peer_that_hangs_ends_the_wait_and_the_recorder_is_written(
    gpus: PretendedCuda, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank, the layer and the tag are named; what NCCL did last is in a file of each rank."""
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"messages", raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/rank-")

    def work(ranks: NcclTransport) -> None:
        device = torch.device("cuda", ranks.rank)
        warm_up(ranks, device)
        forwarder = Forwarder(ranks, device=device)
        forwarder.limit_s = 0.3
        forwarder.begin()
        if ranks.rank == 0:
            forwarder.receive(torch.zeros(4, dtype=torch.uint8, device=device), 1, 83, layer=5)
            try:
                forwarder.settle()
            finally:
                forwarder.abandon()
        ranks.barrier()
        forwarder.abandon()

    with pytest.raises(TransportError, match=r"layer 5 \(tag 83, 4 bytes\) from rank 1"):
        run_on_gpus(2, network, work)
    assert (tmp_path / "rank-0").read_bytes() == b"messages"


def test_groups_are_aborted_with_transfers_under_way(gpus: PretendedCuda, network: Network) -> None:
    """A peer that failed never comes: to wait for it in the end is to hang."""

    def work(ranks: NcclTransport) -> None:
        warm_up(ranks, torch.device("cuda", ranks.rank))
        data = torch.zeros(4, dtype=torch.uint8, device=torch.device("cuda", ranks.rank))
        if ranks.rank == 1:
            raise TransportError("this rank fails")
        try:
            ranks.irecv(data, 1, 0)
            ranks.barrier()
        finally:
            ranks.close()

    with pytest.raises(TransportError, match="this rank fails"):
        run_on_gpus(2, network, work)
    gc.collect()
    assert [group.ended for group in network.groups if group.rank == 0] == ["aborted"] * 2
    assert [group.ended for group in network.groups if group.rank == 1] == ["shut down"] * 2
