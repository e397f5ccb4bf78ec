"""Ranks that cannot communicate, fail or are killed end the whole job at once, and it says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from constants import TESTS
from made_jobs import last_line

SMALL_VOCABULARY = True


def test_alone_under_slurm_with_several_tasks(job: Path, kvr_run: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [kvr_run, job],
        capture_output=True,
        text=True,
        env={**os.environ, "SLURM_NTASKS": "4"},
        check=False,
        timeout=300,
    )
    assert run.returncode == 69
    assert last_line(run.stderr) == "exit code 69: the ranks cannot communicate"
    assert "4 ranks were intended" in run.stderr and "srun --mpi=pmi2" in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_an_exception_on_one_rank_or_its_death_ends_all(job: Path, mpirun: Any, tmp_path: Path, kill: bool) -> None:
    marker = tmp_path / "pid"
    run = mpirun(3, [sys.executable, TESTS / "programs" / "failing_rank.py", job, *([marker] if kill else [])])
    assert run.returncode != 0 and (kill or "broken on purpose" in run.stderr)
    failed_at = float(marker.read_text() if kill else run.stdout.split("failing at ")[1].split()[0])
    assert time.time() - failed_at < 60, "the others end soon after it"
