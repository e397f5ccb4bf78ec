"""Jobs that follow a plan, with real documents: the same answers as without one, and what has no room is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_jobs import with_settings as options

from kvr_mpi.runtime import outcome
from kvr_mpi.store.results import open_results


def answers(folder: Path) -> dict[str, tuple[int, ...]]:
    return {record.id: record.token_ids for record in open_results(folder) if record.status == "done"}


@pytest.mark.long
def test_a_planned_job_goes_on_with_other_ranks_and_gives_the_same_answers(
    job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, run_here: Any
) -> None:
    begun = run_here(3, [job, *options("documents.shard=0/3", "output.kv=true", "parallel.partition=even")])
    assert begun.returncode == 65, begun.stderr  # one of the five is empty
    before = answers(tmp_path / "out")
    assert len(before) == 4
    planned = mpirun(4, [kvr_run, job, "--resume", *options("output.kv=true", "prompt.too_long=error")])
    assert planned.returncode == 65 and "5 of them already done" in planned.stderr, planned.stderr
    assert "predicted" in planned.stderr and "lower bound" in planned.stderr and "(planned: " in planned.stderr
    assert "12 done, 2 failed" in planned.stdout
    records = {record.id: record for record in open_results(tmp_path / "out")}
    errors = {name for name, record in records.items() if record.status == "error"}
    assert errors == {"empty.txt", "too-long.txt"}
    ranks = {name: len(record.slices) - 1 for name, record in records.items() if name not in errors}
    assert ranks["doc-08.txt"] > 1 and 1 in ranks.values(), ranks
    after = answers(tmp_path / "out")
    assert len(after) == 12 and after.items() >= before.items()
    fixed = run_here(2, [job, *options("parallel.ranks_per_chain=all", f"output.path={tmp_path / 'fixed'}")])
    assert fixed.returncode == 65 and answers(tmp_path / "fixed") == after, fixed.stderr


@pytest.mark.slow
def test_documents_without_room_are_refused_and_the_rest_is_done(job: Path, tmp_path: Path, run_here: Any) -> None:
    run = run_here(2, [job, *options("documents.limit=10", "parallel.memory_gib=0.00093")])
    assert run.returncode == 65 and "9 done, 1 failed" in run.stdout, run.stderr
    (failed,) = (record for record in open_results(tmp_path / "out") if record.status == "error")
    assert failed.id == "doc-08.txt"
    assert "tokens do not fit into the memory of a chain of up to 2 ranks" in failed.error


@pytest.mark.slow
def test_the_second_job_is_forecast_by_the_first_and_a_part_of_one_says_nothing(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "LEAST_S", 0.0)  # these are too short
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    for limit, option, jobs, is_forecast in ((9, "--overwrite", 1, False), (3, "--overwrite", 2, True)):
        run = run_here(2, [job, *options(f"documents.limit={limit}"), option])
        (history,) = (tmp_path / "cache" / "jobs").glob("*.json")
        assert run.returncode == 0 and len(json.loads(history.read_text())["jobs"]) == jobs, run.stderr
        told = open_results(tmp_path / "out").cost.describe_outcome()
        assert ("in 80 % of cases); it took" in told and told in run.stderr) == is_forecast
    resumed = run_here(2, [job, *options("documents.limit=5"), "--extend"])
    assert resumed.returncode == 0 and "forecast:" not in resumed.stderr
    assert len(json.loads(history.read_text())["jobs"]) == 2
