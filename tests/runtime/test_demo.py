"""The jobs that are shipped are valid, and the demo runs with its real model."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT
from made_jobs import with_settings

from kvr_mpi.job import load_job
from kvr_mpi.store.results import open_results


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_jobs_are_valid(path: Path) -> None:
    spec, _ = load_job(path, (), {})
    assert "{text}" in spec.prompt.template
    assert tomllib.loads(path.read_text())["output"]["path"] == f"runs/{path.stem}"


@pytest.mark.quick
def test_the_demo_runs_with_less_of_it(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    less = ("documents.limit=2", "prompt.max_tokens=400", "prompt.too_long=keep-head", "generation.max_new_tokens=12")
    words = with_settings(f"output.path={tmp_path}", *less)
    run = mpirun(2, [kvr_run, ROOT / "jobs" / "demo.toml", *words], cwd=ROOT)
    assert run.returncode == 0 and len(open_results(tmp_path)) == 2, run.stderr
    for record in open_results(tmp_path):
        assert 300 < record.prompt_tokens <= 400  # cut between words
        assert record.slices[-1] == record.prompt_tokens and len(record.slices) == 3
        assert record.answer.strip() and record.new_tokens == 12
