"""The file formats of a corpus, read as streams, so that a corpus may be larger than memory.

A row's *place* is where reading it can start: the byte offset in an uncompressed ``.jsonl``, otherwise its number.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any

from kvr_mpi.disk import WRONG_KIND, list_folder, retried, unavailable
from kvr_mpi.documents.document import Document
from kvr_mpi.documents.formats import format_of, is_table, open_file, size_and_time
from kvr_mpi.documents.rows import UTF_8, RowFormat
from kvr_mpi.errors import NOT_NOW, CorpusError, UnavailableError
from kvr_mpi.plain import parse_json

MAX_ID_CHARS = 512
# Maximum size of a document or row, more than any model can read. Larger ones are never loaded as a whole.
MAX_TEXT_BYTES = 64 << 20
# What reading a file can raise: no access, or contents that are damaged or of another format.
READ_ERRORS = (OSError, EOFError, ValueError, RecursionError, zlib.error, lzma.LZMAError, csv.Error, zipfile.BadZipFile)
UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}  # by byte order mark
# Rows and bytes of Parquet that are read at once. Dictionaries stay packed if they become more bytes.
PARQUET_ROWS, PARQUET_BYTES = 4096, 16 << 20
SAMPLE_ROWS = 20  # rows to read from a file to find its fields
SURROGATE = re.compile("[\ud800-\udfff]")
# First bytes of the binary files most often found among texts: PDF, ZIP (.docx, .xlsx), gzip, HDF5, images, OLE (.doc).
BINARY = (b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\x89HDF", b"\x89PNG", b"\xff\xd8\xff", b"\xd0\xcf\x11\xe0")
# All bytes except control characters that text does not contain; a larger share of those marks a file as binary.
TEXT_BYTES = bytes([*b"\b\t\n\v\f\r\x1b", *range(32, 127), *range(128, 256)])
MOST_CONTROLS = 0.01
# Control characters, bidirectional marks, line and paragraph separators, byte order marks, surrogates.
BAD_IN_ID = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

# A row as stored: a text, a line of JSON, the size of a line that is too long, a row of CSV or Parquet, or its error.
RawRow = str | bytes | int | dict[str, Any] | csv.Error


def file_error(path: str, error: Exception, encoding: str = UTF_8) -> str:
    """Return the error of a document whose file could not be read; see `errors.NOT_NOW` for passing ones."""
    if isinstance(error, UnavailableError) or is_readable_later(path, error):
        return why_not_now(path, error)
    if isinstance(error, UnicodeDecodeError) and not is_table(path):
        return _why_no_text(path, error, encoding)
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, ValueError) and path.endswith(".parquet"):
        return f"{path} cannot be read as Parquet: {reason}"
    if isinstance(error, UnicodeDecodeError):
        return f"{path} is not UTF-8: {reason}; convert it, such as with `iconv -f latin1 -t utf-8`, or -f utf-16"
    return f"{path} cannot be read: {reason}"


def is_readable_later(path: str, error: Exception) -> bool:
    """Whether an error is about access to a file, such as permission or too many open files, and not its contents.

    A file that is missing although its folder names it is about access, too.
    """
    if not isinstance(error, OSError) or error.errno is None or error.errno in WRONG_KIND:
        return False
    if error.errno != errno.ENOENT:
        return True
    file = Path(path)
    with contextlib.suppress(OSError):
        return not file.is_symlink() and any(entry.name == file.name for entry in list_folder(file.parent))
    return False


def why_not_now(path: str, error: Exception) -> str:
    """Return the error of a document whose file cannot be read now; see `errors.NOT_NOW`."""
    cause = error.__cause__ if isinstance(error, UnavailableError) and error.__cause__ else error
    reason = getattr(cause, "strerror", None) or str(cause)
    return f"{NOT_NOW}{path}: {reason}; the next start of the job tries again"


def read_rows(
    path: str, rows: RowFormat, start: int = 0, end: int | None = None, *, listed: bool = False, patience: float = 1.0
) -> Iterator[tuple[int, RawRow]]:
    """Yield (place, row) of a table from a row's place on, up to `end`; a text file is one row.

    After a transient error, the file is opened again and read from the row that failed; see `disk.retried`, also for
    `listed` and `patience`.

    Raises `UnavailableError` if the file cannot be read now, and otherwise one of `READ_ERRORS`.
    """
    if not is_table(path):
        text = retried(lambda: read_text(path, rows.encoding), path, listed=listed, patience=patience)
        yield 0, text
        return
    version: tuple[int, int] | None = None

    def begin() -> tuple[tuple[int, int, RawRow] | None, Iterator[tuple[int, int, RawRow]]]:
        """Open the file, and read the next row."""
        nonlocal version
        was, version = version, size_and_time(path)
        if was not in (None, version):
            raise UnavailableError(f"{path} was replaced while it was read")
        source = _table_rows(path, rows, start)
        return next(source, None), source

    while True:
        item, source = retried(begin, path, listed=listed, patience=patience)
        while item is not None:
            place, start, row = item
            if end is not None and place >= end:
                return
            yield place, row
            try:
                item = next(source, None)
            except (OSError, UnavailableError):  # a generator ends at an error
                break
        else:
            return


def line_start(path: str, at: int, *, patience: float = 1.0) -> int:
    """Return the offset of the first line that starts at a byte or after it; `retried`."""

    def find() -> int:
        with open_file(path) as stream:
            stream.seek(at - 1)
            place = at - 1
            while (line := stream.readline(1 << 16)) and not line.endswith(b"\n"):
                place += len(line)
            return place + len(line)

    return at and retried(find, path, patience=patience)


def count_lines(path: str, end: int) -> int:
    """Return the number of lines that start before a byte; raises `UnavailableError` if they cannot be read now."""

    def count() -> int:
        lines, left, last = 0, end, b"\n"
        with open_file(path) as stream:
            while left and (data := stream.read(min(left, 1 << 20))):
                lines, left, last = lines + data.count(b"\n"), left - len(data), data
        return lines + (not last.endswith(b"\n"))

    try:
        return retried(count, path)
    except UnavailableError:
        raise
    except OSError as error:
        raise unavailable(path, error) from error


def _table_rows(path: str, rows: RowFormat, start: int) -> Iterator[tuple[int, int, RawRow]]:
    """Yield (place, next place, row) of a table."""
    found = format_of(path)
    assert found is not None
    if found.suffix == ".parquet":
        with open_file(path) as stream:
            for number, fields in parquet_rows(path, stream, rows.needed, start):
                yield number, number + 1, fields
        return
    with open_file(path) as stream:
        if found.suffix in (".csv", ".tsv"):
            for number, row in enumerate(_csv_rows(stream, "\t" if found.suffix == ".tsv" else ",", rows.needed)):
                if number >= start:
                    yield number, number + 1, row
            return
        if not found.can_seek:
            for number, (_, line) in enumerate(read_lines(stream)):
                if number >= start:
                    yield number, number + 1, line
            return
        stream.seek(start)
        for size, line in read_lines(stream):
            yield start, start + size, line
            start += size


def _csv_rows(stream: IO[bytes], delimiter: str, needed: Sequence[str]) -> Iterator[dict[str, Any] | csv.Error]:
    """Yield the rows of a CSV file by the names in its first row; missing fields are None.

    Rows whose quotes are wrong, such as one that is never closed and would contain all later rows, are errors, and so
    are rows with more fields than names, whose text may go on after a comma. Bytes that are not UTF-8 become lone
    surrogates, which `check_document` refuses.

    Raises `UnicodeDecodeError` if a name is not UTF-8, or `ValueError` if a `needed` one occurs twice.
    """
    csv.field_size_limit(MAX_TEXT_BYTES)
    lines = codecs.iterdecode(iter(lambda: stream.readline(MAX_TEXT_BYTES), b""), "utf-8-sig", "surrogateescape")
    reader, first = csv.DictReader(lines, delimiter=delimiter, strict=True), 1
    names = [name.encode(UTF_8, "surrogateescape").decode() for name in reader.fieldnames or ()]
    _check_once(names, needed)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield csv.Error(f"lines {first + 1} to {reader.reader.line_num}: {error}")
        else:
            more = row.pop(None, [])
            what = (
                f"lines {first + 1} to {reader.reader.line_num}: {len(names) + len(more)} fields for {len(names)} names"
            )
            yield csv.Error(what) if any(more) else row
        first = reader.reader.line_num


def _check_once(names: Sequence[str], needed: Sequence[str]) -> None:
    if twice := next((name for name in needed if names.count(name) > 1), None):
        raise ValueError(f"it has the field {twice!r} twice")


def row_name(name: str, number: int) -> str:
    """Return the id of a row without one, by its number from 1."""
    return f"{name}:{number}"


def document_of(row: RawRow, rows: RowFormat, path: str, name: str, number: int) -> Document:
    """Convert a row from `read_rows` to a document; `name` is the file's, `number` is from `row_name`."""
    if isinstance(row, str):
        return rows.text_file(name, row)
    place = row_name(name, number)
    if isinstance(row, csv.Error):
        return Document(
            place, error=f"{path} is not CSV at {row}; quote fields with delimiters, and double quotes in these"
        )
    try:
        found = parse_json(row) if isinstance(row, bytes) else row
        if isinstance(found, dict):
            return rows.document(found, place)
        what = f"is a JSON {type(found).__name__}, not an object"
    except (ValueError, RecursionError) as error:
        what = f"is not JSON: {error}"
    if isinstance(row, int):
        what = f"has {row} bytes, more than the {MAX_TEXT_BYTES >> 20} MiB a row may have; split it"
    return Document(place, error=f"line {number} of {path} {what}")


