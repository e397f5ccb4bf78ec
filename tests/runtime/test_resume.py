"""A job is started again: what is new or changed is answered, all else stays, and nothing stale passes for done."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_corpora import write_gzip, write_lines, write_parquet
from made_jobs import TEXT

from kvr_mpi.cli.status import status
from kvr_mpi.disk import RUN_FILE
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
    again = launch(settings=settings)
    assert "2 documents changed" in again.log and "(doc-1.txt, doc-3.txt)" in again.log
    assert "1 document no longer in the corpus" in again.log and "documents: 6, 2 of them already done" in again.log
    wanted = run_job(2, to="truth").records
    check_extended(tmp_path, before, wanted)
    for words in ((), ("--resume",)):
        assert "nothing left to do" in launch(*words, settings=settings).log
    check_extended(tmp_path, before, wanted)
    shown = json.loads(CliRunner().invoke(status, [str(tmp_path / "out"), "--json"]).output)
    assert (shown["total"], shown["done"], shown["left"]) == (6, 6, 0)


def test_nothing_stale_is_left_when_it_is_stopped_at_any_point(
    launch: Any, job: Path, tmp_path: Path, run_job: Any, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the old results are dropped, before run.json is written, and after."""
    before = launch().records
    change(tmp_path)
    for place in ("LogWriter", "replacing"):
        with monkeypatch.context() as patch:

            def stop(*given: Any, **options: Any) -> Any:
                raise OSError(28, "No space left on device")

            patch.setattr(f"kvr_mpi.store.run.{place}", stop)
            assert run_here(2, [job]).returncode != 0, place
    assert run_here(2, [job, "--time-limit", "0:00:01"]).returncode in (0, 75)
    launch()
    check_extended(tmp_path, before, run_job(2, to="truth").records)


def touch(folder: Path) -> None:
    for file in folder.rglob("*.txt"):
        os.utime(file, (1, 1))


def restore(folder: Path) -> None:
    """Change a text, but neither the size nor the time of its file."""
    file = folder / "corpus" / "doc-1.txt"
    about, text = file.stat(), file.read_text()
    with file.open("r+") as stream:  # the same inode
        stream.write(chr(ord(text[0]) + 1) + text[1:])
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def forget(folder: Path) -> None:
    (folder / "out" / RUN_FILE).unlink()


def damage(folder: Path) -> None:
    file = folder / "out" / RUN_FILE
    file.write_bytes(file.read_bytes()[:-20])


def forget_and_restore(folder: Path) -> None:
    forget(folder)
    restore(folder)


def mark(folder: Path) -> None:
    for file in folder.glob("corpus/*.txt"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def pack(folder: Path) -> None:
    for file in folder.glob("corpus/*.txt"):
        (file.parent / f"{file.name}.xz").write_bytes(lzma.compress(file.read_bytes()))
        file.unlink()


def test_contents_alone_decide_what_is_answered_again(run_job: Any, tmp_path: Path) -> None:
    before = run_job(1, to="out").records
    events: list[tuple[Callable[[Path], None], int]] = [(touch, 0), (restore, 1), (forget, 0), (damage, 0)]
    for happens, changed in (*events, (forget_and_restore, 1), (mark, 0), (pack, 0)):
        happens(tmp_path)
        after = run_job(1, to="out").records
        assert after.keys() == before.keys(), happens
        again = [name for name, record in after.items() if record.finished_at != before[name].finished_at]
        assert len(again) == changed, happens
        assert all(after[name].document_sha256 != before[name].document_sha256 for name in again)
        before = after


def test_rows_with_ids_are_the_same_in_another_file(run_job: Any, tmp_path: Path) -> None:
    rows = [{"id": f"row-{number}", "text": f"{number}: {TEXT}", "title": "t"} for number in range(4)]
    folder = tmp_path / "rows"
    folder.mkdir()
    file = write_lines(folder / "a.jsonl", *rows)
    settings = [f"documents.path={folder}", "output.columns=['title']"]
    before = run_job(1, *settings, to="out").records
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for kind in ("parquet", "packed", "reordered"):
        file.unlink()
        if kind == "parquet":
            file = write_parquet(folder / "a.parquet", **columns)
        elif kind == "packed":
            file = write_gzip(folder / "a.jsonl.gz", *rows)
        else:
            file = write_lines(folder / "b.jsonl", *rows[::-1])
        again = run_job(1, *settings, to="out")
        assert "nothing left to do" in again.log and again.records == before, kind
    write_lines(folder / "b.jsonl", *({**row, "title": "another"} for row in rows))
    later = run_job(1, *settings, to="out").records
    assert all(later[name].finished_at > record.finished_at for name, record in before.items()), "a used field changed"


def test_a_document_that_comes_back_is_answered_as_it_is_now(launch: Any, tmp_path: Path) -> None:
    file = tmp_path / "corpus" / "doc-4.txt"
    first = launch().records["doc-4.txt"]
    file.unlink()
    assert launch().records["doc-4.txt"] == first
    file.write_text("It is back, and says something else. " + TEXT)
    second = launch().records["doc-4.txt"]
    assert second.document_sha256 != first.document_sha256 and second.finished_at > first.finished_at
    file.write_bytes(b"\xff is not UTF-8")
    assert launch(code=65).records["doc-4.txt"].status == "error"
    file.write_text(TEXT)
    assert launch().records["doc-4.txt"].status == "done", "it has been repaired"


def test_another_job_is_refused_and_deletes_nothing(launch: Any) -> None:
    before = launch().records
    for words in ((), ("--resume",)):
        other = launch(*words, settings=["generation.max_new_tokens=9"], code=78)
        assert "written with other settings" in other.log and other.records == before
    assert launch("--overwrite", settings=["generation.max_new_tokens=9"]).records != before
