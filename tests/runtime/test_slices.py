"""How a chain cuts its prompts: as the job says, turned so that the right rank has the last slice."""

from __future__ import annotations

import pytest
from made_tables import a_table

from kvr_mpi.costs.solve import Rates
from kvr_mpi.errors import PartitionError
from kvr_mpi.schedule.partitioner import Partitioner

RATES = Rates(1e-6, 1e-9)


def test_a_slow_rank_has_a_short_slice_wherever_its_place_is() -> None:
    fast, slow = Rates(1e-6, 1e-12), Rates(4e-6, 4e-12)
    cut = Partitioner(3, [fast, slow, fast], None, print).cut
    for decode_rank, place in ((2, 1), (1, 2), (0, 0)):  # ranks 0 1 2, then 2 0 1, then 1 2 0
        lengths = cut(8192, decode_rank, 0).lengths
        assert lengths.index(min(lengths)) == place and sum(lengths) == 8192
    # Tokens that are known make every token dearer.
    cut = Partitioner(2, [RATES] * 2, None, print).cut
    first, _ = cut(8192, 1, 0).lengths
    after, _ = cut(8192, 1, 100_000).lengths
    assert 4096 < after < first, "the more is known, the more even the slices"
    assert Partitioner(4, [], None, print).cut(1024, 0, 0).lengths == (256,) * 4
    with pytest.raises(PartitionError, match="tokens"):
        cut(1, 0, 0)


def test_a_table_cuts_and_a_prompt_outside_of_it_is_warned_about_once() -> None:
    said: list[str] = []
    cut = Partitioner(2, [], a_table(), said.append).cut
    assert cut(2048, 1, 0) == a_table().entries[1].partition and not said
    for tokens in (5000, 6000, 100):
        assert cut(tokens, 1, 0).tokens == tokens
    assert len(said) == 1 and "from 1024 to 4096 tokens on 2 ranks; a prompt of 5000 tokens" in said[0]