def _why_no_text(file: str, error: UnicodeDecodeError, encoding: str) -> str:
    if _is_binary(error.object):
        marked = error.object.count(0) > len(error.object) // 4
        other = ", or UTF-16 without a byte order mark (documents.encoding = 'utf-16-le')" if marked else ""
        return f"{file} is a binary file, not text{other}; convert it to text, or remove it"
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


def read_text(path: str, encoding: str = UTF_8) -> str:
    """Read a whole text file, without its byte order mark, with line feeds for the line ends of Windows.

    Files with a mark of UTF-8 or UTF-16 are read as that, whatever the encoding of other files.

    Raises `UnicodeDecodeError` if it is not in this encoding, or is binary, which most encodings would accept as text.
    """
    with open_file(path) as stream:
        data = stream.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OSError(
            errno.EFBIG, f"it is larger than {MAX_TEXT_BYTES >> 20} MiB, the maximum for one document; split it"
        )
    if not encoding.startswith("utf-32"):
        encoding = UTF_16.get(data[:2], encoding) if len(data) > 2 else encoding
    if data.startswith(codecs.BOM_UTF8) and not encoding.startswith(("utf-16", "utf-32")):
        encoding = UTF_8
    if not encoding.startswith(("utf-16", "utf-32")) and _is_binary(data):
        raise UnicodeDecodeError(encoding, data, 0, 1, "binary")
    return data.decode(encoding).removeprefix("\ufeff").replace("\r\n", "\n")


