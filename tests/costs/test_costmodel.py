"""The cost model: held to plain loops, to the paper's own numbers, and to what must be true of any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.forecast import lower_bound_seconds
from benchmarks.paper_model import best_lengths, costs_on_paper, paper_hardware
from benchmarks.paper_model import chain_seconds as paper_chain_seconds
from benchmarks.paper_model import single_seconds as paper_single_seconds
from benchmarks.published import ring_seconds, tsp_seconds
from kvr_mpi.costs.costmodel import (
    best_split,
    chain_seconds,
    chains_seconds,
    single_seconds,
)
from kvr_mpi.costs.decoding import LEAST_GAIN, Wave, choose_decoding, step_seconds
from kvr_mpi.costs.hardware import load_hardware
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.costs.workload import named_workload
from kvr_mpi.errors import PartitionError
from kvr_mpi.partition import Partition
from kvr_mpi.transport.collectives import SMALL_BYTES

pytestmark = pytest.mark.quick

PAPER_LLAMA = costs_on_paper("Llama 7B", paper_hardware())
H100_LLAMA = costs_of(named_workload("Llama 3.1 8B 1M"), load_hardware("h100-80gb"))

small_s = st.floats(1e-7, 1e-3)
maybe_s = st.one_of(st.just(0.0), small_s)
some_costs = st.builds(
    Costs,
    layers=st.integers(1, 6),
    qkv_token_s=small_s,
    rest_token_s=small_s,
    pair_s=st.floats(1e-11, 1e-6),
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
            now = ready + own * own * pair_s / 2
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
    found = chains_seconds(costs, np.array(splits)).tolist()
    assert found == pytest.approx([cut_through_loop(costs, split, speeds) for split in splits], rel=1e-9)
    assert chain_seconds(costs, lengths) == pytest.approx(found[0], rel=1e-12)


@given(some_costs, some_lengths)
def test_no_chain_beats_the_bound_and_a_chain_of_one_is_one_process(costs: Costs, lengths: list[float]) -> None:
    tokens, bound_s = round(lengths[0]), lower_bound_seconds(costs, sum(lengths), len(lengths))
    assert chain_seconds(costs, lengths) >= bound_s * (1 - 1e-9)
    assert tsp_seconds(costs, tokens, 1) == ring_seconds(costs, tokens, 1) == single_seconds(costs, tokens)
    assert chain_seconds(costs, [tokens]) == pytest.approx(single_seconds(costs, tokens))
    costs = replace(costs, copy_token_s=0.0)
    assert paper_chain_seconds(costs, [tokens]) == pytest.approx(paper_single_seconds(costs, tokens))


def test_rivals_by_hand() -> None:
    costs = Costs(10, 2e-6, 4e-6, 1e-9, 0.0, 0.0, 1000.0, 0.5e9, 0.0)
    # 2 ranks, 1000 tokens: 500 tokens at 6 us, the gather of the other 500 at 2 us each, attention
    gathered_s = 500 * 6e-6 + 500 * 2e-6
    assert tsp_seconds(costs, 1000, 2) == pytest.approx(10 * (gathered_s + 500 * 1000 * 1e-9))
    assert tsp_seconds(costs, 1000, 2, dense=False) == pytest.approx(10 * (gathered_s + 500 * 750 * 1e-9))
    costs = replace(costs, link_bytes_per_s=1e9)
    # half of the pairs in two equal steps; the hop takes 0.5 ms, the step before it only 0.125 ms
    assert ring_seconds(costs, 1000, 2) == pytest.approx(10 * (500 * 6e-6 + 0.125e-3 + 0.5e-3))
    fast = replace(costs, link_bytes_per_s=1e12)
    assert ring_seconds(fast, 1000, 2) == pytest.approx(10 * (500 * 6e-6 + 1000**2 / 2 / 2 * 1e-9))


def test_the_best_split_is_that_of_an_exhaustive_search() -> None:
    costs = replace(H100_LLAMA, link_bytes_per_s=12e9)
    tokens, grid = 8192, range(256, 8192, 256)
    splits = np.array([[a, b - a, tokens - b] for a in grid for b in grid if a < b], dtype=float)
    best_s = chains_seconds(costs, splits).min()
    partition, seconds = best_split(costs, tokens, 3, quantum=256)
    assert all(bound % 256 == 0 for bound in partition.bounds)
    assert seconds <= best_s * 1.002


def test_the_papers_slices() -> None:
    """Fig. 6 (a): 16k on two GPUs; and the ratios for four."""
    costs = PAPER_LLAMA.costs
    assert Partition.by_ratio(16384, best_lengths(costs, 16384, 2), 256).bounds == (0, 9728, 16384)
    found = np.array(best_lengths(costs, 10240, 4)) / 10240
    assert np.abs(found - [0.350, 0.255, 0.210, 0.185]).max() < 0.006


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_a_chain_of_recurrent_layers_is_one_layer_behind_at_every_rank(ranks: int) -> None:
    """(layers + ranks - 1) / layers of the ideal time, where nothing else is waited for; chunks hand on states, too."""
    costs = Costs(12, 1e-3, 2e-3, 0.0, 0.0, 0.0, 0.0, 1e9, 0.0, has_states=True)
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


# The equal-time split: every rank computes equally long, whatever the machine


tokens = st.integers(1, 200_000)
pair_s = st.one_of(st.just(0.0), st.floats(1e-13, 1e-5))
some_rates = st.builds(Rates, st.floats(1e-9, 1e-2), pair_s)
any_rates = st.one_of(some_rates, st.builds(Rates, st.just(0.0), st.floats(1e-13, 1e-5)))


@given(tokens, st.lists(any_rates, min_size=1, max_size=16))
def test_lengths_add_up_and_take_equally_long(tokens: int, rates: list[Rates]) -> None:
    lengths = equal_time(tokens, rates)
    assert len(lengths) == len(rates) and min(lengths) > 0
    assert sum(lengths) == pytest.approx(tokens, rel=1e-9)
    before = [sum(lengths[:rank]) for rank in range(len(rates))]
    times = [
        own * (rate.token_s + rate.pair_s * (known + own / 2))
        for own, known, rate in zip(lengths, before, rates, strict=True)
    ]
    assert times == pytest.approx([times[0]] * len(rates), rel=1e-6)
    assert times[-1] == pytest.approx(rates[-1].seconds(lengths[-1], before[-1]))


@given(some_rates, st.integers(1, 200))
def test_seconds_count_every_pair(rate: Rates, tokens: int) -> None:
    # Two slices take as long as one: nothing is computed twice, nothing left out.
    whole = rate.seconds(2 * tokens, 0)
    assert rate.seconds(tokens, 0) + rate.seconds(tokens, tokens) == pytest.approx(whole)
    assert rate.seconds(0, tokens) == 0


# Decoding in either way, and which is chosen


# A step of 60 ms, 1 ms for another row, 1 us to attend to a token, in 30 layers.
COSTS = Costs(30, 1e-3 / 30, 0.0, 1.0, 0.0, 2e-3, 1536.0, 5e9, 2e-6, kept_token_s=1e-6 / 30)
FREE = replace(COSTS, link_latency_s=0.0, link_bytes_per_s=1e17)
WAVE = Wave(documents=8, ranks=2, kept_tokens=512, new_tokens=64, hidden_bytes=2304)


def test_without_sums_sharing_halves_the_weights_and_leaves_attention() -> None:
    apart_s, shared_s = step_seconds(FREE, WAVE, 1.0)
    assert apart_s == pytest.approx(0.06 + 3 * 0.001 + 4 * 512e-6)
    assert shared_s == pytest.approx(0.03 + 3.5 * 0.001 + 4 * 512e-6)
    assert step_seconds(FREE, WAVE, 0.5)[1] - shared_s == pytest.approx(4 * 512e-6)
    odd = step_seconds(FREE, replace(WAVE, documents=7), 1.0)[0]
    assert odd == pytest.approx(apart_s), "as long as the rank with the most documents"


def test_a_profile_tells_weights_from_launching_which_does_not_get_less() -> None:
    work, h200 = named_workload("Llama 3.1 8B"), load_hardware("h200")
    costs = costs_of(work, h200)
    assert replace(costs, launch_floor_s=1e-9).step_s == work.weight_bytes / h200.memory_bytes_per_s > 0.003
    assert costs.decode_key_s == pytest.approx(work.layers * work.kv_bytes / h200.memory_bytes_per_s)
    assert costs.step_floor_s == work.layers * costs.launch_floor_s and COSTS.step_floor_s == 0.0
    slow = replace(costs, launch_floor_s=1.0)
    assert slow.step_s > 32 and step_seconds(slow, WAVE, 1.0)[1] > 32
    assert choose_decoding(slow, WAVE, 1.0).mode == "data-parallel"


def test_the_choice_follows_the_sums_and_says_why() -> None:
    fast, slow = choose_decoding(COSTS, WAVE, 0.98), choose_decoding(replace(COSTS, link_latency_s=1e-3), WAVE, 0.98)
    assert (fast.mode, slow.mode) == ("head-parallel", "data-parallel")
    assert str(slow).startswith("decode.mode = 'auto': data-parallel, since for 8 documents on 2 ranks, 512 tokens")
    assert "65 ms data-parallel" in str(slow) and "ms head-parallel" in str(slow)
    # One document on four ranks: three have nothing to do, each by itself.
    assert choose_decoding(COSTS, replace(WAVE, documents=1, ranks=4), 1.0).mode == "head-parallel"
    alone = choose_decoding(COSTS, replace(WAVE, ranks=1), 1.0)
    assert alone.mode == "data-parallel" and "only one rank" in alone.why


@pytest.mark.parametrize(
    ("share", "mode"), [(1 / LEAST_GAIN - 0.01, "head-parallel"), (0.99, "data-parallel"), (1.01, "data-parallel")]
)
def test_a_gain_within_what_no_forecast_knows_is_not_taken(share: float, mode: str) -> None:
    """Also of what is measured, to which only what is attended to is added."""
    costs, measured_s = replace(FREE, kept_token_s=0.0), (0.1, share * 0.1)
    assert step_seconds(costs, WAVE, 0.8, measured_s) == pytest.approx(measured_s)
    found = choose_decoding(costs, WAVE, 0.8, measured_s)
    assert found.mode == mode and ("requires a forecast of 1.1 times the speed" in found.why) is (share == 0.99)
    assert step_seconds(FREE, WAVE, 0.8, measured_s)[1] - share * 0.1 == pytest.approx(4 * 512e-6 / 0.8)


def test_a_sum_of_many_documents_goes_round_a_ring() -> None:
    few, many = (replace(WAVE, ranks=4, documents=SMALL_BYTES // 2304 + more) for more in (0, 1))
    handed = [-(-wave.documents // 4) * 512 * 46080 * 3 / 4 / 5e9 / 64 for wave in (few, many)]
    sums = [
        step_seconds(COSTS, wave, 1.0)[1] - step_seconds(FREE, wave, 1.0)[1] - given
        for wave, given in zip((few, many), handed, strict=True)
    ]
    steps = 2 * COSTS.layers + 2
    assert sums[0] / steps == pytest.approx(2e-6 + 3 * few.documents * 2304 / 5e9)
    assert sums[1] / steps == pytest.approx(6 * (2e-6 + many.documents * 2304 / 4 / 5e9))
