"""Cuts of a prompt: always a cover, never an empty slice, and a refusal that says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.errors import EXIT_CONFIG, PartitionError
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
    assert [0, *(stop for _, stop in partition.slices())] == [*(start for start, _ in partition.slices()), tokens]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=16))
def test_bounds_and_lengths_say_the_same(lengths: list[int]) -> None:
    partition = Partition(tuple(sum(lengths[:rank]) for rank in range(len(lengths) + 1)))
    assert_covers(partition, sum(lengths), len(lengths))
    assert partition.lengths == tuple(lengths)
    assert [int(part) for part in str(partition).split("+")] == lengths


@pytest.mark.parametrize(
    ("make", "told"),
    [
        *(
            (partial(Partition, bounds), "at least two, the first one 0")
            for bounds in [(), (0,), (7,), (1, 5), (-1, 5)]
        ),
        (partial(Partition, (0, 0)), "rank 0 would get 0 tokens.*use fewer ranks"),
        (partial(Partition, (0, 5, 3)), "rank 1 would get -2 tokens"),
        (partial(Partition, (0, 3, 7, 7)), "rank 2 would get 0 tokens"),
        (partial(Partition((0, 3, 10)).check_prefix, 3), "first slice has to end after the 3 tokens"),
        (partial(Partition.even, 7, 8), "7 tokens .* over 8 ranks.*use at most 7 ranks"),
        *(
            (partial(Partition.by_ratio, 100, [1.0, bad, 1.0]), rf"{bad}, 1.0\]: expected one positive number")
            for bad in (0, -0.0, -1e-9, math.inf, math.nan)
        ),
        (partial(Partition.by_ratio, 100, []), r"ratios \[\]: expected one positive number"),
        (partial(Partition.by_ratio, 100, [1, 1], 0), "quantum 0: expected at least 1"),
    ],
)
def test_what_cannot_be_cut_is_a_mistake_of_the_job(make: Callable[[], object], told: str) -> None:
    with pytest.raises(PartitionError, match=told) as caught:
        make()
    assert caught.value.exit_code == EXIT_CONFIG


@given(tokens_and_ratios(), st.integers(1, 64), st.sampled_from([2.0, 0.25, 1024.0]))
def test_any_positive_ratios_make_a_cover(case: tuple[int, list[float]], quantum: int, factor: float) -> None:
    tokens, ratios = case
    partition, even = Partition.by_ratio(tokens, ratios, quantum), Partition.even(tokens, len(ratios))
    assert_covers(partition, tokens, len(ratios))
    assert_covers(even, tokens, len(ratios))
    assert max(even.lengths) - min(even.lengths) <= 1
    # They need not add up to one. A power of two scales without rounding, so the cut is the very same.
    assert partition == Partition.by_ratio(tokens, [factor * ratio for ratio in ratios], quantum)
    if tokens < 4 * quantum * len(ratios):
        assert partition == Partition.by_ratio(tokens, ratios), "a short prompt is cut as if there were no quantum"


@given(st.lists(st.floats(1, 2), min_size=1, max_size=12), st.integers(1, 64), st.integers(0, 100_000))
def test_slices_are_in_proportion_and_inner_bounds_multiples_of_the_quantum(
    ratios: list[float], quantum: int, more: int
) -> None:
    tokens = 4 * quantum * len(ratios) + more
    partition, exact = Partition.by_ratio(tokens, ratios, quantum), Partition.by_ratio(tokens, ratios)
    for length, ratio in zip(exact.lengths, ratios, strict=True):
        assert abs(length - tokens * ratio / sum(ratios)) <= 1 + 1e-6
    assert all(bound % quantum == 0 for bound in partition.bounds[:-1])
    assert all(abs(one - other) <= quantum / 2 + 1 for one, other in zip(partition.bounds, exact.bounds, strict=True))


@pytest.mark.parametrize(
    ("tokens", "ratios", "lengths"),
    [
        (1000, [1e-12, 1, 1e-12, 1e-12], (1, 997, 1, 1)),
        (1000, [1, 5e-324], (999, 1)),
        (100, [1e308, 1e308], (50, 50)),
        (7, [1.0 + rank**3 for rank in range(7)], (1,) * 7),
    ],
)
def test_vanishing_and_huge_ratios_are_ratios_like_any(tokens: int, ratios: list[float], lengths: Any) -> None:
    assert Partition.by_ratio(tokens, ratios).lengths == lengths


@given(tokens_and_ratios(), st.data())
def test_the_last_slice_begins_early_enough(case: tuple[int, list[float]], data: st.DataObject) -> None:
    tokens, ratios = case
    size, known = len(ratios), data.draw(st.integers(0, 20))
    partition = Partition.by_ratio(tokens, ratios).after(known)
    token = data.draw(st.integers(known, tokens + known - 1))
    if token - known < size - 1:
        with pytest.raises(PartitionError, match=f"{size - 1} slices must fit"):
            partition.with_last_from(token, known)
        return
    cut = partition.with_last_from(token, known)
    assert_covers(cut, tokens + known, size)
    assert size == 1 or cut.bounds[-2] == min(token, partition.bounds[-2])
    assert size == 1 or cut.slices(known)[0] == (known, cut.bounds[1])
