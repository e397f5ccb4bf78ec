"""Captured steps and FlexAttention as a GPU would be asked for them: no GPU has run any of this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu import GPU, FakeGpu, Traffic, on_fake_gpu
from models import prompt
from pretended_cuda import PretendedCuda, Stream
from torch.nn.attention.flex_attention import AuxOutput

from kvr_mpi.decode.graphs import StepGraphs
from kvr_mpi.kv import attention, flex
from kvr_mpi.kv.attention import AttentionParams, attend, attend_window
from kvr_mpi.kv.paged import PagedArena
from kvr_mpi.kv.paged_row import PaddedCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.graph_capture import WARM_UPS, GraphCapture, call_again
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.setup import prepare
from kvr_mpi.setup.prepare import describe_portable
from kvr_mpi.transport.local import LocalTransport


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with on_fake_gpu(monkeypatch) as fake:
        yield fake


# -- captured steps


def padded_step(loaded: LoadedModel, traffic: list[int]) -> Any:
    """Two documents in a row of four: a step is run as it would be captured, and its traffic noted."""
    arena = PagedArena(loaded.shape.layers, loaded.dtype, GPU, extent_pages=4, has_scrap=True)
    prefills = prefill_packed(loaded, [prompt(40), prompt(30)], reserve_tokens=4, arena=arena)

    def capture(compute: Any) -> Any:
        with Traffic() as within:
            replay, result = call_again(compute)
        traffic.append(within.waits.total())
        return replay, result

    graphs = StepGraphs(loaded, lambda text: None, capture=capture, patience=0)
    # Fake logits have no values that could be held against others.
    row = [prefill.cache for prefill in prefills]
    return graphs, row, arena


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt-oss-sinks"])
def test_nothing_in_a_captured_step_waits_for_the_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its tokens and lengths are copied before it, at once; the kernel is told what it takes."""
    monkeypatch.setattr("kvr_mpi.decode.graphs._why_other", lambda *given: None)
    loaded, within = gpu.model(name, 2), list[int]()
    graphs, row, _ = padded_step(loaded, within)
    before = gpu.kernel.calls["paged"]
    graphs.step(row, [3, 4], lambda: torch.empty(2, loaded.shape.vocab_size, device=GPU))
    assert graphs.why_not is None and within == [0]
    assert gpu.kernel.calls["paged"] - before == 2 * 2, "a call a layer: when it was captured, and when it was replayed"
    with Traffic() as traffic:
        logits = graphs.step(row, [3, 4], lambda: pytest.fail("it is captured"))
    assert traffic.waits.total() == 1, "tokens and lengths, at once"
    assert logits.device == GPU and tuple(logits.shape) == (2, loaded.shape.vocab_size)


