"""Corpora of every kind, written for tests and read back, with what holds of every document checked."""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from kvr_mpi.documents import Document, RowFormat, read_corpus

# What any document may be: text that is Unicode (no lone surrogates).
unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


def read(*paths: str | Path, **options: Any) -> list[Document]:
    """Read the whole corpus, and check what holds of every one."""
    rows = RowFormat(**{name: options.pop(name) for name in [*options] if name != "limit"})
    documents = list(read_corpus([str(path) for path in paths], rows=rows, **options))
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
    path.write_bytes(gzip.compress(write_lines(path, *rows).read_bytes()))
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


def with_chat(tokenizer: Any, chat_template: str | None) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = chat_template
    return other
