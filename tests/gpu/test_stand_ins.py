"""What a GPU would have shown in the first minute, found with stand-ins: no GPU has run any of this."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chains import greedy, single
from fake_nccl import Connections, FakeNccl
from models import prompt, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from kvr_mpi.kv import attention, ragged
from kvr_mpi.kv.ragged import RaggedLayout, elements_needed
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams, prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill import one_prompt
from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_ring
from kvr_mpi.runtime.host_memory import ranks_on_device
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.staging import StagedSend, Staging
from kvr_mpi.tuning.measure import _measure_links

CPU = torch.device("cpu")


class NamesDevice(TorchFunctionMode):
    """Refuses tensors that are made without a word of where: they would lie in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.zeros, torch.empty) and "device" not in (kwargs or {}):
            raise AssertionError(f"{func.__name__} makes a tensor in host memory, which NCCL refuses")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_links_are_measured_over_connections_that_are_there(size: int) -> None:
    loaded, connections = tiny("llama-gqa"), Connections()

    def work(local: LocalTransport) -> tuple[float, float]:
        rank: Any = FakeNccl(local, connections)
        warm_up(rank, CPU)
        with NamesDevice():
            return _measure_links(loaded, rank)

    for latency_s, bytes_per_s in run_local(size, work):
        assert latency_s >= 0 and bytes_per_s > 0


def test_the_stand_in_hangs_where_nothing_was_warmed_up() -> None:
    loaded, connections = tiny("llama-gqa"), Connections(timeout_s=0.5)

    def work(local: LocalTransport) -> None:
        rank: Any = FakeNccl(local, connections)
        _measure_links(loaded, rank)

    with pytest.raises(TimeoutError, match="nobody makes"):
        run_local(2, work)


@pytest.mark.parametrize("size", [2, 4])
def test_chains_and_rings_find_every_connection(size: int) -> None:
    """Prompts end at each rank in turn, in chains of all ranks and then of half of them, as planned jobs do."""
    loaded, ids, connections = tiny("llama-gqa"), prompt(96), Connections()
    truth = greedy(loaded.model, single(loaded, ids), 2)
    prepare_model(loaded.model, chain=True)

    def work(local: LocalTransport) -> list[list[int]]:
        whole: Any = FakeNccl(local, connections)
        found = []
        for chain in (whole, whole.split(local.rank // (size // 2))):
            warm_up(chain, CPU)
            forwarder = Forwarder(chain, device=CPU) if chain.size > 1 else None
            for last in range(chain.size):
                options: Any = {"reserve_tokens": 2, "last": last, "forwarder": forwarder}
                prefills = [prefill_kvr(loaded, ids, Partition.even(96, chain.size), chain, **options)]
                prefills.append(prefill_ring(loaded, ids, chain, **options))
                found += [greedy(loaded.model, each, 2) for each in prefills if each.logits is not None]
            if forwarder is not None:
                forwarder.close()
        return found

    found = [tokens for rank in run_local(size, work) for tokens in rank]
    assert len(found) == 4 * size and all(tokens == truth for tokens in found)


@pytest.mark.parametrize(
    ("uuids", "sharers"),
    [("abcd", [1, 1, 1, 1]), ("aabb", [2, 2, 2, 2]), ("aaab", [3, 3, 3, 1])],
)
def test_memory_is_shared_by_the_ranks_of_one_gpu(
    monkeypatch: pytest.MonkeyPatch, uuids: str, sharers: list[int]
) -> None:
    """Whatever number a rank's GPU has for it: with --gpus-per-task=1 it is always 0."""

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=uuids[int(threading.current_thread().name.removeprefix("rank "))])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert run_local(4, lambda rank: ranks_on_device(rank, torch.device("cuda", 0))) == sharers
    assert run_local(4, lambda rank: ranks_on_device(rank, CPU)) == [4] * 4


def test_threads_that_touch_a_gpu_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.update({threading.current_thread().name: device}))
    gpu = torch.device("cuda", 3)
    Forwarder(LocalTransport(), device=gpu).close()
    assert told == {"forwarder": gpu}
    told.clear()
    run_local(2, lambda rank: None, gpu)
    assert told == {"rank 0": gpu, "rank 1": gpu}
    told.clear()
    Forwarder(LocalTransport(), forwards=True).close()
    assert not told


