"""Corpora of every kind, sound and broken: what is wrong with one document stays with that document."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import math
import os
import random
import re
import socket
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvr_mpi.documents import MAX_ID_CHARS, SUFFIXES, Document, find_files, read_corpus, scan_corpus
from kvr_mpi.errors import EXIT_CONFIG, ConfigError, CorpusError

# What any document may be: text that is Unicode (no lone surrogates).
unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


def read(*paths: str | Path, **options: Any) -> list[Document]:
    """Read the whole corpus, and check what holds of every one."""
    documents = list(read_corpus([str(path) for path in paths], **options))
    ids = [document.id for document in documents]
    assert len(set(ids)) == len(ids)
    for document in documents:
        assert document.id
        assert document.id.encode("utf-8")  # it becomes a key, and part of a hash
        assert not re.search(r"[\x00-\x1f\x7f]", document.id)
        if document.error is None:
            assert document.text.strip()
            assert document.text.encode("utf-8")
    return documents


def read_one(*paths: str | Path, **options: Any) -> Document:
    (document,) = read(*paths, **options)
    return document


def errors_of(documents: Iterable[Document]) -> dict[str, str]:
    """What is wrong, by id, for those with something wrong."""
    return {document.id: document.error for document in documents if document.error is not None}


def write_lines(path: Path, *rows: Any) -> Path:
    """Write JSON Lines; a row of bytes is written as it is."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_gzip(path: Path, *rows: Any) -> Path:
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    ".jsonl": lambda path, rows: write_lines(path, *rows),
    ".jsonl.gz": lambda path, rows: write_gzip(path, *rows),
    ".parquet": lambda path, rows: write_parquet(path, **{key: [row[key] for row in rows] for key in rows[0]}),
}
tables = pytest.mark.parametrize("suffix", WRITERS)


# Where documents come from


def test_a_folder_is_read_to_its_depths_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "deep/er/c.txt", "deep/a.txt", "Z.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "notes.pdf").write_text("of no known format, and passed over")
    documents = read(tmp_path)
    assert {document.id for document in documents} == {"b.txt", "a.md", "deep/er/c.txt", "deep/a.txt", "Z.TXT"}
    assert all(document == Document(document.id, f"text of {document.id}") for document in documents)
    assert documents == read(tmp_path) == read(tmp_path)
    found = [Path(file) for file, _ in find_files([str(tmp_path)])]
    assert found == sorted(found)


def test_hidden_files_and_folders_are_passed_over(tmp_path: Path) -> None:
    corpus = tmp_path / ".cache" / "corpus"  # hidden folders above the corpus do not count
    for name in ("seen.txt", ".hidden.txt", ".git/inside.txt", "sub/.hidden.md"):
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_text("text")
    assert [document.id for document in read(corpus)] == ["seen.txt"]


def test_globs_match_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.text for document in read(tmp_path / "*.txt")] == ["a.txt", "b.txt"]
    assert {document.text for document in read(tmp_path / "**" / "*.txt")} == {"a.txt", "b.txt", "sub/d.txt"}


def test_a_name_full_of_wildcards_is_a_file_first(tmp_path: Path) -> None:
    (tmp_path / "draft [1].txt").write_text("the one that was named")
    assert read_one(tmp_path / "draft [1].txt").text == "the one that was named"


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    assert read_one("~/a.txt") == Document("a.txt", "text")


def test_paths_are_read_in_the_order_they_are_named(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert [document.text for document in read(*(tmp_path / f"{name}.txt" for name in "cab"))] == ["c", "a", "b"]


def test_a_file_named_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert len(find_files(["docs", "docs/*.txt", "docs/a.txt", "./docs"])) == 1
    assert len(find_files(["docs", str(tmp_path / "docs")])) == 1


@pytest.mark.parametrize("name", ["missing.txt", "missing", "missing/*.jsonl", "*.nothing"])
def test_a_path_that_is_not_there_is_named_with_where_we_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CorpusError,
        match=re.escape(f"documents.path {name!r}: no such file or folder") + f".*{re.escape(str(tmp_path / name))}",
    ):
        find_files([name])


