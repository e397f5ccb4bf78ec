"""The index of a corpus: where its documents are, in numpy columns, made by all ranks together.

Rank 0 lists the files (`list_files`); each rank indexes its spans of them (`cut_spans`, `index_spans`); rank 0 joins
the parts (`join`). A task of an array indexes only its own part of the corpus. A row takes about 40 bytes. Text files
are read here only if there are results to compare them with.

Uncompressed ``.jsonl`` files and Parquet files are divided by bytes and rows. Texts, and tables that can only be read
forward, are dealt as whole files; if there are fewer such tables than tasks, each task takes every n-th row of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvr_mpi.disk import retried
from kvr_mpi.documents.document import Document
from kvr_mpi.documents.files import (
    READ_ERRORS,
    check_document,
    count_lines,
    document_of,
    file_error,
    line_start,
    parquet_length,
    read_rows,
    row_name,
)
from kvr_mpi.documents.formats import FileFormat, format_of, plain_name, size_and_time
from kvr_mpi.documents.paths import find_files
from kvr_mpi.documents.rows import RowFormat
from kvr_mpi.errors import UnavailableError

DIGEST_BYTES = 8  # of a SHA-256 that are kept in memory to compare a document with its own record
AT_ONCE = 1 << 16  # numbers that are objects of Python at a time
NONE_RECORDED: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)


class CorpusPart(NamedTuple):
    """The part of a corpus that one task of an array processes."""

    number: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return "all documents" if self.parts == 1 else f"documents.shard = '{self.number}/{self.parts}'"


class FileSpan(NamedTuple):
    """Rows of a file: those that begin from byte `start` to byte `end` (None: its end), every `parts`-th of them."""

    file: int
    start: int = 0
    end: int | None = None
    number: int = 0
    parts: int = 1


def hash_id(name: str) -> int:
    """Return 64 bits that stand for a document's id."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass"))


def has_hash(hashes: npt.NDArray[np.uint64], name: str) -> bool:
    """Return whether the hash of an id is among sorted ones."""
    at = int(np.searchsorted(hashes, wanted := np.uint64(hash_id(name))))
    return at < len(hashes) and bool(hashes[at] == wanted)


@dataclass(slots=True)
class Strings:
    """Many strings in one block of memory; `ends` are the offsets at which they end."""

    data: bytes | bytearray | memoryview
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Pack strings."""
        data, ends = bytearray(), array("q")
        for each in strings:
            data += each.encode(errors="surrogatepass")
            ends.append(len(data))
        return cls(data, np.frombuffer(ends, np.int64) if ends else np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return bytes(self.data[start : int(self.ends[number])]).decode(errors="surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of bytes of each."""
        return np.diff(self.ends, prepend=0)


def pack_columns(head: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any] | Strings]) -> bytes:
    """Return JSON values and columns as bytes: a line of JSON, and then the columns; strings are two of them."""
    arrays = dict[str, npt.NDArray[Any]]()
    for name, column in columns.items():
        if isinstance(column, Strings):
            arrays |= {name: np.frombuffer(column.data, np.uint8), f"{name}.ends": column.ends}
        else:
            arrays[name] = column
    listed = [(name, str(column.dtype), column.shape) for name, column in arrays.items()]
    line = json.dumps({**head, "columns": listed}).encode()
    buffers: list[Any] = [np.ascontiguousarray(column) for column in arrays.values()]
    return b"".join([line, b"\n", *buffers])


