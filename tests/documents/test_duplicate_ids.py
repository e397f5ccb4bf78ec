"""Every document has an id of its own: later copies are errors under other names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpora import read, write_gzip, write_lines, write_parquet

from kvr_mpi.documents import Document


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


@settings(max_examples=60)
@given(names=st.lists(st.text("ab#2\n", max_size=4), min_size=1, max_size=12))
def test_ids_are_unique_whatever_they_were(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    documents = read(write_lines(file, *({"id": name, "text": "words"} for name in names)))  # `read` checks it
    assert len(documents) == len(names)
    assert documents == read(file)
    sound = [document.id for document in documents if document.error is None]
    assert set(sound) <= set(names)
