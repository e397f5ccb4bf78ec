"""A corpus that grows: what is new or changed is answered, all else stays, and nothing stale passes for done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_jobs import TEXT

from kvr_mpi.cli.status import status
from kvr_mpi.store import run as store_run
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results


def change(folder: Path) -> None:
    """Two new documents, two others, and one less."""
    corpus = folder / "corpus"
    (corpus / "new-1.txt").write_text("Something new. " + TEXT)
    (corpus / "new-2.txt").write_text("Something else that is new. " + TEXT * 3)
    (corpus / "doc-1.txt").write_text("Another text in its place. " + TEXT * 2)
    (corpus / "doc-3.txt").write_text("And here. " + TEXT)
    (corpus / "doc-4.txt").unlink()


def check_extended(folder: Path, before: dict[str, Record], truth: dict[str, Record]) -> None:
    found = {record.id: record for record in open_results(folder / "out")}
    assert found.keys() == truth.keys() | {"doc-4.txt"}
    for name, record in truth.items():
        mine = found[name]
        assert (mine.token_ids, mine.document_sha256) == (record.token_ids, record.document_sha256), name
    for name in ("doc-0.txt", "doc-2.txt", "doc-4.txt"):
        assert found[name].finished_at == before[name].finished_at, "it is not computed again"


@pytest.fixture
def launch(run_job: Any) -> Any:
    """Run the job in the same folder again, with these words."""
    return lambda *words, settings=(), code=0: run_job(2, *settings, to="out", words=words, code=code)


def test_a_corpus_that_has_grown(launch: Any, tmp_path: Path, run_job: Any) -> None:
    settings = ["output.kv=true"]
    before = launch(settings=settings).records
    change(tmp_path)
    assert "answer new and changed ones with --extend" in launch("--resume", settings=settings, code=78).log
    extended = launch("--extend", settings=settings)
    told = "2 changed (doc-1.txt, doc-3.txt), 1 gone (doc-4.txt), 2 new (new-1.txt, new-2.txt)"
    assert told in extended.log and "documents: 6, 2 of them already done" in extended.log
    wanted = run_job(2, to="truth").records
    check_extended(tmp_path, before, wanted)
    # The same again has nothing to do, and to resume it now needs no word more.
    for word in ("--extend", "--resume"):
        assert "is extended" not in launch(word, settings=settings).log
    check_extended(tmp_path, before, wanted)
    shown = json.loads(CliRunner().invoke(status, [str(tmp_path / "out"), "--json"]).output)
    assert (shown["total"], shown["done"], shown["left"]) == (6, 6, 0)


def test_nothing_stale_is_left_when_it_is_stopped_at_any_point(
    launch: Any, job: Path, tmp_path: Path, run_job: Any, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the old results are dropped, before the new list of documents is written, and after."""
    before = launch().records
    change(tmp_path)
    for place in ("LogWriter", "replacing"):
        with monkeypatch.context() as patch:

            def stop(*given: Any, **options: Any) -> Any:
                raise OSError(28, "No space left on device")

            patch.setattr(f"kvr_mpi.store.run.{place}", stop)
            assert run_here(2, [job, "--extend"]).returncode != 0
        assert "the documents have changed since it began" in launch("--resume", code=78).log, place
    assert run_here(2, [job, "--extend", "--time-limit", "0:00:01"]).returncode in (0, 75)
    launch("--resume")
    check_extended(tmp_path, before, run_job(2, to="truth").records)


def test_a_document_that_comes_back_is_answered_as_it_is_now(launch: Any, tmp_path: Path) -> None:
    file = tmp_path / "corpus" / "doc-4.txt"
    first = launch().records["doc-4.txt"]
    file.unlink()
    assert launch("--extend").records["doc-4.txt"] == first
    file.write_text("It is back, and says something else. " + TEXT)
    second = launch("--extend").records["doc-4.txt"]
    assert second.document_sha256 != first.document_sha256 and second.finished_at > first.finished_at
    file.write_bytes(b"\xff is not UTF-8")
    assert launch("--extend", code=65).records["doc-4.txt"].status == "error"
    file.write_text(TEXT)
    assert launch("--resume").records["doc-4.txt"].status == "done", "it has been repaired"


def test_what_cannot_be_extended_is_refused(launch: Any, tmp_path: Path) -> None:
    shard = launch("--extend", settings=["documents.shard=0/2"], code=78)
    assert "--extend cannot be combined with documents.shard" in shard.log
    before = launch().records
    other = launch("--extend", settings=["generation.max_new_tokens=9"], code=78)
    assert "written with other settings" in other.log
    (tmp_path / "out" / store_run.RUN_FILE).unlink()
    unknown = launch("--extend", code=78)
    assert "it is unknown which documents have changed" in unknown.log and unknown.records == before
