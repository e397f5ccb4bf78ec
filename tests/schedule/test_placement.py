"""Documents on chains, fixed or planned: each once, the same on every rank, and never far from the best."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.errors import ConfigError
from kvr_mpi.schedule.moldable import lower_bound
from kvr_mpi.schedule.placement import LATER, Schedule, deal, sampled, schedule


def numbered(sizes: list[int]) -> list[tuple[str, int]]:
    """Documents of these sizes, each with a name of its own."""
    return [(f"document {number}", chars) for number, chars in enumerate(sizes)]


@pytest.mark.quick
@given(
    st.lists(st.integers(1, 1_000_000), max_size=60),
    st.integers(1, 12),
)
def test_documents_are_dealt_evenly(sizes: list[int], chains: int) -> None:
    works = np.array(sizes, np.int64)
    dealt = deal(works, chains)
    assert len(dealt) == len(works) and set(dealt.tolist()) <= set(range(chains))
    # Graham's bound: the chain that ends last had least to do when its last document came.
    bound = sum(sizes) / chains + (1 - 1 / chains) * max(sizes, default=0)
    assert max(works[dealt == chain].sum() for chain in range(chains)) <= bound + 1e-6


def test_the_longest_document_is_not_left_for_the_end() -> None:
    assert deal(np.array([1, 1, 1, 1, 1, 1, 6]), 2).tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert np.bincount(deal(np.ones(8, np.int64), 4)).tolist() == [2, 2, 2, 2]


def seconds(tokens: int, ranks: int) -> float:
    """A model of the right shape: linear and quadratic work, what a link and a step of the chain cost, decoding."""
    work = 1e-4 * tokens + 1e-9 * tokens**2
    return work / ranks + (1e-6 * tokens + 0.01 * ranks if ranks > 1 else 0) + 0.5


def anything_fits(tokens: int, ranks: int) -> bool:
    return True


def only_short_ones_fit(tokens: int, ranks: int) -> bool:
    return tokens <= 60_000 * ranks


corpora = st.lists(st.one_of(st.integers(0, 40), st.integers(1, 300_000)), max_size=40).map(numbered)
many_ranks = st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16, 30, 64])
abilities = st.sampled_from([anything_fits, only_short_ones_fit])


def chains_of(plan: Schedule) -> dict[str, tuple[int, int]]:
    return {place.id: (place.first_rank, place.ranks) for place in plan.placements}


def test_the_bound_counts_the_work_of_the_chains_that_a_deadline_needs() -> None:
    """Within 6 s, the first document needs both ranks, for 12 of their 12 rank-seconds: none are left for the other."""
    assert lower_bound(np.array([[10, 6], [1, 1]]), np.array([1, 2]), 2) == 7


@pytest.mark.quick
@given(corpora, many_ranks, abilities, st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.randoms(use_true_random=False))
def test_a_plan_has_every_document_once_and_keeps_its_bounds(
    documents: list[tuple[str, int]], ranks: int, fits: Any, limit: float, random: Random
) -> None:
    plan = schedule(documents, ranks, seconds, fits, min_efficiency=limit)
    placed = {place.id: place.tokens for place in plan.placements}
    lost = {name: tokens for name, tokens, _ in plan.does_not_fit}
    assert len(placed) == len(plan.placements) and not placed.keys() & lost.keys()
    assert placed | lost == dict(documents)
    assert all(not fits(tokens, ranks) for tokens in lost.values())
    for place in plan.placements:
        assert place.first_rank % place.ranks == 0 and 0 <= place.first_rank <= ranks - place.ranks
        assert fits(place.tokens, place.ranks) and place.reason
        assert place.start_s < place.end_s <= plan.makespan_s
    for rank in range(ranks):
        mine = [place for place in plan.placements if place.first_rank <= rank < place.first_rank + place.ranks]
        # In the order of the list, so that all ranks of a chain meet: nothing waits for what comes later.
        assert all(a.end_s <= b.start_s for a, b in zip(mine, mine[1:], strict=False))
    # One communicator for each length: no rank is asked for a longer chain after a shorter one.
    assert [place.ranks for place in plan.placements] == sorted((p.ranks for p in plan.placements), reverse=True)
    # Every rank plans the same, in whatever order it found the documents; the order on a chain is the corpus's.
    shuffled = list(documents)
    random.shuffle(shuffled)
    other = schedule(shuffled, ranks, seconds, fits, min_efficiency=limit)
    assert chains_of(plan) == chains_of(other) and plan.fixed_s == other.fixed_s
    assert (plan.makespan_s, plan.lower_bound_s) == (other.makespan_s, other.lower_bound_s)
    soonest = schedule(documents, ranks, seconds, fits)
    assert plan.lower_bound_s <= soonest.makespan_s
    assert soonest.makespan_s <= plan.makespan_s <= 1.02 * soonest.makespan_s + 1e-6
    assert all(plan.makespan_s <= LATER * makespan_s + 1e-6 for _, makespan_s in plan.fixed_s)
    if fits is not anything_fits:
        return
    assert {length for length, _ in plan.fixed_s} == {n for n in range(1, ranks + 1) if ranks % n == 0}
    # Graham: one rank for each is within the mean load and one document, and the plan is no worse.
    alone = [seconds(tokens, 1) for _, tokens in documents]
    assert soonest.makespan_s <= 1.01 * (sum(alone) / ranks + max(alone, default=0.0))
    for place in plan.placements:
        ideal_s = seconds(place.tokens, 1) / place.ranks
        if 1 < place.ranks <= place.tokens and ideal_s < limit * (1 - 1e-5) * seconds(place.tokens, place.ranks):
            assert "% longer" in place.reason, "wasteful chains are avoided where that costs little"


def test_a_chain_that_is_not_worth_it_is_not_taken() -> None:
    """On one rank the long document would end 5% later than on two: too much, unless the others take as long."""

    def steep(tokens: int, ranks: int) -> float:
        """Nine tenths of a document's work are not shared out."""
        return tokens * (0.9 + 0.1 / ranks)

    later = "efficiency 53%, but without such chains the batch would take 5% longer"
    for others, ranks, reason in (
        ([250] * 6, 2, later),
        ([985] * 2, 1, "a chain of 2 would have an efficiency of only 53%"),
    ):
        plan = schedule([("long", 1000), *numbered(others)], 4, steep, anything_fits, min_efficiency=0.9)
        (place,) = (place for place in plan.placements if place.id == "long")
        assert place.ranks == ranks and place.reason.endswith(reason)
    for count, chain in ((101, 4), (401, 1)):  # on chains the batch would end 3% or less than 1% sooner
        plan = schedule(numbered([100] * count), 4, lambda tokens, ranks: tokens / ranks, anything_fits)
        assert plan.chain_lengths == (chain,)
    needed = schedule(numbered([100_000] * 2), 4, steep, only_short_ones_fit, min_efficiency=1.0).placements
    assert [(place.ranks, place.reason) for place in needed] == [(2, "does not fit on fewer ranks")] * 2


