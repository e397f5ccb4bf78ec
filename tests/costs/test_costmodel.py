"""The cost model: held to plain loops, to the paper's own numbers, and to what must be true of any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.costs.costmodel import (
    RelayKind,
    best_split,
    chain_seconds,
    chains_seconds,
    lower_bound_seconds,
    ring_seconds,
    search_split,
    single_seconds,
    tsp_seconds,
)
from kvr_mpi.costs.hardware import load_hardware
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.workload import named_workload
from kvr_mpi.errors import PartitionError

pytestmark = pytest.mark.quick

A100_LLAMA = costs_of(named_workload("Llama 7B"), load_hardware("a100-80gb"))
H100_LLAMA = costs_of(named_workload("Llama 3.1 8B 1M"), load_hardware("h100-80gb"))
RELAYS: tuple[RelayKind, ...] = ("cut-through", "store-and-forward")

small_s = st.floats(1e-7, 1e-3)
maybe_s = st.one_of(st.just(0.0), small_s)
some_costs = st.builds(
    Costs,
    layers=st.integers(1, 6),
    qkv_token_s=small_s,
    rest_token_s=small_s,
    pair_s=st.floats(1e-11, 1e-6),
    eager=st.booleans(),
    layer_s=maybe_s,
    launch_floor_s=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    kv_bytes=st.floats(1, 1e5),
    link_bytes_per_s=st.floats(1e6, 1e11),
    link_latency_s=maybe_s,
    copy_token_s=maybe_s,
    head_s=maybe_s,
)
some_lengths = st.lists(st.floats(1, 3000), min_size=1, max_size=7)


def cut_through_loop(costs: Costs, lengths: list[float], speeds: list[float]) -> float:
    """Step every layer, rank and segment."""
    ranks, overhead_s = len(lengths), costs.layer_s if len(lengths) > 1 else 0.0
    ends, free = [0.0] * ranks, [0.0] * ranks
    for layer in range(costs.layers):
        here: list[float] = []
        for rank, own in enumerate(lengths):
            pair_s = costs.pair_s / speeds[rank]
            if rank == ranks - 1 > 0 and layer == costs.layers - 1:
                pair_s = 0.0
            start = max(ends[rank], layer * costs.launch_floor_s)
            ready = start + overhead_s / 2 + own * costs.qkv_token_s / speeds[rank]
            now = ready + own * own * pair_s * (1 if costs.eager else 0.5)
            mine = [ready]
            for segment in reversed(range(rank)):
                sent = max(free[rank], here[rank - 1 - segment])
                free[rank] = sent + lengths[segment] * costs.kv_bytes / costs.link_bytes_per_s
                mine.append(free[rank] + costs.link_latency_s)
                now = max(now, mine[-1]) + lengths[segment] * (own * pair_s + costs.copy_token_s / speeds[rank])
            ends[rank] = now + overhead_s / 2 + own * costs.rest_token_s / speeds[rank]
            here = mine
    return max(ends[-1], costs.layers * costs.launch_floor_s) + costs.head_s


@given(some_costs, some_lengths, st.data())
def test_events_are_those_of_plain_loops(costs: Costs, lengths: list[float], data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.floats(0.3, 3), min_size=len(lengths), max_size=len(lengths)))
    costs = replace(costs, speeds=tuple(speeds))
    splits = [lengths, lengths[::-1], [sum(lengths) / len(lengths)] * len(lengths)]  # several at once
    found = chains_seconds(costs, np.array(splits), "cut-through").tolist()
    assert found == pytest.approx([cut_through_loop(costs, split, speeds) for split in splits], rel=1e-9)
    assert chain_seconds(costs, lengths) == pytest.approx(found[0], rel=1e-12)


@given(some_costs, some_lengths)
def test_no_chain_beats_the_bound_and_a_chain_of_one_is_one_process(costs: Costs, lengths: list[float]) -> None:
    tokens, bound_s = round(lengths[0]), lower_bound_seconds(costs, sum(lengths), len(lengths))
    assert all(chain_seconds(costs, lengths, relay) >= bound_s * (1 - 1e-9) for relay in RELAYS)
    costs = replace(costs, copy_token_s=0.0)
    assert chain_seconds(costs, [tokens], "store-and-forward") == pytest.approx(single_seconds(costs, tokens))
    assert tsp_seconds(costs, tokens, 1) == ring_seconds(costs, tokens, 1) == single_seconds(costs, tokens)


def test_rivals_by_hand() -> None:
    costs = Costs(10, 2e-6, 4e-6, 1e-9, False, 0.0, 0.0, 1000.0, 1e9, 0.0, gather_link_share=0.5)
    # 2 ranks, 1000 tokens: 500 tokens at 6 us, the gather of the other 500 at 2 us each, attention
    gathered_s = 500 * 6e-6 + 500 * 2e-6
    assert tsp_seconds(costs, 1000, 2) == pytest.approx(10 * (gathered_s + 500 * 1000 * 1e-9))
    assert tsp_seconds(costs, 1000, 2, dense=False) == pytest.approx(10 * (gathered_s + 500 * 750 * 1e-9))
    # half of the pairs in two equal steps; the hop takes 0.5 ms, the step before it only 0.125 ms
    assert ring_seconds(costs, 1000, 2) == pytest.approx(10 * (500 * 6e-6 + 0.125e-3 + 0.5e-3))
    fast = replace(costs, link_bytes_per_s=1e12)
    assert ring_seconds(fast, 1000, 2) == pytest.approx(10 * (500 * 6e-6 + 1000**2 / 2 / 2 * 1e-9))


@pytest.mark.parametrize("relay", RELAYS)
def test_the_best_split_is_that_of_an_exhaustive_search(relay: RelayKind) -> None:
    costs = replace(H100_LLAMA if relay == "cut-through" else A100_LLAMA, link_bytes_per_s=12e9)
    tokens, grid = 8192, range(256, 8192, 256)
    splits = np.array([[a, b - a, tokens - b] for a in grid for b in grid if a < b], dtype=float)
    best_s = chains_seconds(costs, splits, relay).min()
    partition, seconds = best_split(costs, tokens, 3, relay, quantum=256)
    assert all(bound % 256 == 0 for bound in partition.bounds)
    assert seconds <= best_s * 1.002


def test_the_papers_slices() -> None:
    """Fig. 6 (a): 16k on two GPUs; and the ratios for four."""
    assert best_split(A100_LLAMA, 16384, 2, "store-and-forward", 256)[0].bounds == (0, 9728, 16384)
    found = np.array(search_split(A100_LLAMA, 10240, 4, "store-and-forward")) / 10240
    assert np.abs(found - [0.350, 0.255, 0.210, 0.185]).max() < 0.006


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_a_chain_of_recurrent_layers_is_one_layer_behind_at_every_rank(ranks: int) -> None:
    """(layers + ranks - 1) / layers of the ideal time, where nothing else is waited for; chunks hand on states, too."""
    costs = Costs(12, 1e-3, 2e-3, 0.0, False, 0.0, 0.0, 0.0, 1e9, 0.0, has_states=True)
    ideal_s = 12 * 100 * 3e-3
    behind_s = ideal_s * (12 + ranks - 1) / 12
    assert chain_seconds(costs, [100] * ranks) == pytest.approx(behind_s)
    plain = replace(costs, has_states=False, launch_floor_s=1e-6)
    assert chain_seconds(plain, [100] * ranks) == pytest.approx(ideal_s)
    assert plain.in_chunks(1) == plain and plain.in_chunks(3).launch_floor_s == pytest.approx(3e-6)
    assert chain_seconds(plain.in_chunks(3), [100] * ranks) == pytest.approx(behind_s)


@pytest.mark.parametrize(
    ("changes", "lengths", "words"),
    [
        ({"qkv_token_s": 0.0, "rest_token_s": 0.0, "pair_s": 0.0}, [1], "expected tokens that cost time"),
        ({}, [10, 0], "at least one token"),
        ({"speeds": (1.0, 1.0)}, [10, 10, 10], "2 ranks"),
    ],
)
def test_costs_and_splits_that_are_none_are_refused(changes: dict[str, Any], lengths: list[float], words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        chain_seconds(replace(H100_LLAMA, **changes), lengths)
