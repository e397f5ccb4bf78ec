"""Slices computed in chunks: the same as at once, whatever the chunks, the slices and the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from chains import greedy, single
from models import CONFIGS, STATES, WHOLE, prompt, tiny

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.cache import layer_kv
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, compute_prefix, prefill_kvr, prefill_ring, prefill_tsp
from kvr_mpi.transport.local import LocalTransport, run_local

NEW_TOKENS = 8


def chunked(loaded: LoadedModel, ids: Sequence[int], bounds: Sequence[int], chunk_tokens: int | None) -> Prefill:
    """Run a chain of threads."""
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    partition = Partition(tuple(bounds))
    return run_local(
        partition.size,
        lambda rank: prefill_kvr(
            loaded, ids, partition, rank, reserve_tokens=NEW_TOKENS, chunk_tokens=chunk_tokens, keeps_all=True
        ),
    )[-1]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")  # a configuration made up for tests makes transformers warn
def test_chunks_give_what_one_process_gives(name: str) -> None:
    loaded, ids = tiny(name), prompt(90)
    truth = single(loaded, ids)
    assert truth.logits is not None
    kept = [layer_kv(truth.cache, idx) for idx in range(len(loaded.shape.layers))]
    kept = [None if pair is None else (pair[0].clone(), pair[1].clone()) for pair in kept]
    expected = greedy(loaded.model, truth, NEW_TOKENS)
    for bounds in ((0, 90), (0, 53, 90), (0, 1, 60, 89, 90)):
        for chunk_tokens in (7, 16, 1000):
            found = chunked(loaded, ids, bounds, chunk_tokens)
            assert found.logits is not None
            assert torch.allclose(found.logits, truth.logits, atol=1e-4), (bounds, chunk_tokens)
            for idx, pair in enumerate(kept):
                mine = layer_kv(found.cache, idx)
                if pair is None or mine is None:
                    continue
                for one, other in zip(mine, pair, strict=True):
                    assert torch.allclose(one[-len(other) :], other, atol=1e-4), (bounds, chunk_tokens, idx)
            assert greedy(loaded.model, found, NEW_TOKENS) == expected


@pytest.mark.parametrize("chunk_tokens", [1, 30])
def test_chunks_of_one_token_and_longer_ones_give_the_same(chunk_tokens: int) -> None:
    loaded, ids = tiny("llama-gqa"), prompt(33)
    truth = single(loaded, ids)
    for bounds in ((0, 33), (0, 20, 33)):
        found = chunked(loaded, ids, bounds, chunk_tokens)
        assert found.logits is not None and truth.logits is not None
        assert torch.allclose(found.logits, truth.logits, atol=1e-4)


def test_chunks_end_at_the_same_tokens_however_the_prompt_is_cut() -> None:
    """Sums are made in another order where slices end, but not by what runs beside: the bits are the prompt's own."""
    loaded, ids = tiny("llama-gqa"), prompt(70)
    prepare_model(loaded.model, chain=True)
    prefix = compute_prefix(loaded, ids[:21])
    caches = []
    for options in ({"prefix": prefix}, {}):
        run = prefill_kvr(loaded, ids, Partition((0, 70)), LocalTransport(), chunk_tokens=16, **options)
        caches.append(run)
    assert caches[0].cache.chunks == [[(21, 32)], [(32, 48)], [(48, 64)], [(64, 70)]]
    assert caches[1].cache.chunks[1:] == [[(16, 32)], [(32, 48)], [(48, 64)], [(64, 70)]]
    assert torch.allclose(caches[0].logits, caches[1].logits, atol=1e-4)


@pytest.mark.parametrize("name", ["bloom-own-attention", "lfm2-convolutions"])
@pytest.mark.filterwarnings("ignore")
def test_models_that_take_no_chunks_are_refused_by_name(name: str) -> None:
    loaded = tiny(name)
    assert name in {**WHOLE, **STATES}
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    with pytest.raises(ModelError, match=rf"{loaded.shape.architecture}: .* so its slices cannot be run in chunks"):
        prefill_kvr(loaded, prompt(20), Partition((0, 20)), LocalTransport(), chunk_tokens=8)


def test_rivals_take_no_chunks() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    for run in (
        lambda rank: prefill_ring(loaded, prompt(20), rank, chunk_tokens=8),
        lambda rank: prefill_tsp(loaded, prompt(20), rank, dense=False, chunk_tokens=8),
    ):
        with pytest.raises(ModelError, match="takes no chunks"):
            run_local(2, run)
