"""A job is forecast by those before it, and says in the end how that turned out: as in docs/planning.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from constants import ROOT
from made_jobs import with_settings

from kvr_mpi.cli.plan import plan
from kvr_mpi.report.page import page_of
from kvr_mpi.runtime import outcome
from kvr_mpi.store.results import open_results


@pytest.mark.slow
def test_the_second_job_is_forecast_and_its_outcome_is_told(
    tmp_path: Path, long_model_dir: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the demo's documents, with a tiny model: jobs of a second, which are too short outside of this test."""
    monkeypatch.setattr(outcome, "LEAST_S", 0.0)
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    settings = with_settings(
        f"model.path={long_model_dir}",
        *(f"output.path={tmp_path / 'out'}", "generation.max_new_tokens=8", "prompt.too_long=keep-head"),
    )

    def planned() -> dict[str, Any]:
        words = ["jobs/demo.toml", *settings, "--ranks", "2", "--json"]
        return dict(json.loads(CliRunner().invoke(plan, words, catch_exceptions=False).stdout))

    first = run_here(2, ["jobs/demo.toml", *settings])
    assert first.returncode == 0 and "forecast:" not in first.stderr, first.stderr
    expected = planned()["expected"]
    assert expected["jobs"] == 1 and 0 < expected["start_s"] < expected["low_s"] < expected["high_s"]
    stopped = run_here(2, ["jobs/demo.toml", *settings, *with_settings("documents.limit=3"), "--overwrite"])
    assert stopped.returncode == 0 and planned()["expected"]["jobs"] == 2, stopped.stderr
    resumed = run_here(2, ["jobs/demo.toml", *settings, "--extend"])
    assert resumed.returncode == 0 and "forecast:" not in resumed.stderr
    assert planned()["expected"]["jobs"] == 2, "a part of a job says nothing of a whole one"
    third = run_here(2, ["jobs/demo.toml", *settings, "--overwrite"])
    told = open_results(tmp_path / "out").cost.describe_outcome()
    assert third.returncode == 0 and told in third.stderr and "in 80 % of cases); it took" in told
    assert told in page_of(tmp_path / "out")[0].decode()
