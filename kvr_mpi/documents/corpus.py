"""A corpus: its index, which all ranks have, and its texts, which are read when they are needed."""

from __future__ import annotations

import contextlib
import json
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvr_mpi.disk import retried
from kvr_mpi.documents.document import Document
from kvr_mpi.documents.files import (
    MAX_ID_CHARS,
    READ_ERRORS,
    RawRow,
    check_document,
    document_of,
    file_error,
    is_readable_later,
    parquet_groups,
    read_rows,
    why_not_now,
)
from kvr_mpi.documents.index import (
    DIGEST_BYTES,
    NONE_RECORDED,
    CorpusFiles,
    CorpusPart,
    FileSpan,
    Index,
    Strings,
    cut_spans,
    describe_cut,
    index_spans,
    join,
    list_files,
    pack_columns,
    take,
    unpack_columns,
)
from kvr_mpi.documents.questions import answer_id
from kvr_mpi.documents.rows import DEFAULT_ROWS, RowFormat
from kvr_mpi.errors import NOT_NOW, CorpusError, UnavailableError
from kvr_mpi.plain import from_plain

# The first prompt about a document is this many times the work of a later one, which reuses the prefilled text.
SHARED_WORK = 16
OPEN_FILES = 16  # files that are read forward at the same time


@dataclass(slots=True)
class Corpus:
    """All documents of a job, by number.

    prompts : names of several prompts about each document; each prompt has a number, and a document's are adjacent.
    part, cut : see `index.CorpusPart` and `index.describe_cut`.
    later_work : work of a document's later prompts relative to the first one, as a divisor.
    """

    files: CorpusFiles = field(repr=False)
    index: Index = field(repr=False)
    rows: RowFormat = DEFAULT_ROWS
    prompts: tuple[str, ...] = ()
    part: CorpusPart = CorpusPart()
    cut: str = ""
    later_work: int = SHARED_WORK
    _last: tuple[int, Document] | None = field(default=None, init=False, repr=False, compare=False)
    _patience: float = field(default=1.0, init=False, repr=False, compare=False)  # see `disk.retried`
    _forward: ForwardReader | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.index) * (len(self.prompts) or 1)

    def document_number(self, number: int) -> int:
        """Return the number of the document that a number is about."""
        return number // (len(self.prompts) or 1)

    def id(self, number: int) -> str:
        """Return the id of a document, or of the answer to one of several prompts about it."""
        return self.named(number)[0]

    def named(self, number: int) -> tuple[str, str | None]:
        """Return the id, and the error if it is too long."""
        own = self.index.own_id(self.document_number(number), self.files)
        return answer_id(own, self.prompts[number % len(self.prompts)]) if self.prompts else (own, None)

    def ids(self) -> Iterator[str]:
        """Yield all ids, by number."""
        return map(self.id, range(len(self)))

    def is_bad(self, number: int) -> bool:
        """Whether it is known that a document cannot be processed; `read` says why."""
        return bool(self.index.is_bad[self.document_number(number)]) or self.named(number)[1] is not None

    def bad_among(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return `is_bad` of each of some numbers."""
        documents = numbers // (len(self.prompts) or 1)
        found = self.index.is_bad[documents].astype(np.bool_)
        if self.prompts:
            names = max(len(name.encode()) for name in self.prompts)
            for at in np.flatnonzero(self.index.ids.lengths[documents] + names >= MAX_ID_CHARS).tolist():
                found[at] = self.is_bad(int(numbers[at]))
        return found

    def is_transient(self, number: int) -> bool:
        """Whether a document's file could not be read for the moment, so that the next start of the job reads it."""
        return self.index.errors.get(self.document_number(number), "").startswith(NOT_NOW)

    def chars(self, number: int) -> int:
        """Return the length of a document's text: in characters, or bytes of a file that was not read yet."""
        return int(self.index.chars[self.document_number(number)])

    def works(self) -> npt.NDArray[np.int64]:
        """Return the work of each number, at least 1: characters, fewer for a document's later prompts."""
        each = len(self.prompts) or 1
        works = np.repeat(self.index.chars.astype(np.int64), each)
        later = np.arange(len(works)) % each > 0
        works[later] //= self.later_work
        return np.maximum(works, 1)

    def digest(self, number: int) -> str | None:
        """Return the beginning of the hash of a document's contents; None if they were not compared."""
        document = self.document_number(number)
        at = int(np.searchsorted(self.index.digested, document))
        if at < len(self.index.digested) and int(self.index.digested[at]) == document:
            return bytes(self.index.digests[at]).hex()
        return None

    def read(self, number: int) -> Document:
        """Read a document as it is now; if that fails, or another one is in its place, the result has the error."""
        document_number = self.document_number(number)
        name, too_long = self.named(number)
        error = self.index.errors.get(document_number, too_long)
        file = self.files.paths[int(self.index.file[document_number])]
        try:
            document, self._patience = self._read(document_number), 1.0
        except UnavailableError as failure:
            self._patience /= 2
            return Document(name, error=error or why_not_now(file, failure))
        except READ_ERRORS as failure:
            if error is not None or is_readable_later(file, failure):
                return Document(name, error=error or why_not_now(file, failure))
            if self.index.is_bad[document_number] or not self.files.format(self.index.file[document_number]).is_table:
                return Document(name, error=file_error(file, failure, self.rows.encoding))
            reason = getattr(failure, "strerror", None) or str(failure)
            return Document(name, error=f"{file} could be read when the job began, but no longer: {reason}")
        own = self.index.own_id(document_number, self.files)
        if error is None and document.id != own:
            found = f"{own!r} is not where it was"
            return Document(name, error=f"{NOT_NOW}{file} has changed since the job began: {found}; start it again")
        if error is not None:
            return Document(name, error=error, passed=document.passed)
        return replace(document, id=name)

    def _read(self, number: int) -> Document:
        if self._last is not None and self._last[0] == number:  # of several prompts
            return self._last[1]
        file, place = int(self.index.file[number]), int(self.index.place[number])
        path, kind = self.files.paths[file], self.files.format(file)
        if kind.is_table and (not kind.can_seek or kind.suffix == ".parquet"):
            self._forward = self._forward or ForwardReader()
            row = self._forward.row(path, self.rows, place, self._patience)
        else:
            row = next((row for _, row in read_rows(path, self.rows, place, patience=self._patience)), None)
        if row is None:
            raise ValueError("it has fewer rows")
        name = self.files.names[file]
        document = check_document(document_of(row, self.rows, path, name, int(self.index.row[number])))
        self._last = number, document
        return document

    def to_bytes(self) -> bytes:
        """Return everything as bytes, for other ranks."""
        head: dict[str, Any] = {"rows": asdict(self.rows), "prompts": self.prompts, "part": self.part, "cut": self.cut}
        head |= {"later_work": self.later_work, "errors": [*self.index.errors.items()]}
        return pack_columns(head, {**self.files.columns(), **self.index.columns()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Corpus:
        """Reconstruct a corpus, whose columns stay in `data`."""
        head, columns = unpack_columns(data)
        return cls(
            CorpusFiles.of(columns),
            Index.of(columns, dict(head["errors"])),
            from_plain(RowFormat, head["rows"]),
            tuple(head["prompts"]),
            CorpusPart(*head["part"]),
            head["cut"],
            head["later_work"],
        )


def corpus_of(
    ids: Sequence[str],
    chars: Sequence[int],
    hashes: Sequence[str],
    errors: Mapping[int, str] = MappingProxyType({}),
    prompts: tuple[str, ...] = (),
) -> Corpus:
    """Make a corpus of documents that are in no files, with their hashes (empty: unknown).

    Each prompt about one is the same work.
    """
    count = len(ids)
    digested = np.array([number for number in range(count) if hashes[number]], np.int32)
    digests = b"".join(bytes.fromhex(hashes[number]) for number in digested.tolist())
    index = Index(
        np.zeros(count, np.int32),
        np.arange(count, dtype=np.int64),
        np.ones(count, np.int32),
        np.array(chars, np.int32),
        np.array([number in errors for number in range(count)], np.bool_),
        Strings.of(ids),
        dict(errors),
        digested,
        np.frombuffer(digests, np.uint8).reshape(len(digested), -1 if len(digested) else DIGEST_BYTES),
    )
    files = CorpusFiles(Strings.of(()), Strings.of(()), np.zeros(0, np.int64))
    return Corpus(files, index, prompts=prompts, later_work=1)


class ForwardReader:
    """Reads rows of files in which not every row can be found, each file once, whatever the order of the rows.

    Reading starts at the beginning of the file, or of a row group of Parquet. Rows that are passed are kept in a
    temporary file without a name (in TMPDIR); if it cannot grow, they are read again instead.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, Iterator[tuple[int, RawRow]]]] = {}  # the next row, and all from there on
        self._kept: dict[str, array[int]] = {}  # offsets in the temporary file, by row, or -1
        self._groups: dict[str, list[int]] = {}  # first rows
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
        self._size, self._is_full = 0, False

    def __del__(self) -> None:
        self._file.close()

    def row(self, path: str, rows: RowFormat, place: int, patience: float) -> RawRow | None:
        """Return a row; None if there are fewer."""
        kept = self._kept.setdefault(path, array("q"))
        if place < len(kept) and kept[place] >= 0:
            self._file.seek(kept[place])
            return _unpack(self._file.readline())
        if path not in self._groups:
            is_parquet = path.lower().endswith(".parquet")
            self._groups[path] = retried(partial(parquet_groups, path), path, patience=patience) if is_parquet else [0]
        group = self._groups[path][bisect_right(self._groups[path], place) - 1]
        at, source = self._open.pop(path, (-1, iter(())))
        if not group <= at <= place:
            if len(self._open) == OPEN_FILES:
                del self._open[next(iter(self._open))]
            unread = (number for number in range(group, place) if number >= len(kept) or kept[number] < 0)
            source = read_rows(path, rows, place if self._is_full else next(unread, place), patience=patience)
        for number, row in source:
            kept.extend([-1] * (number + 1 - len(kept)))
            if kept[number] < 0:
                kept[number] = self._keep(row)
            if number == place:
                self._open[path] = number + 1, source
                return row
        return None

    def _keep(self, row: RawRow) -> int:
        """Write a row to the temporary file; return its offset, or -1."""
        line = _pack(row)
        if line is None or self._is_full:
            return -1
        try:
            self._file.seek(self._size)
            self._file.write(line)
            self._file.flush()
        except OSError:
            self._is_full = True
            return -1
        self._size += len(line)
        return self._size - len(line)


def _pack(row: RawRow) -> bytes | None:
    """Return a row as a line; None if that loses a type."""
    if isinstance(row, bytes):
        return b"r" + row.rstrip(b"\r\n") + b"\n"
    with contextlib.suppress(TypeError):
        return b"j" + json.dumps(row).encode() + b"\n"
    return None


def _unpack(line: bytes) -> RawRow:
    row: RawRow = line[1:] if line.startswith(b"r") else json.loads(line[1:])
    return row


def scan_corpus(
    paths: Iterable[str],
    *,
    rows: RowFormat = DEFAULT_ROWS,
    limit: int | None = None,
    prompts: Sequence[str] = (),
    part: CorpusPart = CorpusPart(),  # noqa: B008
    recorded: npt.NDArray[np.uint64] = NONE_RECORDED,
) -> Corpus:
    """Index a corpus on one rank.

    paths : folders, globs, files (see `formats`), or datasets of the hub.
    rows : the fields to read from a row. A row without an id is named by its file and number.
    limit : only the first documents, of which `part` then is a part.
    prompts : names of several prompts about each document.
    recorded : as for `index_spans`.

    Raises `CorpusError` if a path matches nothing, a file has an unknown format, or there are no documents;
    `UnavailableError` if a folder cannot be listed now.
    """
    files = list_files(paths := list(paths))
    rows = with_model(files, rows)
    every = CorpusPart() if limit is not None else part
    spans = [FileSpan(number) for number in range(len(files))] if limit is not None else cut_spans(files, every)
    found = index_spans(files, spans, rows, recorded=recorded, limit=limit)
    return make_corpus(files, [found], rows, paths=paths, prompts=prompts, part=part, limit=limit)


def make_corpus(
    files: CorpusFiles,
    parts: Iterable[Any],
    rows: RowFormat,
    *,
    paths: Sequence[str] = (),
    prompts: Sequence[str] = (),
    part: CorpusPart = CorpusPart(),  # noqa: B008
    limit: int | None = None,
) -> Corpus:
    """Join what all ranks have indexed; with a limit on documents, the part is taken of those.

    Raises `CorpusError`, which names the `paths`, if there are no documents; a part may have none.
    """
    index = join(parts, files, is_batch=rows.kind == "openai-batch")
    if limit is not None and part.parts > 1:
        index = take(index, np.arange(part.number, len(index), part.parts))
    if not len(index) and part.parts == 1:
        raise CorpusError(f"documents.path {list(paths)}: the files contain no documents; expected at least one")
    return Corpus(files, index, rows, tuple(prompts), part, describe_cut(files, part, limit))


def with_model(files: CorpusFiles, rows: RowFormat) -> RowFormat:
    """Return the format with the model that the first valid request names."""
    if rows.kind != "openai-batch" or rows.model is not None:
        return rows
    for path, name in zip(files.paths, files.names, strict=True):
        with contextlib.suppress(*READ_ERRORS, UnavailableError):
            for place, row in read_rows(path, rows):
                document = document_of(row, rows, path, name, place + 1)
                if document.error is None and (model := document.passed.get("model")) is not None:
                    return replace(rows, model=str(model))
    return rows


def read_corpus(
    paths: Iterable[str], *, rows: RowFormat = DEFAULT_ROWS, limit: int | None = None
) -> Iterator[Document]:
    """Yield the documents of a corpus; parameters as for `scan_corpus`; invalid documents have an error."""
    corpus = scan_corpus(paths, rows=rows, limit=limit)
    yield from map(corpus.read, range(len(corpus)))
