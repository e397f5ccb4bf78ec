"""What decoding takes in either way, and which is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvr_mpi.costs.decoding import LEAST_GAIN, Wave, choose_decoding, step_seconds
from kvr_mpi.costs.hardware import load_hardware
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.workload import named_workload
from kvr_mpi.transport.collectives import SMALL_BYTES

# A step of 60 ms, 1 ms for another row, 1 us to attend to a token, in 30 layers.
COSTS = Costs(30, 1e-3 / 30, 0.0, 1.0, False, 0.0, 2e-3, 1536.0, 5e9, 2e-6, kept_token_s=1e-6 / 30)
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
    assert found.mode == mode and ("has to be forecast 1.1 times as fast" in found.why) is (share == 0.99)
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
