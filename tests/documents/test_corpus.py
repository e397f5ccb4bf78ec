"""A corpus listed once: any document can be read again, no change of it goes unseen, and none fills the memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_calls import Faults, faults
from made_corpora import write_gzip, write_lines

import kvr_mpi.documents.files as files_module
from kvr_mpi.documents import Corpus, CorpusPart, RowFormat, formats, read_corpus, scan_corpus
from kvr_mpi.documents.corpus import make_corpus
from kvr_mpi.documents.index import cut_spans, hash_id, index_spans, list_files, part_numbers
from kvr_mpi.documents.rows import DEFAULT_ROWS
from kvr_mpi.errors import NOT_NOW

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
    assert len(corpus) == len(wanted) and (limit is None or len(wanted) == limit)
    opened: list[str] = []
    real_open = files_module.open_file
    monkeypatch.setattr(files_module, "open_file", lambda path, **how: opened.append(path) or real_open(path, **how))  # type: ignore[func-returns-value]
    jumps = [index for index in random.Random(0).choices(range(len(corpus)), k=75) for _ in "ab"]  # each twice
    assert [corpus.read(index) for index in jumps] == [wanted[index] for index in jumps]
    assert [*corpus.ids()] == [document.id for document in wanted]
    again = Corpus.from_bytes(corpus.to_bytes())
    assert again.to_bytes() == corpus.to_bytes() and [again.read(n) for n in range(len(again))] == wanted
    if limit is None:
        forward = [path for path in opened if path.endswith("b.jsonl.gz")]
        assert len(forward) <= 2, "whatever the order, a file that can only be read forward is read once by each"


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt"])
@pytest.mark.parametrize("change", ["shorter", "gone", "pipe", "garbage"])
def test_a_file_that_changes_gives_no_other_document(tmp_path: Path, name: str, change: str) -> None:
    folder = write_corpus(tmp_path / "c")
    corpus, before = scan_corpus([str(folder)]), {doc.id: doc for doc in read_corpus([str(folder)])}
    file = folder / name
    if change in ("gone", "pipe"):
        file.unlink()
        if change == "pipe":
            os.mkfifo(file)  # nobody waits for it
    elif change == "garbage":
        file.write_bytes(random.Random(1).randbytes(file.stat().st_size))
    else:
        file.write_bytes(file.read_bytes()[:3])
    for number, own in enumerate(corpus.ids()):
        document = corpus.read(number)
        assert document.id == own
        if corpus.files.paths[corpus.index.file[number]] != str(file):
            assert document == before[own]
        elif name != "d.txt" or change != "shorter":  # any text is a text
            assert document.text == "" and document.error is not None
            assert change != "pipe" or "duplicate" in document.error or "a named pipe" in document.error


def test_rows_that_have_moved_are_left_to_the_next_start(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *({"id": name, "text": f"text of {name}"} for name in "abc"))
    corpus = scan_corpus([str(file)])
    write_lines(file, *({"id": name, "text": f"text of {name}"} for name in "bca"))
    found = [corpus.read(number) for number in range(3)]
    assert [document.id for document in found] == [*"abc"]
    assert all(str(document.error).startswith(NOT_NOW) for document in found)


@pytest.mark.parametrize("field", ["text", "title", "label"])
def test_what_is_used_of_a_row_is_in_its_hash(tmp_path: Path, field: str) -> None:
    row = {"id": "a", "text": "words", "title": "t", "label": "l", "unused": 1}
    file = write_lines(tmp_path / "a.jsonl", row)
    recorded = np.array([hash_id("a")], np.uint64)

    def digest() -> str | None:
        rows = RowFormat(columns=("title",), passed=("label",))
        found = scan_corpus([str(file)], rows=rows, recorded=recorded)
        assert found.read(0).sha256.startswith(str(found.digest(0)))
        return found.digest(0)

    first = digest()
    write_lines(file, {**row, "unused": 2})
    assert digest() == first
    write_lines(file, {**row, field: "x"})
    assert digest() != first


# Divided between ranks and the tasks of an array


def write_tables(folder: Path) -> list[str]:
    """Tables of all kinds, whose rows differ in length."""
    rows = [{"id": f"{n}", "text": f"text {n} " * (1 + n * n % 37)} for n in range(230)]
    folder.mkdir()
    write_lines(folder / "a.jsonl", *rows[:70])
    write_lines(folder / "b.jsonl", *rows[70:75])
    write_gzip(folder / "c.jsonl.gz", *rows[75:120])
    pq.write_table(pa.Table.from_pylist(rows[120:180]), folder / "d.parquet", row_group_size=7)
    write_lines(folder / "e.jsonl", *rows[180:])
    for name in ("empty.jsonl", "bare.csv"):
        (folder / name).touch()
    for n in range(11):
        (folder / f"{n}.txt").write_text(f"text file {n}")
    return [row["id"] for row in rows] + [f"{n}.txt" for n in range(11)]


@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (1, 3), (4, 1), (3, 2), (50, 1), (7, 5)])
def test_every_document_is_in_one_part_and_indexed_by_one_rank(tmp_path: Path, parts: int, ranks: int) -> None:
    wanted = write_tables(tmp_path / "c")
    files, found = list_files([str(tmp_path / "c")]), list[str]()
    whole = scan_corpus([str(tmp_path / "c")])
    expected = part_numbers(files, whole.index, parts)
    for number in range(parts):
        part = CorpusPart(number, parts)
        pieces = [index_spans(files, cut_spans(files, part, rank, ranks), DEFAULT_ROWS) for rank in range(ranks)]
        corpus = make_corpus(files, pieces, DEFAULT_ROWS, part=part)
        assert [corpus.read(n).id for n in range(len(corpus))] == [*corpus.ids()]
        assert [*corpus.ids()] == [whole.id(n) for n in np.flatnonzero(expected == number).tolist()]
        assert not any(corpus.read(n).error for n in range(len(corpus)))
        found += corpus.ids()
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rows_without_ids_have_the_same_ones_whoever_indexed_them(tmp_path: Path, ranks: int) -> None:
    rows = [b"{broken", b"", *(json.dumps({"text": f"text {n}" * n}).encode() for n in range(1, 40)), b"[1]"]
    file = write_lines(tmp_path / "a.jsonl", *rows)
    files = list_files([str(file)])
    pieces = [index_spans(files, cut_spans(files, CorpusPart(), rank, ranks), DEFAULT_ROWS) for rank in range(ranks)]
    corpus = make_corpus(files, pieces, DEFAULT_ROWS)
    assert [*corpus.ids()] == [f"a.jsonl:{n}" for n, row in enumerate(rows, 1) if row]
    assert "line 1 of" in str(corpus.read(0).error) and "line 42 of" in str(corpus.read(40).error)
    ids = list[str]()
    for task in range(3):
        part = CorpusPart(task, 3)
        pieces = [index_spans(files, cut_spans(files, part, rank, ranks), DEFAULT_ROWS) for rank in range(ranks)]
        share = make_corpus(files, pieces, DEFAULT_ROWS, part=part)
        assert [share.read(n).id for n in range(len(share))] == [*share.ids()]
        ids += share.ids()
    assert ids == [*corpus.ids()]


def test_rows_after_a_part_that_cannot_be_read_get_no_wrong_ids(tmp_path: Path) -> None:
    rows = [{"text": f"text {n} " * 30, **({"id": f"row-{n}"} if n % 2 else {})} for n in range(60)]
    file = write_lines(tmp_path / "a.jsonl", *rows)
    files = list_files([str(file)])

    def index(failing: int | None) -> Corpus:
        pieces = []
        for rank in range(3):
            with faults(*[Faults("open", file.name)] * (rank == failing)):
                pieces.append(index_spans(files, cut_spans(files, CorpusPart(), rank, 3), DEFAULT_ROWS))
        return make_corpus(files, pieces, DEFAULT_ROWS)

    whole = index(None)
    wanted = {name: whole.read(number) for number, name in enumerate(whole.ids())}
    for failing in range(3):
        found = index(failing)
        read = {name: found.read(number) for number, name in enumerate(found.ids())}
        assert str(read.pop("a.jsonl").error).startswith(NOT_NOW)
        assert read.items() <= wanted.items()
        after = 20 * (2 - failing)
        assert abs(len(read) - (20 * failing + after // 2)) <= 2, "those with ids are known"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_the_division_of_a_table_that_has_changed_is_another_one(tmp_path: Path, name: str) -> None:
    rows = [{"id": f"{n}", "text": f"text {n}"} for n in range(20)]

    def cut(rows: list[Any]) -> str:
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            (write_gzip if name.endswith(".gz") else write_lines)(tmp_path / name, *rows)
        return scan_corpus([str(tmp_path)], part=CorpusPart(1, 3)).cut

    assert cut(rows) == cut(rows) != cut([{"id": "new", "text": "another"}, *rows])


def test_a_hundred_tasks_read_the_corpus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": f"{n}", "text": "words " * 200} for n in range(4000)]
    size = write_lines(tmp_path / "a.jsonl", *rows).stat().st_size
    for n in range(300):
        (tmp_path / f"{n}.txt").write_text("words " * 5000)
    read = [0]

    class Counts(io.BufferedReader):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            read[0] += len(line)
            return line

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            read[0] += len(data)
            return data

    real = formats.open_regular
    monkeypatch.setattr(formats, "open_regular", lambda path, **how: Counts(real(path, **how).detach()))
    count = sum(len(scan_corpus([str(tmp_path)], part=CorpusPart(n, 100))) for n in range(100))
    assert count == 4300
    assert size <= read[0] < 1.1 * size, "texts are read by those who answer them"


def test_a_million_rows_need_little_memory(tmp_path: Path) -> None:
    """A row is a few numbers, its id, and the beginning of its hash if it has results; here of 20,000."""
    count = 20_000
    with (tmp_path / "a.jsonl").open("w") as stream:
        stream.writelines(f'{{"id": "document-{n:07d}", "text": "words"}}\n' for n in range(count))
    files = list_files([str(tmp_path)])
    recorded = np.sort(np.array([hash_id(f"document-{n:07d}") for n in range(count)], np.uint64))
    spans = [cut_spans(files, CorpusPart(), rank, 4) for rank in range(4)]
    pieces = [index_spans(files, some, DEFAULT_ROWS, recorded=recorded) for some in spans]
    tracemalloc.start()
    try:
        corpus = Corpus.from_bytes(make_corpus(files, pieces, DEFAULT_ROWS).to_bytes())
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(corpus) == len(corpus.index.digested) == count and corpus.id(17_777) == "document-0017777"
    assert now < 75 * count and peak < 150 * count


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
    assert [(one.id, one.text) for one in found] == [("large.txt", ""), ("rows.jsonl:1", ""), ("b", "short")]
    assert "larger than 64 MiB" in str(found[0].error)
    assert f"line 1 of {tmp_path}/rows.jsonl.gz has {8 * (48 << 20) + 24} bytes" in str(found[1].error)
    assert peak_bytes < 300 << 20
