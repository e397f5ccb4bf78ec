"""What decoding takes, measured: steps of short documents in both ways, and attention to long ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import tiny

from kvr_mpi.compress.placement import place_statically
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import decode_probe
from kvr_mpi.tuning.decode_probe import PROBE_TOKENS, attention_seconds, measure_decoding


@pytest.fixture
def loaded() -> Any:
    found = tiny("llama-gqa")
    prepare_model(found.model, chain=True)
    return found


def test_every_rank_is_told_the_same_times(loaded: Any) -> None:
    found = run_local(2, lambda rank: measure_decoding(loaded, rank, 3, place_statically))
    assert found[0] == found[1]
    assert min(found[0]) > 0


def test_attention_to_long_documents_is_that_of_caches_of_their_length(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are as counted here: a second for each token that is attended to in a layer."""
    attended: list[int] = []

    def count(of: Any, caches: Any, ranks: Any) -> list[float]:
        attended.extend(cache.length + 1 for cache in caches)
        return [float(sum(cache.length + 1 for cache in caches))] * len(of.model.model.layers)

    monkeypatch.setattr(decode_probe, "attention_seconds", count)
    found = decode_probe.kept_token_seconds(loaded, LocalTransport())
    assert found == 1
    assert sorted(set(attended)) == [PROBE_TOKENS, decode_probe.LONG_TOKENS]


def test_timing_attention_changes_no_cache(loaded: Any) -> None:
    ids = loaded.shape.sample_ids(40)
    caches = [prefill.cache for prefill in prefill_packed(loaded, [ids, ids[:20]], reserve_tokens=4)]
    before = [[tensor.clone() for tensor in cache.layers[1].rows(0, cache.length)] for cache in caches]
    times = attention_seconds(loaded, caches, LocalTransport())
    assert len(times) == len(loaded.model.model.layers) and all(0 < each < 10 for each in times)
    for cache, (keys, values), length in zip(caches, before, (40, 20), strict=True):
        assert cache.length == length
        assert all(map(torch.equal, cache.layers[1].rows(0, length), (keys, values)))
