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
    place_best_with_copies,
    place_with_copies,
    total_efficiency,
)
from kvr_mpi.compress.placement import (
    place_in_proportion,
    place_layers,
    place_statically,
    place_with_equal_copies,
    sync_efficiency,
)


@settings(max_examples=60)
@given(
    loads=st.lists(st.integers(1, 1000), min_size=2, max_size=6),
    ranks=st.integers(2, 5),
    copies=st.integers(0, 4),
)
def test_searching_is_never_worse(loads: list[int], ranks: int, copies: int) -> None:
    quick, exact = place_with_copies(loads, ranks, copies), place_best_with_copies(loads, ranks, copies)
    for found in (quick, exact):
        check(found, loads, copies)
    assert (
        exact.heaviest
        <= quick.heaviest * (1 + 1e-9)
        <= place_with_equal_copies(loads, ranks, copies).heaviest * (1 + 1e-8)
    )


@pytest.mark.parametrize("model", list(TABLE_2))
def test_profiles_that_match_table_2_reach_what_the_paper_gains(model: str) -> None:
    for budget in TABLE_2[model][1]:
        found = paper_profile(model, budget)
        assert np.abs(np.array(found.utilisation) - found.target).max() < 0.025, "of the table"
        counts = found.profile.counts
        static = place_layers(counts, 8, place_statically)
        assert counts.mean() == pytest.approx(budget) and sync_efficiency(static) == pytest.approx(found.utilisation[2])
        quick = place_layers(counts, 8, partial(place_with_copies, copies=4))
        assert sync_efficiency(quick) >= 0.94
        assert sync_efficiency(place_layers(counts, 8, place_in_proportion)) >= 0.999
        if model.startswith("Llama-3.3") and budget > 128:
            exact = place_layers(counts, 8, partial(place_best_with_copies, copies=4))
            assert load_ratio(exact, static) >= 1.66
        assert total_efficiency(quick) > 0.99
