"""The main job as a user runs it: real processes under mpirun, real files, the same answers on any ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import h5py
import pytest
from made_jobs import answers, with_settings
from made_runs import kv_in

from kvr_mpi.store.results import open_results


@pytest.mark.slow
def test_existing_results_are_refused_resumed_or_deleted(
    job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, run_here: Any
) -> None:
    first = mpirun(2, [kvr_run, job, "--set", "documents.shard=0/2"])
    assert first.returncode == 0, first.stderr
    before = {record.id: record for record in open_results(tmp_path / "out")}

    refused = run_here(2, [job])
    assert refused.returncode == 78
    assert "--resume" in refused.stderr and "--overwrite" in refused.stderr
    assert {record.id: record for record in open_results(tmp_path / "out")} == before

    resumed = mpirun(1, [kvr_run, job, "--resume"])  # on another number of ranks
    assert resumed.returncode == 0, resumed.stderr
    assert "3 of them already done" in resumed.stderr
    after = {record.id: record for record in open_results(tmp_path / "out")}
    assert len(after) == 5
    assert all(after[name] == record for name, record in before.items())

    again = run_here(2, [job, "--overwrite", "--set", "documents.limit=1"])
    assert again.returncode == 0, again.stderr
    assert len(answers(tmp_path / "out")) == 1


def test_another_job_is_not_resumed_and_says_so_before_the_model_is_loaded(run_job: Any) -> None:
    begun, again = ("documents.limit=2", "generation.max_new_tokens=1"), {"to": "out", "words": ["--resume"]}
    run_job(1, *begun, to="out")
    for setting, words in (
        ("prompt.template=Read: {text}", "prompt was"),
        ("generation.max_new_tokens=9", "generation was"),
        ("documents.limit=1", "documents have changed since it began"),
    ):
        log = run_job(1, *begun, setting, **again, code=78).log
        assert "cannot resume" in log and words in log and "loading" not in log
    assert "2 of them already done" in run_job(1, *begun, "output.columns=[]", **again).log


@pytest.mark.slow
def test_kv_is_kept_when_asked_for(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, kvr: Path) -> None:
    settings = ["output.kv=true", "generation.max_new_tokens=0", "model.dtype=bfloat16", "documents.limit=2"]
    run = mpirun(2, [kvr_run, job, *with_settings(*settings)])
    assert run.returncode == 0, run.stderr
    records = list(open_results(tmp_path / "out"))
    with h5py.File(tmp_path / "out" / "results.h5") as file:
        for record in records:
            kv, tokens = kv_in(file, record.id), record.prompt_tokens
            assert record.new_tokens == 0 and record.answer == ""
            assert list(kv) == ["layer_000", "layer_001", "layer_002", "token_ids"]
            assert kv["token_ids"].shape == (tokens,)
            assert kv["layer_000/keys"].shape == kv["layer_002/values"].shape == (tokens, 2, 8)
            assert abs(kv["layer_001/keys"][()]).max() > 0
    shown = subprocess.run([kvr, "inspect", tmp_path / "out", "doc-0.txt"], capture_output=True, text=True, check=True)
    assert "bfloat16" in shown.stdout


def test_prompts_shorter_than_the_chain(tmp_path: Path, run_job: Any) -> None:
    """Two tokens over four ranks: the last rank does them alone."""
    (tmp_path / "two.txt").write_text("ab cd")
    settings = ["prompt.template={text}", "prompt.chat_template=false", f"documents.path={tmp_path / 'two.txt'}"]
    (record,) = run_job(4, *settings).records.values()
    assert record.prompt_tokens < 4 and record.slices == (0, record.prompt_tokens) and record.new_tokens == 8
