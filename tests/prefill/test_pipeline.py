"""Prompts follow each other through a chain without a barrier, in any order of ranks, and one that fails ends alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from constants import TESTS
from models import prompt, tiny
from pipelines import Failing, draw_prompts, run_prompts, truths

from kvr_mpi.errors import PartitionError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.transport.local import LocalTransport, run_local

PROGRAM = TESTS / "programs" / "mpi_pipeline.py"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_prompts_of_a_pipeline_are_exact_though_some_fail(size: int) -> None:
    prompts, failing = draw_prompts(16, size, seed=size, failing=0.4), Failing()
    logits = truths(prompts)
    with failing.installed():
        assert max(run_local(size, lambda rank: run_prompts(rank, prompts, logits, failing))) < 1e-4


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
