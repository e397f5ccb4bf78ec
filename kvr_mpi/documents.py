"""Corpus files to `Document`s: the first step of the data's way.

A corpus is read as a stream, in the same order by every rank, so it may be larger than memory. What is
wrong with one document is kept with it and does not stop the others.
"""

from __future__ import annotations

import glob
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.errors import CorpusError

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".parquet")
MAX_ID_CHARS = 512


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


def find_files(paths: Iterable[str]) -> list[tuple[Path, str]]:
    """List the corpus files behind folders, globs and file names.

    Returns
    -------
    list of (Path, str)
        Each file once, with the name documents in it are called by: relative to the folder that was named.

    Raises
    ------
    CorpusError
        If a path matches nothing, or a file is of no known format.
    """
    found: dict[Path, str] = {}
    for pattern in paths:
        base = Path(pattern).expanduser()
        if base.is_dir():
            files = sorted(file for file in base.rglob("*") if _suffix(file) and not _hidden(file, base))
            if not files:
                raise CorpusError(
                    f"documents.path {pattern!r}: the folder {base.absolute()} holds no {', '.join(SUFFIXES)} file"
                )
            names = {file: file.relative_to(base).as_posix() for file in files}
        else:
            matches = [base] if base.exists() else sorted(map(Path, glob.glob(str(base), recursive=True)))
            if not matches:
                raise CorpusError(
                    f"documents.path {pattern!r}: no such file or folder, and no file matches it "
                    f"(looked for {base.absolute()})"
                )
            names = {file: file.name for file in matches if not file.is_dir()}
            for file in names:
                if not _suffix(file):
                    raise CorpusError(f"documents.path {pattern!r}: {file} is none of {', '.join(SUFFIXES)}")
        for file, name in names.items():
            found.setdefault(file, name)
    return list(found.items())


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
    seen: set[str] = set()
    for number, document in enumerate(_read_all(find_files(paths), id_field, text_field)):
        if limit is not None and number >= limit:
            return
        document = _check(document)
        if document.id in seen:
            copy = next(n for n in range(2, len(seen) + 3) if f"{document.id}#{n}" not in seen)
            document = Document(
                f"{document.id}#{copy}",
                error=f"duplicate id {document.id!r}: an earlier document has it; make ids unique",
            )
        seen.add(document.id)
        yield document


def _read_all(files: list[tuple[Path, str]], id_field: str, text_field: str) -> Iterator[Document]:
    for file, name in files:
        kind = _suffix(file)
        try:
            if kind in TEXT_SUFFIXES:
                yield _read_text(file, name)
            elif kind == ".parquet":
                yield from _read_parquet(file, name, id_field, text_field)
            else:
                yield from _read_jsonl(file, name, id_field, text_field, zipped=kind == ".jsonl.gz")
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            yield Document(name, error=f"{file} cannot be read: {reason}")


def _read_text(file: Path, name: str) -> Document:
    try:
        return Document(name, file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Document(
            name,
            error=f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}; re-encode it",
        )


def _read_jsonl(file: Path, name: str, id_field: str, text_field: str, *, zipped: bool) -> Iterator[Document]:
    with gzip.open(file, "rb") if zipped else file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{name}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                yield Document(place, error=f"line {number} of {file} is not JSON: {error}")
                continue
            if not isinstance(row, dict):
                yield Document(place, error=f"line {number} of {file} is a JSON {type(row).__name__}, not an object")
                continue
            yield _from_row(row, place, id_field, text_field)


def _read_parquet(file: Path, name: str, id_field: str, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(f"{file}: reading Parquet needs pyarrow; `pip install kvr-mpi[parquet]`") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = [field for field in (id_field, text_field) if field in table.schema_arrow.names]
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _from_row(row, f"{name}:{number}", id_field, text_field)
    except pyarrow.lib.ArrowException as error:
        yield Document(name, error=f"{file} cannot be read as Parquet: {error}")


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


def _check(document: Document) -> Document:
    bad = next((char for char in document.id if ord(char) < 32 or ord(char) == 127), None)
    if bad is not None or not document.id or len(document.id) > MAX_ID_CHARS:
        what = f"contains {bad!r}" if bad else f"has {len(document.id)} characters"
        name = (document.id.encode("unicode_escape").decode()[: MAX_ID_CHARS - 16]) or "(empty id)"
        return Document(
            name,
            error=f"the id {name!r} {what}; expected 1 to {MAX_ID_CHARS} characters, none of them a control character",
        )
    if document.error is None:
        try:
            document.text.encode("utf-8")
        except UnicodeEncodeError as error:
            return replace(
                document,
                text="",
                error=f"{document.id}: lone surrogate at character {error.start}; not Unicode text",
            )
        if not document.text.strip():
            return replace(document, text="", error=f"{document.id} is empty: there is no text to work on")
    return document


def _suffix(file: Path) -> str | None:
    name = file.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _hidden(file: Path, base: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(base).parts)


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
