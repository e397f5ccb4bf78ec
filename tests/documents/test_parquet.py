"""Parquet files of every way to store a string, sound and damaged: what is wrong stays with the file."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from made_corpora import WRITERS, errors_of, read, read_one, rows_that_do_not_compress, write_parquet
from measured import run_and_measure

from kvr_mpi.documents import Document


def test_dates_in_parquet_are_ids(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", id=[datetime.date(2024, 1, 31)], text=["words"])
    assert read_one(tmp_path).id == "2024-01-31"


@pytest.mark.parametrize("damage", ["empty", "truncated", "foreign", "pages"])
def test_a_damaged_parquet_file_is_an_error_and_the_others_go_on(tmp_path: Path, damage: str) -> None:
    rows = rows_that_do_not_compress()
    file = WRITERS[".parquet"](tmp_path / "a.parquet", rows)
    raw = bytearray(file.read_bytes())
    if damage == "pages":
        for position in range(20, len(raw) // 2):
            raw[position] ^= 0xFF
    file.write_bytes({"empty": b"", "truncated": raw[: len(raw) // 2], "foreign": b"words", "pages": raw}[damage])
    (tmp_path / "z.txt").write_text("sound")
    documents = read(tmp_path)
    assert documents[-1] == Document("z.txt", "sound")
    assert re.search(r"a\.parquet cannot be read", errors_of(documents)["a.parquet"])


def test_parquet_strings_that_are_not_utf8_are_an_error(tmp_path: Path) -> None:
    # Parquet does not check its strings, and neither do all who write it.
    texts = pa.array([b"sound", b"caf\xe9"], pa.binary()).view(pa.string())
    write_parquet(tmp_path / "a.parquet", id=["a", "b"], text=texts)
    (tmp_path / "z.txt").write_text("sound")
    documents = read(tmp_path)
    assert documents[-1] == Document("z.txt", "sound")
    assert len(errors_of(documents)) >= 1


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_may_store_strings_in_any_way(tmp_path: Path, kind: pa.DataType) -> None:
    file = write_parquet(tmp_path / "a.parquet", id=[1, 2], text=pa.array(["one", "two"]).cast(kind))
    assert read(file) == [Document("1", "one"), Document("2", "two")]


def test_a_parquet_file_without_rows_has_no_documents(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", id=pa.array([], pa.string()), text=pa.array([], pa.string()))
    assert read(file) == []


def test_parquet_without_either_field_is_an_error_a_row(tmp_path: Path) -> None:
    documents = read(write_parquet(tmp_path / "a.parquet", body=["one", "two"]))
    assert set(errors_of(documents)) == {"a.parquet:1", "a.parquet:2"}


@pytest.mark.slow
def test_a_parquet_file_that_inflates_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """A dictionary holds a long text once, however many rows have it."""
    path = tmp_path / "rows.parquet"
    rows = pa.table({"id": [f"{n}" for n in range(40)], "text": ["x" * (20 << 20)] * 40})
    pyarrow.parquet.write_table(rows, path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    del rows
    count = "import sys; from kvr_mpi.documents import read_corpus; print(sum(1 for _ in read_corpus(sys.argv[1:])))"
    code, rss_bytes = run_and_measure([sys.executable, "-c", count, path])
    assert code == 0 and rss_bytes < 700 << 20, f"{rss_bytes >> 20} MiB"
