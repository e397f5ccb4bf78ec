"""What cannot be read for the moment is not lost, nor taken for damaged, and an outage is waited for once."""

from __future__ import annotations

import errno
import gzip
import io
import os
import random
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_calls import Faults, faults
from made_corpora import write_gzip, write_lines

import kvr_mpi.documents.formats as files_module
from kvr_mpi import disk
from kvr_mpi.documents import files, find_files, read_corpus, scan_corpus
from kvr_mpi.documents.index import hash_id
from kvr_mpi.errors import EXIT_CONFIG, EXIT_STOPPED, NOT_NOW, CorpusError, KvrError, UnavailableError

ROWS = [{"id": f"row-{number}", "text": f"text {number} " * 50} for number in range(40)]
TABLES = ("t.jsonl", "t.jsonl.gz", "t.parquet")


def write_folder(folder: Path) -> Path:
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "z.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return folder


def write_table(folder: Path, name: str) -> Path:
    file = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=8)
        return file
    return (write_gzip if name.endswith(".gz") else write_lines)(file, *ROWS)


@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "s*/*.txt", "sub/**/*.txt", "*/deep/*"])
def test_a_folder_that_cannot_be_listed_loses_no_documents(tmp_path: Path, pattern: str) -> None:
    path = str(write_folder(tmp_path) / pattern)
    wanted = find_files([path])
    for ending in (str(tmp_path), "sub", "sub/deep"):
        with faults(list_fault := Faults("scandir", ending, times=2)):
            assert find_files([path]) == wanted
        if list_fault.count == 0:  # this pattern does not need it
            continue
        for number, code in ((errno.ESTALE, EXIT_STOPPED), (errno.EACCES, EXIT_CONFIG)):
            with faults(Faults("scandir", ending, number=number)), pytest.raises(KvrError, match=ending) as caught:
                find_files([path])
            assert caught.value.exit_code == code
            assert isinstance(caught.value, UnavailableError if code == EXIT_STOPPED else CorpusError)


def test_only_the_file_system_may_look_into_its_lost_files(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "lost+found").mkdir()
    with faults(Faults("scandir", "lost+found", number=errno.EACCES)):
        assert len(find_files([str(tmp_path)])) == len(find_files([str(tmp_path / "**")])) == 4


class FailsOnce(io.BufferedReader):
    """A stream whose n-th read of a line or block fails."""

    left: list[int]

    def _strike(self) -> None:
        self.left[0] -= 1
        if self.left[0] == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def readline(self, size: int | None = -1, /) -> bytes:
        self._strike()
        return super().readline(size)

    def read(self, size: int | None = -1, /) -> bytes:
        self._strike()
        return super().read(size)


