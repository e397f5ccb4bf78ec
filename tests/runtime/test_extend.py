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

SMALL_VOCABULARY = True


def records(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


def change(folder: Path) -> None:
    """Two new documents, two others, and one less."""
    corpus = folder / "corpus"
    (corpus / "new-1.txt").write_text("Something new. " + TEXT)
    (corpus / "new-2.txt").write_text("Something else that is new. " + TEXT * 3)
    (corpus / "doc-1.txt").write_text("Another text in its place. " + TEXT * 2)
    (corpus / "doc-3.txt").write_text("And here. " + TEXT)
    (corpus / "doc-4.txt").unlink()


def check_extended(folder: Path, before: dict[str, Record], truth: dict[str, Record]) -> None:
    found = records(folder / "out")
    assert found.keys() == truth.keys() | {"doc-4.txt"}
    for name, record in truth.items():
        mine = found[name]
        assert (mine.token_ids, mine.document_sha256) == (record.token_ids, record.document_sha256), name
    for name in ("doc-0.txt", "doc-2.txt", "doc-4.txt"):
        assert found[name].finished_at == before[name].finished_at, "it is not computed again"


@pytest.fixture
def launch(job: Path, run_here: Any) -> Any:
    return lambda *words: run_here(2, [job, *words])


@pytest.fixture
def truth(run_job: Any) -> Any:
    """Run the job on the corpus as it is, elsewhere."""
    return lambda: run_job(2, to="truth", words=["--overwrite"]).records


@pytest.mark.parametrize("keeps", ["false", "true"])
def test_a_corpus_that_has_grown(launch: Any, tmp_path: Path, truth: Any, keeps: str) -> None:
    settings = ["--set", f"output.kv={keeps}"]
    assert launch(*settings).returncode == 0
    before = records(tmp_path / "out")
    change(tmp_path)
    refused = launch(*settings, "--resume")
    assert refused.returncode == 78 and "answer new and changed ones with --extend" in refused.stderr
    extended = launch(*settings, "--extend")
    assert extended.returncode == 0, extended.stderr
    told = "2 changed (doc-1.txt, doc-3.txt), 1 gone (doc-4.txt), 2 new (new-1.txt, new-2.txt)"
    assert told in extended.stderr and "documents: 6, 2 of them already done" in extended.stderr
    wanted = truth()
    check_extended(tmp_path, before, wanted)
    # The same again has nothing to do, and to resume it now needs no word more.
    for word in ("--extend", "--resume"):
        again = launch(*settings, word)
        assert again.returncode == 0 and "is extended" not in again.stderr, again.stderr
    check_extended(tmp_path, before, wanted)
    shown = json.loads(CliRunner().invoke(status, [str(tmp_path / "out"), "--json"]).output)
    assert (shown["total"], shown["done"], shown["left"]) == (6, 6, 0)


def test_nothing_stale_is_left_when_it_is_stopped_at_any_point(
    launch: Any, tmp_path: Path, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the old results are dropped, before the new list of documents is written, and after."""
    assert launch().returncode == 0
    before = records(tmp_path / "out")
    change(tmp_path)
    for place in ("LogWriter", "replacing"):
        with monkeypatch.context() as patch:

            def stop(*given: Any, **options: Any) -> Any:
                raise OSError(28, "No space left on device")

            patch.setattr(f"kvr_mpi.store.run.{place}", stop)
            assert launch("--extend").returncode != 0
        refused = launch("--resume")
        assert refused.returncode == 78 and "the documents have changed since it began" in refused.stderr, place
    assert launch("--extend", "--time-limit", "0:00:01").returncode in (0, 75)
    assert launch("--resume").returncode == 0
    check_extended(tmp_path, before, truth())


def test_a_document_that_comes_back_is_answered_as_it_is_now(launch: Any, tmp_path: Path) -> None:
    file = tmp_path / "corpus" / "doc-4.txt"
    assert launch().returncode == 0
    first = records(tmp_path / "out")["doc-4.txt"]
    file.unlink()
    assert launch("--extend").returncode == 0
    assert records(tmp_path / "out")["doc-4.txt"] == first
    file.write_text("It is back, and says something else. " + TEXT)
    assert launch("--extend").returncode == 0
    second = records(tmp_path / "out")["doc-4.txt"]
    assert second.document_sha256 != first.document_sha256 and second.finished_at > first.finished_at


def test_what_cannot_be_extended_is_refused(launch: Any, tmp_path: Path) -> None:
    shard = launch("--extend", "--set", "documents.shard=0/2")
    assert shard.returncode == 78 and "--extend cannot be combined with documents.shard" in shard.stderr
    assert launch().returncode == 0
    other = launch("--extend", "--set", "generation.max_new_tokens=9")
    assert other.returncode == 78 and "written with other settings" in other.stderr
    (tmp_path / "out" / store_run.RUN_FILE).unlink()
    unknown = launch("--extend")
    assert unknown.returncode == 78 and "it is unknown which documents have changed" in unknown.stderr
    assert len(records(tmp_path / "out")) == 5
