"""Ranks that cannot communicate, fail or are killed end the whole job at once, and it says why."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from constants import TESTS

SMALL_VOCABULARY = True


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_an_exception_on_one_rank_or_its_death_ends_all(job: Path, mpirun: Any, tmp_path: Path, kill: bool) -> None:
    marker = tmp_path / "pid"
    run = mpirun(3, [sys.executable, TESTS / "programs" / "failing_rank.py", job, *([marker] if kill else [])])
    assert run.returncode != 0 and (kill or "broken on purpose" in run.stderr)
    failed_at = float(marker.read_text() if kill else run.stdout.split("failing at ")[1].split()[0])
    assert time.time() - failed_at < 60, "the others end soon after it"
