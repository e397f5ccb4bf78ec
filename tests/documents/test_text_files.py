"""A text file is its text to the last character, or an error that names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from made_corpora import errors_of, read, read_one, unicode_text

from kvr_mpi.documents import Document


@settings(max_examples=50)
@given(text=unicode_text.filter(str.strip))
@example(text="one\r\ntwo\rthree\n")
def test_a_text_file_is_its_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("corpus") / "a.txt"
    mark = "\ufeff" if len(text) % 2 else ""  # no part of the text
    file.write_bytes((mark + text).encode())
    document = read_one(file)
    assert document == Document("a.txt", text if mark else text.removeprefix("\ufeff"))
    assert document.chars == len(document.text)


OTHER = "; set documents.encoding to the encoding of all files, or re-encode it"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "is empty: there is no text"),
        ("\u2003\u00a0\n".encode(), "is empty: there is no text"),
        (b"\xef\xbb\xbf", "is empty: there is no text"),
        (b"caf\xe9", f"is not UTF-8: byte 0xe9 at position 3{OTHER}"),
        ("text".encode("utf-16"), f"is not UTF-8: byte 0xff at position 0{OTHER}"),
        (("Der Kapit\xe4n sah das \tzweite Boot nicht.\r\n" * 20).encode("cp437"), OTHER),
        (("\u8239\u9577\u306f\u4e8c\u96bb\n" * 20).encode("shift_jis"), OTHER),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "is a binary file"),
        (b"PK\x03\x04\x14\x00\xff", "is a binary file"),
        (bytes(range(256)) * 4, "is a binary file"),
    ],
)
def test_what_is_no_text_is_an_error_and_the_others_go_on(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "b.txt").write_text("sound")
    bad, good = read(tmp_path)
    assert (bad.id, bad.text) == ("a.txt", "") and bad.error is not None and why in bad.error
    assert ("re-encode" in bad.error) == (why.endswith(OTHER))
    assert good == Document("b.txt", "sound")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_text_in_another_encoding_is_read_and_binary_files_are_still_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("caf\xe9 \xdcber".encode(encoding))
    (tmp_path / "z.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(33))
    text, image = read(tmp_path, encoding=encoding)
    assert text.text == "caf\xe9 \xdcber" and text.error is None
    assert (image.error is not None and "binary file" in image.error) or encoding != "latin-1"


def test_a_file_that_cannot_be_read_is_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    gone = ["gone.jsonl", "gone.jsonl.gz", "gone.parquet", "gone.txt"]
    for name in gone:
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    (tmp_path / "x.txt").mkdir()
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("its name is not Unicode")
    (tmp_path / "z.txt").write_text("sound")
    documents = read(tmp_path)
    assert {document.id for document in documents if document.error is None} == {"z.txt"} and len(documents) == 7
    errors = errors_of(documents)
    assert all(f"{tmp_path / name} cannot be read" in errors[name] for name in (*gone, "x.txt"))
    assert "No such file" in errors["gone.txt"] and "directory" in errors["x.txt"]
    assert "cannot be read" in errors_of(read(tmp_path / "gone.txt"))["gone.txt"], "named by itself, too"
    assert "a text file has no fields" in errors_of(read(tmp_path, columns=("title",)))["z.txt"]
