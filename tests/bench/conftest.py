"""Benchmarks as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT

Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_bench(mpirun: Any) -> Bench:
    """Run a benchmark on some ranks: ``run_bench(2, "first-token", "--contexts", "128")``."""

    def run(ranks: int, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        found: subprocess.CompletedProcess[str] = mpirun(
            ranks, [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, **options
        )
        return found

    return run
