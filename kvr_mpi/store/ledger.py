"""The ledger: what is durable. One file for each writer, a line of JSON for each shard, sealed by a checksum.

A shard is closed and synced, then written into the ledger, then given its name: it counts once it has both. So a
crash leaves either a shard that is complete and known by its checksum, or nothing that counts.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvr_mpi.disk import LEDGER_NAME, PART, open_regular, open_to_append

SEAL = re.compile(rb', "seal": "([0-9a-f]{8})"\}')
SEAL_BYTES = len(b', "seal": "01234567"}')
READ_BYTES = 1 << 22
LINE_BYTES = 1 << 27  # a line of a million documents is half as long
# Unix times that a calendar can show.
TIMES_S = (-6e10, 2.5e11)


@dataclass(frozen=True, slots=True)
class ShardLine:
    """A file of results.

    crc32 : of the whole file, in hexadecimal digits.
    done, failed : ids of its documents.
    at_s : Unix time.
    reasons : why those that failed did (see ``summary.shorten``), in their order.
    parts : ids of the parts that other ranks wrote of documents that are done (see ``parts``); those that are not named
        have none.
    """

    shard: str
    size_bytes: int
    crc32: str
    done: list[str]
    failed: list[str]
    at_s: float
    reasons: list[str]
    parts: dict[str, list[str]]


@dataclass(slots=True)
class Ledger:
    """All ledgers of a folder.

    shards : every line about each file, by its name, in the order of writing; ``results.h5`` may have several.
    damaged : (file, line number) of lines that cannot be trusted; the last one of a file may be torn by a crash.
    """

    shards: dict[str, list[ShardLine]] = field(default_factory=dict)
    damaged: list[tuple[str, int]] = field(default_factory=list)


def seal(value: dict[str, Any]) -> bytes:
    """One line of JSON that ends with a checksum of itself."""
    body = json.dumps(value)[:-1].encode()
    return body + b', "seal": "%08x"}\n' % zlib.crc32(body)


def unseal(line: bytes) -> dict[str, Any] | None:
    """Read a line that `seal` made; None if it is torn or changed."""
    line = line.rstrip(b"\n")
    body, end = line[:-SEAL_BYTES], SEAL.fullmatch(line[-SEAL_BYTES:])
    if end is None or int(end[1], 16) != zlib.crc32(body):
        return None
    value: dict[str, Any] = json.loads(line)
    value.pop("seal")
    return value


class LedgerWriter:
    """Append to one writer's ledger."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"ledger-{name}.jsonl"

    def record(self, line: ShardLine) -> None:
        """Write a file's line, and bring it to the disk."""
        self._append(asdict(line))

    def publish(self, path: Path, done: list[str], failed: dict[str, str], parts: dict[str, list[str]]) -> None:
        """Make a complete file count: sync ``PATH.part``, record it, give it its name.

        `failed` says why, by id; `parts` is that of `ShardLine`.

        A crash at any time leaves the old state, the new one, or a recorded file that only lacks its name.
        """
        part = path.with_name(path.name + PART)
        with ThreadPoolExecutor(1) as other:
            synced = other.submit(sync, part)  # the disk works meanwhile
            crc32 = crc32_of(part)
            synced.result()
        reasons = list(failed.values())
        sizes = part.stat().st_size, crc32
        self.record(ShardLine(path.name, *sizes, done, list(failed), time.time(), reasons, parts))
        os.replace(part, path)
        sync(path.parent)

    def _append(self, value: dict[str, Any]) -> None:
        handle = open_to_append(self._path)
        try:
            # A line torn by a crash, or by a full disk, must not swallow the next one.
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            write_all(handle, (b"\n" if torn else b"") + seal(value))
            os.fsync(handle)
        finally:
            os.close(handle)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems sync no folders
            raise
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Write all of it, in as few calls as the system takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def read_ledger(folder: Path) -> Ledger:
    """Read all ledgers of a folder."""
    ledger = Ledger()
    for path in ledger_files(folder):
        number = 0
        try:
            for number, line in enumerate(_lines(path), start=1):
                if not line.strip(b"\n"):
                    continue
                try:
                    _add_line(ledger, unseal(line) or {})
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    ledger.damaged.append((path.name, number))
        except OSError:  # no regular file, or not ours to read
            ledger.damaged.append((path.name, number))
    return ledger


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file; one that is longer than any of ours comes in pieces, none of which is sealed."""
    with open_regular(path) as stream:
        while line := stream.readline(LINE_BYTES):
            yield line


def _add_line(ledger: Ledger, value: dict[str, Any]) -> None:
    """Take in a line, if its values are of the types they are to have."""
    line = ShardLine(**value)
    for names in ([line.shard, line.crc32], line.done, line.failed, line.reasons):
        _check_names(names)
    if len(line.failed) != len(line.reasons):
        raise ValueError(line.reasons)
    _check_numbers(line.at_s, line.size_bytes)
    _check_parts(line.parts)
    ledger.shards.setdefault(line.shard, []).append(line)


def _check_names(names: list[str]) -> None:
    """Raise `TypeError` or `ValueError` unless they are text that can be written."""
    if not isinstance(names, list):
        raise TypeError(names)
    "".join(names).encode()


def _check_parts(parts: dict[str, list[str]]) -> None:
    """Raise `TypeError` or `ValueError` unless they are names by names, all of which can be written."""
    if not isinstance(parts, dict):
        raise TypeError(parts)
    for names in (list(parts), *parts.values()):
        _check_names(names)


def _check_numbers(at_s: float, count: int) -> None:
    """Raise `TypeError` or `ValueError` unless they are a time that a calendar can show, and a whole number."""
    if not isinstance(count, int) or not TIMES_S[0] < at_s < TIMES_S[1]:
        raise ValueError(at_s, count)


def ledger_files(folder: Path) -> Iterator[Path]:
    """Ledgers of a folder, in the order of their names."""
    return (folder / name for name in sorted(os.listdir(folder)) if LEDGER_NAME.fullmatch(name))


def crc32_of(path: Path) -> str:
    """Checksum of a file, in hexadecimal digits."""
    value = 0
    with path.open("rb", buffering=0) as stream:
        buffer = bytearray(min(READ_BYTES, os.fstat(stream.fileno()).st_size + 1))
        view = memoryview(buffer)
        while count := stream.readinto(buffer):
            value = zlib.crc32(view[:count], value)
    return f"{value:08x}"