def test_a_copy_in_a_captured_step_would_be_seen(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvr_mpi.decode.graphs._why_other", lambda *given: None)
    begin = PaddedCache.begin

    def copies(cache: PaddedCache) -> None:
        begin(cache)
        cache.lengths.copy_(torch.zeros(1, cache.row.rows, dtype=torch.int64))

    monkeypatch.setattr(PaddedCache, "begin", copies)
    loaded, within = gpu.model("llama-gqa", 2), list[int]()
    graphs, row, _ = padded_step(loaded, within)
    graphs.step(row, [3, 4], lambda: torch.empty(2, loaded.shape.vocab_size, device=GPU))
    assert within == [1]


class PretendedPools:
    """What torch's allocator keeps of captures: those under way, and how many hold each pool.

    As its sources have it: a capture that CUDA calls broken raises where it ends, before the allocator hears of that.
    """

    def __init__(self) -> None:
        self.underway: list[Any] = []
        self.holders = 0
        self.is_broken = False  # the capture under way

    def begin(self, pool: Any) -> None:
        self.underway.append(pool)
        self.holders += 1

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.holders -= 1
        assert self.holders >= 0

    def empty_cache(self) -> None:
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"


class PretendedGraph:
    """What CUDA's would be told: where it began, and on which stream."""

    def __init__(self, gpus: PretendedCuda, told: list[Any], pools: PretendedPools) -> None:
        self.gpus, self.told, self.pools = gpus, told, pools

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.told.append(("begin", self.gpus.current_stream().id, pool, capture_error_mode))
        self.pools.begin(pool)

    def capture_end(self) -> None:
        self.told.append(("end", self.gpus.current_stream().id))
        if self.pools.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.pools.end(0, "pool")

    def replay(self) -> None:
        self.told.append(("replay", self.gpus.current_stream().id))


@pytest.fixture
def pools(gpus: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> PretendedPools:
    found = PretendedPools()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", found.release, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", found.empty_cache)
    return found


@pytest.fixture
def told(gpus: PretendedCuda, pools: PretendedPools, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: PretendedGraph(gpus, found, pools))
    return found


def captured(gpus: PretendedCuda) -> Any:
    """Capture something that reads what the default stream wrote, and read its result there."""
    device = torch.device("cuda", 2)
    gpus.set_device(device)
    given = gpus.put(torch.ones(64, 64), device)
    given.add_(1)
    replay, result = GraphCapture(device)(lambda: given * 2)
    result.add_(1)
    return replay


def test_a_step_is_captured_after_warm_ups_on_a_stream_of_its_own(gpus: PretendedCuda, told: list[Any]) -> None:
    replay = captured(gpus)
    begun, ended = told
    assert begun[0] == "begin" and begun[2:] == ("pool", "thread_local") and ended == ("end", begun[1])
    here = gpus.current_stream().id
    assert begun[1] != here and not gpus.syncs_of_devices and not gpus.faults
    replay()
    assert told[-1] == ("replay", here) and WARM_UPS >= 1


def test_a_capture_that_waits_for_nothing_is_seen(
    gpus: PretendedCuda, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: None)
    captured(gpus)
    assert gpus.faults


@pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "out of memory"])
def test_a_capture_that_fails_leaves_nothing_behind(
    gpus: PretendedCuda, told: list[Any], pools: PretendedPools, is_broken: bool
) -> None:
    """Neither the stream nor the allocator; what its runs before it were given may be used again at once."""
    device = torch.device("cuda", 2)
    gpus.set_device(device)
    given = gpus.put(torch.ones(64, 64), device)
    runs = iter([False] * WARM_UPS + [True])

    def compute() -> torch.Tensor:
        given.add_(1)
        if next(runs):
            pools.is_broken = is_broken
            raise RuntimeError("operation not permitted when stream is capturing")
        return given

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphCapture(device)(compute)
    assert [each[0] for each in told] == ["begin", "end"]
    torch.cuda.empty_cache()
    assert pools.holders == (0 if is_broken else 1), "a graph that was made lets its pool go by itself"
    given.add_(1)
    assert not gpus.faults


def test_a_capture_that_cannot_end_is_one_that_failed(
    gpus: PretendedCuda, told: list[Any], pools: PretendedPools
) -> None:
    """An operation may break it, and say nothing."""

    def compute() -> torch.Tensor:
        pools.is_broken = True
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        GraphCapture(torch.device("cuda", 0))(compute)
    torch.cuda.empty_cache()
    assert pools.holders == 0 and gpus.current_stream().id != told[0][1]


# -- FlexAttention


