"""A run to be shown and exported, as it is at work and merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_runs import example_records, write_run

from kvr_mpi.store.rewrite import merge_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run still in logs and volumes: nothing is merged yet."""
    records = example_records()
    layer = torch.zeros(100, 2, 8)
    write_run(tmp_path / "run", records[:2], [(layer, layer), None, (layer, layer)])
    return write_run(tmp_path / "run", records[2:])


@pytest.fixture
def result(tmp_path: Path, run_folder: Path) -> Path:
    return merge_run(run_folder)
