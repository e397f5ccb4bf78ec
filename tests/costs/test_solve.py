"""The equal-time split: every rank computes equally long, whatever the machine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.errors import PartitionError
from kvr_mpi.partition import Partition

pytestmark = pytest.mark.quick

tokens = st.integers(1, 200_000)
ranks = st.integers(1, 16)
token_s = st.floats(1e-9, 1e-2)
pair_s = st.one_of(st.just(0.0), st.floats(1e-13, 1e-5))
some_rates = st.builds(Rates, token_s, pair_s)
any_rates = st.one_of(some_rates, st.builds(Rates, st.just(0.0), st.floats(1e-13, 1e-5)))


def seconds_of(lengths: list[float], rates: list[Rates]) -> list[float]:
    """Time of every rank, by the model the split is made for."""
    return [
        rate.seconds(length, sum(lengths[:rank]))
        for rank, (length, rate) in enumerate(zip(lengths, rates, strict=True))
    ]


@given(tokens, st.lists(any_rates, min_size=1, max_size=16))
def test_lengths_add_up_and_take_equally_long(tokens: int, rates: list[Rates]) -> None:
    lengths = equal_time(tokens, rates)
    assert len(lengths) == len(rates)
    assert min(lengths) > 0
    assert sum(lengths) == pytest.approx(tokens, rel=1e-9)
    times = seconds_of(lengths, rates)
    assert times == pytest.approx([times[0]] * len(rates), rel=1e-6)


@given(tokens, token_s, ranks)
def test_without_pair_cost_the_split_is_even(tokens: int, token_s: float, ranks: int) -> None:
    assert equal_time(tokens, [Rates(token_s, 0)] * ranks) == pytest.approx([tokens / ranks] * ranks, rel=1e-9)


@given(tokens, st.lists(token_s, min_size=1, max_size=16))
def test_without_pair_cost_a_slice_is_as_long_as_its_rank_is_fast(tokens: int, token_times: list[float]) -> None:
    lengths = equal_time(tokens, [Rates(seconds, 0) for seconds in token_times])
    speed = sum(1 / seconds for seconds in token_times)
    assert lengths == pytest.approx([tokens / seconds / speed for seconds in token_times], rel=1e-9)


@given(st.integers(100, 200_000), st.floats(0, 1e-3), st.floats(1e-9, 1e-5), st.integers(2, 16))
def test_later_ranks_of_equal_machines_get_less(tokens: int, token_s: float, pair_s: float, ranks: int) -> None:
    lengths = equal_time(tokens, [Rates(token_s, pair_s)] * ranks)
    assert all(later < earlier for earlier, later in zip(lengths, lengths[1:], strict=False))


@given(tokens, st.lists(some_rates, min_size=2, max_size=8), st.data(), st.floats(1.1, 100))
def test_a_rank_that_gets_slower_gets_less(tokens: int, rates: list[Rates], data: st.DataObject, factor: float) -> None:
    rank = data.draw(st.integers(0, len(rates) - 1))
    slowed = list(rates)
    slowed[rank] = Rates(rates[rank].token_s * factor, rates[rank].pair_s * factor)
    assert equal_time(tokens, slowed)[rank] < equal_time(tokens, rates)[rank]


@given(tokens, any_rates)
def test_one_rank_does_it_all(tokens: int, rate: Rates) -> None:
    assert equal_time(tokens, [rate]) == pytest.approx([tokens])


@given(st.integers(16, 200_000), st.lists(any_rates, min_size=1, max_size=16))
def test_the_split_is_a_ratio_a_partition_takes(tokens: int, rates: list[Rates]) -> None:
    partition = Partition.by_ratio(tokens, equal_time(tokens, rates), 16)
    assert (partition.size, partition.tokens) == (len(rates), tokens)


@given(any_rates, st.floats(1, 1e6), st.floats(0, 1e6))
def test_tokens_in_is_the_inverse_of_seconds(rate: Rates, tokens: float, before: float) -> None:
    assert rate.tokens_in(rate.seconds(tokens, before), before) == pytest.approx(tokens, rel=1e-9)


@given(some_rates, st.integers(1, 200))
def test_seconds_count_every_pair(rate: Rates, tokens: int) -> None:
    # Two slices take as long as one: nothing is computed twice, nothing left out.
    whole = rate.seconds(2 * tokens, 0)
    assert rate.seconds(tokens, 0) + rate.seconds(tokens, tokens) == pytest.approx(whole)
    assert rate.seconds(0, tokens) == 0


@pytest.mark.parametrize("bad", [-1e-9, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["token_s", "pair_s"])
def test_rates_no_machine_has_are_refused_by_name(name: str, bad: float) -> None:
    with pytest.raises(PartitionError, match=rf"rates\.{name} = {bad}: expected a finite number of seconds"):
        Rates(**{"token_s": 1.0, "pair_s": 1.0, name: bad})


def test_rates_of_nothing_at_all_are_refused() -> None:
    with pytest.raises(PartitionError, match="token_s and pair_s are both 0; expected measured seconds"):
        Rates(0, 0)
