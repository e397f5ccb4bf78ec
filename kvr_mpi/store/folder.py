"""Reading a run: a folder of shards, or the one file they are merged into; each document counts once.

Done beats error, later beats earlier. What the ledgers say of a file is believed if the file is as recorded.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvr_mpi.disk import PART, create
from kvr_mpi.errors import DataError, MissingError, OutputError, counted
from kvr_mpi.store.hdf5 import explained, group_in, read_attribute
from kvr_mpi.store.ledger import ledger_files
from kvr_mpi.store.outputs import Record, document_groups, key_of, open_file, read_record
from kvr_mpi.store.summary import Summary, count_reasons, shorten
from kvr_mpi.store.survey import DAMAGED, RESULTS, Survey, is_ours, order, survey

__all__ = ["RESULTS", "check_fresh", "check_writable", "index_run", "run_files"]

OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a document is: a file, and its group's name there; why it failed, if it did and that is known."""

    file: Path
    key: str
    is_done: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file that is not as its ledger has it, and the documents that only it has."""

    file: Path
    why: str
    documents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Where all documents are.

    places : by id.
    unrecorded : files that no ledger tells of; that they can be read is not known.
    gone : documents that ledgers have, and no file.
    damaged : what was passed over, if that was asked for.
    """

    places: dict[str, Place]
    unrecorded: tuple[Path, ...] = ()
    gone: int = 0
    damaged: tuple[DamagedFile, ...] = ()

    def summary(self) -> Summary:
        """Count the documents."""
        reasons = [(name, place.reason, 1) for name, place in self.places.items() if not place.is_done]
        return Summary(len(self.places) - len(reasons), len(reasons), count_reasons(reasons))

    def by_file(self) -> dict[Path, dict[str, Place]]:
        """Group places by file, the files in order."""
        files = sorted({place.file for place in self.places.values()})
        found: dict[Path, dict[str, Place]] = {file: {} for file in files}
        for name, place in self.places.items():
            found[place.file][name] = place
        return found

    def ids(self, status: str | None = None) -> list[str]:
        """Ids in order, of all documents or of those with this status."""
        return sorted(
            name for name, place in self.places.items() if status in (None, "done" if place.is_done else "error")
        )


