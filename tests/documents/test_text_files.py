"""A text file is its text to the last character, or an error that names the file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from made_corpora import errors_of, read, read_one, unicode_text

from kvr_mpi.documents import Document, read_corpus


@settings(max_examples=50)
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
        rf"a\.txt is not UTF-8: byte {byte} at position {position}; set documents.encoding", bad.error
    )
    assert good == Document("b.txt", "sound")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_text_in_another_encoding_is_read_and_binary_files_are_still_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("caf\xe9 \xdcber".encode(encoding))
    (tmp_path / "z.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(33))
    text, image = read(tmp_path, encoding=encoding)
    assert text.text == "caf\xe9 \xdcber" and text.error is None
    assert (image.error is not None and "binary file" in image.error) or encoding != "latin-1"


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


@pytest.mark.parametrize(
    "data",
    [b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", b"PK\x03\x04\x14\x00\xff", b"\x89PNG\r\n\x1a\n", bytes(range(256)) * 4],
)
def test_a_binary_file_is_said_to_be_one(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    (found,) = read_corpus([str(tmp_path)])
    assert found.error is not None and "binary" in found.error and "re-encode" not in found.error


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "cp437", "shift_jis"])
def test_text_in_another_encoding_is_not_taken_for_binary(tmp_path: Path, encoding: str) -> None:
    text = (
        "Der Kapitän sah das \tzweite Boot nicht.\r\n"
        if encoding != "shift_jis"
        else "船長は二隻目の船を見なかった。\n"
    )
    (tmp_path / "a.txt").write_bytes((text * 20).encode(encoding))
    (found,) = read_corpus([str(tmp_path)])
    assert found.error is not None and "re-encode" in found.error
