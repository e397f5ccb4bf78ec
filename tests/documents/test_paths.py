"""Where documents come from: folders, globs and files, each read once and to the last character; nothing odd is."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from made_corpora import errors_of, read, read_one, unicode_text
from made_runs import record, take
from made_runs import write as write_results

from kvr_mpi.documents import SUFFIXES, Document, describe_others, find_files, other_files
from kvr_mpi.errors import EXIT_CONFIG, CorpusError


def write_files(folder: Path, *names: str) -> None:
    """Write files whose text is their name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_folders_are_read_to_their_depths_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / ".cache" / "corpus"  # hidden folders above the corpus do not count
    names = ["Z.TXT", "a.md", "b.txt", "deep/a.txt", "deep/er/c.txt"]
    write_files(corpus, *names, ".hidden.txt", ".git/inside.txt", "deep/.hidden.md")
    write_files(corpus, "c.PDF", "deep/skip.docx", "deep/er/more.docx", "deep/README", ".d.pdf", ".hidden/e.pdf")
    assert read(corpus) == [Document(name, name) for name in names]
    assert {document.text for document in read(corpus / "*.txt")} == {"b.txt"}
    assert {document.text for document in read(corpus / "**" / "*.txt")} == {"b.txt", "deep/a.txt", "deep/er/c.txt"}
    monkeypatch.chdir(corpus)
    others = other_files(["deep", str(corpus), "b.txt", "*.txt"])
    found = sorted(os.path.relpath(file) for file in others)
    assert found == ["c.PDF", "deep/README", "deep/er/more.docx", "deep/skip.docx"]
    told = describe_others(others)
    assert "(2 .docx, 1 .pdf, 1 without a suffix)" in told
    assert f"pdftotext {corpus}/c.PDF" in told
    assert "pandoc deep/er/more.docx -t plain -o deep/er/more.txt" in told or "deep/skip.docx -t plain -o" in told
    assert "convert" not in describe_others(["notes.xyz"])
    assert other_files(["b.txt"]) == other_files(["**/*.md"]) == []


def test_output_folders_hold_no_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["a.txt", "accounts/log-0001.jsonl", "log-2023.jsonl", "project/notes.md"]
    write_files(tmp_path, *wanted, "project/run.json")
    for name in ("out", "deep/out", "deep/locked"):
        take(tmp_path / name).lock.release()
        write_results(tmp_path / name, 0, [record("a")])
        write_files(tmp_path / name, "answers.jsonl")
    for file in (*(tmp_path / "deep" / "out").glob(".lock-*"), tmp_path / "deep" / "locked" / "run.json"):
        file.unlink()
    assert [name for _, name in find_files(["."])] == wanted
    assert [name for _, name in find_files([str(tmp_path)])] == wanted
    assert sorted(file for file, _ in find_files(["**/*.jsonl", "**/*.md", "*.txt"])) == wanted
    assert [name for _, name in find_files(["out/*.jsonl"])] == ["answers.jsonl"]
    for path, words in (("out", "is the output folder of a job"), ("out/log-0001-0000.jsonl", "only the logs")):
        with pytest.raises(CorpusError, match=words):
            find_files([path])


