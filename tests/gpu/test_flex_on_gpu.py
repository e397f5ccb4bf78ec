"""FlexAttention as a GPU would be asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import GPU, FakeGpu, Traffic, on_fake_gpu
from models import prompt
from torch.nn.attention.flex_attention import AuxOutput

from kvr_mpi.kv import attention, flex
from kvr_mpi.kv.attention import AttentionParams, attend, attend_window
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.setup import prepare
from kvr_mpi.setup.prepare import describe_portable
from kvr_mpi.transport.local import LocalTransport


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with on_fake_gpu(monkeypatch) as fake:
        yield fake


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


@pytest.mark.parametrize(
    ("head_dim", "room", "side"),
    [(128, 101_376, None), (256, 166_912, None), (256, 101_376, 64), (512, 166_912, 64), (512, 101_376, 32)],
)
def test_blocks_fit_into_the_shared_memory_of_the_gpu(
    head_dim: int, room: int, side: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compiled for GPUs of 80, 86 and 90 by `test_wheel`."""
    about = SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    flex._options.cache_clear()
    options = flex._options(GPU, head_dim)
    flex._options.cache_clear()
    assert (options.get("BLOCK_M"), options.get("BLOCK_N")) == (side, side)


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
