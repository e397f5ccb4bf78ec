"""What a GPU would be asked for, seen on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import GPU, FakeGpu, FlashReference, KernelError, Traffic, check_flash, on_fake_gpu
from models import prompt
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from kvr_mpi.kv import attention
from kvr_mpi.kv.arena import Arena
from kvr_mpi.kv.attention import AttentionParams, PartialAttention, attend, attend_window
from kvr_mpi.kv.decode_cache import DecodeCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.transport.local import LocalTransport, PretendedChain

FLASH, PORTABLE = ("llama-gqa", "mistral-window"), ("gemma2-softcap",)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with on_fake_gpu(monkeypatch) as fake:
        yield fake


def as_it_is(loaded: LoadedModel) -> LoadedModel:
    return loaded


def run_alone(loaded: LoadedModel) -> Prefill:
    return prefill_kvr(loaded, prompt(40), Partition((0, 40)), LocalTransport(), reserve_tokens=4)


def run_last(loaded: LoadedModel) -> Prefill:
    """The last of two ranks: it attends to its slice, and to the other's."""
    return prefill_kvr(loaded, prompt(60), Partition((0, 45, 60)), PretendedChain())


def run_packed(loaded: LoadedModel) -> list[Prefill]:
    return prefill_packed(loaded, [prompt(40), prompt(30)], reserve_tokens=4)


Row = tuple[LoadedModel, DecodeCache]


def make_row(loaded: LoadedModel) -> Row:
    return loaded, DecodeCache([prefill.cache for prefill in run_packed(loaded)])


def make_row_of_pages(loaded: LoadedModel, keeps_all: bool = True) -> Row:
    """Documents lie in pages; a step copies their lengths to the GPU once, for all layers."""
    arena = Arena(loaded.shape.layers, loaded.dtype, GPU, extent_bytes=1 << 24)
    prefills = prefill_packed(loaded, [prompt(40), prompt(30)], reserve_tokens=4, arena=arena)
    caches = [prefill.cache for prefill in prefills]
    if not keeps_all:
        for cache in caches:
            kept = [torch.arange(3 + head, device=GPU) for head in range(loaded.shape.layers[0].num_kv_heads)]
            for layer in cache.layers:
                cache.admit(layer, kept, 4)
    row = loaded, DecodeCache(caches)
    step(row)
    return row


def make_row_of_heads(loaded: LoadedModel) -> Row:
    """Heads keep tokens of their own."""
    return make_row_of_pages(loaded, keeps_all=False)


def step(row: Row) -> torch.Tensor:
    return decode_packed(*row, [3, 4])


@pytest.mark.parametrize("name", [*FLASH, *PORTABLE])
@pytest.mark.parametrize(("prepare", "run"), [(as_it_is, run_packed), (make_row, step)])
def test_nothing_waits_for_the_gpu_in_a_layer(gpu: FakeGpu, name: str, prepare: Any, run: Any) -> None:
    assert gpu.waits_per_layer(run, name, prepare) == 0
    assert bool(gpu.kernel.calls) == (name in FLASH)


def test_nothing_waits_for_the_gpu_in_a_layer_with_a_window(gpu: FakeGpu) -> None:
    assert gpu.waits_per_layer(run_alone, "mistral-window", as_it_is) == 0
    assert gpu.kernel.calls["dense"] == 2 + 4


def test_nothing_waits_for_the_gpu_in_a_layer_of_a_chain(gpu: FakeGpu) -> None:
    assert gpu.waits_per_layer(run_last, "llama-gqa", as_it_is) == 0
    assert gpu.kernel.calls["dense"] == (3 + 7), "both slices at once where only the last token is read"


def test_nothing_waits_for_the_gpu_in_a_layer_of_heads_of_their_own(gpu: FakeGpu) -> None:
    assert gpu.waits_per_layer(step, "llama-gqa", make_row_of_heads) == 0
    assert gpu.kernel.calls["paged"] == 2 * (2 + 4), "a call a layer in each of two steps"


@pytest.mark.parametrize("name", [*FLASH, *PORTABLE])
def test_a_step_over_pages_copies_its_tokens_and_no_more(gpu: FakeGpu, name: str) -> None:
    assert gpu.waits_per_layer(step, name, make_row_of_pages) == 0
    assert gpu.kernel.calls["paged"] == (2 * (2 + 4) if name in FLASH else 0), "a call a layer in each of two steps"
    row = make_row_of_pages(gpu.model(name, 2))
    with Traffic() as traffic:
        step(row)
    assert traffic.waits.total() == 1, "tokens and lengths, in one copy"


def run_last_of_eight(loaded: LoadedModel) -> Prefill:
    """It attends to its slice, and to those of seven others."""
    rank = PretendedChain()
    rank.rank, rank.size, rank.local_rank, rank.local_size = 7, 8, 7, 8
    return prefill_kvr(loaded, prompt(80), Partition(tuple(range(0, 90, 10))), rank)


