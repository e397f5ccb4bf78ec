"""What one process and a chain of threads give, for tests to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.published import LENT, PUBLISHED
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import follow
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr, prefill_single
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

NEW_TOKENS = 32


def greedy(model: Any, prefill: Prefill, count: int) -> list[int]:
    """Decode the likeliest tokens after a prefill."""
    return follow(model, prefill, count).tokens


def single(loaded: LoadedModel, ids: Sequence[int]) -> Prefill:
    prepare_model(loaded.model, chain=False)
    return prefill_single(loaded.model, ids, loaded.device)


def all_ranks(loaded: LoadedModel, ids: Sequence[int], bounds: Sequence[int], **options: Any) -> list[Prefill]:
    """What each rank of a chain of threads has."""
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    partition = Partition(tuple(bounds))
    ranks = run_local(partition.size, lambda rank: prefill_kvr(loaded, ids, partition, rank, **options))
    assert all(rank.logits is None for rank in ranks[:-1])
    return ranks


def chain(loaded: LoadedModel, ids: Sequence[int], bounds: Sequence[int], reserve: int = 0, **options: Any) -> Prefill:
    return all_ranks(loaded, ids, bounds, reserve_tokens=reserve, **options)[-1]


def rival(
    name: str, loaded: LoadedModel, ids: Sequence[int], ranks: Transport, *, lends: bool = False, **options: Any
) -> Prefill:
    """Prefill by a strategy with even slices, as published, or with what jobs have."""
    strategy = (LENT if lends else PUBLISHED)[name]
    return prefill_kvr(loaded, ids, strategy.cut_evenly(len(ids), ranks.size), ranks, strategy, **options)
