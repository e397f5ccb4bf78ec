"""Checks of HDF5 and the output folder: safe writing, free space, and whether all hosts see the same folder."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvr_mpi.disk import replaced
from kvr_mpi.doctor.facts import RankFacts
from kvr_mpi.doctor.findings import Finding, fail, ok, some, warn
from kvr_mpi.errors import counted
from kvr_mpi.store.hdf5 import NewFile, open_hdf5, write_dataset
from kvr_mpi.transport import Transport, gather_json, share_json

# Time within which a network file system shows a new file on other hosts.
VISIBLE_WITHIN_S = 5.0
FEW_BYTES = 5 << 30
VALUES = 1 << 18


def existing_folder(path: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def check_folder(path: Path) -> list[Finding]:
    """Check writing and space."""
    folder = existing_folder(path)
    text = str(folder) if folder == path.absolute() else f"{folder} ({path} does not exist yet)"
    stem = f".kvr-doctor-{uuid.uuid4().hex}"
    try:
        unchanged = write_and_read(folder, stem)
    except Exception as error:  # HDF5 and file systems raise many kinds of errors
        reason = " ".join(str(error).split())
        remedy = "choose a folder that you can write to (output.path), with free space and quota"
        return [fail("folder", f"{text} cannot be written: {reason}", remedy)]
    if not unchanged:
        remedy = "do not use this file system, and inform its administrators"
        return [fail("folder", f"{text}: an HDF5 file read back differs from what was written", remedy)]
    free = shutil.disk_usage(folder).free
    room = f"{free / 2**30:.1f} GiB free (quotas are not checked)"
    remedy = "free some space, or choose another folder, especially for output.kv = true"
    space = warn("space", room, remedy) if free < FEW_BYTES else ok("space", room)
    return [ok("folder", f"{text}: HDF5 file written, fsynced, renamed and read back"), space]


def write_and_read(folder: Path, stem: str) -> bool:
    """Write an HDF5 file as a job does, read it back, and remove it; raises `OSError` and `DataError`."""
    path, values = folder / f"{stem}.h5", np.arange(VALUES, dtype=np.int64)
    try:
        with replaced(path) as part, NewFile(part) as file:
            write_dataset(file, "values", values)
        with open_hdf5(path) as file:
            return bool(np.array_equal(file["values"][()], values))
    finally:
        path.unlink(missing_ok=True)


def check_shared(transport: Transport, path: Path, facts: Sequence[RankFacts]) -> list[Finding]:
    """Write a token on rank 0 and read it on every rank; all ranks call this, and only rank 0 needs `facts`."""
    file, token = existing_folder(path) / f".kvr-doctor-{uuid.uuid4().hex}", uuid.uuid4().hex

    def write() -> str:
        """Write the token; empty if that fails, which `check_folder` has reported already."""
        with contextlib.suppress(OSError):
            file.write_text(token)
            return file.name
        return ""

    name = share_json(transport, write() if transport.rank == 0 else None)
    if not name:
        return []
    try:
        found = gather_json(transport, read_token(path, name))
    finally:
        if transport.rank == 0:
            file.unlink(missing_ok=True)
    if transport.rank:
        return []
    missing = [f"rank {one.rank} on {one.host}" for one, got in zip(facts, found, strict=True) if got != token]
    if missing:
        text = f"a file that rank 0 writes to {path.absolute()} cannot be seen by {some(missing)}"
        remedy = "choose a folder on a file system that all hosts share, and give its full path"
        return [fail("shared folder", text, remedy)]
    hosts = len({one.host for one in facts})
    return [ok("shared folder", f"the same on all {counted(hosts, 'host')}" if hosts > 1 else "one host")]


def read_token(path: Path, name: str) -> str:
    """Read a file that another host has just written; empty if it cannot be seen."""
    ends = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        try:
            return (existing_folder(path) / name).read_text()
        except OSError:
            if time.monotonic() > ends:
                return ""
            time.sleep(0.1)
