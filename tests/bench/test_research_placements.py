"""Placements that only research needs: as good as any, eq. 4 taken literally, and the gains of the FairKV paper."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_placements import check

from benchmarks.paper_profiles import TABLE_2, paper_profile
from benchmarks.placement import (
    load_ratio,
    place_best_in_proportion,
    place_by_total,
    total_efficiency,
)
from kvr_mpi.compress.placement import (
    place_best_effort,
    place_in_proportion,
    place_layers,
    place_statically,
    sync_efficiency,
)


@settings(max_examples=60)
@given(loads=st.lists(st.integers(1, 1000), min_size=2, max_size=6), ranks=st.integers(2, 5), copies=st.integers(0, 4))
def test_searching_is_never_worse(loads: list[int], ranks: int, copies: int) -> None:
    quick, exact = place_in_proportion(loads, ranks, copies), place_best_in_proportion(loads, ranks, copies)
    check(exact, loads, copies)
    assert exact.heaviest <= quick.heaviest * (1 + 1e-9)


@settings(max_examples=60)
@given(
    loads=st.lists(st.floats(0, 10_000).map(lambda load: round(load, 2)), min_size=1, max_size=8),
    ranks=st.integers(2, 8),
    copies=st.integers(0, 7),
    most=st.integers(1, 4),
)
def test_no_head_has_more_pieces_than_allowed(loads: list[float], ranks: int, copies: int, most: int) -> None:
    found = place_best_in_proportion(loads, ranks, copies, most)
    check(found, loads, copies)
    assert max(sum(piece.head == head for piece in found.pieces) for head in range(len(loads))) <= most


def test_eq_4_alone_can_be_worse_than_doing_nothing() -> None:
    """What the paper makes small is not what a step waits for."""
    loads = np.array([[4.0, 4, 1, 1], [1, 1, 4, 4]] * 8)
    static, by_total = place_layers(loads, 2, place_statically), place_by_total(loads, 2)
    ours = place_layers(loads, 2, place_best_effort)
    assert total_efficiency(by_total) == pytest.approx(1) == total_efficiency(ours)
    skewed = np.array([[9.0, 1, 1, 9], [1, 9, 9, 1], [5, 5, 5, 5]] * 8)
    random = np.random.default_rng(0).gamma(0.7, size=(40, 8))
    for each, ranks in ((skewed, 4), (random, 4), (random, 8)):
        static, by_total = place_layers(each, ranks, place_statically), place_by_total(each, ranks)
        ours = place_layers(each, ranks, place_best_effort)
        assert total_efficiency(by_total) >= total_efficiency(static) - 1e-9
        assert sync_efficiency(ours) >= sync_efficiency(static) - 1e-9
    assert sync_efficiency(by_total) < sync_efficiency(static) and load_ratio(by_total, static) < 1


@pytest.mark.parametrize("model", list(TABLE_2))
def test_profiles_that_match_table_2_reach_what_the_paper_gains(model: str) -> None:
    for budget in TABLE_2[model][1]:
        found = paper_profile(model, budget)
        assert np.abs(np.array(found.utilisation) - found.target).max() < 0.025, "of the table"
        counts = found.profile.counts
        static = place_layers(counts, 8, place_statically)
        assert counts.mean() == pytest.approx(budget) and sync_efficiency(static) == pytest.approx(found.utilisation[2])
        quick = place_layers(counts, 8, partial(place_in_proportion, copies=4))
        assert sync_efficiency(quick) >= 0.94
        assert sync_efficiency(place_layers(counts, 8, partial(place_in_proportion, copies=7))) >= 0.999
        if model.startswith("Llama-3.3") and budget > 128:
            exact = place_layers(counts, 8, partial(place_best_in_proportion, copies=4))
            assert load_ratio(exact, static) >= 1.66
        assert total_efficiency(quick) > 0.99
