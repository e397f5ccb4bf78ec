"""A job is done once each of its documents has a record, whatever could not be read meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from made_faults import failing, system_error

from kvr_mpi import disk
from kvr_mpi.documents import Corpus
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK, EXIT_STOPPED, NOT_NOW
from kvr_mpi.runtime import batch
from kvr_mpi.store.folder import survey
from kvr_mpi.store.results import open_results


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(disk, "RETRY_S", 0.005)


def test_done_means_that_every_document_has_a_record(
    run_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(folder: Path) -> Any:
        found = survey(folder)
        found.records.invalidate([found.records.name(0)], only_kv=False)
        return found

    monkeypatch.setattr(batch, "survey", losing)
    ran = run_job(1, code=EXIT_STOPPED, to="out")
    assert "1 document left" in ran.log
    monkeypatch.undo()
    run_job(1, to="out", words=["--resume"])
    assert len(open_results(ran.folder)) == 5


def test_results_that_cannot_be_read_at_the_end_are_not_zero_documents(
    run_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(h5py, "File", failing(h5py.File, system_error(errno.ESTALE), "results.h5$"))
        assert "5 documents answered" in run_job(1, to="out").log
    before = (stored := run_job(1, to="out", words=["--resume"]).folder / "results.h5").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(h5py, "File", failing(h5py.File, system_error(errno.ESTALE), "results.h5$", times=999))
        ran = run_job(1, to="out", code=EXIT_STOPPED, words=["--resume"])
    assert "results.h5 cannot be read now" in ran.log and stored.read_bytes() == before


def test_documents_that_cannot_be_read_for_the_moment_are_no_allowed_failures(
    run_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Corpus.read

    def read(self: Corpus, index: int) -> Any:
        found = real(self, index)
        return replace(found, text="", error=NOT_NOW + "Stale file handle") if index == 3 else found

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "read", read)
        run_job(1, "output.max_failed=5", to="out", code=EXIT_BAD_DATA)
    ran = run_job(1, "output.max_failed=5", to="out", words=["--resume"])
    assert open_results(ran.folder).ids("error") == [] and len(open_results(ran.folder)) == 5


@pytest.mark.parametrize("times", [1, 999])
def test_the_output_folder_cannot_be_listed_at_once(
    job: Path, run_job: Callable[..., Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job(1, to="out")
    monkeypatch.setattr(os, "scandir", failing(os.scandir, system_error(errno.ESTALE), "/out$", times=times))
    ran = run_job(1, to="out", code=EXIT_OK if times == 1 else EXIT_STOPPED, words=["--resume"])
    assert "bug in" not in ran.log


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError("Input/output error (os error 5)"), EXIT_STOPPED), (MemoryError(), EXIT_CONFIG)],
    ids=["EIO", "no memory"],
)
def test_weights_that_cannot_be_read_are_named(
    run_job: Callable[..., Any], error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    ran = run_job(1, code=code)
    assert "model.path" in ran.log and "bug in" not in ran.log


def test_a_question_about_a_document_that_cannot_be_read_now_is_asked_again(
    run_job: Callable[..., Any], ask_about: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = run_job(1, "output.kv=true", to="stored").folder
    asked = ask_about(stored, "And now?")
    real = batch.open_documents

    def opened(*args: Any) -> Any:  # what was listed is gone for a while
        monkeypatch.setattr(h5py, "File", failing(h5py.File, system_error(errno.ESTALE), "stored/results", times=999))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "open_documents", opened)
        ran = run_job(1, of=asked, to="answers", code=EXIT_BAD_DATA)
        assert all(record.error.startswith(NOT_NOW) for record in ran.records.values())
    monkeypatch.undo()
    assert {record.status for record in run_job(1, of=asked, to="answers", words=["--resume"]).records.values()} == {
        "done"
    }
