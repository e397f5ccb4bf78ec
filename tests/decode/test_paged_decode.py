"""Documents in pages are answered as those with memory of their own."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import random_model, tiny
from rows import (
    LENGTHS,
    NEW_TOKENS,
    alone,
    answer,
    batch_of,
    check_integrity,
    finish,
    other_prompt,
    pages_of,
    pages_read,
    ready,
    tokens_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tiny import shrink
from kvr_mpi.kv.pool import PAGE_ROWS, Block, Pool, pages_for
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.kv.table import PageTable
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, own_pool, prefill_kvr
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport.local import LocalTransport, run_local

NAMES = ["llama-gqa", "llama-mha", "mistral-window", "qwen2-some-windows", "gemma2-softcap", "gpt-oss-sinks"]


@pytest.mark.parametrize("name", NAMES)
def test_pages_change_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, by one call for all of them, and in the portable way, one by one where they lie."""
    loaded = ready(name)
    end = answer(loaded, own_pool(loaded))["250"][4]
    truth, pool = answer(loaded, own_pool(loaded), end), pages_of(loaded, 8)
    assert answer(loaded, pool, end) == truth and len(truth) == len(LENGTHS)
    assert any(len(tokens) < NEW_TOKENS for tokens in truth.values()), "one leaves early"
    with pages_read(monkeypatch) as watched:
        assert answer(loaded, own_pool(loaded), end) == truth and watched.paged_calls == 0
        assert answer(loaded, pool, end) == truth
    assert bool(watched.paged_calls) == (name != "gemma2-softcap")
    assert not pool.taken_bytes, "what has left holds no memory"


def test_a_layer_of_a_full_pool_attends_with_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And few other operations that a GPU launches, however many sequences there are, also of shared prefixes."""
    loaded, steps, shared = ready("llama-gqa"), 6, other_prompt(300)
    pool, layers, filled, counts = pages_of(loaded, 12), len(loaded.shape.layers), [0], list[int]()
    fill = PageTable.fill
    monkeypatch.setattr(PageTable, "fill", lambda *given: (filled.append(1), fill(*given))[1])
    with pages_read(monkeypatch) as watched:
        for many, prefix in ((1, None), (6, None), (5, compute_prefix(loaded, shared, pool))):
            batch, prompts = batch_of(loaded, steps + 1), [other_prompt(250 + at) for at in range(many)]
            prompts = [[*shared, *ids[:20]] for ids in prompts] if prefix else prompts
            prefills = prefill_packed(loaded, prompts, reserve_tokens=9, pool=pool, prefix=prefix)
            for at, (ids, prefill) in enumerate(zip(prompts, prefills, strict=True)):
                batch.add(at, prefill, ids, 0)
            batch.step()
            before, filled[:] = watched.paged_calls, []
            with Launches() as launched:
                for _ in range(3):
                    batch.step()
            assert watched.paged_calls == before + 3 * layers and not filled
            counts.append(sum(launched.of_cache.values()) // 3 // layers)
            for one in finish(batch).values():
                one.prefill.release()
        assert prefix is not None
        prefix.release()
    assert {*counts} == {counts[0]} and counts[0] <= 13, "the attention call and 12 others"
    check_integrity(pool)
    with pytest.raises(MemoryError, match="pages of keys and values are free"):
        SequenceKV(loaded, pool, 13 * PAGE_ROWS).open(0), SequenceKV(loaded, pool, 30 * PAGE_ROWS).open(1)


class Launches(TorchDispatchMode):
    """Counts the operations that launch kernels on a GPU, within calls of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.of_cache = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.endswith(("kv/layer.py", "kv/row.py")):
            frame = frame.f_back
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if frame is not None and not is_view and func is not torch.ops.aten.empty.memory_format:
            self.of_cache[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_values_of_another_size_than_keys_are_not_read_by_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    config = shrink("mimo_v2_flash")
    config.v_head_dim = 16
    loaded = ready(random_model(config))
    assert all(layer.key_dim != layer.value_dim for layer in loaded.shape.layers)
    with pages_read(monkeypatch) as watched:
        assert answer(loaded, pages_of(loaded, 8)) == answer(loaded, own_pool(loaded)) and not watched.paged_calls


def test_after_a_chain_the_last_rank_alone_has_pages() -> None:
    loaded, ids = ready("llama-gqa"), other_prompt(300)
    pools = [pages_of(loaded, 4) for _ in range(3)]
    partition = Partition((0, 120, 220, 300))

    def work(rank: LocalTransport) -> Any:
        return prefill_kvr(loaded, ids, partition, rank, reserve_tokens=4, pool=pools[rank.rank])

    *others, last = run_local(3, work)
    whole = alone(loaded, ids, 4)
    assert last.logits is not None and whole.logits is not None
    torch.testing.assert_close(last.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert not any(one.cache for one in others) and not any(pool.taken_bytes for pool in pools[:2])
    for layer in range(len(loaded.shape.layers)):
        rows = last.cache.rows(layer, 0, 300), whole.cache.rows(layer, 0, 300)
        torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)
    assert last.cache.nbytes == 2 * pools[2].page_bytes, "each head has two pages"
    last.release()
    check_integrity(pools[2])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "hold", "release"]), st.integers(1, 700)), max_size=40))
