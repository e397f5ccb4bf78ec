"""The file formats of a corpus, read as streams, so that a corpus may be larger than memory."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from kvr_mpi.disk import WRONG_KIND, list_folder, open_regular, retried
from kvr_mpi.documents.document import Document
from kvr_mpi.documents.paths import TEXT_SUFFIXES, suffix_of
from kvr_mpi.documents.rows import UTF_8, RowFormat
from kvr_mpi.errors import NOT_NOW, CorpusError, UnavailableError
from kvr_mpi.plain import parse_json

MAX_ID_CHARS = 512
# Maximum size of a document or row, more than any model can read. Larger ones are never loaded as a whole.
MAX_TEXT_BYTES = 64 << 20
PARQUET_ROWS, PARQUET_BYTES = 16, 64 << 20  # limits of what is in memory at once
SAMPLE_ROWS = 20  # rows to read from a file to find its fields
SURROGATE = re.compile("[\ud800-\udfff]")
# First bytes of the binary files most often found among texts: PDF, ZIP (.docx, .xlsx), gzip, HDF5, images, OLE (.doc).
BINARY = (b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\x89HDF", b"\x89PNG", b"\xff\xd8\xff", b"\xd0\xcf\x11\xe0")
# All bytes except control characters that text does not contain; a larger share of those marks a file as binary.
TEXT_BYTES = bytes([*b"\b\t\n\v\f\r\x1b", *range(32, 127), *range(128, 256)])
MOST_CONTROLS = 0.01
# Control characters, bidirectional marks, line and paragraph separators, byte order marks, surrogates.
BAD_IN_ID = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

# A row as stored: a text, a line of JSON, the size of a line that is too long, or a row of Parquet.
RawRow = str | bytes | int | dict[str, Any]


def stream_rows(files: Sequence[tuple[str, str]], rows: RowFormat) -> Iterator[tuple[int, int, Document]]:
    """Yield (file number, place, document) of all files, unchecked; see `check_document`.

    `read_rows` can start at a place: the byte offset in ``.jsonl``, the row number (from 0) in ``.jsonl.gz`` and
    ``.parquet``, otherwise 0.
    """
    patience = 1.0
    for number, (path, name) in enumerate(files):
        file, listed = Path(path), not os.path.islink(path)  # a link may lead nowhere
        try:
            there = read_rows(file, rows, listed=listed, patience=patience)
            for count, (place, row) in enumerate(there, start=1):
                patience = 1.0
                if not isinstance(row, bytes) or row.strip():
                    yield number, place, document_of(row, rows, file, name, count)
        except UnavailableError as error:
            patience /= 2
            yield number, 0, Document(name, error=why_not_now(file, error))
        except UnicodeDecodeError as error:
            yield number, 0, Document(name, error=_why_no_text(file, error, rows.encoding))
        except ValueError as error:
            if suffix_of(file) != ".parquet":  # a bug of ours
                raise
            yield number, 0, Document(name, error=f"{file} cannot be read as Parquet: {error}")
        except (OSError, EOFError, zlib.error) as error:
            if is_readable_later(file, error):
                yield number, 0, Document(name, error=why_not_now(file, error))
                continue
            reason = getattr(error, "strerror", None) or str(error)
            yield number, 0, Document(name, error=f"{file} cannot be read: {reason}")


def is_readable_later(file: Path, error: Exception) -> bool:
    """Whether an error is about access to a file, such as permission or too many open files, and not its contents.

    A file that is missing although its folder names it is about access, too.
    """
    if not isinstance(error, OSError) or error.errno is None or error.errno in WRONG_KIND:
        return False
    if error.errno != errno.ENOENT:
        return True
    with contextlib.suppress(OSError):
        return not file.is_symlink() and any(entry.name == file.name for entry in list_folder(file.parent))
    return False


def why_not_now(file: Path, error: Exception) -> str:
    """Return the error of a document whose file cannot be read now; see `errors.NOT_NOW`."""
    cause = error.__cause__ if isinstance(error, UnavailableError) and error.__cause__ else error
    reason = getattr(cause, "strerror", None) or str(cause)
    return f"{NOT_NOW}{file}: {reason}; the next start of the job tries again"


def read_rows(
    file: Path, rows: RowFormat, start: int = 0, *, listed: bool = False, patience: float = 1.0
) -> Iterator[tuple[int, RawRow]]:
    """Yield (place, row) of a file, starting at a place; a text file is one row.

    After a transient error, the file is opened again and read from the row that failed; see `disk.retried`, also for
    `listed` and `patience`.

    Raises `UnavailableError` if the file cannot be read now; `OSError`, `EOFError`, `ValueError` or `zlib.error` if it
    cannot be read at all, or is damaged.
    """
    if suffix_of(file) in TEXT_SUFFIXES:
        yield (
            0,
            retried(lambda: read_text(file, rows.encoding, patience=patience), file, listed=listed, patience=patience),
        )
        return
    version: tuple[int, int] | None = None
    source: Iterator[tuple[int, int, RawRow]] | None = None

    def advance() -> tuple[int, int, RawRow] | None:
        nonlocal source, version
        try:
            if source is None:
                found = os.stat(file)
                was, version = version, (found.st_size, found.st_mtime_ns)
                if was not in (None, version):
                    raise UnavailableError(f"{file} was replaced while it was read")
                source = _table_rows(file, rows, start, patience)
            return next(source, None)
        except BaseException:  # a generator ends at an error
            source = None
            raise

    while (item := retried(advance, file, listed=listed, patience=patience)) is not None:
        place, start, row = item
        yield place, row


def _table_rows(file: Path, rows: RowFormat, start: int, patience: float) -> Iterator[tuple[int, int, RawRow]]:
    """Yield (place, next place, row) of a table."""
    kind = suffix_of(file)
    with open_regular(file, patience=patience) as stream:
        if kind == ".parquet":
            for number, fields in parquet_rows(file, rows.needed, start):
                yield number, number + 1, fields
            return
        if kind == ".jsonl.gz":
            for number, (_, line) in enumerate(read_lines(gzip.open(stream, "rb"))):
                if number >= start:
                    yield number, number + 1, line
            return
        stream.seek(start)
        for size, line in read_lines(stream):
            yield start, start + size, line
            start += size


def document_of(row: RawRow, rows: RowFormat, file: Path, name: str, number: int) -> Document:
    """Convert a row from `read_rows` to a document; `number` counts the rows of the file from 1."""
    if isinstance(row, str):
        return rows.text_file(name, row)
    place = f"{name}:{number}"
    if isinstance(row, int):
        most = f"more than the {MAX_TEXT_BYTES >> 20} MiB a row may have"
        return Document(place, error=f"line {number} of {file} has {row} bytes, {most}; split it")
    if isinstance(row, bytes):
        try:
            row = parse_json(row)
        except (ValueError, RecursionError) as error:
            return Document(place, error=f"line {number} of {file} is not JSON: {error}")
    if not isinstance(row, dict):
        return Document(place, error=f"line {number} of {file} is a JSON {type(row).__name__}, not an object")
    return rows.document(row, place)


def _why_no_text(file: Path, error: UnicodeDecodeError, encoding: str) -> str:
    if _is_binary(error.object):
        return f"{file} is a binary file, not text; convert it to text, or remove it"
    what = f"byte {error.object[error.start]:#04x} at position {error.start}"
    wanted = f"{file} is not {encoding.upper()}: {what}"
    return (
        f"{wanted}; convert it, such as with `iconv -f latin1 -t utf8`, or set documents.encoding if all files have "
        f"another encoding"
    )


def _is_binary(data: bytes) -> bool:
    """Whether bytes are not text: they have a binary signature or many control characters, but no UTF-16 mark."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False
    return data.startswith(BINARY) or len(data.translate(None, TEXT_BYTES)) > MOST_CONTROLS * len(data)


