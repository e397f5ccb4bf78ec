"""Cuts of a prompt: always a cover, never an empty slice, and a refusal that says why."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.errors import EXIT_CONFIG, ConfigError, PartitionError
from kvr_mpi.partition import Partition

pytestmark = pytest.mark.quick

positive = st.floats(min_value=1e-6, max_value=1e6)


@st.composite
def tokens_and_ratios(draw: st.DrawFn) -> tuple[int, list[float]]:
    ratios = draw(st.lists(positive, min_size=1, max_size=12))
    return draw(st.integers(min_value=len(ratios), max_value=100_000)), ratios


def assert_covers(partition: Partition, tokens: int, size: int) -> None:
    """Slices are non-empty, adjoin, and go from the first token to the last."""
    assert partition.size == len(partition.lengths) == size
    assert partition.tokens == sum(partition.lengths) == tokens
    assert min(partition.lengths) >= 1
    assert partition.start(0) == 0
    assert partition.stop(size - 1) == tokens
    for rank in range(1, size):
        assert partition.start(rank) == partition.stop(rank - 1)


# What the bounds say


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=16))
def test_bounds_and_lengths_say_the_same(lengths: list[int]) -> None:
    partition = Partition(tuple(sum(lengths[:rank]) for rank in range(len(lengths) + 1)))
    assert_covers(partition, sum(lengths), len(lengths))
    assert partition.lengths == tuple(lengths)
    assert [partition.stop(rank) - partition.start(rank) for rank in range(partition.size)] == lengths
    assert [int(part) for part in str(partition).split("+")] == lengths


@pytest.mark.parametrize("bounds", [(), (0,), (7,), (1, 5), (-1, 5)])
def test_bounds_start_at_zero_and_are_two_at_least(bounds: tuple[int, ...]) -> None:
    with pytest.raises(PartitionError, match=re.escape(str(list(bounds))) + ".*at least two, the first one 0"):
        Partition(bounds)


@pytest.mark.parametrize(
    ("bounds", "rank", "got"), [((0, 0), 0, 0), ((0, 5, 5, 9), 1, 0), ((0, 5, 3), 1, -2), ((0, 3, 7, 7), 2, 0)]
)
def test_an_empty_slice_is_refused_by_its_rank(bounds: tuple[int, ...], rank: int, got: int) -> None:
    with pytest.raises(PartitionError, match=f"rank {rank} would get {got} tokens.*at least one.*use fewer ranks"):
        Partition(bounds)


def test_check_tokens_names_both_numbers() -> None:
    partition = Partition((0, 3, 10))
    partition.check_tokens(10)
    for tokens in (0, 9, 11):
        with pytest.raises(PartitionError, match=rf"add up to 10 tokens; the prompt has {tokens}$"):
            partition.check_tokens(tokens)


def test_a_bad_partition_is_a_mistake_in_the_job() -> None:
    with pytest.raises(ConfigError) as caught:
        Partition((0, 0))
    assert caught.value.exit_code == EXIT_CONFIG


# Even


@given(st.data())
def test_even_slices_differ_by_one_token_at_most(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 64))
    tokens = data.draw(st.integers(size, 200_000))
    partition = Partition.even(tokens, size)
    assert_covers(partition, tokens, size)
    assert max(partition.lengths) - min(partition.lengths) <= 1


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_as_many_ranks_as_tokens_is_one_token_each(size: int) -> None:
    assert Partition.even(size, size).lengths == (1,) * size
    assert Partition.by_ratio(size, [1.0 + rank**3 for rank in range(size)]).lengths == (1,) * size


@pytest.mark.parametrize(("tokens", "size"), [(0, 1), (1, 2), (7, 8)])
def test_more_ranks_than_tokens_says_how_many_fit(tokens: int, size: int) -> None:
    with pytest.raises(PartitionError, match=f"{tokens} tokens .* over {size} ranks.*use at most {tokens} ranks"):
        Partition.even(tokens, size)


@pytest.mark.parametrize("size", [0, -1])
def test_no_ranks_is_refused(size: int) -> None:
    with pytest.raises(PartitionError, match="one positive number for each rank"):
        Partition.even(10, size)


# By ratio


@given(tokens_and_ratios(), st.integers(1, 64))
def test_any_positive_ratios_make_a_cover(case: tuple[int, list[float]], quantum: int) -> None:
    tokens, ratios = case
    assert_covers(Partition.by_ratio(tokens, ratios, quantum), tokens, len(ratios))


@given(st.lists(st.floats(1, 2), min_size=1, max_size=12), st.integers(0, 100_000))
def test_slices_are_in_proportion_to_the_token(ratios: list[float], more: int) -> None:
    tokens = 4 * len(ratios) + more
    lengths = Partition.by_ratio(tokens, ratios).lengths
    for length, ratio in zip(lengths, ratios, strict=True):
        assert abs(length - tokens * ratio / sum(ratios)) <= 1 + 1e-6


@given(tokens_and_ratios(), st.sampled_from([2.0, 0.25, 1024.0]))
def test_ratios_need_not_add_up_to_one(case: tuple[int, list[float]], factor: float) -> None:
    tokens, ratios = case
    # A power of two scales without rounding, so the cut is the very same.
    assert Partition.by_ratio(tokens, ratios) == Partition.by_ratio(tokens, [factor * ratio for ratio in ratios])


def test_ratios_may_be_whole_numbers() -> None:
    assert Partition.by_ratio(60, [3, 2, 1]).lengths == (30, 20, 10)


def test_a_vanishing_ratio_still_gets_a_token() -> None:
    assert Partition.by_ratio(1000, [1e-12, 1, 1e-12, 1e-12]).lengths == (1, 997, 1, 1)
    assert Partition.by_ratio(1000, [1, 5e-324]).lengths == (999, 1)


@pytest.mark.parametrize("ratios", [[1e308, 1e308], [1e307, 1e307]])
def test_huge_ratios_are_ratios_like_any(ratios: list[float]) -> None:
    assert all(map(math.isfinite, ratios))
    assert Partition.by_ratio(100, ratios).lengths == (50, 50)


@pytest.mark.parametrize("bad", [0, 0.0, -0.0, -1, -1e-9, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ratios_no_rank_can_have_are_refused(bad: float, rank: int) -> None:
    ratios = [1.0, 1.0, 1.0]
    ratios[rank] = bad
    with pytest.raises(PartitionError, match=re.escape(str(ratios)) + ": expected one positive number for each rank"):
        Partition.by_ratio(100, ratios)


def test_no_ratios_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"ratios \[\]: expected one positive number for each rank"):
        Partition.by_ratio(100, [])


# Quantum


@given(st.lists(st.floats(1, 2), min_size=1, max_size=8), st.integers(1, 64), st.integers(0, 10_000))
def test_inner_bounds_of_a_long_prompt_are_multiples_of_the_quantum(
    ratios: list[float], quantum: int, more: int
) -> None:
    tokens = 4 * quantum * len(ratios) + more
    partition = Partition.by_ratio(tokens, ratios, quantum)
    assert_covers(partition, tokens, len(ratios))
    assert all(bound % quantum == 0 for bound in partition.bounds[:-1])
    for bound, exact in zip(partition.bounds, Partition.by_ratio(tokens, ratios).bounds, strict=True):
        assert abs(bound - exact) <= quantum / 2 + 1


@given(st.data())
def test_a_short_prompt_is_cut_as_if_there_were_no_quantum(data: st.DataObject) -> None:
    size, quantum = data.draw(st.integers(1, 8)), data.draw(st.integers(2, 64))
    tokens = data.draw(st.integers(size, 4 * quantum * size - 1))
    ratios = data.draw(st.lists(positive, min_size=size, max_size=size))
    assert Partition.by_ratio(tokens, ratios, quantum) == Partition.by_ratio(tokens, ratios)


@pytest.mark.parametrize("quantum", [0, -16])
def test_a_quantum_is_one_token_at_least(quantum: int) -> None:
    with pytest.raises(PartitionError, match=f"quantum {quantum}: expected at least 1"):
        Partition.by_ratio(100, [1, 1], quantum)
