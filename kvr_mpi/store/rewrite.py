"""Rewriting stored results: ``results.h5`` from logs and volumes, and volumes without unneeded data.

All records, keys and values are verified before they are copied, so that a new file is readable or is not written.
Old files are removed once their successor is complete and on the disk, so that a crash leaves one or the other.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile

import h5py

from kvr_mpi.disk import PART, VOLUME_NAME, truncate
from kvr_mpi.errors import DataError, OutputError, Say, counted
from kvr_mpi.store.folder import Index, Place, index_run, list_logs, read_records, survey
from kvr_mpi.store.hdf5 import group_in
from kvr_mpi.store.kv import open_kv, write_kv
from kvr_mpi.store.log import PRUNED, VOLUME, Header, LogWriter, seal, sync
from kvr_mpi.store.pieces import Piece, open_pieces, piece_id
from kvr_mpi.store.record import Record, record_values
from kvr_mpi.store.shares import Runs, index_runs, read_header_of
from kvr_mpi.store.volumes import (
    KV,
    LOG,
    RECORDS,
    RESULTS,
    create_volume,
    key_of,
    open_volume,
    volume_line,
    write_lines,
)

# If keys and values are larger than this in total, they stay in their volumes: copying would double the writing.
MERGE_MAX_BYTES = 4 << 30
ROOM = 1.1  # free space that rewriting needs, as a multiple of the data to write
# System messages when a file cannot grow; HDF5 quotes them within a long message.
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))

# Returns whether the keys and values of a document are copied into ``results.h5``; others stay in their volumes.
Copies = Callable[[Place], bool]


class _FullError(Exception):
    """The disk has no room for the new file."""


class _StoppedError(Exception):
    """The job ends before the new file is complete."""


def finish_run(folder: Path, should_stop: Callable[[], bool] = lambda: False, say: Say = lambda line: None) -> Path:
    """Write ``results.h5`` at the end of a run; it replaces the logs, and the volumes if they are small enough.

    Parameters
    ----------
    folder : Path
    should_stop : callable
        Called before each document; if it returns true, the logs stay as they are.
    say : callable
        Receives a log line with the reason if the file could not be written.

    Returns
    -------
    Path
        ``results.h5``; the folder itself if there is no space, no time, or no document.
    """
    try:
        found = survey(folder)
        index = found.index()
        size = sum(place.size + place.kv_bytes for place in index.places.values())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}; restore it, and run the job with --resume to merge again"
        ) from None
    if not found.records or should_stop():
        return folder
    copies_kv = index.kv_bytes <= MERGE_MAX_BYTES
    needed = size if copies_kv else size - index.kv_bytes
    try:
        if free < ROOM * needed:
            raise OutputError(f"{folder / RESULTS} needs {ROOM * needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free")
        return merge_run(folder, copies=lambda _: copies_kv, should_stop=should_stop)
    except _StoppedError:
        return folder
    except OutputError as error:  # every document is in the logs
        say(f"warning: the results stay in logs, which are complete: {error}; `kvr merge {folder}` merges them later")
        return folder


def merge_run(
    folder: Path, *, copies: Copies = lambda _: True, should_stop: Callable[[], bool] = lambda: False
) -> Path:
    """Write all documents of a run to its ``results.h5``, which replaces its logs and volumes.

    The folder has to be locked.

    Raises
    ------
    DataError
        If files are damaged or documents are lost: nothing is written, and the message says what to do.
    OutputError
        If the file cannot be written; nothing is removed.
    """
    index = index_run(folder)
    if index.gone:
        raise DataError(
            f"{folder} has lost keys and values of {counted(len(index.gone), 'document')}, so nothing was merged; "
            f"`kvr-run JOB.toml --resume` processes them again, and `kvr merge {folder} -o FILE` merges the others"
        )
    result = folder / RESULTS
    logs = list_logs(os.listdir(folder))
    kept = {Path(piece.path).name for place in index.places.values() for piece in place.pieces}
    outside = (place for place in index.places.values() if any(piece.path != str(result) for piece in place.pieces))
    if logs or any(map(copies, outside)):
        with replaced(result) as part:
            kept = write_results(part, index, read_header_of([folder]), copies, should_stop)
    volumes = [name for name in os.listdir(folder) if VOLUME_NAME.fullmatch(name)]
    # The oldest log first: a line that drops earlier records must be removed no later than the records after it.
    for name in (*logs, *(name for name in volumes if name not in kept)):
        (folder / name).unlink()
    sync(folder)
    return result


def merge_runs(runs: Runs, target: Path) -> tuple[str, ...]:
    """Write all documents of a run, or of the shares of a corpus, to another file; the originals stay.

    Returns
    -------
    tuple of str
        Descriptions of missing shares and documents, as from `index_runs`.

    Raises
    ------
    DataError
        If a file is damaged, the runs belong to different jobs, or a document is in two of them.
    OutputError
        If the file cannot be written.
    """
    index, missing = index_runs(runs)
    with replaced(target) as part:
        write_results(part, index, read_header_of(runs.paths), lambda _: True)
    return missing


@contextlib.contextmanager
def replaced(result: Path) -> Iterator[Path]:
    """Yield a temporary file name; the file replaces the target when the block succeeds, and is removed otherwise."""
    part = result.with_name(result.name + PART)
    try:
        part.unlink(missing_ok=True)
        yield part
        sync(part)
        os.replace(part, result)
        sync(result.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            truncate(part)  # HDF5 may still have it open
        with contextlib.suppress(OSError):
            part.unlink()
        if not isinstance(error, (OSError, RuntimeError, _FullError)):
            raise
        reason = next((text for text in FULL if text in str(error)), str(error))
        raise OutputError(f"{result} cannot be written: {reason}; nothing else was changed") from error


def write_results(
    target: Path, index: Index, header: Header, copies: Copies, should_stop: Callable[[], bool] = lambda: False
) -> set[str]:
    """Write every document once to a new file; return the names of the volumes that it still needs.

    Parameters
    ----------
    copies : callable
    should_stop : callable
        Called before each document.

    Raises
    ------
    DataError
        If a document cannot be read.
    """
    inside: dict[str, tuple[int, str]] = {}
    beside: dict[Path, dict[str, tuple[int, str]]] = {}
    with create_volume(target) as file, TemporaryFile(dir=target.parent) as records:
        for name, record in zip(index.ids(), read_records(index, index.ids()), strict=True):
            if should_stop():
                raise _StoppedError
            place = index.places[name]
            needs = place.needs
            if needs and copies(place):
                piece, told = _copy_kv(file[KV], record, place.pieces)
                inside[piece], needs = told, (piece,)
            else:
                for each in place.pieces:
                    beside.setdefault(Path(each.path), {})[each.id] = (each.bytes, each.sha256)
            records.write(seal(record_values(record, needs)))
        write_lines(file, RECORDS, records)
        log = BytesIO()
        log.write(seal(header.as_line()))
        log.write(seal({"line": VOLUME, "name": RESULTS, "size_bytes": 0, "pieces": inside}))
        for volume, pieces in sorted(beside.items()):
            log.write(volume_line(volume, pieces))
        for cost in index.costs.values():
            log.write(seal(cost.as_line()))
        write_lines(file, LOG, log)
    return {volume.name for volume in beside}


def _copy_kv(kv: h5py.Group, record: Record, pieces: Sequence[Piece]) -> tuple[str, tuple[int, str]]:
    """Copy a document's keys and values as one piece; return its id and its entry for the log."""
    try:
        if len(pieces) == 1:
            copy_piece(kv, pieces[0])
            return pieces[0].id, (pieces[0].bytes, pieces[0].sha256)
        with contextlib.closing(open_pieces(record.id, pieces)) as whole:
            layers = (whole.read(number) if number in whole.layers else None for number in range(max(whole.layers) + 1))
            name = piece_id(record, whole.tokens)
            return name, write_kv(kv, key_of(name), layers, whole.tokens)
    except (OSError, RuntimeError) as error:
        if any(text in str(error) for text in FULL):  # the error is in writing, not in reading
            raise _FullError(str(error)) from error
        raise


