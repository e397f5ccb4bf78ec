"""Files that are compressed, in archives, remote, or tables of another kind: the same documents with the same ids."""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib.util
import json
import lzma
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_corpora import errors_of, read, read_one, write_lines, write_parquet

from kvr_mpi.documents import Document, check_lines, first_rows, scan_corpus
from kvr_mpi.errors import CorpusError

ROWS = [{"id": f"row {n}", "text": f'text {n},\n"quoted", and more\t{"words " * n}'} for n in range(30)]
WANTED = [Document(row["id"], row["text"]) for row in ROWS]
PACKED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
if importlib.util.find_spec("zstandard"):
    PACKED[".zst"] = importlib.import_module("zstandard").ZstdCompressor().compress


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",", mark: str = "") -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        stream.write(mark)
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("packed", PACKED)
def test_packing_a_file_changes_no_document(tmp_path: Path, packed: str) -> None:
    made = [write_lines(tmp_path / "a.jsonl", *ROWS), write_csv(tmp_path / "b.csv", [{"text": "no id"}])]
    (tmp_path / "c.txt").write_text("a text")
    before = read(tmp_path)
    for file in (*made, tmp_path / "c.txt"):
        (tmp_path / f"{file.name}{packed}").write_bytes(PACKED[packed](file.read_bytes()))
        file.unlink()
    assert read(tmp_path) == before == [*WANTED, Document("b.csv:1", "no id"), Document("c.txt", "a text")]
    damaged = tmp_path / f"a.jsonl{packed}"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    assert "cannot be read" in errors_of(read(tmp_path))["a.jsonl"]


def test_files_in_a_zip_archive_are_documents(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in/a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
        archive.writestr("b.txt.gz", gzip.compress(b"a text"))
        archive.writestr("picture.png", b"no text")
        archive.writestr("../../out.txt", "hidden names are left out")
    found = read(tmp_path)
    assert found == [Document("all.zip/b.txt", "a text"), *WANTED]
    assert read(tmp_path / "all.zip") == found == read(tmp_path / "*.zip")
    (tmp_path / "all.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CorpusError, match="no zip archive"):
        read(tmp_path)


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_tables_of_comma_separated_values(tmp_path: Path, suffix: str, delimiter: str) -> None:
    file = write_csv(tmp_path / f"a{suffix}", ROWS, delimiter, mark="\ufeff")
    assert read(file) == WANTED
    assert first_rows(str(file), ()) == ROWS[:20]
    corpus = scan_corpus([str(file)])
    assert [corpus.read(n) for n in (20, 3, 29, 3)] == [WANTED[n] for n in (20, 3, 29, 3)]
    file.write_text(f"id{delimiter}text\na\nb{delimiter}x{delimiter}{delimiter}\n")
    assert "the text field 'text' is missing" in errors_of(read(file))["a"] and read(file)[1] == Document("b", "x")


def test_rows_of_csv_never_lose_part_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("id,text\na,Yes\nb,No, said the mayor\n")
    good, bad = read(file)
    assert good == Document("a", "Yes") and "3 fields for 2 names" in (bad.error or "")
    file.write_text("id,text,text,,\na,one,two,,\n")
    assert "'text' twice" in (read_one(file).error or "")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text"] * 2), tmp_path / "b.parquet")
    assert "'text' twice" in (read_one(tmp_path / "b.parquet").error or "")
    assert read_one(file, text_field="id", id_field="x") == Document("a.csv:1", "a")


def test_rows_with_wrong_quotes_are_errors_and_swallow_no_others(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        'id,text\na,"said "no" loudly"\nb,"two\nlines, ""quoted"""\nc,an inch is 1"\nd,"open\ne,lost\nf,too\n'
    )
    found = read(file)
    assert [document.text for document in found if document.error is None] == ['two\nlines, "quoted"', 'an inch is 1"']
    assert [re.findall(r"lines \d to \d", document.error) for document in found if document.error] == [
        ["lines 2 to 2"],
        ["lines 6 to 8"],
    ]


def test_rows_that_are_not_utf_8_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes("id,text\na,caf\xe9\nb,tea\n".encode("latin-1"))
    bad, good = read(file)
    assert "the byte 0xe9 in CSV at character 3" in (bad.error or "") and good == Document("b", "tea")
    for encoding in ("utf-16", "latin-1"):
        file.write_bytes("text,pri\xe8re\na,b\n".encode(encoding))
        assert "iconv -f latin1" in (read_one(file).error or "")


def test_strings_of_parquet_without_their_type_are_text(tmp_path: Path) -> None:
    texts = pa.array([row["text"].encode() for row in ROWS], pa.binary())
    ids = pa.array([row["id"].encode() for row in ROWS], pa.binary())
    assert read(write_parquet(tmp_path / "a.parquet", id=ids, text=texts)) == WANTED
    bad = read_one(write_parquet(tmp_path / "a.parquet", id=["a"], text=pa.array([b"\xff"], pa.binary())))
    assert "the text field 'text' is a bytes" in (bad.error or "")


def test_text_files_with_a_mark_of_utf_16(tmp_path: Path) -> None:
    for name, encoding in (("a.txt", "utf-16-le"), ("b.txt", "utf-16-be"), ("c.txt", "utf-8")):
        (tmp_path / name).write_bytes("\ufeffGrüße".encode(encoding))
    assert [document.text for document in read(tmp_path)] == ["Grüße"] * 3
    (tmp_path / "d.txt").write_bytes("Grüße".encode("latin-1"))
    assert [document.text for document in read(tmp_path, encoding="iso8859-1")] == ["Grüße"] * 4


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (json.dumps(ROWS, indent=2).encode(), r"jq -c '\.\[\]"),
        (json.dumps(ROWS).encode(), r"jq -c '\.\[\]'"),
        (json.dumps(ROWS[0], indent=1).encode(), r"jq -c \."),
        (("\ufeff" + json.dumps(ROWS[0])).encode("utf-16-le"), "iconv -f utf-16"),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_json_that_is_no_table_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, content: bytes, command: str, packed: str
) -> None:
    file = tmp_path / f"a.jsonl{packed}"
    file.write_bytes(PACKED[packed](content) if packed else content)
    with pytest.raises(CorpusError, match=command):
        check_lines(str(file))


def test_tables_that_are_lines_of_json_pass(tmp_path: Path) -> None:
    for lines in ((b"", b"  ", *ROWS), (b"\xef\xbb\xbf{}",), (b"{broken",), (b"[1]",), ()):
        check_lines(str(write_lines(tmp_path / "a.jsonl", *lines)))


def test_remote_files_are_read_by_fsspec() -> None:
    file_system: Any = fsspec.filesystem("memory")
    file_system.pipe("/corpus/in/a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS).encode())
    file_system.pipe("/corpus/b.txt.gz", gzip.compress(b"a text"))
    try:
        found = read("memory://corpus")
        assert found == [Document("b.txt", "a text"), *WANTED]
        assert read("memory://corpus/*/*.jsonl") == read("memory://corpus/in/a.jsonl") == WANTED
        with pytest.raises(CorpusError, match="no .* files found there"):
            read("memory://nothing")
        with pytest.raises(CorpusError, match="nosuch"):
            read("nosuch://corpus")
    finally:
        file_system.rm("/corpus", recursive=True)
