"""The main job as a user runs it: real processes under mpirun, real files, the same answers on any ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from made_jobs import answers

from kvr_mpi.store.lock import Lock, this_process
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
    for setting, words, step in (
        ("prompt.template=Read: {text}", 'is "Read: {text}"); restore', "importing torch"),
        ("generation.max_new_tokens=9", "(generation.max_new_tokens was 1, is 9);", "importing torch"),
        ("documents.limit=1", "documents have changed since it began", "loading"),
    ):
        log = run_job(1, *begun, setting, **again, code=78).log
        assert "cannot resume" in log and words in log and step not in log
    assert "2 of them already done" in run_job(1, *begun, "output.columns=[]", **again).log


@pytest.mark.parametrize("words", [[], ["--resume"], ["--overwrite"]])
def test_a_folder_in_use_is_refused_before_torch_is_imported(words: list[str], tmp_path: Path, run_job: Any) -> None:
    (tmp_path / "out").mkdir()
    other = Lock(tmp_path / "out", this_process())
    log = run_job(1, to="out", words=words, code=78).log
    other.release()
    assert f"is in use by process {os.getpid()}" in log and "importing torch" not in log
    assert log.splitlines()[-1].endswith("exit code 78: the output folder or file cannot be used")


def test_prompts_shorter_than_the_chain(tmp_path: Path, run_job: Any) -> None:
    """Two tokens over four ranks: the last rank does them alone."""
    (tmp_path / "two.txt").write_text("ab cd")
    settings = ["prompt.template={text}", "prompt.chat_template=false", f"documents.path={tmp_path / 'two.txt'}"]
    (record,) = run_job(4, *settings).records.values()
    assert record.prompt_tokens < 4 and record.slices == (0, record.prompt_tokens) and record.new_tokens == 8
