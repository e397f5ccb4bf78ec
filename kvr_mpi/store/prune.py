"""Removing what is stored: keys and values of documents whose answers stay, or all there is of documents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvr_mpi.errors import DataError
from kvr_mpi.store.folder import Index, index_run, run_files
from kvr_mpi.store.ledger import LedgerWriter
from kvr_mpi.store.merge import copy_documents, part_of
from kvr_mpi.store.outputs import open_file, read_header
from kvr_mpi.store.parts import PARTS, PartIndexes, document_of, index_parts, open_document
from kvr_mpi.store.survey import survey


@dataclass(frozen=True, slots=True)
class StoredKVOf:
    """A document's keys and values: how large they are, and when the document was finished (UTC)."""

    id: str
    bytes: int
    finished_at: datetime


def list_stored(index: Index) -> list[StoredKVOf]:
    """List the documents that have keys and values, the oldest first.

    Raises
    ------
    DataError
        If a record cannot be read.
    """
    found, parts = [], PartIndexes()
    for file, places in index.by_file().items():
        with open_file(file) as stored:
            for name, place in places.items():
                if place.is_done:
                    with open_document(stored, place.key, parts) as (record, kv):
                        if kv.bytes:
                            found.append(StoredKVOf(name, kv.bytes, _time(record.finished_at)))
    return sorted(found, key=lambda one: (one.finished_at, one.id))


def choose_pruned(
    stored: Sequence[StoredKVOf],
    *,
    documents: Collection[str] = (),
    older_than: timedelta | None = None,
    keep_bytes: int | None = None,
    now: datetime | None = None,
) -> list[StoredKVOf]:
    """Say whose keys and values are to go.

    Parameters
    ----------
    stored : sequence of StoredKVOf
        Of `list_stored`.
    documents : collection of str
        These go.
    older_than : timedelta or None
        And those of documents that were finished longer ago.
    keep_bytes : int or None
        And then the oldest, until no more than so many bytes are left.
    """
    before = None if older_than is None else (now or datetime.now(UTC)) - older_than
    gone = {one.id for one in stored if one.id in documents or (before is not None and one.finished_at < before)}
    left = sum(one.bytes for one in stored if one.id not in gone)
    for one in stored:
        if keep_bytes is None or left <= keep_bytes:
            break
        if one.id not in gone:
            gone.add(one.id)
            left -= one.bytes
    return [one for one in stored if one.id in gone]


def prune_kv(folder: Path, documents: Iterable[str]) -> None:
    """Write the files that have these documents' keys and values anew, without them; the folder has to be locked.

    Each file is replaced when its successor is complete and recorded, so that a crash leaves one or the other.

    Raises
    ------
    DataError
        If a file is damaged: it stays as it is, and those before it are pruned.
    OutputError
        If there is no room for the successor.
    """
    index, gone = index_run(folder, verify=True), set(documents)
    if unknown := gone - index.places.keys():
        raise DataError(f"{folder} has no document {min(unknown)!r}")
    _write_without(index, gone)
    # The records first, which are whole without parts: the other way round a crash would leave some that are not.
    parts = index_parts(folder)
    _write_without(parts, {name for name in parts.places if document_of(name) in gone})


def _write_without(index: Index, gone: Collection[str]) -> None:
    """Write the files of a folder anew that have records with these keys and values, without them."""
    for file, here in index.by_file().items():
        if not here.keys().isdisjoint(gone):
            _publish(file, replace(index, places=here), gone)


def drop_documents(folder: Path, documents: Collection[str]) -> None:
    """Write the files that have records of these documents anew, without them; the folder has to be locked.

    Parts of their keys and values go, too. Each file is replaced as in `prune_kv`.

    Raises
    ------
    DataError, OutputError
        As `prune_kv`.
    """
    names = set(documents)
    _drop(folder, names.__contains__)
    if run_files(folder / PARTS):
        _drop(folder / PARTS, lambda part: document_of(part) in names)


def _drop(folder: Path, is_dropped: Callable[[str], bool]) -> None:
    """Write the files of a folder anew that have some records, without them; what is copied is held against seals."""
    found, index = survey(folder), index_run(folder)
    for name, line in found.sound.items():
        if any(map(is_dropped, (*line.done, *line.failed))):
            file = folder / name
            kept = {key: place for key, place in index.places.items() if place.file == file and not is_dropped(key)}
            _publish(file, replace(index, places=kept))


def _publish(file: Path, index: Index, without_kv: Collection[str] = ()) -> None:
    """Put a file with these documents in the place of another."""
    with open_file(file) as stored:
        header = read_header(stored)
    with part_of(file) as part:
        copied = copy_documents(index, header, part, without_kv=without_kv)
        LedgerWriter(file.parent, "pruned").publish(file, *copied)


def _time(text: str) -> datetime:
    """Read when a document was finished; long ago, if the record does not say."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
