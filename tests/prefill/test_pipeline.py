"""Prompts follow each other through a chain without a barrier, in any order of ranks, and one that fails ends alone."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
import torch
from chains import single
from constants import TESTS
from models import prompt, tiny
from pipelines import MODELS, Failing, draw_prompts, run_prompts, truths

from kvr_mpi.errors import PartitionError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, differences, first_difference, follow
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.transport.local import LocalTransport, run_local

PROGRAM = TESTS / "programs" / "mpi_pipeline.py"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_prompts_of_a_pipeline_are_exact_though_some_fail(size: int) -> None:
    prompts = draw_prompts(16, size, seed=size, failing=0.4)
    logits = truths(prompts)
    mine = threading.local()  # the ranks are threads here, and share the models that are made to fail

    def work(rank: LocalTransport) -> float:
        mine.rank, mine.fails = rank.rank, None
        return run_prompts(rank, prompts, logits, lambda fails: setattr(mine, "fails", fails))

    with Failing(lambda: (getattr(mine, "rank", None), getattr(mine, "fails", None))).installed(MODELS):
        assert max(run_local(size, work)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "transport"),
    [
        pytest.param(2, "mpi", marks=pytest.mark.quick),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(3, "staged"), (4, "gloo"), (4, "mpi")]),
    ],
)
def test_prompts_of_a_pipeline_over_real_ranks(mpirun: Any, size: int, transport: str) -> None:
    run = mpirun(size, [sys.executable, PROGRAM, 30, transport], env={"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["size"] == size and result["worst"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_shared_prefix_changes_nothing(name: str) -> None:
    loaded, ids = tiny(name), prompt(60)
    truth = follow(loaded.model, single(loaded, ids), 8)
    prepare_model(loaded.model, chain=True)
    for tokens, bounds in [(1, (0, 60)), (25, (0, 26, 60)), (37, (0, 44, 50, 60)), (57, (0, 58, 59, 60))]:
        prefix, partition = compute_prefix(loaded, ids[:tokens]), Partition(bounds)
        options: dict[str, Any] = {"prefix": prefix, "reserve_tokens": 8}
        ranks = run_local(partition.size, lambda rank: prefill_kvr(loaded, ids, partition, rank, **options))  # noqa: B023
        row = loaded.shape.kv_bytes_per_token
        assert [rank.sent_bytes for rank in ranks[:-1]] == [(stop - tokens) * row for stop in bounds[1:-1]]
        found = follow(loaded.model, ranks[-1], 8)
        assert first_difference(differences(found, truth), allowed_error(torch.float32)) is None, tokens
        assert found.tokens == truth.tokens, tokens


def test_a_prefix_or_a_partition_of_another_prompt_is_refused() -> None:
    loaded, ids = tiny("llama-gqa"), prompt(20)
    prepare_model(loaded.model, chain=True)
    prefix = compute_prefix(loaded, ids[:8])
    with pytest.raises(ValueError, match="does not begin with the shared prefix of 8 tokens"):
        prefill_kvr(loaded, [5, *ids], Partition((0, 21)), LocalTransport(), prefix=prefix)
    with pytest.raises(PartitionError, match="has to end after the 8 tokens"):
        prefill_kvr(loaded, ids, Partition((0, 8, 20)), LocalTransport(), prefix=prefix)
    with pytest.raises(PartitionError, match="add up to 20 tokens; the prompt has 21"):
        prefill_kvr(loaded, [5, *ids], Partition((0, 20)), LocalTransport())
    assert Partition.even(12, 2).after(8) == Partition((0, 14, 20))
