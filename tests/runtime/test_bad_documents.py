"""Documents that cannot be read are records, the rest is done, and the exit code says which it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from made_jobs import TEXT, last_line

from kvr_mpi.store.results import open_results

SMALL_VOCABULARY = True


@pytest.mark.slow
def test_bad_documents_are_records_and_the_rest_is_done(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "empty.txt").write_text(" \n")
    (corpus / "latin1.txt").write_bytes("Käse".encode("latin-1"))
    (corpus / "long.txt").write_text(TEXT * 60)
    (corpus / "rows.jsonl").write_text(
        '{"id": "a/b c", "text": "A short one."}\n{"id": "x", "te\n{"id": "a/b c", "text": "y"}\n'
    )
    run = mpirun(2, [kvr_run, job])
    assert run.returncode == 65, run.stderr
    records = {record.id: record for record in open_results(tmp_path / "out")}
    errors = {name: record.error for name, record in records.items() if record.status == "error"}
    assert {name for name, record in records.items() if record.status == "done"} == {
        *(f"doc-{number}.txt" for number in range(5)),
        "a/b c",
    }
    assert set(errors) == {"empty.txt", "latin1.txt", "long.txt", "rows.jsonl:2", "a/b c#2"}
    assert "empty" in errors["empty.txt"]
    assert "not UTF-8" in errors["latin1.txt"]
    assert "too_long" in errors["long.txt"]
    assert "line 2" in errors["rows.jsonl:2"]
    assert "duplicate id 'a/b c'" in errors["a/b c#2"]
    for error in errors.values():
        assert error.split()[0] in run.stderr
    assert "6 done, 5 failed" in run.stdout
    assert last_line(run.stderr) == ("exit code 65: done; 5 of 11 documents failed (allowed: 0, output.max_failed)")


@pytest.mark.slow
def test_failures_may_be_allowed(job: Path, run_job: Any) -> None:
    for name in ("empty-1.txt", "empty-2.txt"):
        (job.parent / "corpus" / name).write_text(" ")
    for allowed, code in (("1", 65), ("2", 0), ("0.28", 65), ("28.6%", 0)):
        run = run_job(1, f"output.max_failed={allowed}", to="out", words=["--resume"], code=code)
        assert last_line(run.log).startswith(f"exit code {code}: done") and "2 of 7 documents failed" in run.log


@pytest.mark.slow
def test_pipes_and_devices_in_a_corpus_are_records(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    os.mkfifo(tmp_path / "corpus" / "pipe.txt")
    (tmp_path / "corpus" / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "corpus" / "ids.jsonl").write_text('{"id": {"a": 1}, "text": "x"}\n{"id": "a\u202eb", "text": "x"}\n')
    run = mpirun(2, [kvr_run, job, "--set", "documents.path=" + str(tmp_path / "corpus" / "**")])
    assert run.returncode == 65, run.stderr
    errors = {record.id: record.error for record in open_results(tmp_path / "out") if record.status == "error"}
    assert set(errors) == {"pipe.txt", "zero.jsonl", "ids.jsonl:1", "a\\u202eb"}
    assert "a named pipe" in errors["pipe.txt"] and "a device" in errors["zero.jsonl"]
    assert "\u202e" not in run.stderr + run.stdout


def test_files_of_other_types_are_named(tmp_path: Path, run_job: Any) -> None:
    """They would be lost without a word: the user believes that they are answered."""
    for name in ("skip.docx", "more.docx", "scan.pdf"):
        (tmp_path / "corpus" / name).write_text("text")
    run = run_job(1)
    assert "2 .docx, 1 .pdf" in run.log and last_line(run.log) == "exit code 0: done; 5 documents answered"
    assert all(f"{tmp_path}/corpus/{name}" in run.log for name in ("skip.docx", "more.docx", "scan.pdf"))
