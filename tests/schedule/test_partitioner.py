"""How a chain cuts its prompts: as the job says, turned so that the right rank has the last slice."""

from __future__ import annotations

import pytest

from kvr_mpi.costs.solve import Rates
from kvr_mpi.job import ParallelSection
from kvr_mpi.schedule.partitioner import Partitioner


def partitioner(size: int, rates: list[Rates] | None = None, **parallel: object) -> Partitioner:
    said: list[str] = []
    return Partitioner(ParallelSection(**parallel), size, rates or [], None, said.append)


def test_a_slow_rank_has_a_short_slice_wherever_its_place_is() -> None:
    fast, slow = Rates(1e-6, 1e-12), Rates(4e-6, 4e-12)
    cut = partitioner(3, [fast, slow, fast], partition="equal_time").cut
    for decode_rank, place in ((2, 1), (1, 2), (0, 0)):  # ranks 0 1 2, then 2 0 1, then 1 2 0
        lengths = cut(8192, decode_rank, 0).lengths
        assert lengths.index(min(lengths)) == place and sum(lengths) == 8192


def test_tokens_that_are_known_make_every_token_dearer() -> None:
    cut = partitioner(2, [Rates(1e-6, 1e-9)] * 2, partition="equal_time").cut
    first, _ = cut(8192, 1, 0).lengths
    after, _ = cut(8192, 1, 100_000).lengths
    assert 4096 < after < first, "the more is known, the more even the slices"
    assert partitioner(4, partition="even").cut(1024, 0, 0).lengths == (256,) * 4


def test_a_rank_without_a_token_is_refused() -> None:
    with pytest.raises(Exception, match="tokens"):
        partitioner(2, [Rates(1e-6, 1e-9)] * 2, partition="equal_time").cut(1, 0, 0)
