"""The equal-time split: every rank computes equally long, whatever the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.costs.solve import Rates, equal_time

pytestmark = pytest.mark.quick

tokens = st.integers(1, 200_000)
pair_s = st.one_of(st.just(0.0), st.floats(1e-13, 1e-5))
some_rates = st.builds(Rates, st.floats(1e-9, 1e-2), pair_s)
any_rates = st.one_of(some_rates, st.builds(Rates, st.just(0.0), st.floats(1e-13, 1e-5)))


@given(tokens, st.lists(any_rates, min_size=1, max_size=16), st.sampled_from([0.5, 1.0]))
def test_lengths_add_up_and_take_equally_long(tokens: int, rates: list[Rates], share: float) -> None:
    """By the model that the split is made for: with half of a slice's own pairs, or all."""
    lengths = equal_time(tokens, rates, share)
    assert len(lengths) == len(rates) and min(lengths) > 0
    assert sum(lengths) == pytest.approx(tokens, rel=1e-9)
    before = [sum(lengths[:rank]) for rank in range(len(rates))]
    times = [
        own * (rate.token_s + rate.pair_s * (known + share * own))
        for own, known, rate in zip(lengths, before, rates, strict=True)
    ]
    assert times == pytest.approx([times[0]] * len(rates), rel=1e-6)
    if share == 0.5:
        assert times[-1] == pytest.approx(rates[-1].seconds(lengths[-1], before[-1]))


@given(some_rates, st.integers(1, 200))
def test_seconds_count_every_pair(rate: Rates, tokens: int) -> None:
    # Two slices take as long as one: nothing is computed twice, nothing left out.
    whole = rate.seconds(2 * tokens, 0)
    assert rate.seconds(tokens, 0) + rate.seconds(tokens, tokens) == pytest.approx(whole)
    assert rate.seconds(0, tokens) == 0