def read_lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes | int]]:
    """Yield (size in bytes, line) of every line; of lines larger than `MAX_TEXT_BYTES` only the size."""
    while line := stream.readline(MAX_TEXT_BYTES):
        size, rest = len(line), line
        while rest and not rest.endswith(b"\n") and size >= MAX_TEXT_BYTES:
            rest = stream.readline(1 << 20)
            size += len(rest)
        yield size, line if size <= MAX_TEXT_BYTES else size


def check_lines(path: str) -> None:
    """Refuse a ``.jsonl`` file whose lines are not JSON values: the `CorpusError` has a command that converts it.

    Files that cannot be read are not reported here.
    """
    found, first = format_of(path), b""
    if found is None or found.suffix != ".jsonl":
        return
    with contextlib.suppress(*READ_ERRORS), open_file(path) as stream:
        first = next(filter(None, map(bytes.strip, iter(lambda: stream.readline(1 << 16), b""))), b"")
    if first[:2] in UTF_16:
        raise CorpusError(f"{path} is UTF-16; rows are UTF-8: iconv -f utf-16 -t utf-8 {path} > NEW.jsonl")
    first = first.removeprefix(b"\xef\xbb\xbf")
    if first in (b"{", b"["):
        raise CorpusError(
            f"{path}: the first line is {first.decode()!r}, so it is JSON on several lines; expected an object on each "
            f"line: jq -c '.[]?' FILE > NEW.jsonl for a list, jq -c . FILE > NEW.jsonl for objects"
        )
    if first.startswith(b"[{"):
        raise CorpusError(
            f"{path}: the first line is a JSON list; expected an object on each line: jq -c '.[]' FILE > NEW.jsonl"
        )


