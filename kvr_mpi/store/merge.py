"""Shards into one file that needs no other: the end of a run, or ``kvr merge``."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

import h5py

from kvr_mpi.errors import DataError, OutputError
from kvr_mpi.store.folder import index_run, run_files
from kvr_mpi.store.hdf5 import group_in, read_attribute
from kvr_mpi.store.ledger import PART, LedgerWriter, sync
from kvr_mpi.store.outputs import Header, open_file, read_header, start_file
from kvr_mpi.store.survey import RESULTS, survey

# Shards larger than this together are left as they are at the end of a run: copying would double the writing.
MERGE_MAX_BYTES = 4 << 30


class _FullError(Exception):
    """There is no room for the merged file."""


def merge_run(folder: Path) -> Path:
    """Merge at the end of a run, if that is cheap.

    Returns
    -------
    Path
        ``results.h5``; the folder itself if the shards are too large to be copied, there is no room, or no shard.
    """
    files = run_files(folder)
    size = sum(file.stat().st_size for file in files)
    if not files or size > MERGE_MAX_BYTES or (len(files) > 1 and shutil.disk_usage(folder).free < 1.1 * size):
        return folder
    return merge_files(folder)


def merge_files(folder: Path, target: Path | None = None, *, keep_shards: bool = False) -> Path:
    """Put all documents of a run into one file, every shard held against its checksum.

    Parameters
    ----------
    folder : Path
    target : Path or None
        File to write; None: the folder's ``results.h5``, which then stands for the shards.
    keep_shards : bool
        Do not remove them.

    Raises
    ------
    DataError
        If a shard is damaged: nothing is written, the message says what to do.
    OutputError
        If the file cannot be written; the shards stay.
    """
    result = target or folder / RESULTS
    found = survey(folder)
    found.verify()
    if found.damaged:
        told = "; ".join(f"{folder / name}: {why}" for name, why in sorted(found.damaged.items()))
        raise DataError(
            f"damaged: {told}. Nothing was merged; `kvr-run JOB.toml --resume` sets such files aside and does their "
            f"documents again"
        )
    files = run_files(folder)
    if files == [result]:
        return result
    part = result.with_name(result.name + PART)
    try:
        done, failed = _copy(folder, part)
        if target is not None:
            sync(part)
            os.replace(part, target)
            return target
        LedgerWriter(folder, "merged").publish(result, done, failed)
        if not keep_shards:
            for file in files:
                if file != result:
                    file.unlink()
    except (OSError, RuntimeError, _FullError) as error:
        with contextlib.suppress(OSError):
            os.truncate(part, 0)  # HDF5 may still have it open
            part.unlink()
        raise OutputError(
            f"{result} cannot be written: {error}; the shards in {str(folder)!r} are as they were"
        ) from error
    return result


def _copy(folder: Path, part: Path) -> tuple[list[str], list[str]]:
    """Copy every document once; return the ids of those done and those failed."""
    places: dict[Path, list[tuple[str, str]]] = {}
    for name, (file, key) in index_run(folder).items():
        places.setdefault(file, []).append((name, key))
    found: dict[bool, list[str]] = {True: [], False: []}
    part.unlink(missing_ok=True)
    with h5py.File(part, "x", libver="v110", locking=False) as merged:
        start_file(merged, _header(folder))
        for file, documents in places.items():
            with open_file(file) as stored:
                groups = group_in(stored, "documents")
                for name, key in documents:
                    group = group_in(groups, key)
                    _copy_group(group, merged["documents"], key)
                    found[read_attribute(group, "status", str) == "done"].append(name)
    return found[True], found[False]


def _copy_group(group: h5py.Group, documents: h5py.Group, key: str) -> None:
    try:
        group.file.copy(group, documents, name=key)
    except (OSError, RuntimeError) as error:
        if os.strerror(errno.ENOSPC) in str(error):  # not the source's fault
            raise _FullError(str(error)) from error
        raise


def _header(folder: Path) -> Header:
    with open_file(run_files(folder)[-1]) as latest:
        return read_header(latest)
