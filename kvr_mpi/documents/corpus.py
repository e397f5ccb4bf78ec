"""A corpus, listed once and then read at any place: one rank scans it, and every rank reads what it is to do.

The list says of each document where it is and what its text hashes to, so that a text that changes under a
running batch, or before a resume, is noticed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvr_mpi.documents.files import (
    MAX_TEXT_BYTES,
    Document,
    check_document,
    parquet_rows,
    read_lines,
    read_text,
    stream_rows,
)
from kvr_mpi.documents.paths import TEXT_SUFFIXES, find_files, open_regular, suffix_of
from kvr_mpi.errors import CorpusError

SHA256_CHARS = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One document of the list.

    sha256 : of its text in UTF-8, in hexadecimal digits.
    file, place : number of its file, and where it is in there (see ``files.stream_rows``).
    error : what is wrong with it, if anything; then its text is empty.
    """

    id: str
    chars: int
    sha256: str
    file: int
    place: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file of the corpus as it was when it was listed; a file that cannot be looked at has the size -1."""

    path: str
    name: str
    size_bytes: int
    mtime_ns: int


@dataclass(slots=True)
class Corpus:
    """All documents of a corpus, by number.

    Parameters
    ----------
    files, entries : tuple
    id_field, text_field, limit
        How it was scanned.
    """

    files: tuple[CorpusFile, ...]
    entries: tuple[Entry, ...]
    id_field: str = "id"
    text_field: str = "text"
    limit: int | None = None
    _open: tuple[int, Callable[[int], Any]] | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, index: int) -> Document:
        """Read one document; quick if asked for in ascending order.

        Returns
        -------
        Document
            What `read_corpus` yields in this place, or an error if the text is no longer what was listed.
        """
        entry = self.entries[index]
        if entry.error is not None:
            return Document(entry.id, error=entry.error)
        file = self.files[entry.file].path
        try:
            text = self._text(entry)
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
            self._open = None
            reason = getattr(error, "strerror", None) or str(error)
            return Document(entry.id, error=f"{file} could be read when the batch began, but not now: {reason}")
        if not isinstance(text, str) or _sha256(text) != entry.sha256:
            return Document(
                entry.id, error=f"{file} has changed since the batch began: {entry.id!r} has another text now"
            )
        return Document(entry.id, text)

    def _text(self, entry: Entry) -> Any:
        if self._open is None or self._open[0] != entry.file:
            self._open = (entry.file, _text_reader(Path(self.files[entry.file].path), self.text_field))
        return self._open[1](entry.place)

    def to_json(self) -> dict[str, Any]:
        """Columns, which are quick to write and to read, as are the hashes in one piece."""
        return {
            "id_field": self.id_field,
            "text_field": self.text_field,
            "limit": self.limit,
            "files": [[file.path, file.name, file.size_bytes, file.mtime_ns] for file in self.files],
            "ids": [entry.id for entry in self.entries],
            "chars": [entry.chars for entry in self.entries],
            "file": [entry.file for entry in self.entries],
            "place": [entry.place for entry in self.entries],
            "sha256": "".join(entry.sha256 for entry in self.entries),
            "errors": {str(n): entry.error for n, entry in enumerate(self.entries) if entry.error is not None},
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Corpus:
        """Read what `to_json` made."""
        errors = {int(number): error for number, error in stored["errors"].items()}
        digests = stored["sha256"]
        columns = zip(stored["ids"], stored["chars"], stored["file"], stored["place"], strict=True)
        return cls(
            tuple(CorpusFile(*file) for file in stored["files"]),
            tuple(
                Entry(name, chars, digests[n * SHA256_CHARS : (n + 1) * SHA256_CHARS], file, place, errors.get(n))
                for n, (name, chars, file, place) in enumerate(columns)
            ),
            stored["id_field"],
            stored["text_field"],
            stored["limit"],
        )


def scan_corpus(
    paths: Iterable[str],
    *,
    id_field: str = "id",
    text_field: str = "text",
    limit: int | None = None,
    known: Corpus | None = None,
) -> Corpus:
    """List the documents of a corpus in one pass.

    Parameters
    ----------
    paths, id_field, text_field, limit
        As for `read_corpus`.
    known : Corpus or None
        An earlier list. If it is of the same files, by name, size and time of change, nothing is read.

    Raises
    ------
    CorpusError
        If a path matches nothing, a file is of no known format, or there is no document at all.
    """
    paths = list(paths)
    found = find_files(paths)
    files = tuple(_look(file, name) for file, name in found)
    if (
        known is not None
        and (known.id_field, known.text_field, known.limit) == (id_field, text_field, limit)
        and list(map(_state, known.files)) == list(map(_state, files))
    ):
        return Corpus(files, known.entries, id_field, text_field, limit)
    entries = tuple(
        Entry(document.id, document.chars, _sha256(document.text), number, place, document.error)
        for number, place, document in _stream(found, id_field, text_field, limit)
    )
    if not entries:
        raise CorpusError(f"documents.path {paths}: the files hold no document; expected at least one")
    return Corpus(files, entries, id_field, text_field, limit)


def read_corpus(
    paths: Iterable[str], *, id_field: str = "id", text_field: str = "text", limit: int | None = None
) -> Iterator[Document]:
    """Stream the documents of a corpus; ids are unique, and bad documents carry their error.

    Parameters
    ----------
    paths : iterable of str
        Folders, globs or files: ``.txt``/``.md`` (one document each, named by its file), ``.jsonl``,
        ``.jsonl.gz`` and ``.parquet`` (one document a row).
    id_field, text_field : str
        The fields of a row. A row without an id is named by its file and number.
    limit : int or None
        Stop after this many documents.
    """
    for _, _, document in _stream(find_files(paths), id_field, text_field, limit):
        yield document


def _stream(
    files: list[tuple[str, str]], id_field: str, text_field: str, limit: int | None
) -> Iterator[tuple[int, int, Document]]:
    """Yield (file, place, document), checked, with ids that are unique."""
    seen: set[str] = set()
    copies: dict[str, int] = {}
    for count, (number, place, document) in enumerate(stream_rows(files, id_field, text_field)):
        if limit is not None and count >= limit:
            return
        document = check_document(document)
        if document.id in seen:
            first = copies.get(document.id, 2)
            copy = next(n for n in range(first, len(seen) + 3) if f"{document.id}#{n}" not in seen)
            copies[document.id] = copy + 1
            error = document.error or f"duplicate id {document.id!r}: an earlier document has it; make ids unique"
            document = Document(f"{document.id}#{copy}", error=error)
        seen.add(document.id)
        yield number, place, document


def _text_reader(file: Path, text_field: str) -> Callable[[int], Any]:
    """Return what reads the text at a place of a file."""
    kind = suffix_of(file)
    if kind in TEXT_SUFFIXES:
        return lambda place: read_text(file)
    if kind == ".jsonl":
        return lambda place: _field(_line_at(file, place), text_field)
    if kind == ".parquet":
        row_at = _forward(lambda start: parquet_rows(file, (text_field,), start))
        return lambda place: row_at(place).get(text_field)
    line_at = _forward(lambda start: _unzipped_lines(file))
    return lambda place: _field(line_at(place), text_field)


def _forward(rows_from: Callable[[int], Iterator[tuple[int, Any]]]) -> Callable[[int], Any]:
    """Return what gives the row of a number, from a stream that can only be read forwards, or begun again."""
    rows: Iterator[tuple[int, Any]] = iter(())
    last_read = -1  # number of the last row read; -1: none

    def row_at(place: int) -> Any:
        nonlocal rows, last_read
        if last_read < 0 or place <= last_read:
            rows, last_read = rows_from(place), -1
        for number, row in rows:
            if number == place:
                last_read = number
                return row
        last_read = -1
        raise ValueError(f"it has no row {place + 1} any more")

    return row_at


def _line_at(file: Path, place: int) -> bytes:
    # Opened anew: cheaper than anything that is done with a document, and no handle is left behind.
    with open_regular(file) as stream:
        stream.seek(place)
        return stream.readline(MAX_TEXT_BYTES)


def _unzipped_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with open_regular(file) as stream:
        for number, (_, line) in enumerate(read_lines(gzip.open(stream, "rb"))):
            yield number, line or b""


def _field(line: bytes, text_field: str) -> Any:
    row = json.loads(line)
    return row.get(text_field) if isinstance(row, dict) else None


def _look(file: str, name: str) -> CorpusFile:
    try:
        found = os.stat(file)
    except OSError:
        return CorpusFile(file, name, -1, 0)
    return CorpusFile(file, name, found.st_size, found.st_mtime_ns)


def _state(file: CorpusFile) -> tuple[str, int, int]:
    return file.name, file.size_bytes, file.mtime_ns


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
