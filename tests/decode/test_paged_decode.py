"""Documents in pages are answered as those with memory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from paged_rows import LENGTHS, NEW_TOKENS, Numbers, Watched, answer, arena_of, pages_read, ready
from rows import one_thread, other_prompt
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.tiny import shrink
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.kv import decode_cache
from kvr_mpi.kv.paged import PAGE_TOKENS
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport.local import LocalTransport, run_local

__all__ = ["one_thread"]  # a fixture of every test here

NAMES = ["llama-gqa", "llama-mha", "mistral-window", "qwen2-some-windows", "gemma2-softcap", "gpt-oss-sinks"]


@pytest.fixture
def reads_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with pages_read(monkeypatch) as watched:
        yield watched


@pytest.mark.parametrize("name", NAMES)
def test_pages_change_no_answer(name: str) -> None:
    """The portable way, which reads documents one by one where they lie."""
    loaded = ready(name)
    end = answer(loaded, None)["250"][4]
    truth, arena = answer(loaded, None, end), arena_of(loaded, 4)
    assert answer(loaded, arena, end) == truth and len(truth) == len(LENGTHS)
    assert any(len(tokens) < NEW_TOKENS for tokens in truth.values()), "one leaves early"
    arena.collect()
    assert not arena.extents, "what has left holds no memory"


@pytest.mark.parametrize(("name", "extent_pages"), [*((name, 8) for name in NAMES), ("mistral-window", 1)])
def test_one_call_reads_the_pages_of_all(reads_pages: Watched, name: str, extent_pages: int) -> None:
    """With one page to an extent every document has one of its own, and a call."""
    loaded = ready(name)
    truth = answer(loaded, None)
    assert reads_pages.paged_calls == 0
    assert answer(loaded, arena_of(loaded, extent_pages)) == truth
    assert bool(reads_pages.paged_calls) == (name != "gemma2-softcap")


def test_a_layer_takes_one_call_for_all_documents(reads_pages: Watched) -> None:
    loaded = ready("llama-gqa")
    arena = arena_of(loaded, 8)
    config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    batch: DecodeBatch[int] = DecodeBatch(loaded, config, stop=(), max_new_tokens=NEW_TOKENS)
    prompts = [other_prompt(tokens) for tokens in LENGTHS]
    for ids, prefill in zip(
        prompts, prefill_packed(loaded, prompts, reserve_tokens=NEW_TOKENS, arena=arena), strict=True
    ):
        batch.add(len(ids), prefill, ids, 0)
    before = reads_pages.paged_calls
    batch.step()
    assert reads_pages.paged_calls - before == len(loaded.shape.layers) and len(arena.extents) == 1


def test_values_of_another_size_than_keys_are_not_read_by_flash_attention(reads_pages: Watched) -> None:
    config = shrink("mimo_v2_flash")
    config.v_head_dim = 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    shape = probe_shape(config, torch.float32)
    assert all(layer.key_dim != layer.value_dim for layer in shape.layers)
    loaded = LoadedModel(model, Numbers(), shape, "tiny", "tiny", torch.float32, torch.device("cpu"))
    prepare_model(model, chain=True)
    truth = answer(loaded, None)
    assert answer(loaded, arena_of(loaded, 8)) == truth and not reads_pages.paged_calls


def test_pages_of_another_document_are_found_out(reads_pages: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: with a wrong page answers are others."""
    loaded = ready("llama-gqa")
    truth = answer(loaded, None)
    pages = decode_cache._in_pages

    def swapped(documents: Any) -> Any:
        row = pages(documents)
        if row is not None:
            for part in row._parts:
                part.table.pages.copy_(part.table.pages.flip(0).clone())
        return row

    monkeypatch.setattr(decode_cache, "_in_pages", swapped)
    assert answer(loaded, arena_of(loaded, 8)) != truth


def test_a_prompt_is_received_into_its_pages() -> None:
    """On a chain, in place: the last rank's buffers are those pages."""
    loaded, ids = ready("llama-gqa"), other_prompt(300)
    arenas = [arena_of(loaded, 4) for _ in range(3)]
    partition = Partition((0, 120, 220, 300))

    def work(rank: LocalTransport) -> Any:
        return prefill_kvr(loaded, ids, partition, rank, reserve_tokens=4, arena=arenas[rank.rank])

    *others, last = run_local(3, work)
    alone = prefill_kvr(loaded, ids, Partition((0, 300)), LocalTransport(), reserve_tokens=4)
    assert last.logits is not None and alone.logits is not None
    torch.testing.assert_close(last.logits, alone.logits, atol=1e-4, rtol=1e-4)
    assert [len(arena.extents) for arena in arenas] == [0, 0, 1]
    (extent,) = arenas[2].extents
    for at, layer in enumerate(last.cache.layers):
        assert layer.buffer.data_ptr() == extent.layers[at].data_ptr() and layer.buffer.shape[0] == 304
    assert all(prefill.cache.run is None for prefill in others)


def test_pages_are_used_again_when_the_last_view_is_gone() -> None:
    loaded = ready("llama-gqa")
    arena = arena_of(loaded, 4)
    first, second = arena.take(2 * PAGE_TOKENS), arena.take(1)
    assert (first.first, second.first) == (0, 2) and first.extent is second.extent
    held = first.buffers[1][5:7, :3]  # as a writer, or a transfer, would hold it
    held.fill_(7.0)
    del first
    third = arena.take(PAGE_TOKENS)
    assert third.first == 3, "one view of one layer is left"
    assert bool((held == 7.0).all())
    del held
    fourth = arena.take(PAGE_TOKENS + 1)
    assert fourth.first == 0 and len(arena.extents) == 1
    fifth = arena.take(5 * PAGE_TOKENS)
    assert fifth.extent.pages == 5 and len(arena.extents) == 2, "a long document has an extent of just its size"
    del second, third, fourth
    arena.collect()
    assert [extent.pages for extent in arena.extents] == [5]


def test_no_memory_for_an_extent_is_memory_for_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ready("llama-gqa")
    arena, asked = arena_of(loaded, 64), []

    def make_flat(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(count * dtype.itemsize // arena.page_bytes)
        if asked[-1] > room:
            raise MemoryError("no bytes for keys and values")
        return torch.empty(count, dtype=dtype)

    monkeypatch.setattr("kvr_mpi.kv.paged.make_flat", make_flat)
    room = 10
    assert arena.take(3 * PAGE_TOKENS).extent.pages == 3 and asked == [64, 3]
    room = 2
    with pytest.raises(MemoryError):
        arena.take(3 * PAGE_TOKENS)
