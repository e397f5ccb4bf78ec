"""Documents in pages are answered as those with memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import random_model
from rows import LENGTHS, NEW_TOKENS, alone, answer, arena_of, other_prompt, pages_read, ready

from benchmarks.tiny import shrink
from kvr_mpi.kv.arena import PAGE_ROWS
from kvr_mpi.model import LayerShape
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport.local import LocalTransport, run_local

NAMES = ["llama-gqa", "llama-mha", "mistral-window", "qwen2-some-windows", "gemma2-softcap", "gpt-oss-sinks"]


@pytest.mark.parametrize(("name", "pages"), [*((name, 8) for name in NAMES), ("mistral-window", 1)])
def test_pages_change_no_answer(name: str, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, by one call for all that lie in an extent, and in the portable way, one by one where they lie."""
    loaded = ready(name)
    end = answer(loaded, None)["250"][4]
    truth, arena = answer(loaded, None, end), arena_of(loaded, pages)
    assert answer(loaded, arena, end) == truth and len(truth) == len(LENGTHS)
    assert any(len(tokens) < NEW_TOKENS for tokens in truth.values()), "one leaves early"
    with pages_read(monkeypatch) as watched:
        assert answer(loaded, None, end) == truth and watched.paged_calls == 0
        assert answer(loaded, arena, end) == truth
    assert bool(watched.paged_calls) == (name != "gemma2-softcap")
    arena.collect()
    assert not arena.extents, "what has left holds no memory"


def test_values_of_another_size_than_keys_are_not_read_by_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    config = shrink("mimo_v2_flash")
    config.v_head_dim = 16
    loaded = ready(random_model(config))
    assert all(layer.key_dim != layer.value_dim for layer in loaded.shape.layers)
    with pages_read(monkeypatch) as watched:
        assert answer(loaded, arena_of(loaded, 8)) == answer(loaded, None) and not watched.paged_calls


def test_after_a_chain_the_last_rank_alone_has_pages() -> None:
    loaded, ids = ready("llama-gqa"), other_prompt(300)
    arenas = [arena_of(loaded, 4) for _ in range(3)]
    partition = Partition((0, 120, 220, 300))

    def work(rank: LocalTransport) -> Any:
        return prefill_kvr(loaded, ids, partition, rank, reserve_tokens=4, arena=arenas[rank.rank])

    *_, last = run_local(3, work)
    whole = alone(loaded, ids, 4)
    assert last.logits is not None and whole.logits is not None
    torch.testing.assert_close(last.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert [len(arena.extents) for arena in arenas] == [0, 0, 1]
    for layer, truth in zip(last.cache.layers, whole.cache.layers, strict=True):
        torch.testing.assert_close(layer.store.rows(0, 300), truth.store.rows(0, 300), atol=1e-5, rtol=1e-5)
    assert last.cache.held_bytes == 2 * arenas[2].page_bytes, "each head has two pages"


def test_pages_are_used_again_when_the_last_view_is_gone() -> None:
    loaded = ready("llama-gqa")
    arena, shape = arena_of(loaded, 1), loaded.shape.layers[0]  # two heads, three layers: six pages to an extent
    first, second = arena.take(shape, 2), arena.take(shape, 1)
    assert (first.row, second.row) == (0, 2 * PAGE_ROWS) and first.extent is second.extent
    held = first.values[0, 5:7]  # as a writer, or a transfer, would hold it
    held.fill_(7.0)
    del first
    third = arena.take(shape, 3)
    assert third.row == 3 * PAGE_ROWS and third.extent is second.extent
    fourth = arena.take(shape, 1)
    assert fourth.extent is not second.extent and bool((held == 7.0).all()), "one view is left"
    del held
    fifth = arena.take(shape, 6)
    assert fifth.extent not in (second.extent, fourth.extent)
    arena.collect()
    sixth = arena.take(shape, 2)
    assert sixth.row == 0 and sixth.extent is second.extent
    seventh = arena.take(shape, 7)
    assert seventh.extent is not None and seventh.extent.pages == 7, "a long document has an extent of just its size"
    del second, third, fourth, fifth, sixth
    arena.collect()
    assert [extent.pages for extent in arena.extents] == [7]
    wide = arena.take(LayerShape(2, 16, 16), 1)  # a layer with other heads has extents of its own
    assert wide.extent not in (None, seventh.extent) and wide.keys.shape == (1, PAGE_ROWS, 16)


def test_no_memory_for_an_extent_is_memory_for_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ready("llama-gqa")
    arena, asked = arena_of(loaded, 64), []

    def make_flat(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(count * dtype.itemsize // arena.page_bytes)
        if asked[-1] > room:
            raise MemoryError("no bytes for keys and values")
        return torch.empty(count, dtype=dtype)

    monkeypatch.setattr("kvr_mpi.kv.arena.make_flat", make_flat)
    shape, room = loaded.shape.layers[0], 10
    taken = arena.take(shape, 18)
    assert taken.extent is not None and taken.extent.pages == 18 and asked == [64, 3]
    room = 2
    with pytest.raises(MemoryError):
        arena.take(shape, 18)
