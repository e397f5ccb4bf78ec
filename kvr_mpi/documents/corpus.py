"""A corpus, listed once by one rank; every rank then reads the documents it needs.

The list has the location and hash of each document, so that kvr-mpi notices when a text changes during a batch or
before a resume.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvr_mpi.disk import retried
from kvr_mpi.documents.document import Document
from kvr_mpi.documents.files import (
    RawRow,
    check_document,
    document_of,
    is_readable_later,
    read_rows,
    stream_rows,
    why_not_now,
)
from kvr_mpi.documents.paths import find_files, suffix_of
from kvr_mpi.documents.questions import answer_id
from kvr_mpi.documents.rows import DEFAULT_ROWS, RowFormat
from kvr_mpi.errors import NOT_NOW, CorpusError, UnavailableError
from kvr_mpi.plain import from_plain

SHA256_CHARS = 64
# An open file: its number, the place of the last row read, and the rows after it. This value: no file is open.
CLOSED: tuple[int, int, Iterator[tuple[int, RawRow]]] = -1, -1, iter(())
# The first prompt about a document is this many times the work of a later one, which reuses the prefilled text.
SHARED_WORK = 16


class Entry(NamedTuple):
    """One document in the list.

    sha256 : hash of its text and of the other used fields of its row (`Document.sha256`).
    file, place : number of its file, and its position there (see ``files.stream_rows``).
    error : why it cannot be processed; its text is empty if there is one.
    """

    id: str
    chars: int
    sha256: str
    file: int
    place: int
    error: str | None = None

    @property
    def is_transient(self) -> bool:
        """Whether its file could not be read for the moment, so that the next start of the job reads it again."""
        return self.error is not None and self.error.startswith(NOT_NOW)


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file of the corpus when it was listed; without access its size is -1. `path` is not compared."""

    path: str = field(compare=False)
    name: str
    size_bytes: int
    mtime_ns: int