class PretendedFlex:
    """Checks what it is asked for, and counts it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, query: Any, keys: Any, values: Any, *, block_mask: Any, **how: Any) -> Any:
        assert query.device == keys.device == values.device == GPU and query.shape[2] > flex.BLOCK
        assert query.dtype == keys.dtype == values.dtype == torch.bfloat16
        assert how["return_aux"].lse and how["enable_gqa"] == (query.shape[1] != keys.shape[1])
        if block_mask is not None:
            assert block_mask.seq_lengths == (query.shape[2], keys.shape[2])
            tables = block_mask.kv_num_blocks, block_mask.kv_indices
            assert all(each.device == GPU and each.dtype == torch.int32 for each in tables)
        self.calls += 1
        lse = torch.empty(query.shape[:3], device=GPU)
        return query.new_empty(*query.shape[:3], values.shape[3]), AuxOutput(lse=lse, max_scores=None)


@pytest.fixture
def flexible(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedFlex]:
    """A GPU with a compiler, on which FlexAttention holds."""
    pretended, caches = PretendedFlex(), (flex._bend, flex.visible_blocks)
    monkeypatch.setattr(flex, "compiles", lambda device: True)
    monkeypatch.setattr(flex, "_function", lambda device_type: pretended)
    monkeypatch.setattr(attention, "why_no_flex", lambda *given: None)
    for cache in caches:
        cache.cache_clear()
    yield pretended
    for cache in caches:
        cache.cache_clear()


def queries_of(dtype: torch.dtype, head_dim: int, queries: int) -> torch.Tensor:
    return torch.empty(1, 4, queries, head_dim, dtype=dtype, device=GPU)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "queries", "softcap", "way"),
    [
        (torch.bfloat16, 64, 200, None, "flash"),
        (torch.bfloat16, 64, 200, 5.0, "flex"),
        (torch.bfloat16, 264, 200, None, "flex"),
        (torch.bfloat16, 20, 200, None, "flex"),
        (torch.bfloat16, 64, 128, 5.0, "portable"),
        (torch.bfloat16, 64, 1, 5.0, "portable"),
        (torch.bfloat16, 8, 200, 5.0, "portable"),
        (torch.float32, 64, 200, 5.0, "portable"),
    ],
)
def test_which_way_a_layer_goes(
    gpu: FakeGpu, flexible: PretendedFlex, dtype: torch.dtype, head_dim: int, queries: int, softcap: Any, way: str
) -> None:
    query, params = queries_of(dtype, head_dim, queries), AttentionParams(0.1, softcap)
    for part in (attend(query, query, query, params, causal=True), attend_window(query, query, query, params, 7)):
        assert part.out.shape == query.shape and part.lse.shape == query.shape[:3] and part.lse.dtype == torch.float32
    assert (gpu.kernel.calls["dense"], flexible.calls) == {"flash": (2, 0), "flex": (0, 2), "portable": (0, 0)}[way]


@pytest.mark.parametrize(("capability", "compiler"), [((7, 5), True), ((9, 0), False)])
def test_without_a_compiler_or_on_an_old_gpu_it_is_the_portable_way(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], compiler: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flex, "has_triton", lambda: compiler)
    flex.compiles.cache_clear()
    query = queries_of(torch.bfloat16, 64, 200)
    assert not flex.suits_flex(query, query)
    flex.compiles.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(flex, "has_triton", lambda: True)
    assert flex.suits_flex(query, query)
    flex.compiles.cache_clear()


def test_a_layer_of_bent_scores_waits_for_nothing(gpu: FakeGpu, flexible: PretendedFlex) -> None:
    def run(loaded: LoadedModel) -> Any:
        return prefill_kvr(loaded, prompt(200), Partition((0, 200)), LocalTransport())

    loaded = gpu.model("gemma2-softcap", 4, head_dim=16)
    run(loaded)
    assert flexible.calls >= 3 and not gpu.kernel.calls
    with Traffic() as few:
        run(gpu.model("gemma2-softcap", 2, head_dim=16))
    with Traffic() as many:
        run(gpu.model("gemma2-softcap", 4, head_dim=16))
    assert few.waits.total() == many.waits.total()


def test_what_goes_the_portable_way_is_said(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    bent, asked = gpu.model("gemma2-softcap", 2), list[Any]()
    monkeypatch.setattr(prepare, "compiles", lambda device: False)
    assert "no compiler for this GPU" in next(describe_portable(bent))

    def why(*given: Any) -> str:
        asked.append(given)
        return "its outputs differ"

    monkeypatch.setattr(prepare, "compiles", lambda device: True)
    monkeypatch.setattr(prepare, "why_no_flex", why)
    assert "than FlexAttention: its outputs differ" in next(describe_portable(bent))
    assert asked == [(GPU, torch.bfloat16, 6, 2, (8, 8), 50.0)]
    on_cpu = replace(bent, device=torch.device("cpu"))
    for loaded in (gpu.model("llama-gqa", 2), gpu.model("gemma2-softcap", 2, torch.float32), on_cpu):
        assert not list(describe_portable(loaded))
