"""What decoding takes, measured: steps of short documents in both ways, and attention to long ones."""

from __future__ import annotations

from typing import Any

import pytest
from models import tiny

from kvr_mpi.compress.placement import place_statically
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import decode_probe


def test_ranks_agree_and_attention_to_long_documents_is_that_of_caches_of_their_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of attention times are as counted here: a second for each token that is attended to in a layer."""
    loaded, attended = tiny("llama-gqa"), list[int]()
    prepare_model(loaded.model, chain=True)
    found = run_local(2, lambda rank: decode_probe.measure_decoding(loaded, rank, 3, place_statically))
    assert found[0] == found[1] and min(found[0]) > 0

    def count(of: Any, caches: Any, ranks: Any) -> list[float]:
        attended.extend(cache.length + 1 for cache in caches)
        return [float(sum(cache.length + 1 for cache in caches))] * len(of.model.model.layers)

    monkeypatch.setattr(decode_probe, "attention_seconds", count)
    assert decode_probe.kept_token_seconds(loaded, LocalTransport()) == 1
    assert set(attended) == {decode_probe.PROBE_TOKENS, decode_probe.LONG_TOKENS}