def test_random_lives_of_blocks_lose_and_overlap_nothing(actions: list[tuple[str, int]]) -> None:
    """There is room as long as enough pages are free, wherever they are: then blocks move, with what they hold."""
    loaded = tiny("llama-gqa")
    pool, held = pages_of(loaded, 3), list[Block]()
    for action, number in actions:
        if action == "allocate":
            free = pool.nbytes - sum(2 * 8 * 4 * PAGE_ROWS * pages_for(len(block.keys)) for block in set(held))
            if 2 * 8 * 4 * PAGE_ROWS * pages_for(number) > free:
                with pytest.raises(MemoryError):
                    pool.allocate((8, 8), number)
                continue
            held.append(pool.allocate((8, 8), number))
            for rows in (held[-1].keys, held[-1].values):
                rows.copy_(torch.arange(rows.numel()).view(rows.shape) + 1000 * number)
        elif held and action == "hold":
            held.append(held[number % len(held)].hold())
        elif held:
            held.pop(number % len(held)).release()
        pool.check_integrity(held)
        for block in held:
            for rows in (block.keys, block.values):
                assert torch.equal(rows.flatten() - rows[0, 0], torch.arange(float(rows.numel())))
                assert rows[0, 0] == 1000 * len(rows)
    for block in held:
        block.release()
    assert not pool.taken_bytes
    with pytest.raises(AssertionError, match="has 1 holders, 0 of them known"):
        (pool.allocate((8, 8), 5), pool.check_integrity([]))


def test_answers_do_not_change_when_their_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document comes when as many pages are free as it needs, between those of short ones."""
    loaded = ready("llama-gqa")

    def run(pool: Pool) -> dict[Any, tuple[int, ...]]:
        batch, gone = batch_of(loaded, NEW_TOKENS), []
        for tokens in range(100, 108):
            (prefill,) = prefill_packed(loaded, [other_prompt(tokens)], reserve_tokens=NEW_TOKENS, pool=pool)
            if tokens % 2:
                gone.append(prefill)
            else:
                batch.add(tokens, prefill, other_prompt(tokens), 0)
        batch.step()
        for prefill in gone:
            prefill.release()
        (prefill,) = prefill_packed(loaded, [other_prompt(900)], reserve_tokens=NEW_TOKENS, pool=pool)
        batch.add(900, prefill, other_prompt(900), 0)
        check_integrity(pool, *(one.cache for one in batch.prefills))
        return tokens_of(finish(batch))

    with pages_read(monkeypatch) as watched:
        pool = pages_of(loaded, 8)
        assert run(pool) == run(own_pool(loaded)) and pool.moves == 1 and watched.paged_calls
