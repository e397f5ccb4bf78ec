"""JSON Lines, compressed or not: what is wrong with one line stays with that line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from made_corpora import errors_of, read, read_one, rows_that_do_not_compress, write_gzip, write_lines

from kvr_mpi.documents import Document

# JSON Lines


def test_lines_need_no_escapes(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c 文 \U0001f600"  # line ends to Python, but not to JSON Lines
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"id": "a", "text": text}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_one(file) == Document("a", text)


def test_blank_lines_are_passed_over_but_counted(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", b"", {"text": "one"}, b"  \t", b"\r", {"text": "two"})
    assert [document.id for document in read(file)] == ["a.jsonl:2", "a.jsonl:5"]


def test_a_file_of_blank_lines_has_no_documents(tmp_path: Path) -> None:
    assert read(write_lines(tmp_path / "a.jsonl", b"", b" ")) == []
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert read(tmp_path) == []


def test_a_last_line_needs_no_end_and_a_first_may_have_a_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}')
    assert read(tmp_path) == [Document("a", "one"), Document("b", "two")]


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": "bad", "text": "unfinished',
        b"{'id': 'bad'}",
        b"words",
        b'{"id": "bad", "text": "caf\xe9"}',
        b'{"text": "one"} {"text": "two"}',
        b'{"id": ' + b"9" * 5000 + b', "text": "words"}',
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_broken_line_keeps_the_others(tmp_path: Path, line: bytes) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"id": "a", "text": "one"}, line, {"id": "b", "text": "two"})
    first, bad, last = read(file)
    assert (first, last) == (Document("a", "one"), Document("b", "two"))
    assert bad.id == "a.jsonl:2"
    assert bad.error is not None and re.search(rf"line 2 of {re.escape(str(file))} is not JSON", bad.error)


@pytest.mark.parametrize(
    ("line", "kind"), [(b"[1]", "list"), (b'"words"', "str"), (b"5", "int"), (b"null", "NoneType")]
)
def test_a_line_that_is_no_object_is_an_error(tmp_path: Path, line: bytes, kind: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", line, {"id": "b", "text": "two"})
    bad, good = read(file)
    assert bad.id == "a.jsonl:1"
    assert bad.error is not None and re.search(f"line 1 of .* is a JSON {kind}, not an object", bad.error)
    assert good == Document("b", "two")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    # JSON can write it, UTF-8 cannot: it would break the hash, the tokeniser, and the output file.
    file = write_lines(tmp_path / "a.jsonl", b'{"id": "a", "text": "ab\\ud800c"}', {"id": "b", "text": "two"})
    bad, good = read(file)
    assert bad.text == ""
    assert bad.error is not None and re.search("a: lone surrogate at character 2", bad.error)
    assert good == Document("b", "two")


def test_half_a_surrogate_pair_is_no_id_either(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", b'{"id": "a\\ud800", "text": "one"}', {"id": "b", "text": "two"})
    bad, good = read(file)
    assert bad.error is not None
    assert good == Document("b", "two")


# Compressed JSON Lines


def test_a_truncated_archive_keeps_what_came_before(tmp_path: Path) -> None:
    file = write_gzip(tmp_path / "a.jsonl.gz", *rows_that_do_not_compress())
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (tmp_path / "z.txt").write_text("sound")
    *good, bad, last = read(tmp_path)
    assert good == [Document(row["id"], row["text"]) for row in rows_that_do_not_compress()[: len(good)]]
    assert len(good) > 100
    assert bad.id == "a.jsonl.gz"
    assert bad.error is not None and re.search(r"a\.jsonl\.gz cannot be read: .*ended before", bad.error)
    assert last == Document("z.txt", "sound")


@pytest.mark.parametrize("place", ["header", "block", "data", "checksum"])
def test_a_damaged_archive_is_an_error(tmp_path: Path, place: str) -> None:
    file = write_gzip(tmp_path / "a.jsonl.gz", *rows_that_do_not_compress())
    raw = bytearray(file.read_bytes())
    # The first block follows the header of ten bytes; 0xff is a kind of block that there is not.
    start = {"header": 0, "block": 10, "data": len(raw) // 2, "checksum": len(raw) - 8}[place]
    for position in range(start, min(start + 100, len(raw))):
        raw[position] = 0xFF
    file.write_bytes(raw)
    (tmp_path / "z.txt").write_text("sound")
    documents = read(tmp_path)
    assert documents[-1] == Document("z.txt", "sound")
    assert "cannot be read" in errors_of(documents)["a.jsonl.gz"]


def test_an_archive_that_is_none_is_an_error(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl.gz", {"id": "a", "text": "not compressed"})
    assert re.search("cannot be read: Not a gzipped file", errors_of(read(tmp_path))["a.jsonl.gz"])
