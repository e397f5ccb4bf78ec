"""How a chain cuts its prompts: as the job says, turned so that the right rank has the last slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from made_tables import a_table

from kvr_mpi.costs.solve import Rates
from kvr_mpi.errors import PartitionError
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.registry import KVR
from kvr_mpi.runtime.slice_planner import SlicePlanner
from kvr_mpi.tuning.table import Table

RATES = Rates(1e-6, 1e-9)


def cut_over(
    size: int, rates: Sequence[Rates], table: Table | None = None, say: Any = print
) -> Callable[[int, int, int], Partition]:
    """How a chain of so many ranks cuts: takes new tokens, the rank that decodes, and known tokens."""
    job: Any = SimpleNamespace(spec=None, free_bytes=[0] * size, rates=list(rates), table=table, strategies=(KVR,))
    planner = SlicePlanner(job, size, slice(0, size), say)
    return lambda tokens, decode_rank, known: planner.cut(KVR, known + tokens, known, decode_rank)


def test_a_slow_rank_has_a_short_slice_wherever_its_place_is() -> None:
    fast, slow = Rates(1e-6, 1e-12), Rates(4e-6, 4e-12)
    cut = cut_over(3, [fast, slow, fast])
    for decode_rank, place in ((2, 1), (1, 2), (0, 0)):  # ranks 0 1 2, then 2 0 1, then 1 2 0
        lengths = cut(8192, decode_rank, 0).lengths
        assert lengths.index(min(lengths)) == place and sum(lengths) == 8192
    # Tokens that are known make every token dearer.
    cut = cut_over(2, [RATES] * 2)
    first, _ = cut(8192, 1, 0).lengths
    after = cut(8192, 1, 100_000).bounds[1] - 100_000
    assert 4096 < after < first, "the more is known, the more even the slices"
    assert cut_over(4, [])(1024, 0, 0).lengths == (256,) * 4
    with pytest.raises(PartitionError, match="tokens"):
        cut(1, 0, 0)


def test_a_table_cuts_and_a_prompt_outside_of_it_is_warned_about_once() -> None:
    said: list[str] = []
    cut = cut_over(2, [], a_table(), said.append)
    assert cut(2048, 1, 0) == a_table().entries[1].partition and not said
    for tokens in (5000, 6000, 100):
        assert cut(tokens, 1, 0).tokens == tokens
    assert len(said) == 1 and "from 1024 to 4096 tokens on 2 ranks; a prompt of 5000 tokens" in said[0]
