"""What a GPU is asked for, on a pretended one: which attention kernels, with what, and nothing that waits for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import CONFIGS, STATES, WHOLE, prompt, tiny
from pretended_cuda import CPU, OnDevices, PretendedCuda
from torch.nn.attention.flex_attention import AuxOutput
from transformers import AutoModelForCausalLM, GenerationConfig

from kvr_mpi.compress.compression import open_compression
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.kv import attention, flex
from kvr_mpi.kv.attention import AttentionParams, attend
from kvr_mpi.kv.pool import PAGE_ROWS, Pool
from kvr_mpi.kv.relay import Relay
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.memory_budget import footprint_of
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr, prefill_whole
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.runtime import prepare
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.runtime.prepare import describe_portable
from kvr_mpi.transport.local import LocalTransport, PretendedChain

GPU = torch.device("cuda", 3)
ANSWERED = (
    *(attention._has_flash, attention.why_no_new_flash),
    *(flex.compiles, flex._options, flex._bend, flex.visible_blocks),
)


@pytest.fixture
def gpu(gpus: PretendedCuda) -> Iterator[PretendedCuda]:
    """One of Hopper's kind, for this thread."""
    gpus.watches = False
    torch.cuda.set_device(GPU)
    for known in ANSWERED:
        known.cache_clear()
    with OnDevices(gpus), torch.inference_mode():
        yield gpus
    for known in ANSWERED:
        known.cache_clear()


