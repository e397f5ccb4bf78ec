"""Heads on ranks: every head whole, copies within bounds, and no rank with more than it must have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_placements import check

from kvr_mpi.compress.placement import (
    LayerPlacement,
    place_best_effort,
    place_in_proportion,
    place_layers,
    place_statically,
    place_with_equal_copies,
)

LOADS = st.lists(st.floats(0, 10_000).map(lambda load: round(load, 2)), min_size=1, max_size=12)
Place = Callable[..., LayerPlacement]


@settings(max_examples=200)
@given(loads=LOADS, ranks=st.integers(1, 8), copies=st.integers(0, 7))
def test_every_placement_has_every_head(loads: list[float], ranks: int, copies: int) -> None:
    whole = place_best_effort(loads, ranks)
    even = place_with_equal_copies(loads, ranks, copies)
    free = place_in_proportion(loads, ranks)
    check(whole, loads, 0)
    check(even, loads, copies)
    check(free, loads, ranks - 1)
    assert free.heaviest <= even.heaviest * (1 + 1e-9) <= whole.heaviest * (1 + 1e-8)
    assert free.heaviest == pytest.approx(sum(loads) / ranks, rel=1e-8, abs=1e-6), "all have exactly as much"
    if len(loads) % ranks == 0:
        assert whole.heaviest <= 4 / 3 * place_statically(loads, ranks).heaviest * (1 + 1e-9), "Graham's bound"


def test_ranks_are_renamed_so_that_all_hold_as_much() -> None:
    loads = np.array([[8.0, 4, 2, 1]] * 16)
    placed = place_layers(loads, 4, place_best_effort)
    totals = np.sum([layer.loads for layer in placed], axis=0)
    assert totals.max() / totals.min() < 1.1
    assert all(sorted(layer.loads) == [1, 2, 4, 8] for layer in placed), "what a layer's fullest rank has is the same"


def test_static_placement_is_tensor_parallelism() -> None:
    found = place_statically([1, 2, 3, 4], 2)
    assert [piece.rank for piece in found.pieces] == [0, 0, 1, 1] and found.loads.tolist() == [3, 7]
    assert place_statically([1, 2, 3, 4], 3).loads.tolist() == [3, 3, 4], "the first ranks have one more"
    assert place_statically([5, 7], 3).loads.tolist() == [5, 7, 0], "a rank without a head"