def test_a_layer_takes_three_calls_and_two_merges_however_long_the_chain(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges: list[tuple[torch.dtype, torch.dtype]] = []
    merge = PartialAttention.merge

    def counted(part: PartialAttention, other: PartialAttention) -> PartialAttention:
        merges.append((part.out.dtype, other.out.dtype))
        return merge(part, other)

    monkeypatch.setattr(PartialAttention, "merge", counted)
    run_last_of_eight(gpu.model("llama-gqa", 4))
    assert gpu.kernel.calls["dense"] == 3 * 3 + 1, "all at once where only the last token is read"
    assert merges == 3 * [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]


def test_outputs_are_not_widened_without_a_merge(gpu: FakeGpu) -> None:
    """As the kernel gives them, to the model: of no layer's attention is anything made in float32."""
    row = make_row_of_pages(gpu.model("llama-gqa", 2))
    with Widened() as widened:
        step(row)
        query = torch.empty(1, 4, 20, 64, dtype=torch.bfloat16, device=GPU)
        part = attend(query, query, query, AttentionParams(0.1), causal=True)
    assert part.out.dtype == torch.bfloat16 and part.lse.dtype == torch.float32
    assert not {(2, 8), (6, 8), (20, 64)} & set(widened.shapes)
    with Widened() as widened:
        assert part.merge(part).out.dtype == torch.float32
    assert (20, 64) in widened.shapes, "it sees what is widened"


class Widened(TorchDispatchMode):
    """The last two sizes of what is made float32 of a narrower type."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype) and out.dtype == torch.float32:
            self.shapes.append(tuple(out.shape[-2:]))
        return out


def test_a_wait_in_a_layer_is_seen(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of lengths made for every call, as attention once did; a list for an index; a value read back."""
    whole = attention.attend

    def with_table(query: torch.Tensor, *args: Any, **options: Any) -> attention.PartialAttention:
        torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
        return whole(query, *args, **options)

    monkeypatch.setattr("kvr_mpi.kv.layer.attend", with_table)
    assert gpu.waits_per_layer(run_alone, "llama-gqa", as_it_is) == 1
    row = torch.empty(4, device=GPU)
    with Traffic() as traffic:
        row[[0, 2]]
    assert traffic.waits.total() == 1
    with Traffic() as traffic, pytest.raises(DataDependentOutputException):
        row.sum().item()
    assert traffic.waits.total() == 1


def test_logits_stay_on_their_gpu(gpu: FakeGpu) -> None:
    loaded = gpu.model("llama-gqa", 2)
    prefill = run_alone(loaded)
    assert prefill.logits is not None and prefill.logits.device == GPU == step(make_row(loaded)).device
    cache = prefill.cache
    assert all(layer.buffer.device == GPU for layer in cache.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "fp16 or bf16"),
        ({"head_dim": 12}, "head dimension of 12"),
        ({"head_dim": 264}, "head dimension of 264"),
        ({"device": "cpu"}, "the same GPU"),
        ({"device": "cuda:0"}, "the same GPU"),
        ({"kv_heads": 3}, "4 heads over 3"),
        ({"edges": torch.int64}, "int32"),
        ({"edges_on": "cpu"}, "on the GPU"),
        ({"sequences": 3}, "edges"),
        ({"page": 128}, "256 tokens"),
        ({"used": False}, "how many keys are used"),
    ],
    ids=str,
)
def test_the_kernel_refuses_what_the_real_one_would(gpu: FakeGpu, changes: dict[str, Any], message: str) -> None:
    """As it is all is well; with one thing changed it is not."""

    def call(
        dtype: torch.dtype = torch.bfloat16,
        head_dim: int = 64,
        device: str = "cuda:3",
        kv_heads: int = 2,
        edges: torch.dtype = torch.int32,
        edges_on: str = "cuda:3",
        sequences: int = 2,
        page: int = 256,
        used: bool = True,
    ) -> None:
        query = torch.empty(2, 4, head_dim, dtype=dtype, device=GPU)
        keys = torch.empty(7, page, kv_heads, head_dim, dtype=dtype, device=device)
        of_queries = torch.empty(3, dtype=edges, device=edges_on)
        of_keys = torch.empty(sequences + 1, dtype=torch.int32, device=GPU)
        counts = torch.empty(2, dtype=torch.int32, device=GPU) if used else None
        table = torch.empty(2, 3, dtype=torch.int32, device=GPU)
        check_flash(query, keys, keys, (of_queries, of_keys), counts, table)

    call()
    with pytest.raises(KernelError, match=message):
        call(**changes)