def read_text(file: Path, encoding: str = UTF_8, *, patience: float = 1.0) -> str:
    """Read a whole text file, without its byte order mark.

    Raises `UnicodeDecodeError` if it is not in this encoding, or is binary, which some encodings would accept as text.
    """
    with open_regular(file, patience=patience) as stream:
        data = stream.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OSError(
            errno.EFBIG, f"it is larger than {MAX_TEXT_BYTES >> 20} MiB, the maximum for one document; split it"
        )
    if not encoding.startswith("utf") and _is_binary(data):
        raise UnicodeDecodeError(encoding, data, 0, 1, "binary")
    return data.decode("utf-8-sig" if encoding == UTF_8 else encoding).removeprefix("\ufeff")


def read_lines(stream: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, bytes | int]]:
    """Yield (size in bytes, line) of every line; of lines larger than `MAX_TEXT_BYTES` only the size."""
    while line := stream.readline(MAX_TEXT_BYTES):
        size, rest = len(line), line
        while rest and not rest.endswith(b"\n") and size >= MAX_TEXT_BYTES:
            rest = stream.readline(1 << 20)
            size += len(rest)
        yield size, line if size <= MAX_TEXT_BYTES else size


def is_table(file: Path) -> bool:
    """Whether each row of a file is a document."""
    return suffix_of(file) not in TEXT_SUFFIXES


