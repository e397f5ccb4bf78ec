"""Measuring costs, decoding and single runs: what is measured is what the planner is given, the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import STATES, tiny

from kvr_mpi.costs.costmodel import chain_seconds
from kvr_mpi.costs.solve import Rates, equal_time
from kvr_mpi.costs.workload import workload_of
from kvr_mpi.fairkv.group import HeadGroup
from kvr_mpi.fairkv.placement import place_statically
from kvr_mpi.model import LayerShape, StateShape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import decode_probe, measure
from kvr_mpi.tuning.measure import follow_measurements, leading, measure_costs


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_is_told_the_same_costs(ranks: int) -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    found = run_local(ranks, lambda rank: replace(measure_costs(loaded, rank)))
    assert torch.get_default_dtype() == torch.float32, "models built side by side on meta leave it alone"
    costs = found[0]
    assert found == [costs] * ranks
    assert costs.layers == 3 and costs.kv_bytes == 2 * 2 * 8 * 4
    assert costs.qkv_token_s > 0 and costs.rest_token_s > costs.qkv_token_s
    assert (1e5 < costs.link_bytes_per_s < measure.NO_LINK_BYTES_PER_S) == (ranks > 1)
    assert 0 <= costs.link_latency_s < 1
    assert costs.kept_token_s is not None and costs.decode_key_s == 3 * costs.kept_token_s
    assert costs.speeds is None or len(costs.speeds) == ranks
    assert chain_seconds(costs, [100.0] * ranks) > 0


KERNELS = ("mistral-window", "gemma2-softcap", "gpt-oss-sinks", "llama4-chunks", "falcon-mqa")


@pytest.mark.parametrize("name", [*KERNELS, "bloom-own-attention", *STATES])
def test_costs_make_a_partition_and_attention_of_a_step_is_measured_where_a_kernel_does_it(name: str) -> None:
    loaded = tiny(name)
    if loaded.attends_in_parts:
        prepare_model(loaded.model, chain=True)
    costs = measure_costs(loaded, LocalTransport())
    assert (costs.kept_token_s is not None) == (name in KERNELS)
    assert replace(costs, kept_token_s=None).decode_key_s == costs.layers * costs.pair_s, "as in a prefill"
    lengths = equal_time(400, costs.rates(4))
    assert costs.token_s > 0 and costs.pair_s >= 0 and lengths == sorted(lengths, reverse=True)


def test_slower_ranks_have_lower_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    rates, work = [Rates(1e-5, 1e-9), Rates(2e-5, 2e-9), Rates(1e-5, 1e-9)], workload_of(loaded.config, 4)
    monkeypatch.setattr(measure, "measure_rates", lambda *given: rates)
    costs = measure_costs(loaded, LocalTransport())
    assert costs.speeds == (1.0, 0.5, 1.0)
    assert costs.qkv_token_s + costs.rest_token_s == pytest.approx(1e-5)
    assert costs.qkv_token_s / costs.rest_token_s == pytest.approx(work.qkv_flop / work.rest_flop)


def test_slices_do_not_depend_on_how_the_pace_of_a_machine_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, pace = tiny("llama-gqa"), iter([5.0, 5.0, 1.0, 1.0, 2.0, 2.0, 3.0, 1.0])

    def seconds(_: Any, partition: Partition, *more: Any) -> list[float]:
        start, stop = partition.bounds[-2:]
        return [next(pace) * ((stop - start) + 3e-4 * sum(range(start, stop)))] * 2

    monkeypatch.setattr(measure, "_layer_seconds", seconds)
    (found,) = measure.measure_rates(loaded, LocalTransport())
    assert found.pair_s / found.token_s == pytest.approx(3e-4, rel=1e-3)


def test_rank_0_leads_and_the_others_follow() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    splits = [Partition((0, 50, 90, 120)), Partition((0, 1, 2, 3))]

    def work(rank: Transport) -> list[measure.Observation] | None:
        if rank.rank:
            return follow_measurements(loaded, rank)
        with leading(loaded, rank) as run:
            return [run(split) for split in splits]

    seen = run_local(3, work)[0]
    assert seen is not None and [one.partition for one in seen] == splits
    for one in seen:
        assert len(one.busy_s) == len(one.wait_s) == 3
        assert one.wait_s[0] < one.busy_s[0], "nothing comes before the first rank"
        assert all(wait > 0 for wait in one.wait_s[1:]) and all(busy > 0 for busy in one.busy_s)
        assert one.ttft_s == pytest.approx(one.busy_s[-1] + one.wait_s[-1])


def test_whole_periods_of_layers_are_timed() -> None:
    """Where every fourth layer attends, and the others keep a state, two layers would say nothing of attention."""
    attention, recurrent = LayerShape(2, 8, 8), LayerShape(states=(StateShape("recurrent", 0, (1, 2, 8, 8)),))
    shared = LayerShape()  # its keys are those of an earlier layer
    assert measure._layers_timed([attention] * 30) == (2, 1)
    assert measure._layers_timed([attention]) == (0, 0)
    assert measure._layers_timed(([recurrent] * 3 + [attention]) * 9) == (4, 4)
    assert measure._layers_timed([recurrent, attention] * 5 + [shared] * 4) == (2, 2)


@pytest.mark.parametrize(
    ("busy_s", "marks", "kinds", "undisturbed_s"),
    [
        (10.0, [0.5 + layer for layer in range(9)], [], 10.0),
        (17.0, [0.5 + layer + (7.0 if layer > 3 else 0.0) for layer in range(9)], [], 10.0),  # a short disturbance
        (20.0, [2 * (0.5 + layer) for layer in range(9)], [], 20.0),  # a slow rank
        (17.0, [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 12.0, 13.0], ["sliding_attention", "full_attention"] * 4, 17.0),
        (17.0, [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 12.0, 13.0], [], 11.0),  # without their kinds half seem disturbed
        (3.0, [], ["full_attention"], 3.0),
    ],
)
def test_a_disturbance_is_told_from_a_slow_rank(
    busy_s: float, marks: list[float], kinds: list[str], undisturbed_s: float
) -> None:
    assert measure.undisturbed_seconds(busy_s, marks, kinds) == pytest.approx(undisturbed_s)


def test_ranks_agree_and_attention_to_long_documents_is_that_of_caches_of_their_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of attention times are as counted here: a second for each token that is attended to in a layer."""
    loaded, attended = tiny("llama-gqa"), list[int]()
    prepare_model(loaded.model, chain=True)
    found = run_local(
        2,
        lambda rank: decode_probe.measure_decoding(loaded, rank, 3, lambda: HeadGroup(loaded, rank, place_statically)),
    )
    assert found[0] == found[1] and min(found[0]) > 0

    def count(of: Any, caches: Any, ranks: Any) -> list[float]:
        attended.extend(cache.length + 1 for cache in caches)
        return [float(sum(cache.length + 1 for cache in caches))] * len(of.model.model.layers)

    monkeypatch.setattr(decode_probe, "attention_seconds", count)
    assert decode_probe.kept_token_seconds(loaded, LocalTransport()) == 1
    assert set(attended) == {decode_probe.PROBE_TOKENS, decode_probe.LONG_TOKENS}
