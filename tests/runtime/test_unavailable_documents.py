"""Jobs whose documents cannot be read for a while: the next start answers them unasked."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_calls import Faults, faults
from made_jobs import TEXT, load

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_STOPPED, NOT_NOW

ROWS = ["row-0", "row-1", "row-2"]


@pytest.fixture
def corpus(job: Path) -> Path:
    """The folder of the job's documents, with a table beside five texts."""
    folder = Path(load(job).documents.path[0])
    rows = [json.dumps({"id": name, "text": f"{name}: {TEXT}"}) + "\n" for name in ROWS]
    (folder / "deep").mkdir()
    (folder / "deep" / "rows.jsonl").write_text("".join(rows))
    return folder


def test_a_resume_answers_what_could_not_be_read(run_job: Callable[..., Any], corpus: Path) -> None:
    whole = run_job(1)
    table = Faults("open", "rows.jsonl")  # from the listing on
    text = Faults("open", "doc-2.txt")
    moment = Faults("open", "doc-3.txt", times=2)
    with faults(table, text, moment):
        first = run_job(1, to="out", code=EXIT_BAD_DATA)
    failed = {name: record.error for name, record in first.records.items() if record.status == "error"}
    assert failed.keys() == {"doc-2.txt", "deep/rows.jsonl"} and len(first.records) == 6
    assert all(error.startswith(NOT_NOW) for error in failed.values())
    with faults(Faults("open", "rows.jsonl")):
        run_job(1, "output.max_failed=5", to="out", code=EXIT_BAD_DATA, words=["--resume"])
    second = run_job(1, to="out", words=["--resume"])
    assert second.tokens == whole.tokens and ROWS[0] in second.tokens
    assert "nothing left to do" in run_job(1, to="out", words=["--resume"]).log


def test_nothing_runs_without_the_documents_of_a_folder(run_job: Callable[..., Any], corpus: Path) -> None:
    for number, code in ((errno.ESTALE, EXIT_STOPPED), (errno.EACCES, EXIT_CONFIG)):
        with faults(Faults("scandir", "deep", number=number)):
            run_job(1, to="out", code=code, words=["--overwrite"])
        assert not [*(corpus.parent / "out").glob("log-*")]


def test_a_document_that_was_there_is_not_gone_because_it_cannot_be_read_now(
    run_job: Callable[..., Any], corpus: Path
) -> None:
    before = run_job(1, to="out").tokens
    (corpus / "new.txt").write_text(TEXT)
    with faults(Faults("open", "doc-1.txt")):
        again = run_job(1, to="out")
        assert "cannot be compared" in again.log and again.tokens.items() > before.items()
    with faults(Faults("open", "rows.jsonl")):
        again = run_job(1, to="out", code=EXIT_BAD_DATA)
        assert again.tokens.items() > before.items(), "the answers about its rows stay"
    assert "nothing left to do" in run_job(1, to="out").log


@pytest.mark.parametrize("setting", ["documents.limit=7"])
def test_rows_that_cannot_be_counted_move_no_document_to_another_job(
    run_job: Callable[..., Any], corpus: Path, setting: str
) -> None:
    with faults(Faults("open", "rows.jsonl")):
        run_job(1, setting, code=EXIT_STOPPED)