def copy_piece(kv: h5py.Group, piece: Piece) -> None:
    """Copy a piece unchanged after verifying its checksums."""
    with open_volume(Path(piece.path)) as file:
        group = group_in(group_in(file, KV), key_of(piece.id))
        open_kv(group, piece.bytes, piece.sha256).check()
        file.copy(group, kv, name=group.name.rpartition("/")[-1])


def list_stored(index: Index) -> list[str]:
    """List the ids of the documents that have keys and values, the oldest first."""
    found = [(place.finished_s, name) for name, place in index.places.items() if place.kv_bytes]
    return [name for _, name in sorted(found)]


def choose_pruned(
    index: Index,
    *,
    documents: Collection[str] = (),
    older_than_s: float | None = None,
    keep_bytes: int | None = None,
    now_s: float | None = None,
) -> list[str]:
    """Choose the documents whose keys and values will be removed.

    Parameters
    ----------
    index : Index
    documents : collection of str
        Remove the keys and values of these documents,
    older_than_s : float or None
        and of documents that were finished more than this many seconds ago;
    keep_bytes : int or None
        then remove the oldest until at most this many bytes are left.
    now_s : float, optional
        Unix time from which `older_than_s` counts back.
    """
    before_s = -math.inf if older_than_s is None else (time.time() if now_s is None else now_s) - older_than_s
    stored = list_stored(index)
    gone = {name for name in stored if name in documents or index.places[name].finished_s < before_s}
    left = sum(index.places[name].kv_bytes for name in stored if name not in gone)
    for name in stored:
        if keep_bytes is None or left <= keep_bytes:
            break
        if name not in gone:
            gone.add(name)
            left -= index.places[name].kv_bytes
    return [name for name in stored if name in gone]