def test_paths_are_read_once_as_and_in_the_order_in_which_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, "a.txt", "b.txt", "draft [1].txt", "docs/d.txt")  # full of wildcards, and a file first
    named = ["~/b.txt", str(tmp_path / "draft [1].txt"), "~/a.txt", "docs", "docs/*.txt", "./docs", "*.txt"]
    assert [document.id for document in read(*named)] == ["b.txt", "draft [1].txt", "a.txt", "d.txt"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.txt", r"no such file or folder.*HERE/missing.txt"),
        ("missing/*.jsonl", r"no such file or folder.*HERE/missing/\*.jsonl"),
        ("a.txt missing", "'missing': no such file"),
        ("~no-such-user-here/docs", "cannot be searched"),
        ("x" * 300, ""),
        ("nul\0byte.txt", ""),
        ("empty", "the folder HERE/empty contains no SUFFIXES"),
        ("others", "the folder HERE/others contains no SUFFIXES"),
        ("others/b.pdf", r"b\.pdf has an unsupported type; expected one of SUFFIXES"),
        ("*.txt others/b*", r"b\.pdf has an unsupported type; expected one of SUFFIXES"),
        ("e*", "only folders match it"),
    ],
)
def test_a_path_without_documents_says_what_was_looked_for_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, "a.txt", "others/b.pdf", "others/.hidden.txt", "empty/.git/c.txt")
    words = words.replace("HERE", re.escape(str(tmp_path))).replace("SUFFIXES", re.escape(", ".join(SUFFIXES)))
    with pytest.raises(CorpusError, match=r"documents\.path.*" + words) as caught:
        find_files(path.split())
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize("pattern", ["", "**/*"])
def test_what_is_no_regular_file_is_an_error_and_never_opened(tmp_path: Path, pattern: str) -> None:
    for name in ("pipe.txt", "pipe.jsonl", "other.jsonl.gz", "pipe.parquet"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "to-pipe.md").symlink_to(tmp_path / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as door, contextlib.chdir(tmp_path):
        door.bind("door.txt")
    names = {file.name for file in tmp_path.iterdir()}
    write_files(tmp_path, "sound.txt")
    documents = read(tmp_path / pattern)
    assert [document.text for document in documents if document.error is None] == ["sound.txt"]
    errors = errors_of(documents)
    assert set(errors) == {name.removesuffix(".gz") for name in names}
    assert all("not a regular file" in error for error in errors.values())
    assert "a named pipe" in errors["other.jsonl"] and "a device" in errors["zero.txt"]
    for name in names:
        with pytest.raises(CorpusError, match="expected a folder, a glob or a regular file"):
            find_files([str(tmp_path / name)])


def test_globs_end_where_links_lead_back(tmp_path: Path) -> None:
    """Two links in each of three folders: 40 levels of them, as the kernel allows, would be 2^40 ways."""
    docs = tmp_path / "docs"
    write_files(docs, "a/a.txt", "b/b.txt", "c/c.txt", ".hidden/h.txt")
    for name in ("a", "b", "c"):
        (docs / name / "up").symlink_to(docs)
        (docs / name / "self").symlink_to(docs / name)
    (docs / "elsewhere").symlink_to(docs / "a")
    for pattern in ("**/*.txt", "**", "**/*/**/*.txt"):
        found = [name for _, name in find_files([str(docs / pattern)])]
        assert {*found} == {"a.txt", "b.txt", "c.txt"} and (len(found) == 3 or "*/**" in pattern), pattern


# Text files


@settings(max_examples=50)
@given(text=unicode_text.map(lambda text: re.sub("[\0-\b\x0e-\x1f\x7f]", "", text)).filter(str.strip))
@example(text="one\r\ntwo\rthree\n")
def test_a_text_file_is_its_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("corpus") / "a.txt"
    mark = "\ufeff" if len(text) % 2 else ""  # no part of the text
    file.write_bytes((mark + text).encode())
    document = read_one(file)
    text = text.replace("\r\n", "\n")
    assert document == Document("a.txt", text if mark else text.removeprefix("\ufeff"))
    assert document.chars == len(document.text)


OTHER = (
    "; convert it, such as with `iconv -f latin1 -t utf8`, or set documents.encoding if all files have another encoding"
)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "is empty: it contains no text"),
        ("\u2003\u00a0\n".encode(), "is empty: it contains no text"),
        (b"\xef\xbb\xbf", "is empty: it contains no text"),
        (b"caf\xe9", f"is not UTF-8: byte 0xe9 at position 3{OTHER}"),
        (("Der Kapit\xe4n sah das \tzweite Boot nicht.\r\n" * 20).encode("cp437"), OTHER),
        (("\u8239\u9577\u306f\u4e8c\u96bb\n" * 20).encode("shift_jis"), OTHER),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "is a binary file"),
        (b"PK\x03\x04\x14\x00\xff", "is a binary file"),
        (bytes(range(256)) * 4, "is a binary file"),
        (b"%PDF-1.4\n1 0 obj << /Length 44 >> stream", "is a binary file"),  # valid UTF-8, as the next two
        (b"abc\x01def" * 100, "is a binary file, not text; convert"),
        ("The captain saw the second boat.".encode("utf-16-le"), "documents.encoding = 'utf-16-le'"),
    ],
)
def test_what_is_no_text_is_an_error_and_the_others_go_on(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "b.txt").write_text("sound")
    bad, good = read(tmp_path)
    assert (bad.id, bad.text) == ("a.txt", "") and bad.error is not None and why in bad.error
    assert ("iconv" in bad.error) == (why.endswith(OTHER))
    assert good == Document("b.txt", "sound")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_text_in_another_encoding_is_read_and_binary_files_are_still_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("caf\xe9 \xdcber".encode(encoding))
    (tmp_path / "z.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(33))
    text, image = read(tmp_path, encoding=encoding)
    assert text.text == "caf\xe9 \xdcber" and text.error is None
    assert (image.error is not None and "binary file" in image.error) or encoding != "latin-1"


def test_a_file_that_cannot_be_read_is_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    gone = ["gone.jsonl", "other.jsonl.gz", "gone.parquet", "gone.txt"]
    for name in gone:
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    (tmp_path / "x.txt").mkdir()
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("its name is not Unicode")
    (tmp_path / "z.txt").write_text("sound")
    documents = read(tmp_path)
    assert {document.id for document in documents if document.error is None} == {"z.txt"} and len(documents) == 7
    errors = errors_of(documents)
    assert all(f"{tmp_path / name} cannot be read" in errors[name.removesuffix(".gz")] for name in (*gone, "x.txt"))
    assert "No such file" in errors["gone.txt"] and "directory" in errors["x.txt"]
    assert "cannot be read" in errors_of(read(tmp_path / "gone.txt"))["gone.txt"], "named by itself, too"
    assert "a text file has no fields" in errors_of(read(tmp_path, columns=("title",)))["z.txt"]


def test_datasets_of_the_hub_are_read_from_its_cache(tmp_path: Path) -> None:
    """As the hub's library keeps them, without internet."""
    dataset = tmp_path / "hub" / "datasets--org--minutes"
    write_files(dataset, *(f"snapshots/{'a' * 40}/{name}" for name in ("README.md", "one/test.txt", "one/train.txt")))
    (dataset / "refs").mkdir()
    (dataset / "refs" / "main").write_text("a" * 40)
    program = (
        "import sys\nfrom kvr_mpi.documents import find_files\nfrom kvr_mpi.errors import CorpusError\n"
        "try: print(*(name for _, name in find_files([sys.argv[1]])))\nexcept CorpusError as error: print(error)"
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    for path, expected in (
        ("org/minutes", "one/test.txt one/train.txt"),
        ("org/minutes@main/*/te*.txt", "one/test.txt"),
        ("org/minutes/two/*", "no such .txt"),
        ("org/minutes@v2", "hf download --repo-type dataset org/minutes"),
        ("minutes", "expected hf://datasets/OWNER/NAME"),
    ):
        command = [sys.executable, "-c", program, f"hf://datasets/{path}"]
        said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True).stdout
        assert expected in said and ("documents.path" in said or said.strip() == expected), path
