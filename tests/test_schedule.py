"""Documents dealt to chains: each once, the same on every rank, and never far from the best."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvr_mpi.planner.schedule import deal


def numbered(sizes: list[int]) -> list[tuple[str, int]]:
    """Documents of these sizes, each with a name of its own."""
    return [(f"document {number}", chars) for number, chars in enumerate(sizes)]


def loads_of(shares: list[set[str]], todo: list[tuple[str, int]]) -> list[int]:
    """Characters of each chain; an empty document is work, too."""
    chars = dict(todo)
    return [sum(max(1, chars[name]) for name in share) for share in shares]


documents = st.lists(st.integers(0, 1_000_000), max_size=60).map(numbered)
chains = st.integers(1, 12)


@given(documents, chains)
def test_every_document_is_on_exactly_one_chain(todo: list[tuple[str, int]], chains: int) -> None:
    shares = deal(todo, chains)
    assert len(shares) == chains
    assert sorted(name for share in shares for name in share) == sorted(name for name, _ in todo)


@given(documents, chains, st.randoms(use_true_random=False))
def test_every_rank_deals_the_same(todo: list[tuple[str, int]], chains: int, random: Random) -> None:
    shuffled = list(todo)
    random.shuffle(shuffled)
    assert deal(todo, chains) == deal(todo, chains) == deal(shuffled, chains)


@given(documents, chains)
def test_no_chain_has_more_than_a_fair_share_and_one_document(todo: list[tuple[str, int]], chains: int) -> None:
    # Graham's bound: the chain that ends last had least to do when its last document came.
    sizes = [max(1, chars) for _, chars in todo]
    bound = sum(sizes) / chains + (1 - 1 / chains) * max(sizes, default=0)
    assert max(loads_of(deal(todo, chains), todo)) <= bound + 1e-6


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7).map(numbered), st.integers(1, 3))
def test_the_longest_chain_is_within_four_thirds_of_the_best(todo: list[tuple[str, int]], chains: int) -> None:
    best = min(
        max(sum(chars for (_, chars), on in zip(todo, choice, strict=True) if on == chain) for chain in range(chains))
        for choice in product(range(chains), repeat=len(todo))
    )
    assert max(loads_of(deal(todo, chains), todo)) <= best * (4 / 3 - 1 / (3 * chains)) + 1e-9


@pytest.mark.parametrize("chains", [1, 2, 5])
def test_equal_documents_are_dealt_evenly(chains: int) -> None:
    shares = deal(numbered([100] * (3 * chains)), chains)
    assert [len(share) for share in shares] == [3] * chains


@pytest.mark.parametrize("chars", [0, 1, 500])
def test_more_chains_than_documents_leaves_the_rest_idle(chars: int) -> None:
    assert sorted(len(share) for share in deal(numbered([chars] * 3), 5)) == [0, 0, 1, 1, 1]


def test_documents_without_text_are_spread_as_well() -> None:
    # They have error records to write; a chain must not get them all because they weigh nothing.
    assert [len(share) for share in deal(numbered([0] * 8), 4)] == [2, 2, 2, 2]


def test_the_longest_document_is_not_left_for_the_end() -> None:
    todo = numbered([1, 1, 1, 1, 1, 1, 6])
    assert loads_of(deal(todo, 2), todo) == [6, 6]


def test_nothing_to_do_is_an_empty_share_for_each() -> None:
    assert deal([], 3) == [set(), set(), set()]
