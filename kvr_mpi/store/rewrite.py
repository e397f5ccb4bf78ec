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
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile

from pydantic_core import from_json

from kvr_mpi.disk import LEFTOVER_S, VOLUME_NAME, final_name, names_in, remove, remove_parts, sync
from kvr_mpi.errors import DataError, OutputError, UnavailableError, counted
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.store.folder import RECORD_START, list_logs, survey
from kvr_mpi.store.kv import Piece, piece_id
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.store.kv_writer import KVWriter
from kvr_mpi.store.log import PRUNED, VOLUME, LogWriter, is_sealed, read_header, seal
from kvr_mpi.store.places import Place
from kvr_mpi.store.record import read_head, record_values
from kvr_mpi.store.results import Results, read_results
from kvr_mpi.store.volumes import LOG, RECORDS, RESULTS, lines_of, volume_line

# If keys and values are larger than this in total, they stay in their volumes: copying would double the writing.
MERGE_MAX_BYTES = 4 << 30
ROOM = 1.1  # free space that rewriting needs, as a multiple of the data to write
# System messages when a file cannot grow; HDF5 quotes them within a long message.
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))


class _StoppedError(Exception):
    """The job ends before the new file is complete."""


def finish_run(folder: Path, should_stop: Callable[[], bool] = lambda: False, logger: RankLogger = SILENT) -> Path:
    """Write ``results.h5`` at the end of a run; it replaces the logs, and the volumes if they are small enough.

    `should_stop` is called before each document; if it returns true, the logs stay as they are. `logger` is told
    the reason if the file could not be written. Returns the file, or the folder if there is no space, no
    time, or no document.
    """
    try:
        needed, copies_kv = _merged_bytes(folder)
        free = shutil.disk_usage(folder).free
    except UnavailableError:
        raise
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}; restore it, and run the job with --resume to merge again"
        ) from None
    if needed is None or should_stop():
        return folder
    try:
        if free < needed:
            raise OutputError(f"{folder / RESULTS} needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free")
        return merge_run(folder, copies_kv=copies_kv, should_stop=should_stop)
    except _StoppedError:
        return folder
    except OutputError as error:  # every document is in the logs
        logger.warning(f"the results stay in logs, which are complete: {error}; `kvr merge {folder}` merges them later")
        return folder


def _merged_bytes(folder: Path) -> tuple[float | None, bool]:
    """Return the space that merging a run needs, None without documents, and whether to copy all keys and values."""
    found = Results.of(survey(folder))
    if not (found.places or found.gone or found.unreadable):
        return None, False
    copies_kv = found.kv_bytes <= MERGE_MAX_BYTES
    inside = (place.kv_bytes for _, place in found.places.with_kv() if copies_kv or _is_inside(place, folder / RESULTS))
    return ROOM * (found.places.record_bytes + sum(inside)), copies_kv


def merge_run(folder: Path, *, copies_kv: bool = True, should_stop: Callable[[], bool] = lambda: False) -> Path:
    """Write all documents of a run to its ``results.h5``, which replaces its logs and volumes.

    The folder has to be locked. Without `copies_kv`, keys and values stay in their volumes. `should_stop` is called
    before each document. Raises `DataError`, which says what to do, if files are damaged or documents are lost, and
    `OutputError` if the file cannot be written; then nothing is removed.
    """
    found = read_results([folder])
    if found.gone:
        raise DataError(
            f"{folder} has lost keys and values of {counted(len(found.gone), 'document')}, so nothing was merged; "
            f"`kvr-run JOB.toml --resume` processes them again, and `kvr merge {folder} -o FILE` merges the others"
        )
    result = folder / RESULTS
    logs = list_logs(names_in(folder))
    kept = {Path(piece.path).name for _, place in found.places.with_kv() for piece in place.pieces}
    if logs or (copies_kv and kept - {RESULTS}):
        kept = write_results(result, found, lambda place: copies_kv or _is_inside(place, result), should_stop)
    volumes = [name for name in names_in(folder) if VOLUME_NAME.fullmatch(final_name(name))]
    # The oldest log first: a line that drops earlier records must be removed no later than the records after it.
    for name in (*logs, *(name for name in volumes if name not in kept)):
        remove(folder / name)
    with contextlib.suppress(OSError):  # logs that a crash brings back are merged again
        sync(folder)
    return result


def _is_inside(place: Place, result: Path) -> bool:
    """Whether the keys and values of a document are in ``results.h5``, and so have to be copied to its successor."""
    return any(piece.path == str(result) for piece in place.pieces)


def merge_runs(paths: Sequence[Path], target: Path) -> tuple[str, ...]:
    """Write all documents of a run, or of the shares of a corpus, to another file; the originals stay.

    Returns descriptions of missing shares and documents. Raises `DataError` if a file is damaged, the runs belong to
    different jobs, or a document is in two of them, and `OutputError` if the file cannot be written.
    """
    found = read_results(paths)
    write_results(target, found)
    return found.missing


@contextlib.contextmanager
def rewriting(result: Path) -> Iterator[None]:
    """Raise `OutputError` if a file cannot be written."""
    try:
        yield
    except UnavailableError:  # of a file that was to be copied
        raise
    except (OSError, RuntimeError) as error:
        reason = next((text for text in FULL if text in str(error)), str(error))
        raise OutputError(f"{result} cannot be written: {reason}; nothing else was changed") from error


