"""A batch survives anything: see ``harness``. `make test-faults` runs a hundred cases, `make test` a few of them.

One case again: ``pytest tests/faults -k "seed17]"``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import make_reference, run_case, write_job

QUICK = [1, 4, 9]
CASES = 105


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    return write_job(tmp_path_factory.mktemp("faults"), tiny_model_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, job: Path) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "out"
    make_reference(job, folder)
    return folder


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"seed{seed}", marks=() if seed in QUICK else pytest.mark.slow)
        for seed in range(1, CASES + 1)
    ],
)
def test_nothing_is_lost_double_different_or_unreadable(seed: int, job: Path, reference: Path, tmp_path: Path) -> None:
    case = run_case(seed, job, reference, tmp_path)
    print("; ".join(case.story))
