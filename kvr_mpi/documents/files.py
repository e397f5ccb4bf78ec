"""The formats a corpus may have: files found, and read as a stream, so a corpus may be larger than memory."""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.errors import CorpusError

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".parquet")
MAX_ID_CHARS = 512
SURROGATE = re.compile("[\ud800-\udfff]")
BAD_IN_ID = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the corpus: its text, or what is wrong with it."""

    id: str
    text: str = ""
    error: str | None = None

    @property
    def chars(self) -> int:
        """Length of the text, the measure of work before tokens are known."""
        return len(self.text)


def find_files(paths: Iterable[str]) -> list[tuple[str, str]]:
    """List the corpus files behind folders, globs and file names.

    Returns
    -------
    list of (str, str)
        The path of each file once, and the name documents in it are called by: relative to the folder named.
        Plain text, since there may be 100,000.

    Raises
    ------
    CorpusError
        If a path matches nothing, or a file is of no known format.
    """
    found: dict[str, tuple[str, str]] = {}
    for pattern in paths:
        try:
            for file, name in _match(pattern):
                found.setdefault(os.path.abspath(file), (file, name))
        except (OSError, RuntimeError) as error:  # a name too long, an unknown ~user
            raise CorpusError(f"documents.path {pattern!r} cannot be looked up: {error}") from error
    return list(found.values())


def _match(pattern: str) -> list[tuple[str, str]]:
    """Files behind one folder, glob or file name, with their documents' names."""
    base = Path(pattern).expanduser()
    if base.is_dir():
        names = _names_in(str(base))
        if not names:
            raise CorpusError(
                f"documents.path {pattern!r}: the folder {base.absolute()} holds no {', '.join(SUFFIXES)} file"
            )
        above = "" if str(base) == "." else f"{str(base).rstrip('/')}/"
        return [(above + name, name) for name in names]
    matches = [base] if base.exists() else sorted(map(Path, glob.glob(str(base), recursive=True)))
    files = [file for file in matches if not file.is_dir()]
    if not files:
        what = "only folders match it" if matches else "no such file or folder, and no file matches it"
        raise CorpusError(f"documents.path {pattern!r}: {what} (looked for {base.absolute()})")
    for file in files:
        if not suffix_of(file):
            raise CorpusError(f"documents.path {pattern!r}: {file} is none of {', '.join(SUFFIXES)}")
    return [(str(file), file.name) for file in files]


def stream_rows(
    files: Sequence[tuple[str, str]], id_field: str, text_field: str
) -> Iterator[tuple[int, int, Document]]:
    """Yield (number of the file, place in it, document) of all files, as they are; see `check_document`.

    A place is where `corpus` finds the row again: in ``.jsonl`` a byte, in ``.jsonl.gz`` and ``.parquet`` a number
    of rows before it, else 0.
    """
    for number, (path, name) in enumerate(files):
        file = Path(path)
        kind = suffix_of(file)
        try:
            if kind in TEXT_SUFFIXES:
                rows = _read_text(file, name)
            elif kind == ".parquet":
                rows = _read_parquet(file, name, id_field, text_field)
            else:
                rows = _read_jsonl(file, name, id_field, text_field, zipped=kind == ".jsonl.gz")
            for place, document in rows:
                yield number, place, document
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            yield number, 0, Document(name, error=f"{file} cannot be read: {reason}")


def _read_text(file: Path, name: str) -> Iterator[tuple[int, Document]]:
    try:
        yield 0, Document(name, file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        what = f"byte {error.object[error.start]:#04x} at position {error.start}"
        yield 0, Document(name, error=f"{file} is not UTF-8: {what}; re-encode it")


def _read_jsonl(
    file: Path, name: str, id_field: str, text_field: str, *, zipped: bool
) -> Iterator[tuple[int, Document]]:
    with gzip.open(file, "rb") if zipped else file.open("rb") as stream:
        start = 0
        for number, line in enumerate(stream, start=1):
            where, start = number - 1 if zipped else start, start + len(line)
            if not line.strip():
                continue
            place = f"{name}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, Document(place, error=f"line {number} of {file} is not JSON: {error}")
                continue
            if not isinstance(row, dict):
                what = f"a JSON {type(row).__name__}, not an object"
                yield where, Document(place, error=f"line {number} of {file} is {what}")
                continue
            yield where, _from_row(row, place, id_field, text_field)


def _read_parquet(file: Path, name: str, id_field: str, text_field: str) -> Iterator[tuple[int, Document]]:
    try:
        for number, row in parquet_rows(file, (id_field, text_field)):
            yield number, _from_row(row, f"{name}:{number + 1}", id_field, text_field)
    except ValueError as error:
        yield 0, Document(name, error=f"{file} cannot be read as Parquet: {error}")


def parquet_rows(file: Path, wanted: Sequence[str], start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) from row `start` on; fields that are not wanted are None.

    Raises
    ------
    ValueError
        If it is no Parquet file, or a damaged one.
    """
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(f"{file}: reading Parquet needs pyarrow; `pip install kvr-mpi[parquet]`") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        sizes = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
        groups, number = list(range(len(sizes))), 0
        while groups and number + sizes[groups[0]] <= start:
            number += sizes[groups.pop(0)]
        columns = [field for field in wanted if field in names]
        for batch in table.iter_batches(batch_size=256, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                if number >= start:
                    yield number, {**dict.fromkeys(names), **row}
                number += 1
    except (pyarrow.lib.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def _from_row(row: dict[str, Any], place: str, id_field: str, text_field: str) -> Document:
    name = row.get(id_field)
    name = place if name is None else str(name)
    text = row.get(text_field)
    if not isinstance(text, str):
        fields = ", ".join(sorted(map(str, row))) or "none"
        return Document(
            name,
            error=f"{place}: the text field {text_field!r} is {_kind(text)}; expected a string (fields: {fields})",
        )
    return Document(name, text)


def check_document(document: Document) -> Document:
    """Find what is wrong with an id or a text that was read without error."""
    bad = BAD_IN_ID.search(document.id)
    if bad is not None or not document.id or len(document.id) > MAX_ID_CHARS:
        what = f"contains {bad[0]!r}" if bad else f"has {len(document.id)} characters"
        name = (document.id.encode("unicode_escape").decode()[: MAX_ID_CHARS - 16]) or "(empty id)"
        return Document(
            name,
            error=f"the id {name!r} {what}; expected 1 to {MAX_ID_CHARS} characters, none of them a control character",
        )
    if document.error is None:
        lone = SURROGATE.search(document.text)
        if lone is not None:
            return replace(
                document, text="", error=f"{document.id}: lone surrogate at character {lone.start()}; not Unicode text"
            )
        if not document.text.strip():
            return replace(document, text="", error=f"{document.id} is empty: there is no text to work on")
    return document


def suffix_of(file: Path) -> str | None:
    """Return the known suffix of a file name."""
    name = file.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _names_in(base: str) -> list[str]:
    """Names of all corpus files below a folder, relative to it, in the order of their parts; none that is hidden."""
    found = []
    for folder, inner, names in os.walk(base):
        inner[:] = [name for name in inner if not name.startswith(".")]
        above = os.path.relpath(folder, base) + "/" if folder != base else ""
        # A folder with such a name, too: that it is none that can be read is then said.
        for name in (*names, *inner):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                found.append(above + name)
    return sorted(found, key=lambda name: name.split("/"))


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