def test_ten_thousand_documents_are_within_five_per_cent() -> None:
    """By times at a few lengths, between which they are right."""
    random, ranks = Random(0), 96
    lengths = [min(max(int(random.lognormvariate(math.log(16e3), 1.3)), 1024), 1 << 18) for _ in range(10_000)]
    asked: list[tuple[int, int]] = []

    def costly(tokens: int, ranks: int) -> float:
        asked.append((tokens, ranks))
        return seconds(tokens, ranks)

    plan = schedule(numbered(lengths), ranks, sampled(costly), only_short_ones_fit, min_efficiency=0.5)
    assert len(plan.placements) == 10_000
    assert plan.makespan_s <= 1.05 * plan.lower_bound_s
    assert plan.data_parallel_s is None, "the longest documents fit on no single rank"
    assert len(asked) == len(set(asked)) < 50 * sum(ranks % n == 0 for n in range(1, ranks + 1))
    for place in plan.placements:
        assert place.end_s - place.start_s == pytest.approx(seconds(place.tokens, place.ranks), abs=2e-5)


def test_what_fits_nowhere_is_reported_with_what_would_do() -> None:
    plan = schedule([("huge", 400_000), ("small", 10)], 4, seconds, only_short_ones_fit)
    assert [place.id for place in plan.placements] == ["small"]
    ((name, tokens, reason),) = plan.does_not_fit
    assert (name, tokens) == ("huge", 400_000) and "use 8 ranks" in reason
    ((_, _, reason),) = schedule([("huge", 9)], 2, seconds, lambda tokens, ranks: False).does_not_fit
    assert "more ranks do not help" in reason
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ConfigError, match="predicted time of 5 tokens on 1"):
            schedule([("a", 5)], 2, lambda tokens, ranks, wrong=wrong: wrong, anything_fits)
