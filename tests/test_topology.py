"""Rank arithmetic: every rank has its place, and no two have the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi import topology
from kvr_mpi.errors import ConfigError
from kvr_mpi.topology import KVHeads, Rotation, Topology


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    group = draw(st.integers(1, 4))
    chain = group * draw(st.integers(1, 5))
    return Topology(draw(st.integers(chain, 4 * chain + 3)), chain, group)


@given(topologies())
def test_every_rank_has_one_place(grid: Topology) -> None:
    size, seen = grid.tensor_parallel, grid.by_group
    chains = {rank: grid.chain_of(rank) for rank in range(grid.ranks)}
    places = [(chain, *topology.place_in_group(rank, size)) for rank, chain in chains.items() if chain is not None]
    assert len(places) == len(set(places)) == grid.chains * grid.ranks_per_chain
    assert {group for _, group, _ in places} == set(range(grid.chains * grid.groups))
    assert {part for _, _, part in places} == set(range(size))
    assert all(seen.chain_of(group) == chain for chain, group, _ in places)
    assert (seen.chains, seen.groups) == (grid.chains, grid.groups)
    for chain in range(grid.chains):
        mine = range(grid.ranks)[grid.ranks_of(chain)]
        assert [chains[rank] for rank in mine] == [chain] * grid.ranks_per_chain
        assert len({grid.chain_color(rank) for rank in mine}) == 1
    left = [rank for rank, chain in chains.items() if chain is None]
    assert (not left) == topology.divides(grid.ranks_per_chain, grid.ranks)
    assert len({grid.chain_color(rank) for rank in left}) <= 1


@pytest.mark.parametrize("ranks", [(4, 8, 1), (4, 0, 1), (4, 4, 8), (8, 6, 4), (4, 2, 0)])
def test_what_cannot_be_is_refused(ranks: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="tensor-parallel groups of"):
        Topology(*ranks)


@given(st.integers(1, 9), st.data())
def test_rings(size: int, data: st.DataObject) -> None:
    rank, place = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    turned = Rotation.ending_at(size, rank)
    assert turned.rank_of(size - 1) == rank and turned.place_of(turned.rank_of(place)) == place
    assert sorted(map(turned.rank_of, range(size))) == list(range(size))
    assert topology.following(rank, size) == turned.rank_of(size)
    after, before = list(topology.others_after(rank, size)), list(topology.others_before(rank, size))
    assert after == before[::-1] and sorted([*after, rank]) == list(range(size))
    assert size == 1 or (after[0], before[0]) == (topology.following(rank, size), topology.preceding(rank, size))


@given(st.integers(1, 64), st.integers(1, 16))
def test_devices_and_cores_are_shared_evenly(ranks: int, devices: int) -> None:
    used = topology.gpus_in_turn([list(map(str, range(devices)))] * ranks)
    counts = [used.count(device) for device in range(devices)]
    assert max(counts) - min(counts) <= 1
    shares = [topology.share_of_cores(range(devices), rank, ranks) for rank in range(ranks)]
    assert all(shares) and set().union(*shares) <= set(range(devices))
    if ranks <= devices:
        assert sum(map(len, shares)) == len(set().union(*shares)), "no core is shared by two"


@given(st.integers(0, 99), st.integers(1, 9))
def test_shares_follow_each_other_and_differ_by_one(count: int, size: int) -> None:
    shares = [topology.even_share(count, rank, size) for rank in range(size)]
    assert [item for share in shares for item in range(*share)] == list(range(count))
    lengths = [last - first for first, last in shares]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_of_each_group_the_first_or_the_least() -> None:
    values = [4, 1, 7, 3, 8, 9]
    assert topology.first_of_each(values, 3) == [4, 7, 8] and topology.least_of_each(values, 2) == [1, 3]
    assert topology.whole_groups(7, 2) == 3


def test_ranks_of_a_lane_have_the_same_heads() -> None:
    assert [topology.in_lane_of(5, group, 2) for group in range(3)] == [1, 3, 5]
    assert (topology.rank_name(5, 2), topology.rank_name(5, 1)) == ("rank 5 (group 2.1)", "rank 5")
    mine = KVHeads(2, 4, 6)
    assert mine.shares == [KVHeads(0, 2, 6), mine, KVHeads(4, 6, 6)] and mine.is_even_share and not mine.is_all
    assert KVHeads(0, 6, 6).is_all and KVHeads(0, 6, 6).shares == [KVHeads(0, 6, 6)]
    assert not KVHeads(1, 3, 6).is_even_share and not KVHeads(0, 4, 6).is_even_share