def unpack_columns(data: bytes | bytearray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was packed; the columns stay in `data`."""
    at = data.index(b"\n") + 1
    head, columns = json.loads(data[:at]), dict[str, Any]()
    for name, kind, shape in head["columns"]:
        column = np.frombuffer(data, kind, math.prod(shape), at) if math.prod(shape) else np.zeros(0, kind)
        at += column.nbytes
        of, _, is_ends = name.partition(".")
        columns[of] = Strings(columns[of].data, column) if is_ends else column.reshape(shape)
    return head, columns


@dataclass(slots=True)
class CorpusFiles:
    """The files of a corpus.

    names : those of their documents.
    sizes : in bytes, of files that are divided between ranks; of others -1.
    """

    paths: Strings
    names: Strings
    sizes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.paths)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> CorpusFiles:
        """Reconstruct the files."""
        return cls(columns["paths"], columns["names"], columns["sizes"])

    def columns(self) -> dict[str, npt.NDArray[Any] | Strings]:
        """Return everything."""
        return {"paths": self.paths, "names": self.names, "sizes": self.sizes}

    def format(self, number: int) -> FileFormat:
        """Return a file's format, by its name."""
        found = format_of(self.paths[number])
        assert found is not None, "others are not listed"
        return found


def list_files(paths: Iterable[str]) -> CorpusFiles:
    """List the files of a corpus.

    Raises `CorpusError` if a path matches nothing, or a file has an unknown format; `UnavailableError` if a folder or
    the size of a table cannot be read now.
    """
    found = find_files(paths)
    sizes = np.full(len(found), -1, np.int64)
    for number, (path, _) in enumerate(found):
        kind = format_of(path)
        if kind is not None and kind.can_seek:
            sizes[number] = _size_of(path)
    return CorpusFiles(Strings.of(path for path, _ in found), Strings.of(plain_name(name) for _, name in found), sizes)


def _size_of(path: str) -> int:
    """Return the size of a table in bytes, 0 if it cannot be read; raises `UnavailableError`."""
    try:
        return retried(partial(size_and_time, path), path, listed=not os.path.islink(path))[0]
    except UnavailableError:
        raise
    except OSError:  # `index_spans` reports it
        return 0


def cut_spans(files: CorpusFiles, part: CorpusPart = CorpusPart(), rank: int = 0, ranks: int = 1) -> list[FileSpan]:  # noqa: B008
    """Return what a rank of a task indexes; the spans of all ranks of all tasks are the whole corpus."""
    divided = np.flatnonzero(files.sizes >= 0).tolist()
    total, spans = int(files.sizes[divided].sum()), list[FileSpan]()
    piece, pieces, before = part.number * ranks + rank, part.parts * ranks, 0
    low, high = total * piece // pieces, total * (piece + 1) // pieces
    for number in divided:
        size = int(files.sizes[number])
        start, end = max(low - before, 0), min(high - before, size)
        if start < end:
            spans.append(FileSpan(number, start, end))
        elif size == 0 and piece == 0:  # it may have become unreadable
            spans.append(FileSpan(number))
        before += size
    wholes = np.flatnonzero(files.sizes < 0).tolist()
    formats = [files.format(number).is_table for number in wholes]
    for is_table in (True, False):
        kind = [number for number, each in zip(wholes, formats, strict=True) if each == is_table]
        if is_table and part.parts > len(kind):
            mine = [FileSpan(number, 0, None, part.number, part.parts) for number in kind]
        else:
            mine = [FileSpan(number) for number in kind[part.number :: part.parts]]
        spans += mine[rank::ranks]
    return sorted(spans)


def part_numbers(files: CorpusFiles, index: Index, parts: int) -> npt.NDArray[np.int64]:
    """Return the number of the part that has each document of a whole corpus, if `cut_spans` divides it so."""
    sizes, formats = np.maximum(files.sizes, 0), [files.format(number) for number in range(len(files))]
    offsets = (np.cumsum(sizes) - sizes)[index.file] + index.place
    for number, kind in enumerate(formats):
        if kind.suffix == ".parquet" and (of_file := index.file == number).any():
            place = index.place[of_file]
            offsets[of_file] += place * sizes[number] // len(place) - place
    bounds = [int(sizes.sum()) * number // parts for number in range(1, parts)]
    found = np.searchsorted(bounds, offsets, side="right")
    for is_table in (True, False):
        whole = np.array([each.is_table == is_table for each in formats]) & (files.sizes < 0)
        mine = whole[index.file]
        if is_table and parts > whole.sum():
            found[mine] = index.place[mine] % parts
        else:
            found[mine] = (np.cumsum(whole) - 1)[index.file[mine]] % parts
    return found


def describe_cut(files: CorpusFiles, part: CorpusPart, limit: int | None) -> str:
    """Return a hash of everything on which the division of a corpus into parts depends; empty for one part."""
    if part.parts == 1:
        return ""
    sizes = files.sizes.tolist()
    for number in np.flatnonzero(files.sizes < 0).tolist():
        if files.format(number).is_table:  # whose rows may be dealt
            sizes[number] = _size_of(files.paths[number])
    listed = [part.parts, *files.names, *sizes, *([] if limit is None else [limit])]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Index:
    """The documents of a corpus, or of some spans of it.

    file, place : number of the file, and the row's place there (see `files`).
    row : the row's number from 1; 0: the file itself.
    chars : length of the text; of text files that were not read their size in bytes.
    is_bad : whether reading it gives an error.
    ids : an empty one stands for the name of its file, or its file and row.
    errors : by number, of documents that cannot be processed for another reason than their row.
    digested, digests : numbers of the documents that were compared, and the hashes of their contents (n, bytes), of
        which an index of files has `DIGEST_BYTES`.
    """

    file: npt.NDArray[np.int32]
    place: npt.NDArray[np.int64]
    row: npt.NDArray[np.int32]
    chars: npt.NDArray[np.int32]
    is_bad: npt.NDArray[np.bool_]
    ids: Strings
    errors: dict[int, str]
    digested: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.file)

    @classmethod
    def of(cls, columns: Mapping[str, Any], errors: dict[int, str]) -> Index:
        """Reconstruct an index."""
        return cls(**{name: columns[name] for name in (*COLUMNS, *OTHERS)}, errors=errors)

    def columns(self) -> dict[str, npt.NDArray[Any] | Strings]:
        """Return everything but the errors."""
        return {name: getattr(self, name) for name in (*COLUMNS, *OTHERS)}

    def own_id(self, number: int, files: CorpusFiles) -> str:
        """Return a document's id."""
        return self.ids[number] or self.place_name(number, files)

    def hash_ids(self, files: CorpusFiles) -> npt.NDArray[np.uint64]:
        """Return `hash_id` of all documents' ids."""

        def hashes() -> Iterator[int]:
            data, start = memoryview(self.ids.data), 0
            blocks = range(0, len(self), AT_ONCE)
            for number, end in enumerate(end for at in blocks for end in self.ids.ends[at : at + AT_ONCE].tolist()):
                yield xxhash.xxh3_64_intdigest(data[start:end]) if end > start else hash_id(self.own_id(number, files))
                start = end

        return np.fromiter(hashes(), np.uint64, len(self))

    def place_name(self, number: int, files: CorpusFiles) -> str:
        """Return the id of a document without one."""
        name, row = files.names[int(self.file[number])], int(self.row[number])
        return row_name(name, row) if row else name


OTHERS = ("ids", "digested", "digests")  # besides `COLUMNS`
COLUMNS: dict[str, Any] = {"file": np.int32, "place": np.int64, "row": np.int32, "chars": np.int32, "is_bad": np.bool_}


class _Rows:
    """Collects the rows of an index."""

    def __init__(self) -> None:
        self.file, self.place, self.row, self.chars = array("i"), array("q"), array("i"), array("i")
        self.is_bad = bytearray()
        self.ids, self.ends = bytearray(), array("q")
        self.errors: dict[int, str] = {}
        self.digested, self.digests = array("i"), bytearray()

    def __len__(self) -> int:
        return len(self.file)

    def add(self, file: int, place: int, row: int, chars: int, name: str = "", *, is_bad: bool = False) -> None:
        """Add a document."""
        self.file.append(file)
        self.place.append(place)
        self.row.append(row)
        self.chars.append(min(chars, (1 << 31) - 1))
        self.is_bad.append(is_bad)
        self.ids += name.encode("utf-8", "surrogatepass")
        self.ends.append(len(self.ids))

    def add_digest(self, document: Document) -> None:
        """Add the hash of the contents of the next document."""
        self.digested.append(len(self))
        self.digests += bytes.fromhex(document.sha256)[:DIGEST_BYTES]

    def index(self) -> Index:
        """Return the index."""

        def column(values: array[int] | bytearray, kind: Any) -> npt.NDArray[Any]:
            return np.frombuffer(values, kind) if values else np.zeros(0, kind)

        return Index(
            **{name: column(getattr(self, name), kind) for name, kind in COLUMNS.items()},
            ids=Strings(self.ids, column(self.ends, np.int64)),
            errors=self.errors,
            digested=column(self.digested, np.int32),
            digests=column(self.digests, np.uint8).reshape(-1, DIGEST_BYTES),
        )


class Lines(NamedTuple):
    """What one span contributed: its file and start, its lines, and its documents.

    lines : None if it could not be read to its end.
    """

    file: int
    start: int
    lines: int | None
    documents: int


def index_spans(
    files: CorpusFiles,
    spans: Sequence[FileSpan],
    rows: RowFormat,
    *,
    recorded: npt.NDArray[np.uint64] = NONE_RECORDED,
    limit: int | None = None,
) -> tuple[Index, list[Lines]]:
    """Index spans of files.

    recorded : sorted hashes (`hash_id`) of the ids with results; the contents of these documents are hashed.
    limit : stop after this many documents.
    """
    found, lines, patience = _Rows(), list[Lines](), 1.0
    for span in spans:
        path, name, before = files.paths[span.file], files.names[span.file], len(found)
        count: int | None = 0
        kind = files.format(span.file)
        try:
            if not kind.is_table:
                _add_text(found, files, span.file, rows, is_read=has_hash(recorded, name), patience=patience)
                patience = 1.0
            else:
                for count, place, row in _rows_of(path, files, span, rows, patience):  # noqa: B007
                    patience = 1.0
                    if isinstance(row, bytes) and not row.strip():
                        continue
                    number = count if kind.can_seek else place + 1
                    document = check_document(document_of(row, rows, path, name, number))
                    is_named = document.id != row_name(name, number)
                    is_bad = document.error is not None
                    if len(recorded) and not is_bad and (not is_named or has_hash(recorded, document.id)):
                        found.add_digest(document)
                    own = document.id if is_named else ""
                    found.add(span.file, place, number, document.chars, own, is_bad=is_bad)
                    if limit is not None and len(found) >= limit:
                        break
        except UnavailableError as error:
            patience, count = patience / 2, None
            _add_file_error(found, span, file_error(path, error))
        except READ_ERRORS as error:
            count = None
            _add_file_error(found, span, file_error(path, error, rows.encoding))
        lines.append(Lines(span.file, span.start, count, len(found) - before))
        if limit is not None and len(found) >= limit:
            break
    return found.index(), lines


def _rows_of(
    path: str, files: CorpusFiles, span: FileSpan, rows: RowFormat, patience: float
) -> Iterator[tuple[int, int, Any]]:
    """Yield (number in the span from 1, place, row)."""
    start, end, listed = span.start, span.end, not os.path.islink(path)
    if end is not None and files.format(span.file).suffix == ".parquet":
        size, length = int(files.sizes[span.file]), retried(partial(parquet_length, path), path, patience=patience)
        start, end = -(-start * length // size), -(-end * length // size)
        for place, row in read_rows(path, rows, start, end, listed=listed, patience=patience):
            yield place + 1, place, row
        return
    if start:
        start = line_start(path, start, patience=patience)
    for count, (place, row) in enumerate(read_rows(path, rows, start, end, listed=listed, patience=patience)):
        if count % span.parts == span.number:
            yield count + 1, place, row


def _add_text(found: _Rows, files: CorpusFiles, file: int, rows: RowFormat, *, is_read: bool, patience: float) -> None:
    """Add a text file, whose contents are read only if there are results of it."""
    path, name = files.paths[file], files.names[file]
    listed = not os.path.islink(path)  # a link may lead nowhere
    if is_read:
        ((_, row),) = read_rows(path, rows, listed=listed, patience=patience)
        document = check_document(document_of(row, rows, path, name, 0))
        chars = document.chars
    else:
        document = check_document(Document(name, "x"))
        chars = retried(partial(size_and_time, path), path, listed=listed, patience=patience)[0]
    if is_read and document.error is None:
        found.add_digest(document)
    found.add(file, 0, 0, chars, document.id if document.id != name else "", is_bad=document.error is not None)


def _add_file_error(found: _Rows, span: FileSpan, error: str) -> None:
    found.errors[len(found)] = error
    found.add(span.file, span.start, 0, 0, is_bad=True)


def join(parts: Iterable[tuple[Index, Sequence[Lines]]], files: CorpusFiles, *, is_batch: bool = False) -> Index:
    """Join the indexes of all ranks to one in the order of the corpus, in which all ids are unique.

    A later document with the id of another one gets an error, and an id of its own; is_batch : it is a request.
    """
    before, parts = dict[int, dict[int, int | None]](), list(parts)
    for _, spans in parts:
        for span in spans:
            before.setdefault(span.file, {})[span.start] = span.lines
    _count_before((index for index, _ in parts), before, files)
    indexes = [_number_rows(index, spans, before, files) for index, spans in parts]
    whole = indexes[0] if len(indexes) == 1 else _concatenate(indexes)
    del parts, indexes  # as large as the whole
    order = np.lexsort((whole.place, whole.file)) if (np.diff(whole.file) < 0).any() else None
    if order is not None:
        whole = take(whole, order)
    double = _double_errors(whole, files)
    if double:
        whole = take(whole, np.setdiff1d(np.arange(len(whole)), double))
    _make_unique(whole, files, is_batch=is_batch)
    return whole


def _count_before(indexes: Iterable[Index], before: Mapping[int, dict[int, int | None]], files: CorpusFiles) -> None:
    """Add to `before` the lines that other tasks have of a file, if they number rows without an id.

    Raises `UnavailableError` if they cannot be read now.
    """
    unnamed = (index.file[(index.row > 0) & (index.ids.lengths == 0)] for index in indexes)
    for file in {file for each in unnamed for file in np.unique(each).tolist()}:
        if _has_lines(files.format(file)) and (start := min(before[file])):
            before[file][0] = count_lines(files.paths[file], start)


def _has_lines(kind: FileFormat) -> bool:
    """Whether rows are numbered by lines, of which spans are parts."""
    return kind.is_table and kind.can_seek and kind.suffix != ".parquet"


def _number_rows(
    index: Index, spans: Sequence[Lines], before: Mapping[int, Mapping[int, int | None]], files: CorpusFiles
) -> Index:
    """Give the rows of a rank their numbers in their files, which were counted from the start of each span.

    before : by file and start, the lines of all spans.

    Rows that only their number would name are left out if it is unknown, since an earlier span could not be read.
    """
    is_kept, at = np.ones(len(index), np.bool_), 0
    for span in spans:
        rows, at = slice(at, at + span.documents), at + span.documents
        if not _has_lines(files.format(span.file)):
            continue
        numbered = index.row[rows] > 0
        earlier = [lines for start, lines in before[span.file].items() if start < span.start]
        if None in earlier:
            is_kept[rows] &= (index.ids.lengths[rows] > 0) | ~numbered
        index.row[rows][numbered] += sum(filter(None, earlier))
    return index if is_kept.all() else take(index, np.flatnonzero(is_kept))


def _concatenate(indexes: Sequence[Index]) -> Index:
    offsets = np.cumsum([0, *map(len, indexes)])
    bytes_before = np.cumsum([0, *(len(index.ids.data) for index in indexes)])
    ends = [index.ids.ends + before for index, before in zip(indexes, bytes_before, strict=False)]
    return Index(
        **{name: np.concatenate([getattr(index, name) for index in indexes]) for name in COLUMNS},
        ids=Strings(b"".join(index.ids.data for index in indexes), np.concatenate(ends)),
        errors={
            int(offset) + number: error
            for index, offset in zip(indexes, offsets, strict=False)
            for number, error in index.errors.items()
        },
        digested=np.concatenate([index.digested + np.int32(at) for index, at in zip(indexes, offsets, strict=False)]),
        digests=np.concatenate([index.digests for index in indexes]),
    )


def take(index: Index, order: npt.NDArray[np.int64]) -> Index:
    """Return some documents of an index, in another order."""
    places = np.full(len(index), -1, np.int32)
    places[order] = np.arange(len(order))
    digested = places[index.digested]
    kept = np.flatnonzero(digested >= 0)
    kept = kept[np.argsort(digested[kept], kind="stable")]
    data, ids = memoryview(index.ids.data), bytearray()
    for at in range(0, len(order), AT_ONCE):
        some = order[at : at + AT_ONCE]
        starts, ends = np.where(some > 0, index.ids.ends[some - 1], 0), index.ids.ends[some]
        ids += b"".join(data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
    return Index(
        **{name: getattr(index, name)[order] for name in COLUMNS},
        ids=Strings(ids, np.cumsum(index.ids.lengths[order])),
        errors={int(places[number]): error for number, error in index.errors.items() if places[number] >= 0},
        digested=digested[kept],
        digests=index.digests[kept],
    )


def _double_errors(index: Index, files: CorpusFiles) -> list[int]:
    """Return the entries of tables that several ranks could not read, but for the first one of each table."""
    seen, double = set[int](), list[int]()
    for number in sorted(index.errors):
        file = int(index.file[number])
        if index.row[number] == 0 and files.format(file).is_table:
            if file in seen:
                double.append(number)
            seen.add(file)
    return double


def _make_unique(index: Index, files: CorpusFiles, *, is_batch: bool) -> None:
    """Give later documents with the id of an earlier one an error, and an id that no other document has."""
    hashes = index.hash_ids(files)
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return
    first: dict[str, int] = {}
    copies: dict[str, int] = {}
    renamed: dict[int, str] = {}
    for number in np.flatnonzero(np.isin(hashes, repeated)).tolist():
        name = index.own_id(number, files)
        if first.setdefault(name, number) == number:
            continue
        copy = copies.get(name, 2)
        while has_hash(ordered, f"{name}#{copy}"):
            copy += 1
        copies[name], renamed[number] = copy + 1, f"{name}#{copy}"
        what = f"document {first[name] + 1} has the same id"
        if is_batch:
            what = f"request {number + 1} has the custom_id of request {first[name] + 1}, so it was not run"
        if not index.is_bad[number] or index.row[number] == 0:
            index.errors.setdefault(number, f"duplicate id {name!r}: {what}; make ids unique")
        index.is_bad[number] = True
    index.ids = Strings.of(renamed.get(number, name) for number, name in enumerate(index.ids))