@dataclass(slots=True)
class Corpus:
    """All documents of a corpus, by number.

    rows, limit : the parameters of `scan_corpus`.
    prompts : names of several prompts about each document; each prompt has an entry, and a document's entries are
        adjacent.
    """

    files: tuple[CorpusFile, ...]
    entries: tuple[Entry, ...]
    rows: RowFormat = DEFAULT_ROWS
    limit: int | None = None
    prompts: tuple[str, ...] = ()
    _open: tuple[int, int, Iterator[tuple[int, RawRow]]] = field(default=CLOSED, init=False, repr=False, compare=False)
    _last: Document | None = field(default=None, init=False, repr=False, compare=False)  # at the place in `_open`
    _patience: float = field(default=1.0, init=False, repr=False, compare=False)  # see `disk.retried`

    def __len__(self) -> int:
        return len(self.entries)

    def share(self, documents: slice) -> list[int]:
        """Return the entry numbers of a slice of documents; the entries of one document stay together."""
        each = len(self.prompts) or 1
        numbers = range(len(self.entries) // each)[documents]
        return [document * each + prompt for document in numbers for prompt in range(each)]

    def read(self, index: int) -> Document:
        """Read one document as `read_corpus` yields it, or with an error if it has changed; fast in ascending order."""
        entry = self.entries[index]
        if entry.error is not None:
            return Document(entry.id, error=entry.error, passed=self._passed_of(entry))
        file = self.files[entry.file].path
        try:
            document, self._patience = self._document(entry), 1.0
        except UnavailableError as error:
            self._open, self._patience = CLOSED, self._patience / 2
            return Document(entry.id, error=why_not_now(Path(file), error))
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
            self._open = CLOSED
            if is_readable_later(Path(file), error):
                return Document(entry.id, error=why_not_now(Path(file), error))
            reason = getattr(error, "strerror", None) or str(error)
            return Document(entry.id, error=f"{file} could be read when the job began, but no longer: {reason}")
        if document.error is not None or document.sha256 != entry.sha256:
            return Document(
                entry.id, error=f"{file} has changed since the job began: {entry.id!r} has a different text now"
            )
        return replace(document, id=entry.id)

    def _document(self, entry: Entry) -> Document:
        """Read a document; a file that cannot seek stays open after its last row, kept for more prompts about it."""
        file, (number, last, rows) = Path(self.files[entry.file].path), self._open
        stays_open = suffix_of(file) in (".jsonl.gz", ".parquet")
        if stays_open and (number, last) == (entry.file, entry.place) and self._last is not None:
            return self._last
        if number != entry.file or entry.place <= last or not stays_open:
            rows = read_rows(file, self.rows, entry.place, patience=self._patience)
        for place, row in rows:
            if place == entry.place:
                self._open = entry.file, place, rows
                self._last = check_document(document_of(row, self.rows, file, "row", 1))
                return self._last
        raise ValueError(f"it no longer has row {entry.place + 1}")

    def _passed_of(self, entry: Entry) -> Mapping[str, Any]:
        """Return the columns of a document with an error, if its row is readable and unchanged."""
        with contextlib.suppress(OSError, EOFError, ValueError, RecursionError, zlib.error):
            passed = self._document(entry).passed
            return passed if Document("", passed=passed).sha256 == entry.sha256 else {}
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with one list per column, which is fast to write and to read."""
        return {
            "rows": asdict(self.rows),
            "limit": self.limit,
            "prompts": list(self.prompts),
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
        """Reconstruct a corpus from the result of `to_json`."""
        errors = {int(number): error for number, error in stored["errors"].items()}
        digests = stored["sha256"]
        columns = zip(stored["ids"], stored["chars"], stored["file"], stored["place"], strict=True)
        return cls(
            tuple(CorpusFile(*file) for file in stored["files"]),
            tuple(
                Entry(name, chars, digests[n * SHA256_CHARS : (n + 1) * SHA256_CHARS], file, place, errors.get(n))
                for n, (name, chars, file, place) in enumerate(columns)
            ),
            from_plain(RowFormat, stored["rows"]),
            stored["limit"],
            tuple(stored["prompts"]),
        )


def scan_corpus(
    paths: Iterable[str],
    *,
    rows: RowFormat = DEFAULT_ROWS,
    limit: int | None = None,
    prompts: Sequence[str] = (),
    known: Corpus | None = None,
) -> Corpus:
    """List the documents of a corpus in one pass.

    paths, rows, limit : as for `read_corpus`.
    prompts : names of several prompts about each document.
    known : an earlier list. If it has the same files, by name, size and modification time, and all of them could be
        read, nothing is read.

    Raises `CorpusError` if a path matches nothing, a file has an unknown format, or there are no documents.
    """
    paths = list(paths)
    found = find_files(paths)
    files = tuple(_look(found))
    if (
        known is not None
        and not any(entry.is_transient for entry in known.entries)
        and (known.rows, known.limit, known.prompts) == (rows, limit, tuple(prompts))
        and known.files == files
    ):
        return Corpus(files, known.entries, rows, limit, known.prompts)
    entries = tuple(
        entry
        for number, place, document in _stream(found, rows, limit)
        for entry in _entries(document, number, place, prompts)
    )
    if not entries:
        raise CorpusError(f"documents.path {paths}: the files contain no documents; expected at least one")
    return Corpus(files, entries, rows, limit, tuple(prompts))


def read_corpus(
    paths: Iterable[str], *, rows: RowFormat = DEFAULT_ROWS, limit: int | None = None
) -> Iterator[Document]:
    """Stream the documents of a corpus; ids are unique, and invalid documents have an error.

    paths : folders, globs or files: ``.txt``/``.md`` (one document each, named by its file), ``.jsonl``, ``.jsonl.gz``
        and ``.parquet`` (one document a row).
    rows : the fields to read from a row. A row without an id is named by its file and number.
    limit : stop after this many documents.
    """
    for _, _, document in _stream(find_files(paths), rows, limit):
        yield document


def _stream(files: list[tuple[str, str]], rows: RowFormat, limit: int | None) -> Iterator[tuple[int, int, Document]]:
    """Yield (file, place, document), checked, with unique ids."""
    seen: dict[str, int] = {}  # number of the document, from 1
    copies: dict[str, int] = {}
    asked_for: str | None = None
    for count, (number, place, document) in enumerate(stream_rows(files, rows)):
        if limit is not None and count >= limit:
            return
        document = check_document(document)
        if document.id in seen:
            first = copies.get(document.id, 2)
            copy = next(n for n in range(first, len(seen) + 3) if f"{document.id}#{n}" not in seen)
            copies[document.id] = copy + 1
            what = f"document {seen[document.id]} has the same id"
            if rows.kind == "openai-batch":
                what = f"request {count + 1} has the custom_id of request {seen[document.id]}, so it was not run"
            error = document.error or f"duplicate id {document.id!r}: {what}; make ids unique"
            document = Document(f"{document.id}#{copy}", error=error, passed=document.passed)
        model = document.passed.get("model") if rows.kind == "openai-batch" and document.error is None else None
        if model is not None and model != (asked_for := asked_for or model):
            error = f"body.model is {model!r}, the first row's is {asked_for!r}; a job uses one model: split the file"
            document = Document(document.id, error=error, passed=document.passed)
        seen[document.id] = count + 1
        yield number, place, document


def _entries(document: Document, file: int, place: int, prompts: Sequence[str]) -> Iterator[Entry]:
    """Yield the entries of a document, one per prompt; if it has an error, the hash covers only its columns."""
    counts = document if document.error is None else Document("", passed=document.passed)
    entry = Entry(document.id, document.chars, counts.sha256, file, place, document.error)
    if not prompts:
        yield entry
    for number, name in enumerate(prompts):
        work = entry.chars if number == 0 else entry.chars // SHARED_WORK
        answer, too_long = answer_id(entry.id, name)
        yield entry._replace(id=answer, chars=work, error=entry.error or too_long)


def _look(files: Iterable[tuple[str, str]]) -> Iterator[CorpusFile]:
    """Yield the size and modification time of each file."""
    patience = 1.0
    for file, name in files:
        try:
            found = retried(partial(os.stat, file), file, patience=patience)
        except OSError as error:
            patience = patience / 2 if isinstance(error, UnavailableError) else 1.0
            yield CorpusFile(file, name, -1, 0)
        else:
            patience = 1.0
            yield CorpusFile(file, name, found.st_size, found.st_mtime_ns)