def first_rows(file: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Read a table's first readable rows; raise `CorpusError` if the package for its format is missing."""
    found: list[Any] = []
    with contextlib.suppress(OSError, EOFError, ValueError, zlib.error):
        for _, row in islice(read_rows(file, RowFormat(columns=tuple(fields))), SAMPLE_ROWS):
            with contextlib.suppress(ValueError, RecursionError):
                found.append(parse_json(row) if isinstance(row, bytes) else row)
    return [row for row in found if isinstance(row, dict)]


def parquet_rows(file: Path, wanted: Sequence[str], start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) from row `start` on, unused fields as None; raise `ValueError` for other files."""
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(f"{file}: reading Parquet needs pyarrow; `pip install pyarrow`") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        sizes = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
        groups, number = list(range(len(sizes))), 0
        while groups and number + sizes[groups[0]] <= start:
            number += sizes[groups.pop(0)]
        columns = [field for field in wanted if field in names]
        for batch in table.iter_batches(batch_size=_rows_at_once(table.metadata), row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                if number >= start:
                    yield number, {**dict.fromkeys(names), **row}
                number += 1
    except (pyarrow.lib.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows of a Parquet file to read at once; a single row may be as large as its column chunk."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    largest = max(
        (each.column(n).total_uncompressed_size for each in groups for n in range(each.num_columns)), default=0
    )
    return int(min(PARQUET_ROWS, max(1, PARQUET_BYTES // max(1, largest))))


def check_document(document: Document) -> Document:
    """Check the id and text of a document; return it, or a document with the error."""
    bad = BAD_IN_ID.search(document.id)
    if bad is not None or not document.id or len(document.id) > MAX_ID_CHARS:
        what = f"contains {bad[0]!r}" if bad else f"has {len(document.id)} characters"
        name = (document.id.encode("unicode_escape").decode()[: MAX_ID_CHARS - 16]) or "(empty id)"
        reason = f"the id {name!r} {what}; expected 1 to {MAX_ID_CHARS} characters, none of them a control character"
        return Document(name, error=f"{reason} or a text-direction mark", passed=document.passed)
    if document.error is None:
        for name, text in (("", document.text), *document.columns.items()):
            lone = SURROGATE.search(text)
            if lone is not None:
                where = f" of {name!r}" if name else ""
                reason = f"lone surrogate at character {lone.start()}{where}; not Unicode text"
                return replace(document, text="", columns={}, error=reason)
        if not document.text.strip():
            return replace(document, text="", error="the document is empty: it contains no text")
    return document