def run_files(path: Path) -> list[Path]:
    """List the result files of a run's folder (or a single file), oldest first."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    return [path / name for name in sorted(os.listdir(path), key=order) if is_ours(name) and (path / name).is_file()]


def read_records(index: Index, ids: Iterable[str]) -> Iterator[Record]:
    """Read documents, each held against its checksum.

    Raises
    ------
    DataError
        If one is damaged.
    """
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name in ids:
            place = index.places[name]
            if place.file not in files:
                if len(files) == OPEN_FILES:
                    stack.close()
                    files.clear()
                files[place.file] = stack.enter_context(open_file(place.file))
            with explained(place.file):
                record = read_record(group_in(group_in(files[place.file], "documents"), place.key))
            if (record.id, record.status) != (name, "done" if place.is_done else "error"):
                raise DataError(f"{place.file}: /documents/{place.key} is not the document {name!r} of the ledger")
            yield record


def index_run(path: Path, *, verify: bool = False, passes_damaged: bool = False) -> Index:
    """Say where each document is.

    Parameters
    ----------
    path : Path
        A file, or a run's folder.
    verify : bool
        Hold files against the checksums of the folder's ledgers. Records are held against their own when they are read.
    passes_damaged : bool
        Pass over files that are not as recorded, and name what they had.

    Raises
    ------
    DataError
        If there is nothing to read (`MissingError`: no such folder), or a file is damaged or foreign.
    """
    files = run_files(path)
    if not files:
        if not path.exists():
            raise MissingError(
                f"{path}: no such file or folder; expected a result file (*.h5) or the output folder of a run"
            )
        if path.is_dir() and any(ledger_files(path)):
            raise DataError(f"{path}: no result file (*.h5) found: no document is stored yet; see `kvr status {path}`")
        raise DataError(f"{path}: no result file (*.h5) found; expected one, or the output folder of a run")
    found = _look(path if path.is_dir() else path.parent, {file.name for file in files}, verify)
    if found.damaged and not passes_damaged:
        told = "; ".join(f"{found.folder / name}: {why}" for name, why in sorted(found.damaged.items()))
        raise DataError(
            f"damaged: {told}. `kvr-run JOB.toml --resume` sets such files aside and processes their documents again"
        )
    places: dict[str, Place] = {}
    for file in (file for file in files if file.name not in found.damaged):
        for name, is_done, reason in _documents(file, found):
            if is_done or name not in places or not places[name].is_done:
                places[name] = Place(file, key_of(name), is_done, reason)
    missing = found.missing().values() if path.is_dir() else ()
    gone = {name for line in missing for name in (*line.done, *line.failed)} - places.keys()
    known = found.sound.keys() | found.damaged.keys()  # a file of another name is not in the survey at all
    unrecorded = tuple(file for file in files if file.name not in known)
    return Index(places, unrecorded, len(gone), tuple(_damaged(found, places)))


def _damaged(found: Survey, places: Container[str]) -> Iterator[DamagedFile]:
    """Name the documents of damaged files that are nowhere else."""
    for name, why in sorted(found.damaged.items()):
        line = found.ledger.shards[name][-1]
        lost = tuple(each for each in (*line.done, *line.failed) if each not in places)
        yield DamagedFile(found.folder / name, why, lost)


def join_indexes(indexes: Iterable[Index]) -> Index:
    """Make one of the shares of a corpus.

    Raises
    ------
    DataError
        If a document is in two of them.
    """
    places: dict[str, Place] = {}
    unrecorded: list[Path] = []
    damaged: list[DamagedFile] = []
    gone = 0
    for index in indexes:
        if twice := index.places.keys() & places.keys():
            name = min(twice)
            raise DataError(
                f"document {name!r} is in {places[name].file.parent} and in {index.places[name].file.parent}, and so "
                f"are {len(twice) - 1} others; expected shares of one corpus, each document in one share only"
            )
        places |= index.places
        unrecorded += index.unrecorded
        damaged += index.damaged
        gone += index.gone
    return Index(places, tuple(unrecorded), gone, tuple(damaged))


def _look(folder: Path, names: set[str], verify: bool) -> Survey:
    """Hold files of a folder against its ledgers."""
    for attempt in (1, 2):  # a job at work may merge shards, and remove them, while they are looked at
        try:
            found = survey(folder)
            found.restrict(names if attempt == 1 else names & found.sizes_bytes.keys())
            if verify:
                found.verify()
        except OSError as error:
            if attempt == 2:
                raise DataError(f"{folder} cannot be read: {error.strerror or error}") from error
            continue
        if not found.damaged:
            break
    return found


def _documents(file: Path, found: Survey) -> list[tuple[str, bool, str]]:
    """Id of every document of a file, whether it is done, and why it failed: told by the ledger, if it can."""
    line = found.sound.get(file.name)
    if line is None:
        return list_documents(file)
    failed = zip(line.failed, line.reasons, strict=True)
    return [(name, True, "") for name in line.done] + [(name, False, reason) for name, reason in failed]


def list_documents(file: Path) -> list[tuple[str, bool, str]]:
    """Read the id of every document in a file, whether it is done, and why it failed."""
    with open_file(file) as stored:
        return [
            (name, is_done, "" if is_done else shorten(read_attribute(group, "error", str)))
            for group, name, is_done in document_groups(stored)
        ]


def check_writable(folder: Path) -> None:
    """Make the folder if it is missing, and raise `OutputError` unless files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(8)}"
        os.close(create(probe))
        probe.unlink()
    except OSError as error:
        raise OutputError(f"output.path {str(folder)!r} cannot be written: {error.strerror or error}") from error


def clear_results(folder: Path) -> None:
    """Delete the result files and ledgers of a folder, damaged and unfinished ones too, and nothing else."""
    for file in ledger_files(folder):
        file.unlink(missing_ok=True)
    for file in list(folder.iterdir()):
        name = file.name.partition(DAMAGED)[0].removesuffix(PART)
        if is_ours(name) and file.is_file():
            file.unlink()


def check_fresh(folder: Path) -> None:
    """Raise `OutputError` if the folder holds results of an earlier run, or is no folder."""
    if folder.is_file():
        raise OutputError(
            f"output.path {str(folder)!r} is a file; expected a folder, which is created if it does not exist (--set "
            f"output.path=...)"
        )
    files = run_files(folder)
    if files:
        raise OutputError(
            f"output.path {str(folder)!r} holds {counted(len(files), 'result file')} of an earlier run; add --resume "
            f"to "
            f"continue that run, --overwrite to delete the files, or choose another folder (--set output.path=...)"
        )