def test_a_prefill_waits_for_its_own_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL still sends beside it is on another: to wait for that is to wait for the next rank."""
    waited: list[torch.device] = []

    def current(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    one_prompt.wait_for_compute(torch.device("cuda", 1))
    one_prompt.wait_for_compute(CPU)
    assert waited == [torch.device("cuda", 1)]
    for path in Path(one_prompt.__file__).parent.glob("*.py"):
        assert "cuda.synchronize" not in path.read_text(), path


class Never:
    """A mark that no stream passes."""

    def query(self) -> bool:
        return False


class Done:
    """A request that has ended."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return


def test_what_was_received_is_passed_on_without_waiting_for_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[torch.Tensor] = []

    def start(data: torch.Tensor) -> Done:
        begun.append(data)
        return Done()

    busy, data = Staging(CPU, direct=True), torch.zeros(4, dtype=torch.uint8)
    monkeypatch.setattr(busy, "mark", Never)
    assert StagedSend(busy, data, start, is_whole=True).test() and len(begun) == 1
    assert not StagedSend(busy, data, start).test() and len(begun) == 1, "what is computed waits for its stream"
    assert StagedSend(Staging(CPU, direct=True), data, start).test() and len(begun) == 2


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "takes"),
    [
        ((9, 0), 128, torch.bfloat16, True),
        ((8, 0), 256, torch.float16, True),
        ((7, 5), 128, torch.float16, False),
        ((9, 0), 100, torch.bfloat16, False),
        ((9, 0), 264, torch.bfloat16, False),
        ((9, 0), 128, torch.float32, False),
    ],
)
def test_flash_attention_is_asked_for_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], head_dim: int, dtype: torch.dtype, takes: bool
) -> None:
    attention._has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        query = torch.empty(1, 4, 3, head_dim, device="cuda:3", dtype=dtype)
        assert attention.takes_flash(query, query, AttentionParams(0.1)) is takes
        assert not attention.takes_flash(query, query, AttentionParams(0.1, softcap=30.0))
    attention._has_flash.cache_clear()


def _varlen_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    scale: float,
    enable_gqa: bool,
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``varlen_attn`` documents: of each sequence its queries, and as many of its keys as are used."""
    assert return_aux.lse and enable_gqa and all(each.dtype == torch.int32 for each in (cu_seq_q, cu_seq_k, seqused_k))
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for at, used in enumerate(seqused_k.tolist()):
        assert used <= max_k and cu_seq_q[at + 1] - cu_seq_q[at] == max_q == 1
        keys = slice(int(cu_seq_k[at]), int(cu_seq_k[at]) + used)
        scores = query[at] @ key[keys, 0].T * scale
        out[at], lse[:, at] = torch.softmax(scores, -1) @ value[keys, 0], torch.logsumexp(scores, -1)
    return out, lse


@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [0, 2, 3]])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_ragged_heads_are_sequences_to_flash_attention(
    monkeypatch: pytest.MonkeyPatch, heads: list[int], has_sinks: bool
) -> None:
    draw, shape, kept = torch.Generator().manual_seed(0), LayerShape(4, 8, 8), [5, 9, 9, 2][: len(heads)]
    flat = torch.randn(elements_needed(shape, kept, 3), generator=draw)
    layout = RaggedLayout(flat, shape, kept, 3, 100, heads)
    keys, query = torch.randn(1, 4, 1, 8, generator=draw), torch.randn(1, 12, 1, 8, generator=draw)
    layout.write(100, keys, keys)
    params = AttentionParams(0.3, sinks=torch.randn(12, generator=draw) if has_sinks else None)
    truth = layout.attend(query, 101, 1, params)
    monkeypatch.setattr(ragged, "takes_flash", lambda *args: True)
    monkeypatch.setattr(ragged, "_is_short_way", lambda *args: False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_reference)
    torch.testing.assert_close(layout.attend(query, 101, 1, params), truth)
