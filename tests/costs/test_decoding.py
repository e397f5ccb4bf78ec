"""What decoding takes in either way, and which is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvr_mpi.costs.decoding import LEAST_GAIN, DecodeCosts, Wave, choose_decoding
from kvr_mpi.transport.collectives import SMALL_BYTES

COSTS = DecodeCosts(
    step_s=0.06,
    floor_s=0.0,
    row_s=0.001,
    kept_token_s=1e-6,
    layers=30,
    hidden_bytes=2304,
    kept_token_bytes=46080,
    link_latency_s=2e-6,
    link_bytes_per_s=5e9,
)
WAVE = Wave(documents=8, ranks=2, kept_tokens=512, new_tokens=64)


def test_without_sums_sharing_halves_the_weights_and_leaves_attention() -> None:
    costs = replace(COSTS, link_latency_s=0.0, link_bytes_per_s=1e30)
    assert costs.data_parallel_s(WAVE) == pytest.approx(0.06 + 3 * 0.001 + 4 * 512e-6)
    assert costs.head_parallel_s(WAVE, 1.0) == pytest.approx(0.03 + 3.5 * 0.001 + 4 * 512e-6)
    assert costs.head_parallel_s(WAVE, 0.5) - costs.head_parallel_s(WAVE, 1.0) == pytest.approx(4 * 512e-6)


def test_what_is_launched_does_not_get_less() -> None:
    costs = replace(COSTS, floor_s=0.062)
    assert costs.head_parallel_s(WAVE, 1.0) > 0.062
    assert choose_decoding(costs, WAVE, 1.0).mode == "data-parallel"


def test_the_choice_follows_the_sums_and_says_why() -> None:
    fast, slow = choose_decoding(COSTS, WAVE, 0.98), choose_decoding(replace(COSTS, link_latency_s=1e-3), WAVE, 0.98)
    assert (fast.mode, slow.mode) == ("head-parallel", "data-parallel")
    assert str(slow).startswith("decode.mode = 'auto': data-parallel, since for 8 documents on 2 ranks, 512 tokens")
    assert "65 ms data-parallel" in str(slow) and "ms head-parallel" in str(slow)


@pytest.mark.parametrize(
    ("share", "mode"), [(1 / LEAST_GAIN - 0.01, "head-parallel"), (0.99, "data-parallel"), (1.01, "data-parallel")]
)
def test_a_gain_within_what_no_forecast_knows_is_not_taken(share: float, mode: str) -> None:
    """Also of what is measured, to which only what is attended to is added."""
    costs = replace(COSTS, measured_s=(0.1, share * 0.1), kept_token_s=0.0, link_bytes_per_s=1e30)
    assert (costs.data_parallel_s(WAVE), costs.head_parallel_s(WAVE, 0.8)) == pytest.approx((0.1, share * 0.1))
    found = choose_decoding(costs, WAVE, 0.8)
    assert found.mode == mode and ("has to be forecast 1.1 times as fast" in found.why) is (share == 0.99)
    attending = replace(costs, kept_token_s=1e-6)
    assert attending.head_parallel_s(WAVE, 0.8) - share * 0.1 == pytest.approx(4 * 512e-6 / 0.8)


def test_ranks_without_documents_are_of_use_only_together() -> None:
    """One document on four ranks: three have nothing to do, each by itself."""
    assert choose_decoding(COSTS, replace(WAVE, documents=1, ranks=4), 1.0).mode == "head-parallel"
    alone = choose_decoding(COSTS, replace(WAVE, ranks=1), 1.0)
    assert alone.mode == "data-parallel" and "only one rank" in alone.why


def test_a_sum_of_many_documents_goes_round_a_ring() -> None:
    few, many = (replace(WAVE, ranks=4, documents=SMALL_BYTES // 2304 + more) for more in (0, 1))
    free = replace(COSTS, link_latency_s=0.0, link_bytes_per_s=1e30)
    handed = [-(-wave.documents // 4) * 512 * 46080 * 3 / 4 / 5e9 / 64 for wave in (few, many)]
    sums = [
        COSTS.head_parallel_s(wave, 1.0) - free.head_parallel_s(wave, 1.0) - given
        for wave, given in zip((few, many), handed, strict=True)
    ]
    steps = 2 * COSTS.layers + 2
    assert sums[0] / steps == pytest.approx(2e-6 + 3 * few.documents * 2304 / 5e9)
    assert sums[1] / steps == pytest.approx(6 * (2e-6 + many.documents * 2304 / 4 / 5e9))
