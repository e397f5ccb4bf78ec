"""Prompts follow each other through a chain without a barrier, in any order of ranks, and one that fails ends alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from constants import TESTS
from pipelines import Failing, draw_prompts, run_prompts, truths

from kvr_mpi.transport.local import run_local

PROGRAM = TESTS / "programs" / "mpi_pipeline.py"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_prompts_of_a_pipeline_are_exact_though_some_fail(size: int) -> None:
    prompts, failing = draw_prompts(16, size, seed=size, failing=0.4), Failing()
    logits = truths(prompts)
    with failing.installed():
        assert max(run_local(size, lambda rank: run_prompts(rank, prompts, logits, failing))) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.quick) for size in (2, 4)])
def test_prompts_of_a_pipeline_over_real_ranks(mpirun: Any, size: int) -> None:
    run = mpirun(size, [sys.executable, PROGRAM, 30], env={"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["size"] == size and result["worst"] < 1e-4
