"""Shards into one file that needs no other: the end of a run, or ``kvr merge``.

Every record is read before it is copied, keys and values included: what comes out can be read, or nothing comes out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import h5py

from kvr_mpi.disk import PART, truncate
from kvr_mpi.errors import DataError, OutputError, counted
from kvr_mpi.store.folder import Index, index_run, join_indexes, run_files
from kvr_mpi.store.hdf5 import create_hdf5, group_in
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.ledger import LedgerWriter, sync
from kvr_mpi.store.outputs import (
    Header,
    Record,
    check_record,
    key_of,
    open_file,
    start_file,
    write_record,
)
from kvr_mpi.store.parts import PARTS, index_parts, open_parts, part_bytes, parts_of, remove_parts
from kvr_mpi.store.shares import Runs, index_runs, read_header_of
from kvr_mpi.store.stored_kv import CachedTokens, KeysValues
from kvr_mpi.store.summary import shorten
from kvr_mpi.store.survey import RESULTS

# Shards larger than this together, or of more documents, are left as they are at the end of a run: copying would double
# the writing, or take minutes.
MERGE_MAX_BYTES = 4 << 30
MERGE_MAX_DOCUMENTS = 5000
MERGE_ROOM = 1.1  # free space that merging needs, in sizes of what is merged
NAMED = 5  # examples in a message
# HDF5 keeps some 20 KB of everything it copied until the file that was copied from is closed.
COPIES_PER_OPENING = 200
# What the system says when a file can grow no further; HDF5 quotes it somewhere in a long message.
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))


class _FullError(Exception):
    """There is no room for the merged file."""


class _StoppedError(Exception):
    """There is no time for the merged file."""


def merge_run(
    folder: Path, should_stop: Callable[[], bool] = lambda: False, say: Callable[[str], None] = lambda line: None
) -> Path:
    """Merge at the end of a run, if that is cheap.

    Parameters
    ----------
    folder : Path
    should_stop : callable
        Asked before each document: whether to leave the shards as they are.
    say : callable
        Takes a line that says why the shards stay, if their merged file could not be written.

    Returns
    -------
    Path
        ``results.h5``; the folder itself if the shards are too large or too many documents to be copied, there is no
        room, no time, or no shard.
    """
    files = run_files(folder)
    parts = part_bytes(folder)
    if not run_files(folder / PARTS):  # no rank has written any
        remove_parts(folder)
    try:
        size = sum(file.stat().st_size for file in files) + parts
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}; restore it, and run the job with --resume to merge again"
        ) from None
    if files == [folder / RESULTS]:
        remove_parts(folder)  # which a crash left after its shards were removed
        return files[0]
    if not files or size > MERGE_MAX_BYTES or should_stop() or len(index_run(folder).places) > MERGE_MAX_DOCUMENTS:
        return folder
    try:
        if free < MERGE_ROOM * size:
            raise OutputError(
                f"{folder / RESULTS} needs {MERGE_ROOM * size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
            )
        return merge_files(folder, should_stop=should_stop)
    except _StoppedError:
        return folder
    except OutputError as error:  # every document is in the shards
        say(f"warning: the results stay in shards, which are complete: {error}; `kvr merge {folder}` merges them later")
        return folder


def merge_files(folder: Path, *, keep_shards: bool = False, should_stop: Callable[[], bool] = lambda: False) -> Path:
    """Put all documents of a run into its ``results.h5``, which then stands for the shards.

    Every shard is held against its checksum, every record against its own.

    Parameters
    ----------
    folder : Path
    keep_shards : bool
        Do not remove them.

    Raises
    ------
    DataError
        If a shard is damaged, or lost with documents that no other has: nothing is written, the message says what to
        do.
    OutputError
        If the file cannot be written; the shards stay.
    """
    result, files = folder / RESULTS, run_files(folder)
    if not files:
        raise DataError(f"{folder}: no result file (*.h5) found; expected the output folder of a run")
    index = index_run(folder, verify=True)
    if index.gone:
        raise DataError(
            f"{folder} has lost {counted(index.gone, 'document')} listed in its ledger, so nothing was merged; "
            f"`kvr-run "
            f"JOB.toml --resume` processes them again, and `kvr merge {folder} -o FILE` merges the others"
        )
    if files != [result] or index.unrecorded:
        with part_of(result) as part:
            parts = index_parts(folder)
            copied = copy_documents(index, read_header_of([folder]), part, should_stop, parts=parts)
            LedgerWriter(folder, "merged").publish(result, *copied)
    if not keep_shards:
        # First the shards: their documents need the parts, those of the merged file do not.
        for file in files:
            if file != result:
                file.unlink()
        sync(folder)
        remove_parts(folder)
    return result


def merge_runs(runs: Runs, target: Path) -> tuple[str, ...]:
    """Put all documents of a run, or of the shares of a corpus, into another file; the shards stay.

    Returns
    -------
    tuple of str
        What is missing, as from `index_runs`.

    Raises
    ------
    DataError
        If a shard is damaged, the runs are of different jobs, or a document is in two of them.
    OutputError
        If the file cannot be written.
    """
    index, missing = index_runs(runs, verify=True)
    parts = join_indexes(map(index_parts, runs.paths))
    header = read_header_of(runs.paths)
    with part_of(target) as part:
        copy_documents(index, header, part, parts=parts)
        sync(part)
        os.replace(part, target)
    return missing


@contextlib.contextmanager
def part_of(result: Path) -> Iterator[Path]:
    """Yield the name of the file to write, and remove it if it is not complete."""
    part = result.with_name(result.name + PART)
    try:
        yield part
    except BaseException as error:
        with contextlib.suppress(OSError):
            truncate(part)  # HDF5 may still have it open
        with contextlib.suppress(OSError):
            part.unlink()
        if not isinstance(error, (OSError, RuntimeError, _FullError)):
            raise
        reason = next((text for text in FULL if text in str(error)), str(error))
        raise OutputError(f"{result} cannot be written: {reason}; the shards were not changed") from error


def copy_documents(
    index: Index,
    header: Header,
    part: Path,
    should_stop: Callable[[], bool] = lambda: False,
    without_kv: Collection[str] = (),
    parts: Index | None = None,
) -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    """Copy every document once into a new file; return what `LedgerWriter.publish` is told of it.

    Parameters
    ----------
    should_stop : callable
        Asked before each document.
    without_kv : collection of str
        Ids of documents whose keys and values are left out.
    parts : Index or None
        Where keys and values are that the records themselves do not have (see ``parts``), to be put together; None:
        they stay where they are.

    Raises
    ------
    DataError
        If one cannot be read.
    """
    done: list[str] = []
    failed: dict[str, str] = {}
    cut: dict[str, list[str]] = {}
    unreadable: list[str] = []
    part.unlink(missing_ok=True)
    with create_hdf5(part) as merged:
        start_file(merged, header)
        for file, names in _stretches(index):
            try:
                with open_file(file) as stored:
                    groups = group_in(stored, "documents")
                    for name in names:
                        if should_stop():
                            raise _StoppedError
                        try:
                            record, needs = _copy_document(groups, name, merged, name in without_kv, parts)
                        except DataError as error:
                            unreadable.append(str(error))
                            continue
                        if record.status == "done":
                            done.append(name)
                            cut |= {name: needs} if needs else {}
                        else:
                            failed[name] = shorten(record.error)
            except DataError as error:
                unreadable.append(str(error))
    if unreadable:
        more = f" ... and {len(unreadable) - NAMED} more" if len(unreadable) > NAMED else ""
        raise DataError(
            f"cannot be read: {'; '.join(unreadable[:NAMED])}{more}. Nothing was merged; `kvr-run JOB.toml --resume` "
            f"sets damaged files aside that are not in the ledger, and processes their documents again"
        )
    return done, failed, cut


def _stretches(index: Index) -> Iterator[tuple[Path, list[str]]]:
    """Yield some documents of a file at a time."""
    for file, places in index.by_file().items():
        names = list(places)
        for start in range(0, len(names), COPIES_PER_OPENING):
            yield file, names[start : start + COPIES_PER_OPENING]


def _copy_document(
    groups: h5py.Group, name: str, merged: h5py.File, drops_kv: bool, parts: Index | None
) -> tuple[Record, list[str]]:
    """Copy a document, with its keys and values, in one piece if its parts are told, or without them.

    Returns its record, and the parts that it still needs.

    Raises
    ------
    DataError
        If it cannot be read.
    """
    group = group_in(groups, key_of(name))
    record = check_record(group)
    if record.id != name:
        raise DataError(f"{group.file.filename}:{group.name}: its id {record.id!r} does not belong there")
    kv = open_kv(group)
    with contextlib.ExitStack() as files:
        layers: Iterable[KeysValues | None] = ()
        tokens: CachedTokens | None = None
        is_joined = not kv.is_whole and parts is not None and not drops_kv
        if is_joined:
            assert parts is not None
            whole = open_parts(group, record, parts, files)
            last = max(whole.layers)
            layers = (whole.read(number) if number in whole.layers else None for number in range(last + 1))
            tokens = whole.tokens
        try:
            if not drops_kv and not is_joined:
                group.file.copy(group, merged["documents"], name=key_of(name))
            else:
                write_record(merged, record, layers, tokens)
        except (OSError, RuntimeError) as error:
            if any(text in str(error) for text in FULL):  # not the source's fault
                raise _FullError(str(error)) from error
            raise
    return record, [] if is_joined or drops_kv else parts_of(record, kv.tokens)
