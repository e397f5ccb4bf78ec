"""A corpus listed once: any document can be read again, no change of it goes unseen, and none fills the memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_corpora import write_lines

import kvr_mpi.documents.corpus as corpus_module
from kvr_mpi.documents import Corpus, RowFormat, read_corpus, scan_corpus
from kvr_mpi.errors import CorpusError

ROWS: list[Any] = [
    {"id": "one", "text": "first"},
    {"id": "two", "text": "zwei\u2028Zeilen 😀\n"},
    {"id": "one", "text": "a copy"},
    {"id": 7, "text": ""},
    {"text": "no id"},
    {"id": "none"},
    {"id": "last", "text": "x" * 5000},
]


def write_corpus(folder: Path, rows: list[Any] = ROWS) -> Path:
    """One of each format, with everything that can be wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row).encode() for row in rows]
    lines[2:2] = [b"", b"  ", b"{broken", b"[1]", b'"text"']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines).replace(b'"id": "', b'"id": "z-') + b"\n"))
    table = [{"id": str(row.get("id", "")) + "-parquet", "text": row.get("text")} for row in rows]
    pq.write_table(pa.Table.from_pylist(table * 100), folder / "c.parquet", row_group_size=64)
    (folder / "d.txt").write_bytes("\ufeffplain".encode())
    (folder / "e.md").write_bytes(b"\xff\xfe")
    (folder / "f.parquet").write_bytes(b"no Parquet")
    (folder / "g.txt").symlink_to("nowhere")
    return folder


@pytest.mark.parametrize("limit", [None, 1, 9])
def test_any_document_is_what_the_stream_gives(
    tmp_path: Path, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(write_corpus(tmp_path / "c"))]
    corpus, wanted = scan_corpus(paths, limit=limit), list(read_corpus(paths, limit=limit))
    assert len(corpus) == len(wanted) == len(corpus.entries) and (limit is None or len(wanted) == limit)
    jumps = [index for index in random.Random(0).choices(range(len(corpus)), k=75) for _ in "ab"]  # each twice
    assert [corpus.read(index) for index in jumps] == [wanted[index] for index in jumps]
    for entry, document in zip(corpus.entries, wanted, strict=True):
        assert (entry.id, entry.chars, entry.error) == (document.id, document.chars, document.error)
    again = Corpus.from_json(json.loads(json.dumps(corpus.to_json())))
    assert again == corpus
    opened: list[Any] = []
    real_open = gzip.open
    monkeypatch.setattr(gzip, "open", lambda *given: opened.append(given) or real_open(*given))  # type: ignore[func-returns-value]
    assert [again.read(index) for index in range(len(again))] == wanted
    assert len(opened) == (limit is None), "in order, an archive is gone through once"


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt"])
@pytest.mark.parametrize("change", ["text", "shorter", "gone", "pipe", "garbage"])
def test_a_text_that_changes_becomes_an_error(tmp_path: Path, name: str, change: str) -> None:
    folder = write_corpus(tmp_path / "c")
    corpus, before = scan_corpus([str(folder)]), {doc.id: doc for doc in read_corpus([str(folder)])}
    file = folder / name
    if change in ("gone", "pipe"):
        file.unlink()
        if change == "pipe":
            os.mkfifo(file)  # nobody waits for it
    elif change == "garbage":
        file.write_bytes(random.Random(1).randbytes(file.stat().st_size))
    elif change == "shorter":
        file.write_bytes(file.read_bytes()[:3])
    else:
        other = write_corpus(tmp_path / "other", [{**row, "text": "changed"} for row in ROWS])
        (other / "d.txt").write_text("changed")
        file.write_bytes((other / name).read_bytes())
    for index, entry in enumerate(corpus.entries):
        document = corpus.read(index)
        if corpus.files[entry.file].name != name or entry.error is not None:
            assert document == before[entry.id]
        else:
            assert document.id == entry.id and document.text == "" and document.error is not None
            assert str(file) in document.error and "job began" in document.error
            assert change != "pipe" or "a named pipe" in document.error


@pytest.mark.parametrize("field", ["title", "label"])
def test_a_field_that_changes_becomes_an_error(tmp_path: Path, field: str) -> None:
    row = {"id": "a", "text": "words", "title": "t", "label": "l", "unused": 1}
    file = write_lines(tmp_path / "a.jsonl", row)
    corpus = scan_corpus([str(file)], rows=RowFormat(columns=("title",), passed=("label",)))
    write_lines(file, {**row, "unused": 2})
    assert corpus.read(0).error is None
    write_lines(file, {**row, field: "x"})
    assert "has changed since the job began" in (corpus.read(0).error or "")


def test_files_that_have_not_changed_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(write_corpus(tmp_path / "c"))]
    known = scan_corpus(paths)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "stream_rows", refuse)
        patch.chdir(tmp_path)
        again = scan_corpus(["c"], known=known)  # by another path
        assert again.entries is known.entries and again.files[0].path == "c/a.jsonl"
        assert [again.read(index) for index in range(5)] == [known.read(index) for index in range(5)]
        for options in ({"rows": RowFormat("name")}, {"limit": 3}, {"prompts": ("one", "two")}):
            with pytest.raises(AssertionError):
                scan_corpus(paths, known=known, **options)  # type: ignore[arg-type]
    os.utime(tmp_path / "c" / "d.txt", (1, 1))
    assert scan_corpus(paths, known=known) == Corpus(scan_corpus(paths).files, known.entries)
    (tmp_path / "c" / "d.txt").write_text("changed")
    assert scan_corpus(paths, known=known).entries != known.entries
    (tmp_path / "void.jsonl").write_text("\n")
    with pytest.raises(CorpusError, match="contain no documents"):
        scan_corpus([str(tmp_path / "void.jsonl")], known=known)


def test_what_no_model_could_read_is_an_error_and_never_in_memory(tmp_path: Path) -> None:
    spaces = gzip.compress(b" " * (48 << 20))
    bomb = gzip.compress(b'{"id": "a", "text": "') + 8 * spaces + gzip.compress(b'"}\n{"id": "b", "text": "short"}\n')
    (tmp_path / "rows.jsonl.gz").write_bytes(bomb)
    with (tmp_path / "large.txt").open("wb") as stream:
        stream.truncate(3 << 30)
    tracemalloc.start()
    try:
        corpus = scan_corpus([str(tmp_path)])
        found = [corpus.read(number) for number in range(len(corpus))]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(one.id, one.text) for one in found] == [("large.txt", ""), ("rows.jsonl.gz:1", ""), ("b", "short")]
    assert "larger than 64 MiB" in str(found[0].error)
    assert f"line 1 of {tmp_path}/rows.jsonl.gz has {8 * (48 << 20) + 24} bytes" in str(found[1].error)
    assert peak_bytes < 300 << 20