def model_of(name: str, layers: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> LoadedModel:
    """A tiny model of so many layers, prepared for chains."""
    config = {**CONFIGS, **STATES, **WHOLE}[name]()
    for key, value in ({"num_hidden_layers": layers} | settings).items():
        setattr(config, key, value)
    if hasattr(config, "no_rope_layers"):
        config.no_rope_layers = [1] * layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(dtype)
    in_parts = name not in WHOLE
    prepare_model(model, chain=in_parts)
    return LoadedModel(model, None, probe_shape(config, dtype), name, name, dtype, CPU, attends_in_parts=in_parts)


def as_it_is(given: Any) -> Any:
    return given


def run_alone(loaded: LoadedModel, tokens: int = 40) -> Prefill:
    return prefill_kvr(loaded, prompt(tokens), Partition((0, tokens)), LocalTransport(), reserve_tokens=4)


def run_last(loaded: LoadedModel, size: int = 2) -> Prefill:
    """The last rank of a chain: it attends to its slice, and to those of the others."""
    rank = PretendedChain()
    rank.rank, rank.size, rank.local_rank, rank.local_size = size - 1, size, size - 1, size
    return prefill_kvr(loaded, prompt(10 * size), Partition(tuple(range(0, 10 * size + 1, 10))), rank)


def run_packed(loaded: LoadedModel) -> list[Prefill]:
    return prefill_packed(loaded, [prompt(40), prompt(30)], reserve_tokens=4)


Run = tuple[LoadedModel, Row]


def make_row(loaded: LoadedModel) -> Run:
    return loaded, Row([prefill.cache for prefill in run_packed(loaded)])


def make_row_of_pages(loaded: LoadedModel, keeps_all: bool = True) -> Run:
    """Documents lie in pages; a step copies their lengths to the GPU once, for all layers."""
    pool = Pool(loaded.shape.layers, loaded.dtype, GPU, 8 * PAGE_ROWS)
    prefills = prefill_packed(loaded, [prompt(40), prompt(30)], reserve_tokens=4, pool=pool)
    caches = [prefill.cache for prefill in prefills]
    if not keeps_all:
        for cache in caches:
            kept = [torch.arange(3 + head, device=GPU) for head in range(loaded.shape.layers[0].num_kv_heads)]
            for layer_idx in range(len(cache.layers)):
                cache.admit(layer_idx, 0, *cache.rows(layer_idx, 0, cache.length), kept)
    return loaded, Row(caches)


def make_row_of_heads(loaded: LoadedModel) -> Run:
    """Heads keep tokens of their own."""
    return make_row_of_pages(loaded, keeps_all=False)


def step(row: Run) -> torch.Tensor:
    return decode_packed(*row, [3, 4])


def waits_in(gpu: PretendedCuda, run: Callable[[], object]) -> int:
    before = gpu.waits.total()
    run()
    return gpu.waits.total() - before


@pytest.mark.parametrize(
    ("name", "prepare", "run", "kernel", "calls"),
    [
        ("llama-gqa", as_it_is, run_packed, "varlen", [2, 4]),
        ("gemma2-softcap", as_it_is, run_packed, "", [0, 0]),
        ("llama-gqa", make_row, step, "dense", [4, 8]),
        ("mistral-window", as_it_is, run_alone, "dense", [2, 4]),
        # Both slices at once where only the last token is read, and however long the chain three calls before that.
        ("llama-gqa", as_it_is, run_last, "dense", [3, 7]),
        ("llama-gqa", as_it_is, lambda loaded: run_last(loaded, 8), "dense", [4, 10]),
        ("llama-gqa", make_row_of_heads, step, "paged", [2, 4]),
        ("llama-gqa", make_row_of_pages, step, "paged", [2, 4]),
        ("mistral-window", make_row_of_pages, step, "paged", [2, 4]),
        ("gemma2-softcap", make_row_of_pages, step, "", [0, 0]),
    ],
)
def test_nothing_waits_for_the_gpu_in_a_layer(
    gpu: PretendedCuda, name: str, prepare: Any, run: Any, kernel: str, calls: list[int]
) -> None:
    """With every layer more there are more calls of attention, and not one wait."""
    waits, called = list[list[int]](), list[int]()
    for layers in (2, 4):
        prepared = prepare(gpu.move(model_of(name, layers), GPU))
        gpu.calls.clear()
        work = partial(run, prepared)
        waits.append([waits_in(gpu, work), waits_in(gpu, work)])  # the first step makes tables
        called.append(gpu.calls.total() // 2)
        assert not gpu.calls.keys() - {kernel}
    assert waits[0] == waits[1] and called == calls
    if prepare in (make_row_of_pages, make_row_of_heads):
        assert waits[0][1] == 1, "tokens and lengths, in one copy"


def run_compressed(loaded: LoadedModel, **settings: Any) -> Prefill:
    retain = open_compression(CompressSettings(budget=16, **settings), loaded).retain(40, (0, 36))
    found = prefill_whole(loaded, prompt(40), reserve_tokens=4, retain=retain)
    kept = [count for idx in range(len(found.cache.layers)) for count in found.cache.counts(idx)]
    assert sum(kept) == 16 * len(kept)
    return found


FEATURES: dict[str, tuple[str, Callable[[LoadedModel], object]]] = {
    **{name: (name, run_alone) for name in ("mixtral-moe", "gpt-oss-sinks", "llama4-chunks", "deepseek-latents")},
    **{name: (name, run_alone) for name in ("lfm2-convolutions", "qwen3-next-delta-rule")},
    "chunks": ("llama-gqa", lambda loaded: prefill_whole(loaded, prompt(40), chunk_tokens=7)),
    "rolling": ("mistral-window", lambda loaded: prefill_rolling(loaded, prompt(40), Rolling(16, 8))),
    "streaming-llm": ("llama-gqa", partial(run_compressed, method="streaming-llm")),
    **{
        name: ("llama-gqa", partial(run_compressed, method=name, window=4))
        for name in ("snapkv", "pyramidkv", "ada-snapkv")
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_prefill_of_many_layers_waits_as_often_as_one_of_few(gpu: PretendedCuda, feature: str) -> None:
    name, run = FEATURES[feature]
    models = [gpu.move(model_of(name, layers), GPU) for layers in (4, 2, 4)]  # the first makes tables
    _, few, many = (waits_in(gpu, partial(run, loaded)) for loaded in models)
    assert few == many > 0, gpu.waits


def test_layers_that_wait_for_their_counts_are_planned_with(gpu: PretendedCuda) -> None:
    loaded = gpu.move(model_of("llama-gqa", 8), GPU)
    compression = open_compression(CompressSettings(method="ada-snapkv", budget=16, window=4), loaded)
    retain, drop, held = compression.retain(400, (0, 400)), compression.planned_drop(400, (0, 400)), list[int]()
    assert retain is not None and drop is not None

    def watched(layer: Any, choose: Any = retain.choose) -> Any:
        slabs = sum(each.slab.nbytes for each in layer.cache.layers if each.slab is not None)
        held.append(slabs + layer.cache.sequence.nbytes)
        return choose(layer)

    prefill_whole(loaded, prompt(400), reserve_tokens=4, retain=replace(retain, choose=watched))
    footprint = replace(footprint_of(loaded.model.config, loaded.dtype, on_gpu=True), activations=lambda *given: 0)
    need = footprint.slice_bytes(Relay(Partition((0, 400)), 0), reserve_tokens=4, drop=drop) - drop.choosing_bytes
    layer_bytes = 404 * loaded.shape.kv_bytes_per_token // 8
    assert need - layer_bytes < max(held) <= need


def test_a_step_waits_as_often_for_many_documents_as_for_two(gpu: PretendedCuda) -> None:
    """The next tokens of all are chosen at once."""
    waits = []
    for many in (2, 6):
        loaded = gpu.move(model_of("llama-gqa", 2), GPU)
        batch = DecodeBatch(loaded, GenerationConfig(do_sample=False), stop=(), max_new_tokens=8)
        for number, prefill in enumerate(prefill_packed(loaded, [prompt(40)] * many, reserve_tokens=8)):
            batch.add(str(number), prefill, prompt(40), number)
        batch.step()
        waits.append(waits_in(gpu, batch.step))
    assert waits[0] == waits[1]


def test_rows_of_packed_prompts_are_longer_on_a_gpu() -> None:
    setups: Any = [SimpleNamespace(spec=SimpleNamespace(is_sharded=False), loaded=tiny("llama-gqa")) for _ in range(2)]
    setups[1].loaded = replace(setups[1].loaded, device=GPU)
    on_cpu, on_gpu = (ChainRunner(setup, LocalTransport(), 0).pack_tokens for setup in setups)
    assert on_cpu < 8000 <= on_gpu <= 16_384


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gemma2-softcap"])
def test_a_gpu_computes_what_a_cpu_does(gpu: PretendedCuda, name: str) -> None:
    """Documents in a row, and steps of them from pages."""
    loaded = model_of(name, 2)
    wide = model_of(name, 2, torch.float32)
    there = gpu.move(loaded, GPU)
    found = [*(one.logits for one in run_packed(there)), *step(make_row_of_pages(there))]
    truth = [*(one.logits for one in run_packed(wide)), *step(make_row(wide))]
    assert len(found) == len(truth) == 4
    for one, other in zip(found, truth, strict=True):
        assert one is not None and other is not None and one.device == GPU
        assert error_share(one.cpu(), other) <= allowed_error(torch.bfloat16)


def drawn(heads: int, tokens: int, head_dim: int = 16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(heads)
    return torch.randn(1, tokens, heads, head_dim, generator=draw).bfloat16().transpose(1, 2)


def check_on(gpu: PretendedCuda, queries: int, *, window: int | None = None, causal: bool = False) -> None:
    """A GPU's attention is that of a CPU."""
    params = AttentionParams(0.3)
    given = drawn(4, 20)[:, :, 20 - queries :], drawn(2, 20), drawn(3, 20)[:, :2]
    there = [gpu.put(each, GPU) for each in given]
    wide = [each.float() for each in given]
    how: Any = {"causal": causal or window is not None, "window": window}
    found, truth = attend(*there, params, **how), attend(*wide, params, **how)
    torch.testing.assert_close(found.out.cpu().float(), truth.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.lse.cpu(), truth.lse, atol=1e-3, rtol=1e-3)


def test_flash_attention_is_told_what_is_meant(gpu: PretendedCuda) -> None:
    for number, (queries, window) in enumerate(itertools.product((1, 5, 20), (None, 1, 6, 100)), 1):
        check_on(gpu, queries, window=window)
        assert gpu.calls == {"dense": number}


def fails(found: Any) -> Any:
    raise RuntimeError("version mismatch")


def differs(found: Any) -> Any:
    return found[0] + 0.5, *found[1:]


@pytest.mark.parametrize(
    ("major", "name", "package"), [(9, "FA3", "flash_attn_interface"), (10, "FA4", "flash_attn.cute")]
)
@pytest.mark.parametrize(
    ("fault", "why"),
    [(None, None), (fails, "RuntimeError: version mismatch"), (differs, "its outputs differ by up to")],
)
def test_newer_flash_attention_is_used_if_it_is_installed_unless_it_fails_or_differs(
    gpu: PretendedCuda,
    fault: Any,
    why: str | None,
    major: int,
    name: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dense and in pages; nothing is left of cuDNN, which makes a plan for every new length."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    used: list[str] = []

    def activate(name: str) -> None:
        used.append(name)
        gpu.flash_fault = fault or gpu.flash_fault

    def restore(**how: Any) -> None:
        used.clear()
        gpu.flash_fault = as_it_is

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", restore)
    assert "is not installed" in str(attention.why_no_new_flash(GPU, torch.bfloat16)) and not used
    for known in ANSWERED:
        known.cache_clear()
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name == package)
    told = attention.why_no_new_flash(GPU, torch.bfloat16)
    assert (why or "None") in str(told) and used == ([name] if why is None else [])
    assert attention.name_attention(GPU).startswith(f"FlashAttention {name[2:]}, ") == (why is None)
    check_on(gpu, 20, causal=True)
    assert gpu.calls["paged"] >= 1 and {*gpu.calls} <= {"dense", "paged"}


@pytest.fixture
def flexible(gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with a compiler, on which FlexAttention holds; `tests/kv/test_flex.py` has what it computes."""

    def pretend(query: Any, keys: Any, values: Any, *, block_mask: Any, **how: Any) -> Any:
        tables = () if block_mask is None else (block_mask.kv_num_blocks, block_mask.kv_indices)
        assert {each.device for each in (query, keys, values, *tables)} == {GPU}
        gpu.calls["flex"] += 1
        lse = torch.zeros(query.shape[:3], device=GPU)
        return torch.zeros(*query.shape[:3], values.shape[3], dtype=query.dtype, device=GPU), AuxOutput(lse=lse)

    monkeypatch.setattr(flex, "has_triton", lambda: True)
    monkeypatch.setattr(flex, "_function", lambda device_type: pretend)
    monkeypatch.setattr(attention, "why_no_flex", lambda *given: None)


@pytest.mark.parametrize(
    ("case", "way"),  # capability, dtype, head_dim, queries, soft cap
    [
        (((9, 0), torch.bfloat16, 128, 200, None), "flash"),
        (((8, 0), torch.float16, 256, 200, None), "flash"),
        (((9, 0), torch.bfloat16, 64, 200, 5.0), "flex"),
        (((9, 0), torch.bfloat16, 264, 200, None), "flex"),
        (((9, 0), torch.bfloat16, 64, 128, 5.0), "portable"),
        (((9, 0), torch.bfloat16, 8, 200, 5.0), "portable"),
        (((9, 0), torch.float32, 64, 200, 5.0), "portable"),
        (((7, 5), torch.float16, 128, 200, None), "portable"),
    ],
)
@pytest.mark.usefixtures("flexible")
def test_which_way_a_layer_goes(gpu: PretendedCuda, case: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, dtype, head_dim, queries, softcap = case
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query, params = torch.zeros(1, 4, queries, head_dim, dtype=dtype, device=GPU), AttentionParams(0.1, softcap)
    for part in (
        attend(query, query, query, params, causal=True),
        attend(query, query, query, params, causal=True, window=7),
    ):
        assert part.out.shape == query.shape and part.lse.shape == query.shape[:3] and part.lse.dtype == torch.float32
        assert part.out.device == part.lse.device == GPU
    assert gpu.calls == {"flash": {"dense": 2}, "flex": {"flex": 2}, "portable": {}}[way]


@pytest.mark.parametrize(
    ("head_dim", "room", "side"),
    [
        (64, 101_376, None),
        (128, 101_376, 64),
        (256, 166_912, None),
        (256, 101_376, 64),
        (512, 166_912, 64),
        (512, 101_376, 32),
        (128, -65_536, 64),  # AMD's, without the property
    ],
)
def test_blocks_fit_into_the_shared_memory_of_the_gpu(
    gpu: PretendedCuda, head_dim: int, room: int, side: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compiled for GPUs of 80, 86 and 90 by `test_wheel`."""
    about = SimpleNamespace(**{"shared_memory_per_block" + "_optin" * (room > 0): abs(room)})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    options = flex._options(GPU, head_dim)
    assert (options.get("BLOCK_M"), options.get("BLOCK_N")) == (side, side)


@pytest.mark.usefixtures("flexible")
def test_a_layer_of_bent_scores_waits_for_nothing(gpu: PretendedCuda) -> None:
    loaded = [gpu.move(model_of("gemma2-softcap", layers, head_dim=16), GPU) for layers in (4, 2, 4)]
    _, few, many = (waits_in(gpu, lambda one=one: run_alone(one, 200)) for one in loaded)  # type: ignore[misc]
    assert few == many and gpu.calls == {"flex": 3 + 1 + 3}


def test_what_goes_the_portable_way_is_said(gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    bent = gpu.move(model_of("gemma2-softcap", 2), GPU)
    monkeypatch.setattr(prepare, "compiles", lambda device: False)
    assert "no compiler for this GPU" in next(describe_portable(bent))

    def why(*given: Any) -> str:
        assert given == (GPU, torch.bfloat16, 6, 2, (8, 8), 50.0)
        return "its outputs differ"

    monkeypatch.setattr(prepare, "compiles", lambda device: True)
    monkeypatch.setattr(prepare, "why_no_flex", why)
    assert "than FlexAttention: its outputs differ" in next(describe_portable(bent))
    others = model_of("llama-gqa", 2), model_of("gemma2-softcap", 2, torch.float32)
    for loaded in (*(gpu.move(one, GPU) for one in others), replace(bent, device=CPU)):
        assert not list(describe_portable(loaded))