@pytest.mark.parametrize("path", ["~no-such-user-here/docs", "x" * 300, "nul\0byte.txt"])
def test_a_path_no_file_can_have_is_missing_like_any(path: str) -> None:
    with pytest.raises(CorpusError, match=r"documents\.path"):
        find_files([path])


@pytest.mark.parametrize("content", [(), ("notes.pdf", "data.csv"), (".hidden.txt",)])
def test_a_folder_without_documents_says_what_it_looked_for(tmp_path: Path, content: tuple[str, ...]) -> None:
    for name in content:
        (tmp_path / name).write_text("text")
    with pytest.raises(CorpusError, match=re.escape(str(tmp_path))) as caught:
        find_files([str(tmp_path)])
    assert all(suffix in str(caught.value) for suffix in SUFFIXES)


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.pdf").write_text("text")
    for pattern in ("b.pdf", "*"):
        with pytest.raises(CorpusError, match=r"b\.pdf is none of") as caught:
            find_files([str(tmp_path / pattern)])
        assert all(suffix in str(caught.value) for suffix in SUFFIXES)


def test_a_glob_that_matches_only_folders_matches_nothing(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match=r"documents\.path"):
        find_files([str(tmp_path / "*")])


def test_a_bad_path_among_good_ones_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="missing") as caught:
        find_files([str(tmp_path / "a.txt"), str(tmp_path / "missing.txt")])
    assert caught.value.exit_code == EXIT_CONFIG


