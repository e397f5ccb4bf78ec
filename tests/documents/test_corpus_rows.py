"""Rows of JSON Lines, compressed or not, and of Parquet: the same fields, ids and errors in all three."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpora import WRITERS, errors_of, read, read_one, tables, unicode_text

from kvr_mpi.documents import MAX_ID_CHARS, Document


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


@settings(max_examples=30)
@given(texts=st.lists(unicode_text.filter(str.strip), min_size=1, max_size=8))
def test_any_text_comes_through_any_table(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    for suffix, write in WRITERS.items():
        file = write(folder / f"a{suffix}", [{"text": text} for text in texts])
        assert [document.text for document in read(file)] == texts
