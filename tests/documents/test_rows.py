"""Rows of JSON Lines, compressed or not, and of Parquet: the same documents in all; what is wrong stays where it is."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpora import (
    WRITERS,
    errors_of,
    read,
    tables,
    unicode_text,
    write_gzip,
    write_lines,
    write_parquet,
)

from kvr_mpi.documents import MAX_ID_CHARS, Corpus, Document, RowFormat, read_corpus, scan_corpus
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.documents.questions import answer_id
from kvr_mpi.errors import CorpusError

# Any table


@tables
def test_rows_are_documents_in_their_order(tmp_path: Path, suffix: str) -> None:
    made = {"title": "Rain", "year": 1931, "more": [1, None], "id": "not this", "text": "not this"}
    rows = [{"key": f"row {number}", "body": f"text {number}", **made} for number in range(600)]
    read_as: dict[str, Any] = {"id_field": "key", "text_field": "body", "columns": ("title", "year")}
    file = WRITERS[suffix](tmp_path / f"a{suffix}", rows)
    documents = read(file, **read_as, passed=("more", "year"))
    columns, passed = {"title": "Rain", "year": "1931"}, {"more": [1, None], "year": 1931}
    assert documents == [Document(row["key"], row["body"], columns=columns, passed=passed) for row in rows]
    corpus = scan_corpus([str(file)], rows=RowFormat(**read_as, passed=("more", "year")))
    again = Corpus.from_bytes(corpus.to_bytes())
    assert corpus.read(599) == again.read(599) == documents[599]


@tables
def test_a_row_without_an_id_is_named_by_its_place(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"a{suffix}", [{"text": "one"}, {"text": "two"}])
    name = f"a{suffix.removesuffix('.gz')}"
    assert [document.id for document in read(tmp_path)] == [f"{name}:1", f"{name}:2"]
    WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": None, "text": "one"}, {"id": "b", "text": "two"}])
    assert [document.id for document in read(tmp_path)] == [f"{name}:1", "b"]


@tables
def test_ids_are_numbers_or_any_text(tmp_path: Path, suffix: str) -> None:
    texts = ["a/b", "/etc/passwd", "../up", ".", "Größe 文", "a#2", "x" * MAX_ID_CHARS]
    for names in ([0, -3], [2.5], texts):
        file = WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": name, "text": "words"} for name in names])
        assert read(file) == [Document(str(name), "words") for name in names]


def test_answers_whose_ids_are_too_long_have_names_of_their_own() -> None:
    """Answers about two documents whose ids differ at the end only were once one document to a run."""
    ids = ["x" * (MAX_ID_CHARS - 1) + last for last in "ab"]
    found = [answer_id(name, "who") for name in ids]
    assert all(error is not None and "512 are allowed" in error for _, error in found)
    assert len({answer for answer, _ in found}) == 2 and all(len(answer) <= MAX_ID_CHARS for answer, _ in found)
    assert answer_id("x" * (MAX_ID_CHARS - 4), "who") == ("x" * (MAX_ID_CHARS - 4) + "#who", None)


LONG = f"expected 1 to {MAX_ID_CHARS} characters"


@tables
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": {"a": 1}, "text": "x"}, "the id field 'id' is a dict"),
        ({"id": True, "text": "x"}, "the id field 'id' is a bool"),
        ({"id": math.nan, "text": "x"}, "the id field 'id' is nan"),
        ({"id": "a\nb", "text": "x"}, rf"contains '\\n'; {LONG}"),
        ({"id": "invoice\u202etxt.exe", "text": "x"}, rf"contains '\\u202e'; {LONG}"),
        ({"id": "x" * (MAX_ID_CHARS + 1), "text": "x"}, f"has {MAX_ID_CHARS + 1} characters; {LONG}"),
        ({"id": "", "text": "x"}, f"has 0 characters; {LONG}"),
        ({"id": "bad", "text": None}, r":1: the text field 'text' is missing; expected a string \(fields: id, label"),
        ({"id": "bad", "text": 5}, "text field 'text' is a int"),
        ({"id": "bad", "text": " \n"}, "document is empty"),
        ({"id": "bad", "text": "x", "title": None}, "the field 'title', used in the template, is missing"),
        ({"id": "bad", "text": "x", "title": ["t"]}, "the field 'title', used in the template, is a list"),
    ],
)
def test_what_is_wrong_with_a_row_is_its_error(tmp_path: Path, suffix: str, row: dict[str, Any], words: str) -> None:
    file = WRITERS[suffix](tmp_path / f"a{suffix}", [{"title": "t", "label": 1, **row}])
    other = WRITERS[suffix](tmp_path / f"b{suffix}", [{"id": "b", "text": "sound", "title": "t", "label": 2}])
    options = {"columns": ("title",), "passed": ("label",)}
    bad, good = read(file, other, **options)
    assert bad.error is not None and re.search(words, bad.error) and bad.text == ""
    assert good == Document("b", "sound", columns={"title": "t"}, passed={"label": 2})
    corpus = scan_corpus([str(file)], rows=RowFormat(**options))  # type: ignore[arg-type]
    assert bad.passed == corpus.read(0).passed == {"label": 1}, "its record still has what is passed on"


@settings(max_examples=30)
@given(texts=st.lists(unicode_text.filter(str.strip), min_size=1, max_size=8))
def test_any_text_comes_through_any_table(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    for suffix, write in WRITERS.items():
        file = write(folder / f"a{suffix}", [{"text": text} for text in texts])
        documents = read(file)
        assert [document.text for document in documents] == texts
        corpus = scan_corpus([str(file)])
        assert [corpus.read(index) for index in reversed(range(len(corpus)))] == documents[::-1]


# Ids are unique


def test_later_copies_of_an_id_are_errors_with_names_of_their_own(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"id": 7, "text": "first", "n": 1}, {"id": "7", "text": "second", "n": 2})
    write_gzip(tmp_path / "b.jsonl.gz", {"id": "7", "text": "third"}, {"id": "b", "text": "other"})
    write_parquet(tmp_path / "c.parquet", id=["7"], text=["fourth"])
    first, *copies, other, last = read(tmp_path, passed=("n",))
    assert (first.id, first.text, other.id) == ("7", "first", "b")
    assert [(copy.id, copy.text) for copy in [*copies, last]] == [("7#2", ""), ("7#3", ""), ("7#4", "")]
    assert all(copy.error and re.search("duplicate id '7'.*make ids unique", copy.error) for copy in copies)
    assert copies[0].passed == scan_corpus([str(tmp_path)], rows=RowFormat(passed=("n",))).read(1).passed == {"n": 2}


@settings(max_examples=60)
@given(names=st.lists(st.text("ab#2\n", max_size=4), min_size=1, max_size=12))
def test_ids_are_unique_whatever_they_were(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    documents = read(write_lines(file, *({"id": name, "text": "words"} for name in names)))  # `read` checks it
    assert len(documents) == len(names) and documents == read(file)
    assert {document.id for document in documents if document.error is None} <= set(names)


# JSON Lines


def test_blank_lines_marks_and_line_ends(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c 文 \U0001f600"  # line ends to Python, but not to JSON Lines
    line = json.dumps({"text": text}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n  \t\n\r\n" + line.replace(b"a", b"z"))
    assert read(tmp_path) == [Document("a.jsonl:1", text), Document("a.jsonl:5", text.replace("a", "z"))]
    for void in (b"\n \n", b""):
        (tmp_path / "a.jsonl").write_bytes(void)
        with pytest.raises(CorpusError, match="no documents"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"id": "bad", "text": "unfinished', "is not JSON"),
        (b'{"id": "bad", "text": "caf\xe9"}', "is not JSON"),
        (b'{"id": ' + b"9" * 5000 + b', "text": "words"}', "is not JSON"),
        pytest.param(b"[" * 100_000, "is not JSON", id="deep"),
        (b"[1]", "is a JSON list, not an object"),
        (b'{"id": "bad", "text": "one", "text": "two"}', "is not JSON: the key 'text' occurs twice"),
        (b'{"id": "bad", "text": "one", "more": [{"a": 1, "a": 1}]}', "is not JSON: the key 'a' occurs twice"),
        # JSON can write it, UTF-8 cannot: it would break the hash, the tokeniser, and the output file.
        (b'{"text": "ab\\ud800c"}', "lone surrogate at character 2"),
        (b'{"id": "a\\ud800", "text": "one"}', "the id 'a"),
    ],
)
def test_a_broken_line_keeps_the_others(tmp_path: Path, line: bytes, why: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"id": "a", "text": "one"}, line, {"id": "b", "text": "two"})
    first, bad, last = read(file)
    assert (first, last) == (Document("a", "one"), Document("b", "two"))
    assert bad.error is not None and why in bad.error and bad.text == ""
    assert "JSON" not in why or (bad.id == "a.jsonl:2" and f"line 2 of {file}" in bad.error)


# Damaged files


# The first block of gzip follows the header of ten bytes; 0xff is a kind of block that there is not.
@pytest.mark.parametrize("place", ["empty", "truncated", "foreign", "header", "block", "data", "checksum"])
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_a_damaged_file_is_an_error_and_the_others_go_on(tmp_path: Path, suffix: str, place: str) -> None:
    words = random.Random(0)
    rows = [{"id": f"{number}", "text": words.randbytes(40).hex()} for number in range(1000)]  # no compression
    file = WRITERS[suffix](tmp_path / f"a{suffix}", rows)
    raw = bytearray(file.read_bytes())
    starts = {"header": 0, "block": 10, "data": len(raw) // 4, "checksum": len(raw) - 8}
    if place in starts:
        stop = len(raw) // 2 if suffix == ".parquet" else starts[place] + 100
        for position in range(starts[place], max(starts[place] + 8, min(stop, len(raw)))):
            raw[position] ^= 0xFF
    changed = {"empty": b"", "truncated": raw[: len(raw) // 2], "foreign": b"words"}.get(place, raw)
    file.write_bytes(changed)
    (tmp_path / "z.txt").write_text("sound")
    *good, last = read(tmp_path)
    assert last == Document("z.txt", "sound")
    if place != "empty" or suffix == ".parquet":
        bad = good.pop()
        assert bad.id == file.name.removesuffix(".gz") and "cannot be read" in (bad.error or "")
    if suffix == ".jsonl.gz" and place == "truncated":
        assert re.search(r"a\.jsonl\.gz cannot be read: .*ended before", bad.error or "") and len(good) > 100
        assert good == [Document(row["id"], row["text"]) for row in rows[: len(good)]], "what came before is kept"


# Parquet


def test_parquet_strings_that_are_not_utf8_are_an_error(tmp_path: Path) -> None:
    # Parquet does not check its strings, and neither do all who write it.
    texts = pa.array([b"sound", b"caf\xe9"], pa.binary()).view(pa.string())
    write_parquet(tmp_path / "a.parquet", id=["a", "b"], text=texts)
    (tmp_path / "z.txt").write_text("sound")
    documents = read(tmp_path)
    assert documents[-1] == Document("z.txt", "sound")
    assert len(errors_of(documents)) >= 1
    assert set(errors_of(read(write_parquet(tmp_path / "b.parquet", body=["x", "y"])))) == {
        "b.parquet:1",
        "b.parquet:2",
    }


@pytest.mark.slow
def test_a_parquet_file_that_inflates_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """A dictionary holds a long text once, however many rows have it."""
    path = tmp_path / "rows.parquet"
    rows = pa.table({"id": [f"{n}" for n in range(40)], "text": ["x" * (20 << 20)] * 40})
    pyarrow.parquet.write_table(rows, path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    del rows
    usual = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(watched)
    try:
        assert sum(1 for _ in read_corpus([str(path)])) == 40
    finally:
        pa.set_memory_pool(usual)
    assert 20 << 20 < watched.max_memory() < 300 << 20, f"{watched.max_memory() >> 20} MiB"


def test_documents_keep_their_hashes() -> None:
    with_column = Document("a", "text", columns={"title": "t"})
    with_setting = Document("a", "text", generation=OwnGeneration(temperature=0.5))
    assert with_column.sha256 == "ff344c0b64729fc10f60dccd40b814f227c249815ab877d50764ff43203c3098"
    assert with_setting.sha256 == "5a90c19bf5fec7db868f5cdc5eb489d45d2ee50b76494346e6fb5b030f4a2519"
    with_penalty = OwnGeneration(temperature=0.5, presence_penalty=0.0)
    assert replace(with_setting, generation=with_penalty).sha256 != with_setting.sha256, "0 may differ from the job's"