def make_odd_files(folder: Path) -> set[str]:
    """Names of files that must not be opened, one of each suffix and kind."""
    for name in ("pipe.txt", "pipe.jsonl", "pipe.jsonl.gz", "pipe.parquet"):
        os.mkfifo(folder / name)
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    (folder / "to-pipe.md").symlink_to(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as door, contextlib.chdir(folder):
        door.bind("door.txt")
    return {
        "pipe.txt",
        "pipe.jsonl",
        "pipe.jsonl.gz",
        "pipe.parquet",
        "zero.txt",
        "zero.jsonl",
        "to-pipe.md",
        "door.txt",
    }


@pytest.mark.parametrize("pattern", ["", "*", "**/*"])
def test_what_is_no_regular_file_is_an_error_and_never_opened(tmp_path: Path, pattern: str) -> None:
    names = make_odd_files(tmp_path)
    (tmp_path / "sound.txt").write_text("sound")
    documents = read(tmp_path / pattern)
    assert [document.text for document in documents if document.error is None] == ["sound"]
    errors = errors_of(documents)
    assert set(errors) == names
    assert all("no regular file" in error for error in errors.values())
    assert "a named pipe" in errors["pipe.jsonl.gz"] and "a device" in errors["zero.txt"]


def test_a_path_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    for name in make_odd_files(tmp_path):
        with pytest.raises(CorpusError, match="expected a folder, a glob or a regular file"):
            find_files([str(tmp_path / name)])


def test_a_file_that_became_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for suffix, write in WRITERS.items():
        write(tmp_path / f"rows{suffix}", [{"id": suffix, "text": "one"}])
    (tmp_path / "plain.txt").write_text("one")
    corpus = scan_corpus([str(tmp_path)])
    for file in corpus.files:
        Path(file.path).unlink()
        os.mkfifo(file.path)
    for number in range(len(corpus)):
        error = corpus.read(number).error
        assert error is not None and "not now" in error and "a named pipe" in error


def test_globs_end_where_links_lead_back(tmp_path: Path) -> None:
    """Two links in each of three folders: 40 levels of them, as the kernel allows, would be 2^40 ways."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
        (tmp_path / name / "up").symlink_to(tmp_path)
        (tmp_path / name / "self").symlink_to(tmp_path / name)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "a")
    assert {name for _, name in find_files([str(tmp_path / "**/*/**/*.txt")])} == {"a.txt", "b.txt", "c.txt"}
    for pattern in ("**/*.txt", "**"):
        found = find_files([str(tmp_path / pattern)])
        assert [name for _, name in found] == ["a.txt", "b.txt", "c.txt"], pattern


def test_globs_follow_links_to_other_folders(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "deep" / "d.txt").write_text("d")
    (tmp_path / "docs" / ".hidden").mkdir(parents=True)
    (tmp_path / "docs" / ".hidden" / "h.txt").write_text("h")
    (tmp_path / "docs" / "a.txt").write_text("a")
    (tmp_path / "docs" / "link").symlink_to(tmp_path / "far")
    assert [document.text for document in read(tmp_path / "docs" / "**" / "*.txt")] == ["a", "d"]


# Text files


@settings(deadline=None, max_examples=50)
@given(text=unicode_text.filter(str.strip))
def test_a_text_file_is_its_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("corpus") / "a.txt"
    file.write_bytes(text.encode())
    document = read_one(file)
    assert document == Document("a.txt", text.removeprefix("\ufeff"))
    assert document.chars == len(document.text)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    assert read_one(tmp_path).text == "text"


def test_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert read_one(tmp_path).text == "one\r\ntwo\rthree\n"


@pytest.mark.parametrize(("raw", "byte", "position"), [(b"caf\xe9", "0xe9", 3), ("text".encode("utf-16"), "0xff", 0)])
def test_text_that_is_not_utf8_says_which_byte(tmp_path: Path, raw: bytes, byte: str, position: int) -> None:
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "b.txt").write_text("sound")
    bad, good = read(tmp_path)
    assert bad.error is not None and re.search(
        rf"a\.txt is not UTF-8: byte {byte} at position {position}; re-encode", bad.error
    )
    assert good == Document("b.txt", "sound")


@pytest.mark.parametrize("text", ["", " ", "\n\t \r\n", "\u2003\u00a0", "\ufeff"])
def test_a_document_without_words_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    document = read_one(tmp_path)
    assert (document.id, document.text) == ("a.txt", "")
    assert document.error is not None and re.search(r"a\.txt is empty: there is no text", document.error)


def test_a_file_that_cannot_be_read_is_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("sound")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "gone.jsonl.gz").symlink_to(tmp_path / "nowhere")
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    (tmp_path / "x.txt").mkdir()
    (tmp_path / "z.txt").write_text("sound, too")
    documents = read(tmp_path)
    assert {document.id for document in documents if document.error is None} == {"a.txt", "z.txt"}
    errors = errors_of(documents)
    assert set(errors) == {"gone.txt", "gone.jsonl", "gone.jsonl.gz", "gone.parquet", "x.txt"}
    assert all(f"{tmp_path / name} cannot be read" in error for name, error in errors.items())
    assert "No such file" in errors["gone.txt"]
    assert "directory" in errors["x.txt"]


def test_a_broken_link_named_by_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert "cannot be read" in errors_of(read(tmp_path / "gone.txt"))["gone.txt"]


def test_a_file_name_that_is_not_unicode_is_an_error_record(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    (tmp_path / "sound.txt").write_text("sound")
    documents = read(tmp_path)
    assert [document.id for document in documents if document.error is None] == ["sound.txt"]
    assert len(documents) == 2


# Tables: what all three kinds share


@tables
def test_rows_are_documents_in_their_order(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": f"row {number}", "text": f"text {number}", "more": number} for number in range(600)]
    documents = read(WRITERS[suffix](tmp_path / f"a{suffix}", rows))
    assert documents == [Document(row["id"], row["text"]) for row in rows]
    assert documents == read(tmp_path)


@tables
def test_fields_may_have_other_names(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": "not this", "key": "a", "body": "words", "text": "not this"}]
    file = WRITERS[suffix](tmp_path / f"a{suffix}", rows)
    assert read_one(file, id_field="key", text_field="body") == Document("a", "words")


@tables
def test_a_row_without_an_id_is_named_by_its_place(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"a{suffix}", [{"text": "one"}, {"text": "two"}])
    assert [document.id for document in read(tmp_path)] == [f"a{suffix}:1", f"a{suffix}:2"]
    WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": None, "text": "one"}, {"id": "b", "text": "two"}])
    assert [document.id for document in read(tmp_path)] == [f"a{suffix}:1", "b"]


@tables
@pytest.mark.parametrize("number", [0, 7, -3, 2.5])
def test_numbers_are_ids(tmp_path: Path, suffix: str, number: float) -> None:
    assert read_one(WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": number, "text": "words"}])).id == str(number)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ({"a": 1}, "a dict"),
        (["a"], "a list"),
        (True, "a bool"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (b"raw", "a bytes"),
    ],
)
@tables
def test_ids_that_are_no_names_are_errors(tmp_path: Path, suffix: str, name: Any, what: str) -> None:
    if isinstance(name, bytes) and suffix != ".parquet":
        pytest.skip("JSON has no bytes")
    (document,) = read(WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": name, "text": "words"}]))
    assert document.id == f"a{suffix}:1" and document.text == ""
    assert document.error is not None and f"the id field 'id' is {what}" in document.error


def test_dates_in_parquet_are_ids(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", id=[datetime.date(2024, 1, 31)], text=["words"])
    assert read_one(tmp_path).id == "2024-01-31"


@tables
@pytest.mark.parametrize("name", ["a/b", "/etc/passwd", "../up", ".", "..", "Größe 文", "a#2", "x" * MAX_ID_CHARS])
def test_ids_may_look_like_paths(tmp_path: Path, suffix: str, name: str) -> None:
    assert read_one(WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": name, "text": "words"}])) == Document(
        name, "words"
    )


@tables
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a\nb", r"contains '\\n'"),
        ("a\0b", r"contains '\\x00'"),
        ("\x7f", r"contains '\\x7f'"),
        ("x" * (MAX_ID_CHARS + 1), f"has {MAX_ID_CHARS + 1} characters"),
        ("", "has 0 characters"),
        ("\x9bm", r"contains '\\x9b'"),
        ("invoice\u202etxt.exe", r"contains '\\u202e'"),
        ("\u2066a", r"contains '\\u2066'"),
        ("a\u2028b", r"contains '\\u2028'"),
    ],
)
def test_ids_that_cannot_be_kept_are_errors(tmp_path: Path, suffix: str, name: str, what: str) -> None:
    rows = [{"id": name, "text": "words"}, {"id": "b", "text": "sound"}]
    bad, good = read(WRITERS[suffix](tmp_path / f"a{suffix}", rows))
    assert bad.error is not None and re.search(f"id .*{what}; expected 1 to {MAX_ID_CHARS} characters", bad.error)
    assert len(bad.id) <= MAX_ID_CHARS
    assert good == Document("b", "sound")


@tables
def test_every_empty_id_says_that_it_is_empty(tmp_path: Path, suffix: str) -> None:
    file = WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": "", "text": "words"}] * 3)
    errors = errors_of(read(file))
    assert len(errors) == 3
    assert all("0 characters" in error for error in errors.values())


@tables
def test_a_missing_text_field_names_the_fields_there_are(tmp_path: Path, suffix: str) -> None:
    file = WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": "a", "body": "words", "title": "word"}])
    error = errors_of(read(file))["a"]
    assert re.search(rf"a{re.escape(suffix)}:1: the text field 'text' is missing; expected a string", error)
    assert "body" in error and "title" in error


@tables
@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "missing"), (5, "int"), (0.5, "float"), (True, "bool"), (["a"], "list"), ({"b": 1}, "dict")],
)
def test_text_that_is_no_string_is_an_error(tmp_path: Path, suffix: str, value: Any, kind: str) -> None:
    documents = read(WRITERS[suffix](tmp_path / f"a{suffix}", [{"id": "a", "text": value}]))
    assert re.search(f"text field 'text' is .*{kind}; expected a string", errors_of(documents)["a"])


@tables
def test_an_empty_row_is_an_error_with_its_id(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": "a", "text": " \n"}, {"id": "b", "text": "sound"}]
    bad, good = read(WRITERS[suffix](tmp_path / f"a{suffix}", rows))
    assert bad.error is not None and "a is empty" in bad.error
    assert good.error is None


@tables
def test_a_limit_stops_after_so_many(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": f"{number}", "text": "words"} for number in range(5)]
    rows[1]["text"] = ""  # an error record counts, too
    file = WRITERS[suffix](tmp_path / f"a{suffix}", rows)
    for limit in (1, 3, 5, 99):
        assert [document.id for document in read(file, limit=limit)] == [row["id"] for row in rows[:limit]]


@settings(deadline=None, max_examples=30)
@given(texts=st.lists(unicode_text.filter(str.strip), min_size=1, max_size=8))
def test_any_text_comes_through_any_table(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    for suffix, write in WRITERS.items():
        file = write(folder / f"a{suffix}", [{"text": text} for text in texts])
        assert [document.text for document in read(file)] == texts


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


@settings(deadline=None, max_examples=60)
@given(raw=st.binary(max_size=200), suffix=st.sampled_from(SUFFIXES))
def test_no_file_stops_the_others(tmp_path_factory: pytest.TempPathFactory, raw: bytes, suffix: str) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / f"a{suffix}").write_bytes(raw)
    (folder / "z.txt").write_text("sound")
    assert read(folder)[-1] == Document("z.txt", "sound")


# Compressed JSON Lines


def rows_that_do_not_compress() -> list[dict[str, str]]:
    words = random.Random(0)
    return [{"id": f"{number}", "text": words.randbytes(40).hex()} for number in range(1000)]


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


# Parquet


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


# Duplicate ids


def test_later_copies_of_an_id_are_errors_with_names_of_their_own(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": text} for text in ("first", "second", "third")]
    first, *copies = read(write_lines(tmp_path / "a.jsonl", *rows, {"id": "b", "text": "other"}))
    assert first == Document("a", "first")
    assert copies.pop() == Document("b", "other")
    assert [copy.id for copy in copies] == ["a#2", "a#3"]
    assert all(copy.error and re.search("duplicate id 'a'.*make ids unique", copy.error) for copy in copies)
    assert all(copy.text == "" for copy in copies)


def test_copies_in_other_files_are_copies(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"id": "x", "text": "first"})
    write_gzip(tmp_path / "b.jsonl.gz", {"id": "x", "text": "second"})
    write_parquet(tmp_path / "c.parquet", id=["x"], text=["third"])
    assert [(document.id, document.text) for document in read(tmp_path)] == [("x", "first"), ("x#2", ""), ("x#3", "")]


def test_files_of_one_name_in_two_folders_are_copies(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    documents = read(tmp_path / "one", tmp_path / "two")
    assert [(document.id, document.text) for document in documents] == [("a.txt", "one"), ("a.txt#2", "")]
    assert {document.id for document in read(tmp_path)} == {"one/a.txt", "two/a.txt"}


def test_a_number_and_its_digits_are_one_id(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"id": 7, "text": "one"}, {"id": "7", "text": "two"})
    assert [document.id for document in read(file)] == ["7", "7#2"]


@settings(deadline=None, max_examples=60)
@given(names=st.lists(st.text("ab#2\n", max_size=4), min_size=1, max_size=12))
def test_ids_are_unique_whatever_they_were(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    documents = read(write_lines(file, *({"id": name, "text": "words"} for name in names)))  # `read` checks it
    assert len(documents) == len(names)
    assert documents == read(file)
    sound = [document.id for document in documents if document.error is None]
    assert set(sound) <= set(names)


# The stream


def test_documents_come_one_by_one(tmp_path: Path) -> None:
    # A corpus may be larger than memory: what comes later is not looked at before it is asked for.
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    stream = read_corpus([str(tmp_path)])
    assert next(stream) == Document("a.txt", "first")
    (tmp_path / "b.txt").write_text("changed")
    assert next(stream) == Document("b.txt", "changed")
    assert next(stream, None) is None


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