@pytest.mark.parametrize("name", [*TABLES, "t.txt"])
@pytest.mark.parametrize("call", ["open", "stat", "read"])
def test_a_file_that_fails_once_is_read_as_if_it_had_not(
    tmp_path: Path, name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_folder(tmp_path) / "a.txt" if name == "t.txt" else write_table(tmp_path, name)
    wanted = list(read_corpus([str(file)]))
    corpus = scan_corpus([str(file)])
    for first in (1, 2, 3):
        if call != "read":
            with faults(Faults(call, file.name, first, times=1)):
                assert list(read_corpus([str(file)])) == wanted
                assert scan_corpus([str(file)]).to_bytes() == corpus.to_bytes()
            with faults(Faults(call, file.name, first, times=1)):
                assert [corpus.read(number) for number in range(len(corpus))] == wanted
        elif name != "t.parquet":
            left, real = [first], files_module.open_regular

            def fails_once(path: Path, left: list[int] = left, real: Any = real, **options: Any) -> BinaryIO:
                stream = FailsOnce(real(path, **options).detach())
                stream.left = left
                return stream

            for read in (lambda: [*read_corpus([str(file)])], lambda: [*map(corpus.read, range(len(corpus)))]):
                left[0] = first
                monkeypatch.setattr(files_module, "open_regular", fails_once)
                with faults():
                    assert read() == wanted
                monkeypatch.undo()
                assert left[0] <= 0 or name != "t.jsonl"


@pytest.mark.parametrize("name", [*TABLES, "sub/b.txt"])
def test_a_file_that_cannot_be_read_now_is_read_again_at_the_next_start(tmp_path: Path, name: str) -> None:
    file = write_folder(tmp_path) / name if name.endswith(".txt") else write_table(tmp_path, name)
    (tmp_path / "damaged.jsonl.gz").write_bytes(gzip.compress(b"x" * 999)[:20])
    with faults(Faults("open", file.name)):
        corpus = scan_corpus([str(tmp_path)])
        found = {document.id: document.error or "" for document in map(corpus.read, range(len(corpus)))}
    name = name.removesuffix(".gz")
    assert found[name].startswith(NOT_NOW) and str(file) in found[name]
    assert found["damaged.jsonl"] and not found["damaged.jsonl"].startswith(NOT_NOW)
    transient = {corpus.id(number) for number in range(len(corpus)) if corpus.is_transient(number)}
    assert transient == ({name} if name.startswith("t.") else set()), "texts are read later"
    assert len(scan_corpus([str(tmp_path)])) == (len(ROWS) + 1 if transient else 5)


def test_a_document_that_cannot_be_read_in_the_middle_of_a_job_says_so_and_the_rest_is_not_waited_for(
    tmp_path: Path,
) -> None:
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_text(f"text {number}")
    corpus = scan_corpus([str(tmp_path)])
    with faults(Faults("open", ".txt")) as waits:
        assert all((corpus.read(number).error or "").startswith(NOT_NOW) for number in range(50))
        assert disk.RETRY_S < sum(waits) < 5 * disk.RETRY_S, "an outage is waited for, not once per document"
        recorded = np.sort(np.array([hash_id(name) for name in corpus.ids()], np.uint64))
        again = scan_corpus([str(tmp_path)], recorded=recorded)
        assert all(map(again.is_transient, range(50)))
        assert sum(waits) < 10 * disk.RETRY_S
    with faults(Faults("open", "07.txt", times=2)):
        assert corpus.read(6).error is None and corpus.read(7).error is None
    (tmp_path / "08.txt").write_text("another text")
    (tmp_path / "09.txt").unlink()
    assert corpus.read(8).text == "another text", "its record has the hash of what was read"
    assert not (corpus.read(9).error or NOT_NOW).startswith(NOT_NOW), "gone, which no start repairs"


def test_a_table_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server reports it (ESTALE): rows of two files must not become one list."""
    file, real, left = write_table(tmp_path, "t.jsonl"), files_module.open_regular, [20]

    class IsReplaced(FailsOnce):
        def _strike(self) -> None:
            try:
                super()._strike()
            except OSError:
                write_lines(file, {"id": "new", "text": "1"}, *ROWS)
                raise

    def fails_at_row_20(path: Path, **options: Any) -> BinaryIO:
        stream = IsReplaced(real(path, **options).detach())
        stream.left = left
        return stream

    with faults():
        monkeypatch.setattr(files_module, "open_regular", fails_at_row_20)
        known = scan_corpus([str(file)])
        monkeypatch.undo()
    assert [known.id(n) for n in range(len(known)) if known.is_transient(n)] == ["t.jsonl"] and len(known) == 20
    assert len(scan_corpus([str(file)])) == len(ROWS) + 1


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.parquet"])
def test_a_file_that_cannot_seek_is_read_once_for_all_prompts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, opened, real = write_table(tmp_path, name), [], files_module.open_regular
    corpus = scan_corpus([str(file)], prompts=("one", "two", "three"))
    monkeypatch.setattr(files_module, "open_regular", lambda path, **how: opened.append(path) or real(path, **how))
    numbers = random.Random(0).sample(range(len(corpus)), len(corpus))  # in any order
    texts = {number: corpus.read(number).text for number in numbers}
    assert [texts[number] for number in range(len(corpus))] == [row["text"] for row in ROWS for _ in range(3)]
    assert len(opened) == (1 if name.endswith(".gz") else pytest.approx(15, abs=10)), "a few times for 5 row groups"


def test_a_row_of_parquet_is_found_in_its_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, read, real = scan_corpus([str(write_table(tmp_path, "t.parquet"))]), list[int](), files.parquet_rows

    def watched(*given: Any) -> Any:
        for number, row in real(*given):
            read.append(number)
            yield number, row

    monkeypatch.setattr(files, "parquet_rows", watched)
    assert [corpus.read(number).id for number in (35, 12, 33, 11)] == ["row-35", "row-12", "row-33", "row-11"]
    assert read == [32, 33, 34, 35, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENFILE, errno.ENOENT])
def test_a_file_that_may_not_be_opened_is_tried_by_the_next_start(tmp_path: Path, number: int) -> None:
    file = write_folder(tmp_path) / "a.txt"
    corpus = scan_corpus([str(tmp_path)])
    with faults(Faults("open", file.name, number=number)):
        assert (corpus.read(0).error or "").startswith(NOT_NOW)
        recorded = np.array([hash_id("a.txt")], np.uint64)
        assert scan_corpus([str(tmp_path)], recorded=recorded).is_transient(0)
