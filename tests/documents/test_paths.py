"""Where documents come from: folders, globs and files, each read once, in order, and nothing odd is opened."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

import pytest
from made_corpora import WRITERS, errors_of, read
from made_runs import record, take
from made_runs import write as write_results

from kvr_mpi.documents import SUFFIXES, Document, describe_types, find_files, other_files, scan_corpus
from kvr_mpi.errors import EXIT_CONFIG, CorpusError


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


def test_output_folders_hold_no_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "log-2023.jsonl", "accounts/log-0001.jsonl", "project/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "words"}')
    (tmp_path / "project" / "run.json").write_text('{"name": "somebody else\'s"}')
    wanted = ["a.txt", "accounts/log-0001.jsonl", "log-2023.jsonl", "project/notes.md"]
    for name in ("out", "deep/out", "deep/locked"):
        take(tmp_path / name, mode="new").close()
        write_results(tmp_path / name, 0, [record("a")])
        (tmp_path / name / "answers.jsonl").write_text('{"text": "words"}')
    for file in (*(tmp_path / "deep" / "out").glob(".lock-*"), tmp_path / "deep" / "locked" / "run.json"):
        file.unlink()
    assert [name for _, name in find_files(["."])] == wanted
    assert [name for _, name in find_files([str(tmp_path)])] == wanted
    assert sorted(file for file, _ in find_files(["**/*.jsonl", "**/*.md", "*.txt"])) == wanted
    assert [name for _, name in find_files(["out/*.jsonl"])] == ["answers.jsonl"]
    for path, words in (("out", "is the output folder of a job"), ("out/log-0001-0000.jsonl", "only the logs")):
        with pytest.raises(CorpusError, match=words):
            find_files([path])


def test_globs_match_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.text for document in read(tmp_path / "*.txt")] == ["a.txt", "b.txt"]
    assert {document.text for document in read(tmp_path / "**" / "*.txt")} == {"a.txt", "b.txt", "sub/d.txt"}


def test_paths_are_read_as_and_in_the_order_in_which_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.txt", "b.txt", "draft [1].txt"):  # full of wildcards, and a file first
        (tmp_path / name).write_text(name)
    named = ["~/b.txt", str(tmp_path / "draft [1].txt"), "~/a.txt"]
    assert [document.id for document in read(*named)] == ["b.txt", "draft [1].txt", "a.txt"]


def test_a_file_named_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert len(find_files(["docs", "docs/*.txt", "docs/a.txt", "./docs"])) == 1
    assert len(find_files(["docs", str(tmp_path / "docs")])) == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.txt", r"no such file or folder.*HERE/missing.txt"),
        ("missing/*.jsonl", r"no such file or folder.*HERE/missing/\*.jsonl"),
        ("a.txt missing", "'missing': no such file"),
        ("~no-such-user-here/docs", "cannot be looked up"),
        ("x" * 300, ""),
        ("nul\0byte.txt", ""),
        ("empty", "the folder HERE/empty contains no SUFFIXES"),
        ("others", "the folder HERE/others contains no SUFFIXES"),
        ("others/b.pdf", r"b\.pdf is none of SUFFIXES"),
        ("*.txt others/b*", r"b\.pdf is none of SUFFIXES"),
        ("e*", "only folders match it"),
    ],
)
def test_a_path_without_documents_says_what_was_looked_for_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "others/b.pdf", "others/.hidden.txt", "empty/.git/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    words = words.replace("HERE", re.escape(str(tmp_path))).replace("SUFFIXES", re.escape(", ".join(SUFFIXES)))
    with pytest.raises(CorpusError, match=r"documents\.path.*" + words) as caught:
        find_files(path.split())
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
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("pattern", ["", "**/*"])
def test_what_is_no_regular_file_is_an_error_and_never_opened(tmp_path: Path, pattern: str) -> None:
    names = make_odd_files(tmp_path)
    (tmp_path / "sound.txt").write_text("sound")
    documents = read(tmp_path / pattern)
    assert [document.text for document in documents if document.error is None] == ["sound"]
    errors = errors_of(documents)
    assert set(errors) == names
    assert all("not a regular file" in error for error in errors.values())
    assert "a named pipe" in errors["pipe.jsonl.gz"] and "a device" in errors["zero.txt"]
    for name in names:
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
        assert error is not None and "no longer" in error and "a named pipe" in error


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


def test_files_of_other_types_below_folders_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    names = "a.txt sub/b.md c.PDF sub/skip.docx sub/deep/more.docx sub/README .d.pdf .hidden/e.pdf"
    for name in names.split():
        (tmp_path / name).write_text("text")
    others = other_files(["sub", str(tmp_path), "a.txt", "*.txt"])
    found = sorted(os.path.relpath(file) for file in others)
    assert found == ["c.PDF", "sub/README", "sub/deep/more.docx", "sub/skip.docx"]
    assert describe_types(others) == "2 .docx, 1 .pdf, 1 without a suffix"
    assert other_files(["a.txt"]) == other_files(["**/*.md"]) == []
