"""Measuring costs and single runs: what is measured is what the planner is given, the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import tiny

from kvr_mpi.costs.costmodel import chain_seconds
from kvr_mpi.costs.solve import Rates
from kvr_mpi.costs.workload import workload_of
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import measure
from kvr_mpi.tuning.measure import follow, leading, measure_costs, observe


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_is_told_the_same_costs(ranks: int) -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    found = run_local(ranks, lambda rank: replace(measure_costs(loaded, rank)))
    assert torch.get_default_dtype() == torch.float32, "models built side by side on meta leave it alone"
    costs = found[0]
    assert found == [costs] * ranks
    assert costs.layers == 3 and costs.kv_bytes == 2 * 2 * 8 * 4
    assert costs.qkv_token_s > 0 and costs.rest_token_s > costs.qkv_token_s
    assert costs.link_bytes_per_s > 1e5
    assert costs.kept_token_s is not None and costs.decode_key_s == 3 * costs.kept_token_s
    assert costs.speeds is None or len(costs.speeds) == ranks
    assert chain_seconds(costs, [100.0] * ranks) > 0


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("mistral-window", True),
        ("gemma2-softcap", True),
        ("gpt-oss-sinks", True),
        ("llama4-chunks", True),
        ("bloom-own-attention", False),
        ("lfm2-convolutions", False),
    ],
)
def test_attention_of_a_step_is_measured_where_a_kernel_does_it(name: str, is_known: bool) -> None:
    loaded = tiny(name)
    if loaded.attends_in_parts:
        prepare_model(loaded.model, chain=True)
    costs = measure_costs(loaded, LocalTransport())
    assert (costs.kept_token_s is not None) == is_known
    known = replace(costs, kept_token_s=1e-6)
    assert known.decode_key_s == pytest.approx(costs.layers * 1e-6)
    assert replace(costs, kept_token_s=None).decode_key_s == costs.layers * costs.pair_s, "as in a prefill"


def test_slower_ranks_have_lower_speeds() -> None:
    work = workload_of(tiny("llama-gqa").model.config, 4)
    rates = [Rates(1e-5, 1e-9), Rates(2e-5, 2e-9), Rates(1e-5, 1e-9)]
    costs = measure._costs(work, rates, 0.0, 0.0, 64, 1e-6, 1e9)
    assert costs.speeds == (1.0, 0.5, 1.0)
    assert costs.qkv_token_s + costs.rest_token_s == pytest.approx(1e-5)
    assert costs.qkv_token_s / costs.rest_token_s == pytest.approx(work.qkv_flop / work.rest_flop)


def test_links_are_timed_with_whatever_number_of_ranks() -> None:
    loaded = tiny("llama-gqa")
    for ranks in (2, 3, 5):
        found = run_local(ranks, lambda rank: measure._slowest_link(loaded, rank))
        assert found == [found[0]] * ranks
        assert 0 < found[0][0] < 1 and found[0][1] < measure.NO_LINK_BYTES_PER_S
    assert measure._slowest_link(loaded, LocalTransport())[1] == measure.NO_LINK_BYTES_PER_S


def test_rank_0_leads_and_the_others_follow() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    splits = [Partition((0, 50, 90, 120)), Partition((0, 1, 2, 3))]

    def work(rank: Transport) -> list[measure.Observation] | None:
        if rank.rank:
            return follow(loaded, rank)
        with leading(loaded, rank) as run:
            return [run(split) for split in splits]

    seen = run_local(3, work)[0]
    assert seen is not None and [one.partition for one in seen] == splits
    for one in seen:
        assert len(one.busy_s) == len(one.wait_s) == 3
        assert one.wait_s[0] < one.busy_s[0], "nothing comes before the first rank"
        assert all(wait > 0 for wait in one.wait_s[1:]) and all(busy > 0 for busy in one.busy_s)
        assert one.ttft_s == pytest.approx(one.busy_s[-1] + one.wait_s[-1])


def test_one_rank_is_a_chain_too() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    seen = observe(loaded, LocalTransport(), Partition((0, 40)))
    assert seen.busy_s == (seen.ttft_s,) and seen.wait_s == (0.0,)


def test_a_short_disturbance_is_told_from_a_slow_rank() -> None:
    quiet = [0.5 + layer for layer in range(9)]
    assert measure.undisturbed_seconds(10.0, quiet, []) == pytest.approx(10.0)
    disturbed = [mark + (7.0 if layer > 3 else 0.0) for layer, mark in enumerate(quiet)]
    assert measure.undisturbed_seconds(17.0, disturbed, []) == pytest.approx(10.0)
    slow = [2 * mark for mark in quiet]
    assert measure.undisturbed_seconds(20.0, slow, []) == pytest.approx(20.0)


def test_layers_are_compared_with_their_like() -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    marks = [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 12.0, 13.0]
    assert measure.undisturbed_seconds(17.0, marks, kinds) == pytest.approx(17.0)
    assert measure.undisturbed_seconds(17.0, marks, []) != pytest.approx(17.0)
    assert measure.undisturbed_seconds(3.0, [], kinds) == 3.0
