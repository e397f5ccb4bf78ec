"""Volumes, which are HDF5 files of keys and values, and ``results.h5``, which also contains the log.

    kv-SESSION-RANK-NUMBER.h5  of a rank, while a job runs
    results.h5                 of all ranks, at its end; needs no other file,
                               or only the volumes that its log lists
      /                        attributes: schema = "kvr-mpi",
                               schema_version = 6
      /kv/KEY/...              keys and values (see ``kv``); KEY is an id in
                               its record's ``pieces``, percent-encoded
      /records                 of results.h5: the records, a line of JSON
                               each, in the order of their ids (uint8)
      /log                     of results.h5: the log's other lines (uint8)
      /embeddings              of results.h5, if there are any: those of the
                               records, in the same order (documents,
                               dimension), float32; NaN if it has none

A volume is valid if a line of a log lists it (see ``log``); otherwise it was not finished. Everything has a checksum:
a line its own, keys and values their digests, and what describes them a hash in the log. Files of any other version are
refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import h5py

from kvr_mpi.disk import LOG_NAME, VOLUME_NAME, open_regular, retried
from kvr_mpi.errors import DataError, ForeignError
from kvr_mpi.store.hdf5 import dataset_in, open_hdf5, read_attribute, where
from kvr_mpi.store.log import LINE_BYTES, VOLUME, check_version, seal

RESULTS = "results.h5"
SCHEMA = "kvr-mpi"
LOG, RECORDS, KV, EMBEDDINGS = "log", "records", "kv", "embeddings"


def is_ours(name: str) -> bool:
    """Whether kvr-mpi gives result files this name."""
    return name == RESULTS or bool(LOG_NAME.fullmatch(name) or VOLUME_NAME.fullmatch(name))


def key_of(any_id: str) -> str:
    """Encode an id as the name of a group or file: percent-encoded, never a path, ``.`` or ``..``."""
    key = quote(any_id, safe=" ,+=@()")
    return key.replace(".", "%2E") if set(key) == {"."} else key


def volume_line(volume: Path, pieces: Mapping[str, tuple[int, str]]) -> bytes:
    """Return the sealed log line that lists a volume, with the bytes and hash of each piece, by id."""
    return seal({"line": VOLUME, "name": volume.name, "size_bytes": volume.stat().st_size, "pieces": pieces})


@contextmanager
def open_volume(path: Path) -> Iterator[h5py.File]:
    """Open one of our files for reading, after checking its schema.

    Raises `DataError` if it is damaged, foreign, or has another schema version; also for damage found while it is open,
    and system errors as `hdf5_errors` does.
    """
    with open_hdf5(path) as file:
        if not len(file.attrs) + len(file):  # a rank that ended while it created the file leaves it so
            raise DataError(f"{path} is an HDF5 file that has no contents")
        if "schema" not in file.attrs or read_attribute(file, "schema", str) != SCHEMA:
            raise ForeignError(
                f"{path} is an HDF5 file, but not written by kvr-mpi (expected the attribute schema = {SCHEMA!r})"
            )
        check_version(read_attribute(file, "schema_version", int), path)
        yield file


@dataclass(frozen=True, slots=True)
class Source:
    """The lines of an open log or ``results.h5``: offset and bytes of each range of them; the last has the records."""

    path: Path
    stream: BinaryIO
    ranges: tuple[tuple[int, int], ...]

    @property
    def inode(self) -> tuple[int, int]:
        """Device and number of the file; another file can have its name later."""
        status = os.fstat(self.stream.fileno())
        return status.st_dev, status.st_ino

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and text of each complete line; raises `DataError` if the file ends before its lines do."""
        for at, size in self.ranges:
            end = at + size
            self.stream.seek(at)
            while line := self.stream.readline(min(LINE_BYTES, end - at)):
                if line.endswith(b"\n"):
                    yield at, line[:-1]
                elif len(line) == LINE_BYTES:  # no line of ours is longer: damaged from here on
                    yield at, b""
                    break
                at += len(line)
            else:
                if at < end:
                    raise DataError(f"{self.path} ends at byte {at}; its lines should end at {end}")

    def read(self, at: int, size: int) -> bytes:
        """Read a line."""
        return os.pread(self.stream.fileno(), size, at)


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a log, or ``results.h5``, for reading; raises as `open_volume` does."""
    if not LOG_NAME.fullmatch(path.name):
        with open_volume(path) as file:
            ranges = tuple(_range_of(dataset_in(file, name, "u", (1,))) for name in (LOG, RECORDS))
            # Not a duplicate of HDF5's descriptor, whose position all readers of the file in this process would share.
            stream = open_regular(path)
            if not os.path.sameopenfile(stream.fileno(), file.id.get_vfd_handle()):
                stream.close()
                raise DataError(f"{path} was replaced while it was opened")
    else:
        stream = open_regular(path)
        ranges = ((0, os.fstat(stream.fileno()).st_size),)
    with stream:
        yield Source(path, stream, ranges)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the `Source.lines` of a log, or of ``results.h5``; `retried`, from where an attempt failed."""
    count, first, opened = 0, None, ExitStack()
    lines: Iterator[tuple[int, bytes]] | None = None

    def next_line() -> tuple[int, bytes] | None:
        nonlocal lines, first
        try:
            if lines is None:
                source = opened.enter_context(open_source(path))
                if source.inode != (first := first or source.inode):
                    raise DataError(f"{path} was replaced while it was read")
                lines = islice(source.lines(), count, None)
            return next(lines, None)
        except OSError:
            lines = None
            with suppress(OSError):
                opened.close()
            raise

    with opened:
        while (found := retried(next_line, path)) is not None:
            count += 1
            yield found


def _range_of(data: h5py.Dataset) -> tuple[int, int]:
    """Return the offset of a dataset of bytes in its file, and its size."""
    size, offset = int(data.shape[0]), data.id.get_offset()
    if data.dtype.itemsize != 1 or (size and offset is None):
        raise DataError(f"{where(data)} is not stored as {size} bytes in one place, as expected")
    return offset or 0, size