def prune_kv(folder: Path, session: int, documents: Collection[str]) -> None:
    """Remove these documents' keys and values, and unused data; the folder must be locked.

    Parameters
    ----------
    session : int
        Number of the lock.

    Raises
    ------
    DataError
        If a file is damaged: it stays unchanged; the files before it are already pruned.
    OutputError
        If there is no space for a file's successor.
    """
    index = index_run(folder)
    if unknown := set(documents) - index.places.keys():
        raise DataError(f"{folder} has no document {min(unknown)!r}")
    if index.gone:
        raise DataError(
            f"{folder} has lost keys and values of {counted(len(index.gone), 'document')}; nothing was removed. "
            f"`kvr-run JOB.toml --resume` processes them again"
        )
    with LogWriter(folder, session, None, read_header_of([folder])) as log:
        log.write(seal({"line": PRUNED, "ids": sorted(documents)}))
        log.sync()
        found = survey(folder)
        needed = {piece.id: piece for place in found.index().places.values() for piece in place.pieces}
        for number, (name, (_, pieces)) in enumerate(found.volumes.items()):
            kept = {piece.id: piece for piece in pieces.values() if needed.get(piece.id) == piece}
            if name != RESULTS and name in found.sizes_bytes and len(kept) < len(pieces):
                if kept:
                    _rewrite_volume(folder / f"kv-{session:04d}-0000-{number:05d}.h5", log, list(kept.values()))
                (folder / name).unlink()
                sync(folder)
    if (folder / RESULTS).is_file():
        merge_run(folder, copies=lambda place: all(Path(piece.path).name == RESULTS for piece in place.pieces))


def _rewrite_volume(target: Path, log: LogWriter, pieces: Sequence[Piece]) -> None:
    """Copy pieces of one volume to a new one, and list the new volume in the log."""
    with replaced(target) as part, create_volume(part) as file:
        for piece in pieces:
            copy_piece(file[KV], piece)
    log.write(volume_line(target, {piece.id: (piece.bytes, piece.sha256) for piece in pieces}))
    log.sync()
