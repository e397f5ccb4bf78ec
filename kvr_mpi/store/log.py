"""The log: one checksummed line of JSON per record, one file per rank and job.

    log-SESSION-RANK.jsonl   of a rank; log-SESSION.jsonl of a command, or of
                             a job before its ranks begin
      {"line": "header", "schema_version": 6, "identity": ..., "model": ...,
       "software": ...}      the first: what the answers depend on; name,
                             architecture and dtype of the model; versions
      {"id": ..., "status": ..., ..., "pieces": [...]}
                             a record: its fields (see ``record``), and ids of
                             the keys and values that it needs
      {"line": "volume", "name": ..., "size_bytes": ..., "pieces": {...}}
                             a volume is complete; by id, the bytes and the
                             hash of the pieces in it
      {"line": "dropped", "ids": [...]}
                             records of these documents from earlier sessions
                             no longer count
      {"line": "pruned", "ids": [...]}
                             records of these documents from earlier sessions
                             need no keys and values any more
      {"line": "cost", "key": ..., "node_s": ..., "joules": ..., ...}
                             what a rank has spent in this session so far; the
                             last line of a key counts (see ``cost``)
      ..., "seal": "..."}    ends every line: CRC32 of what precedes it

Only the process that creates a file ever appends to it, so a crash can tear only its last line: a line without a line
break does not count.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import h5py
from pydantic_core import from_json

from kvr_mpi import __version__
from kvr_mpi.disk import create, sync, write_all
from kvr_mpi.errors import ForeignError
from kvr_mpi.plain import Count, read_plain

SEAL = re.compile(rb', "seal": "([0-9a-f]{8})"\}')
SEAL_BYTES = len(b', "seal": "01234567"}')
LINE_BYTES = 1 << 28  # maximum length of a line, written or read
SCHEMA_VERSION = 6  # of all our files; those of any other version are refused
HEADER, VOLUME, DROPPED, PRUNED = "header", "volume", "dropped", "pruned"


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a log, which holds for all its records.

    identity : settings that the answers depend on; a run can only be resumed with the same identity.
    model : name, architecture, dtype; informative.
    software : versions of the software that produced the answers.
    """

    identity: dict[str, Any]
    model: dict[str, Any]
    software: dict[str, str] = field(default_factory=dict)

    def as_line(self) -> dict[str, Any]:
        """Return the first line of a log."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"line": HEADER, "schema_version": SCHEMA_VERSION, "created": created}
        return {**head, **asdict(self), "software": self.software or software()}


@dataclass(frozen=True, slots=True)
class VolumeLine:
    """A volume that is complete: the bytes and the hash of each piece, by id."""

    name: str
    size_bytes: Count
    pieces: dict[str, tuple[Count, str]]


@dataclass(frozen=True, slots=True)
class DocumentsLine:
    """Documents whose earlier records, or their keys and values, no longer count."""

    ids: tuple[str, ...]


def software() -> dict[str, str]:
    """Return the versions of all software that produced the answers."""
    return {
        "kvr_mpi": __version__,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "transformers": _version_of("transformers"),
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


def _version_of(package: str) -> str:
    """Return the version of a loaded module (with ``+cu130``), else of the installed package, without loading it."""
    loaded = sys.modules.get(package)
    return str(loaded.__version__) if loaded is not None else metadata.version(package)


def read_header(values: Mapping[str, Any], path: Path) -> Header:
    """Read the first line of a log; raises `ValueError` if it is not a header, `ForeignError` as `check_version`."""
    if values.get("line") == HEADER:
        check_version(values.get("schema_version"), path)
    header = read_plain(Header, values)
    if values.get("line") != HEADER or not all(
        isinstance(header.model.get(name), str) for name in ("name", "architecture", "dtype")
    ):
        raise ValueError("expected a header with the name, architecture and dtype of the model")
    return header


def check_version(found: object, path: Path) -> None:
    """Raise `ForeignError` if a file has another version of the format."""
    if found != SCHEMA_VERSION:
        is_newer = isinstance(found, int) and found > SCHEMA_VERSION
        raise ForeignError(
            f"{path} has schema version {found}; this kvr-mpi reads version {SCHEMA_VERSION} only: "
            f"{'upgrade kvr-mpi' if is_newer else 'process its documents again, into a new output.path'}"
        )


def seal(value: Mapping[str, Any]) -> bytes:
    """Return a line of JSON that ends with its checksum."""
    body = json.dumps(value, ensure_ascii=False)[:-1].encode(errors="backslashreplace")
    return body + b', "seal": "%08x"}\n' % zlib.crc32(body)


def is_sealed(line: bytes) -> bool:
    """Whether a line (without its line break) has a valid checksum."""
    body, end = line[:-SEAL_BYTES], SEAL.fullmatch(line[-SEAL_BYTES:])
    return end is not None and int(end[1], 16) == zlib.crc32(body)


def unseal(line: bytes) -> dict[str, Any] | None:
    """Parse a sealed line; None if it is torn or changed, or contains text that cannot be encoded as UTF-8."""
    line = line.rstrip(b"\n")
    try:
        value: dict[str, Any] = from_json(line) if is_sealed(line) else {}
        value.pop("seal")
    except (ValueError, AttributeError, KeyError):
        return None
    return value


class LogWriter:
    """Writes one log; the file is created with its first line.

    session : number of the job or command that holds the folder.
    rank : None: a log of a command, or of a job before its ranks start.
    """

    def __init__(self, folder: Path, session: int, rank: int | None, header: Header) -> None:
        name = f"log-{session:04d}" if rank is None else f"log-{session:04d}-{rank:04d}"
        self.path, self._header = folder / f"{name}.jsonl", header
        self._handle, self._size, self._is_synced = -1, 0, True

    @property
    def is_begun(self) -> bool:
        """Whether the file exists."""
        return self._handle >= 0

    def write(self, line: bytes) -> None:
        """Append a sealed line; a failed write is undone; raises `OSError` if it cannot be written."""
        if self._handle < 0:
            self._handle = create(self.path)
            sync(self.path.parent)
            self._add(seal(self._header.as_line()))
        self._add(line)

    def _add(self, line: bytes) -> None:
        self._is_synced = False
        try:
            write_all(self._handle, line)
        except OSError:
            os.ftruncate(self._handle, self._size)
            os.lseek(self._handle, self._size, os.SEEK_SET)
            raise
        self._size += len(line)

    def sync(self) -> None:
        """Flush all lines to the disk."""
        if not self._is_synced:
            os.fsync(self._handle)
            self._is_synced = True

    def close(self) -> None:
        """Flush all lines to the disk, and close the file."""
        if self._handle >= 0:
            try:
                self.sync()
            finally:
                os.close(self._handle)
                self._handle = -1

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
