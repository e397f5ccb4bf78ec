"""What a group of several ranks takes: its share of the work, and the sums that join the shares."""

from __future__ import annotations

import pytest

from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.costs.hardware import Hardware, load_hardware
from kvr_mpi.costs.layer_costs import costs_of
from kvr_mpi.costs.workload import check_heads, named_workload
from kvr_mpi.errors import ConfigError

WORK = named_workload("Llama 3.1 70B")
H100 = load_hardware("h100-80gb")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shares_make_up_the_whole(size: int) -> None:
    part = WORK.of_group(size)
    for name in ("qkv_flop", "rest_flop", "pair_flop", "kv_bytes", "head_flop", "weight_bytes"):
        assert size * getattr(part, name) == pytest.approx(getattr(WORK, name)), name
    assert size * part.heads == WORK.heads


def test_of_too_few_kv_heads_several_ranks_have_one() -> None:
    part = WORK.of_group(32)
    assert part.kv_bytes == WORK.kv_bytes / 8 and 32 * part.pair_flop == WORK.pair_flop
    kv_flop = 2 * 8192 * (2 * 8 * 128)  # a token's keys and values: 8 heads of 128 each
    assert 32 * part.qkv_flop == pytest.approx(WORK.qkv_flop - kv_flop + 32 / 8 * kv_flop)
    assert 32 * part.weight_bytes == pytest.approx(WORK.weight_bytes + (32 / 8 - 1) * 80 * kv_flop)


def test_a_layer_sums_twice_over_the_group() -> None:
    alone, shared = costs_of(WORK, H100), costs_of(WORK, H100, tensor_parallel=4)
    assert H100.host_link_bytes_per_s is not None
    sums_s = 2 * (2 * 3 / 4) * 8192 * 2 / H100.host_link_bytes_per_s
    assert shared.rest_token_s == pytest.approx(alone.rest_token_s / 4 + sums_s)
    assert shared.kv_bytes == alone.kv_bytes / 4 and shared.link_bytes_per_s == alone.link_bytes_per_s

    # Over hosts they take the slower links.
    def times(hardware: Hardware) -> list[float]:
        return [single_seconds(costs_of(WORK, hardware, tensor_parallel=size), 131072) for size in (8, 16)]

    few = H100.model_copy(update={"link_bytes_per_s": 1e9})
    assert times(few)[0] == times(H100)[0], "within a host nothing goes over them"
    assert times(few)[1] > 2 * times(H100)[1]


def test_groups_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be divided by it; choose one of \[1, 2, 4, 8, 16, 32, 64\]"):
        check_heads(WORK, 3)