@pytest.mark.parametrize(("head_dim", "dtype"), [(12, torch.bfloat16), (8, torch.float32)])
def test_what_the_kernel_refuses_goes_the_portable_way(gpu: FakeGpu, head_dim: int, dtype: torch.dtype) -> None:
    query = torch.empty(1, 4, 3, head_dim, dtype=dtype, device=GPU)
    for part in (
        attend(query, query, query, AttentionParams(0.1), causal=True),
        attend_window(query, query, query, AttentionParams(0.1), 2),
    ):
        assert part.out.device == GPU and part.out.shape == query.shape and part.lse.shape == (1, 4, 3)
    assert not gpu.kernel.calls


@pytest.mark.parametrize("queries", [1, 5, 20])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_flash_attention_is_told_what_is_meant(queries: int, window: int | None) -> None:
    """Its arguments, shapes and log-sum-exp, against a stand-in that does what its sources say."""
    draw, params = torch.Generator().manual_seed(0), AttentionParams(0.3)
    query, keys = (torch.randn(1, heads, 20, 16, generator=draw) for heads in (4, 2))
    query = query[:, :, 20 - queries :]
    with torch.inference_mode(), FlashReference():
        found = attention._attend_flash(query, keys, keys, params, window=window, causal=window is not None)
        if queries == 20:
            causal = attention._attend_flash(query, keys, keys, params, window=None, causal=True)
    truth = attend(query, keys, keys, params) if window is None else attend_window(query, keys, keys, params, window)
    torch.testing.assert_close(found.out, truth.out)
    torch.testing.assert_close(found.lse, truth.lse)
    if queries == 20:
        torch.testing.assert_close(causal.out, attend(query, keys, keys, params, causal=True).out)


class CudnnReference(TorchDispatchMode):
    """cuDNN's attention as torch's sources have it: grouped heads, a log-sum-exp with one element more; or it fails."""

    def __init__(self, error: Exception | None = None, off: float = 0.0) -> None:
        super().__init__()
        self.error, self.off, self.calls = error, off, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._scaled_dot_product_cudnn_attention.default:
            return func(*args, **(kwargs or {}))
        query, keys, values, mask, needs_lse = args[:5]
        dropout, causal = args[5:7] or (0.0, False)  # torch leaves out what is its default
        assert mask is None and needs_lse and not dropout
        self.calls += 1
        if self.error is not None:
            raise self.error
        how = {"offset": 0 if causal else None, "window": None}
        part = attention._attend_blocks(query, keys, values, AttentionParams(kwargs["scale"]), **how)
        return part.out.to(query.dtype) + self.off, part.lse.unsqueeze(-1), None, None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU, what a Hopper GPU would choose: flash attention, or for the scores of these tests cuDNN's."""
    attention._has_cudnn.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "takes_flash", lambda query, values, params: True)
    monkeypatch.setattr(attention, "CUDNN_SCORES", 4 * 20 * 20 // 2)
    yield
    attention._has_cudnn.cache_clear()


def on_hopper(query: torch.Tensor, keys: torch.Tensor, *, causal: bool) -> PartialAttention:
    """As `attend` does on a GPU."""
    params = AttentionParams(0.3)
    if attention._suits_cudnn(query, keys, causal=causal):
        return attention._attend_cudnn(query, keys, keys, params, causal=causal)
    return attention._attend_flash(query, keys, keys, params, window=None, causal=causal)


@pytest.mark.parametrize(("queries", "causal", "calls"), [(20, True, 1), (20, False, 1), (9, False, 0), (10, False, 1)])
def test_cudnn_is_told_what_is_meant_of_long_prompts(hopper: None, queries: int, causal: bool, calls: int) -> None:
    draw = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(1, heads, 20, 16, generator=draw) for heads in (4, 2))
    with torch.inference_mode(), FlashReference(), CudnnReference() as cudnn:
        found = on_hopper(query[:, :, :queries], keys, causal=causal)
    truth = attend(query[:, :, :queries], keys, keys, AttentionParams(0.3), causal=causal)
    torch.testing.assert_close(found.out, truth.out)
    torch.testing.assert_close(found.lse, truth.lse)
    assert cudnn.calls == (calls and 2 + calls), "tried on two shapes, and then used"


@pytest.mark.parametrize(("error", "off"), [(RuntimeError("version mismatch"), 0.0), (None, 0.5)])
def test_cudnn_is_not_used_where_it_fails_or_differs(hopper: None, error: Exception | None, off: float) -> None:
    query = torch.randn(1, 4, 20, 16)
    with torch.inference_mode(), FlashReference(), CudnnReference(error, off) as cudnn:
        on_hopper(query, query, causal=True)
        on_hopper(query, query, causal=True)
    assert cudnn.calls == 1, "that is found out once"
