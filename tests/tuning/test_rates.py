"""A table held against the ranks that are to use it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_tables import COSTS, a_table

from kvr_mpi.costs.solve import Rates
from kvr_mpi.runtime.prepare import describe_few_cores
from kvr_mpi.tuning.rates import SAME_RATES_WITHIN, describe_drift

TABLE = a_table()
TOKEN_S = COSTS.qkv_token_s + COSTS.rest_token_s


def test_ranks_of_another_speed_than_the_tables_are_named() -> None:
    noisy = 1 + (SAME_RATES_WITHIN - 1) / 2
    for times, words in ((1.0, None), (noisy, None), (0.5, "2.0 times as fast"), (3.0, "3.0 times as slow")):
        found = describe_drift(TABLE, [Rates(TOKEN_S * times, COSTS.pair_s * times)] * 2)
        assert (found is None) == (words is None) and (words or "") in str(found)
        assert "longer than necessary" not in str(found), "slices are the same ones"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([("a", [0, 1])] * 2, None),
        ([("a", [0, 1])] * 3, "3 ranks on a may use only 2 cores"),
        ([("a", [0]), ("a", [1]), ("b", [0])], None),  # each bound to its own
        ([("a", [0]), ("b", [3]), ("b", [3])], "2 ranks on b may use only 1 core,"),
        ([("a", [])] * 9, None),  # not known on this system
    ],
)
def test_more_ranks_than_cores_are_named(ranks: list[tuple[str, list[int]]], words: str | None) -> None:
    found = describe_few_cores(ranks)
    assert bool(found) == (words is not None) and (words or "") in "".join(found)


def test_slices_that_lose_are_named() -> None:
    uneven = TABLE.model_copy(update={"rates": replace(COSTS, speeds=(1.0, 0.5))})
    same, slow = uneven.rates.rates(2)
    assert describe_drift(uneven, [same, slow]) is None
    assert "longer than necessary" in str(describe_drift(uneven, [slow, same])), "it is the other rank that is slow"
    # Attention alone: the best slices are in the ratio of square roots, and the table's are nearly even.
    longest = TABLE.entries[-1].context_tokens
    mostly_tokens = a_table().model_copy(update={"rates": replace(COSTS, pair_s=0.0)})
    pair_s = 2 * TOKEN_S / longest
    found = describe_drift(mostly_tokens, [Rates(0.0, pair_s)] * 2)
    assert found is not None and f"at {longest} tokens" in found
    assert f"take {100 * (0.75 / 0.5 - 1):.0f} % longer" in found, "3/4 of the pairs are the second rank's"