def write_results(
    target: Path,
    found: Results,
    copies: Callable[[Place], bool] = lambda _: True,
    should_stop: Callable[[], bool] = lambda: False,
) -> set[str]:
    """Write every document once to a new file, which replaces `target`; return the volumes that it still needs.

    `copies` decides whether a document's keys and values are copied, as one piece; others stay in their volumes.
    `should_stop` is called before each document. Raises `DataError` if a document cannot be read, and `OutputError` if
    the file cannot be written.
    """
    beside: dict[Path, dict[str, tuple[int, str]]] = {}
    with rewriting(target), KVWriter(target, replaces=True) as new, TemporaryFile(dir=target.parent) as records:
        embeddings = new.embeddings(len(found))
        for record in found:
            if should_stop():
                raise _StoppedError
            name, place = record.id, found.places[record.id]
            needs = place.needs
            if needs and copies(place):
                with KVReader(name, place.pieces) as kv:
                    needs = (piece_id(record, kv.tokens),)
                    new.copy(needs[0], kv)
            else:
                for each in place.pieces:
                    beside.setdefault(Path(each.path), {})[each.id] = (each.bytes, each.sha256)
            records.write(seal(record_values(record, needs)))
            embeddings.add(record.embedding)
        embeddings.flush()
        new.write_lines(RECORDS, records)
        log = BytesIO()
        log.write(seal(found.header.as_line()))
        log.write(seal({"line": VOLUME, "name": RESULTS, "size_bytes": 0, "pieces": new.pieces}))
        for volume, pieces in sorted(beside.items()):
            log.write(volume_line(volume, pieces))
        for cost in found.costs.values():
            log.write(seal(cost.as_line()))
        new.write_lines(LOG, log)
        new.finish(partial(_check_records, found))
    with contextlib.suppress(OSError):
        remove_parts(target.parent, target.name, older_s=LEFTOVER_S)
    return {volume.name for volume in beside}


def _check_records(found: Results, part: Path) -> None:
    """Raise `OSError` unless a new file has the records of all documents."""
    if why := _difference(part, found):
        raise OSError(errno.EIO, f"it differs from what was written: {why}", str(part))


def _difference(written: Path, found: Results) -> str:
    """Read a file of results again; describe how it differs from what was to be written."""
    names = found.places.ordered()
    try:
        for number, (_, line) in enumerate(lines_of(written)):
            if not is_sealed(line):
                return f"line {number + 1} is damaged"
            if number == 0:
                read_header(from_json(line), written)
            elif line.startswith(RECORD_START) and read_head(line).id != next(names, None):
                return f"line {number + 1} is another record"
    except (DataError, ValueError) as error:
        return str(error)
    return "records are missing" if next(names, None) is not None else ""


def list_stored(found: Results) -> list[str]:
    """List the ids of the documents that have keys and values, the oldest first."""
    stored = [(place.finished_s, name) for name, place in found.places.with_kv() if place.kv_bytes]
    return [name for _, name in sorted(stored)]


def choose_pruned(
    found: Results,
    *,
    documents: Collection[str] = (),
    older_than_s: float = math.inf,
    keep_bytes: float = math.inf,
    now_s: float | None = None,
) -> list[str]:
    """Choose the documents whose keys and values will be removed.

    These are the named `documents`, and documents that were finished more than `older_than_s` seconds before `now_s`
    (Unix time); then the oldest until at most `keep_bytes` are left.
    """
    before_s = (time.time() if now_s is None else now_s) - older_than_s
    stored = list_stored(found)
    gone = {name for name in stored if name in documents or found.places[name].finished_s < before_s}
    left = sum(found.places[name].kv_bytes for name in stored if name not in gone)
    for name in stored:
        if left > keep_bytes and name not in gone:
            gone.add(name)
            left -= found.places[name].kv_bytes
    return [name for name in stored if name in gone]


def prune_kv(folder: Path, session: int, documents: Collection[str]) -> None:
    """Remove these documents' keys and values, and unused data; the folder must be locked, with the number `session`.

    Raises `DataError` if a file is damaged: it stays unchanged, and the files before it are already pruned;
    `OutputError` if there is no space for a file's successor.
    """
    before = read_results([folder])
    if before.gone:
        raise DataError(
            f"{folder} has lost keys and values of {counted(len(before.gone), 'document')}; nothing was removed. "
            f"`kvr-run JOB.toml --resume` processes them again"
        )
    with LogWriter(folder, session, None, before.header) as log:
        log.write(seal({"line": PRUNED, "ids": sorted(documents)}))
        log.sync()
        found = survey(folder)
        needed = {piece for _, place in found.locate()[0].with_kv() for piece in place.pieces}
        for number, (name, (_, pieces)) in enumerate(found.volumes.items()):
            kept = [piece for piece in pieces.values() if piece in needed]
            if name != RESULTS and name in found.sizes_bytes and len(kept) < len(pieces):
                if kept:
                    _rewrite_volume(folder / f"kv-{session:04d}-0000-{number:05d}.h5", log, kept)
                remove(folder / name)
                sync(folder)
    if (folder / RESULTS).is_file():
        merge_run(folder, copies_kv=False)


def _rewrite_volume(target: Path, log: LogWriter, pieces: Sequence[Piece]) -> None:
    """Copy pieces of one volume to a new one, and list the new volume in the log."""
    with rewriting(target), KVWriter(target) as new:
        for piece in pieces:
            with KVReader(piece.id, [piece], is_part=True) as kv:
                new.copy(piece.id, kv)
        new.finish()
    log.write(volume_line(target, new.pieces))
    log.sync()
