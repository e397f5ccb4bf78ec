"""Documents that cannot be read are records, the rest is done, and the exit code says which it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from made_jobs import TEXT, last_line

from kvr_mpi.store.results import open_results


@pytest.mark.slow
def test_bad_documents_are_records_and_the_rest_is_done(job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    corpus = tmp_path / "corpus"
    os.mkfifo(corpus / "pipe.txt")
    (corpus / "zero.jsonl").symlink_to("/dev/zero")
    (corpus / "ids.jsonl").write_text('{"id": {"a": 1}, "text": "x"}\n{"id": "a\u202eb", "text": "x"}\n')
    (corpus / "empty.txt").write_text(" \n")
    (corpus / "latin1.txt").write_bytes("Käse".encode("latin-1"))
    (corpus / "long.txt").write_text(TEXT * 60)
    (corpus / "rows.jsonl").write_text(
        '{"id": "a/b c", "text": "A short one."}\n{"id": "x", "te\n{"id": "a/b c", "text": "y"}\n'
    )
    run = mpirun(2, [kvr_run, job, "--set", f"documents.path={corpus}/**"])
    assert run.returncode == 65, run.stderr
    records = {record.id: record for record in open_results(tmp_path / "out")}
    errors = {name: record.error for name, record in records.items() if record.status == "error"}
    assert {name for name, record in records.items() if record.status == "done"} == {
        *(f"doc-{number}.txt" for number in range(5)),
        "a/b c",
    }
    expected = {
        "empty.txt": "empty",
        "latin1.txt": "not UTF-8",
        "long.txt": "too_long",
        "rows.jsonl:2": "line 2",
        "a/b c#2": "duplicate id 'a/b c'",
        "pipe.txt": "a named pipe",
        "zero.jsonl": "a device",
        "ids.jsonl:1": "id",
        "a\\u202eb": "",
    }
    assert errors.keys() == expected.keys() and records["latin1.txt"].document_sha256 == ""  # not an empty text's
    assert all(words in errors[name] and errors[name].split()[0] in run.stderr for name, words in expected.items())
    assert "\u202e" not in run.stderr + run.stdout and "6 done, 9 failed" in run.stdout
    assert "65: done; 9 of 15 documents failed (allowed: 0," in last_line(run.stderr)


def test_what_cannot_be_read_is_recorded_before_any_prompt_runs_and_other_types_are_named(
    tmp_path: Path, run_job: Any
) -> None:
    """They would be lost without a word: the user believes that they are answered."""
    corpus, others = tmp_path / "corpus", ("skip.docx", "more.docx", "scan.pdf")
    (corpus / "zero.txt").write_bytes("Käse".encode("latin-1"))  # short ones come last
    for name in others:
        (corpus / name).write_text("text")
    run = run_job(1, "generation.max_new_tokens=1", code=65)
    assert "1/6 zero.txt: error: " in run.log and "2 .docx, 1 .pdf" in run.log
    assert all(f"{corpus}/{name}" in run.log for name in others)
    assert "5 documents answered, 1 failed in" in run.log
    assert "5 of 5 answers cut off at generation.max_new_tokens" in run.log