def first_rows(path: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Read a table's first readable rows; raise `CorpusError` if the package for its format is missing."""
    found: list[Any] = []
    with contextlib.suppress(*READ_ERRORS):
        for _, row in islice(read_rows(path, RowFormat(columns=tuple(fields))), SAMPLE_ROWS):
            with contextlib.suppress(ValueError, RecursionError):
                found.append(parse_json(row) if isinstance(row, bytes) else row)
    return [row for row in found if isinstance(row, dict)]


def parquet_length(path: str) -> int:
    """Return the number of rows of a Parquet file; raises `ValueError` for other files."""
    with open_file(path) as stream:
        return int(_open_parquet(path, stream).metadata.num_rows)


def parquet_groups(path: str) -> list[int]:
    """Return the first row of each row group of a Parquet file; raises `ValueError` for other files."""
    with open_file(path) as stream:
        table = _open_parquet(path, stream).metadata
        return [0, *accumulate(table.row_group(number).num_rows for number in range(table.num_row_groups - 1))]


def _open_parquet(path: str, stream: IO[bytes], packed: Sequence[str] = ()) -> Any:
    """Open a Parquet file; the values of `packed` columns stay dictionaries, which may hold a long text once."""
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(f"{path}: reading Parquet needs pyarrow; `pip install pyarrow`") from error
    try:
        return pyarrow.parquet.ParquetFile(stream, read_dictionary=list(packed) or None)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(str(error)) from error


def parquet_rows(
    path: str, stream: IO[bytes], wanted: Sequence[str], start: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) from row `start` on, unused fields as None; raise `ValueError` for other files.

    Strings that are stored without their type (BINARY) are text in UTF-8.
    """
    table = _open_parquet(path, stream)
    import pyarrow.lib

    try:
        names = table.schema_arrow.names
        _check_once(names, wanted)
        columns = [field for field in wanted if field in names]
        table = _open_parquet(path, stream, [name for name in columns if _is_text(table.schema_arrow.field(name).type)])
        groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
        first, number, missing = 0, 0, dict.fromkeys(names)
        while first < len(groups) and number + groups[first].num_rows <= start:
            number, first = number + groups[first].num_rows, first + 1
        bytes_per_row = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1)
        count = max(16, min(PARQUET_ROWS, int(PARQUET_BYTES / max(1, bytes_per_row))))
        for batch in table.iter_batches(batch_size=count, row_groups=range(first, len(groups)), columns=columns):
            skipped = min(max(0, start - number), len(batch))
            rows = batch.slice(skipped)
            values = [_values_of(rows.column(name)) for name in columns]
            for at, row in enumerate(zip(*values, strict=True) if columns else [()] * len(rows), number + skipped):
                yield at, {**missing, **dict(zip(columns, row, strict=True))}
            number += len(batch)
    except (pyarrow.lib.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def _is_text(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind))


def _values_of(column: Any) -> Iterable[Any]:
    """Return the values of a column; one after the other if they are large, or not all of them are text."""
    if hasattr(column, "dictionary"):
        import pyarrow.compute

        sizes = pyarrow.compute.binary_length(column.dictionary).take(column.indices)
        if (pyarrow.compute.sum(sizes).as_py() or 0) > PARQUET_BYTES:
            return (_as_utf8(value.as_py()) for value in column)
        column = column.dictionary_decode()
    with contextlib.suppress(UnicodeDecodeError):
        values: list[Any] = column.to_pylist()
        return map(_as_utf8, values) if any(isinstance(value, bytes) for value in values) else values
    return (value.as_py() for value in column)


def _as_utf8(value: Any) -> Any:
    """Decode bytes that are UTF-8; other values stay as they are."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


def check_document(document: Document) -> Document:
    """Check the id and text of a document; return it, or a document with the error."""
    bad = None if document.id.isascii() and document.id.isprintable() else BAD_IN_ID.search(document.id)
    if bad is not None or not document.id or len(document.id) > MAX_ID_CHARS:
        what = f"contains {bad[0]!r}" if bad else f"has {len(document.id)} characters"
        name = (document.id.encode("unicode_escape").decode()[: MAX_ID_CHARS - 16]) or "(empty id)"
        reason = f"the id {name!r} {what}; expected 1 to {MAX_ID_CHARS} characters, none of them a control character"
        return Document(name, error=f"{reason} or a text-direction mark", passed=document.passed)
    if document.error is None:
        for name, text in (("", document.text), *document.columns.items()):
            lone = None if text.isascii() else SURROGATE.search(text)
            if lone is not None:
                where = f" of {name!r}" if name else ""
                byte = f", or the byte {ord(lone[0]) - 0xDC00:#04x} in CSV" if "\udc80" <= lone[0] <= "\udcff" else ""
                reason = f"lone surrogate{byte} at character {lone.start()}{where}; not Unicode text"
                return replace(document, text="", columns={}, error=reason)
        if not document.text or document.text.isspace():
            return replace(document, text="", error="the document is empty: it contains no text")
    return document
