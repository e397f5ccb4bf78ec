"""Reading a run: ``results.h5`` and logs, compared with the volumes that exist; each document counts once.

A document is done if its record and all keys and values that it needs exist. A done record takes precedence over an
error, a later record over an earlier one. Reading changes no files.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from kvr_mpi.disk import (
    LOG_NAME,
    OTHER_FOLDER,
    VOLUME_NAME,
    create,
    is_folder,
    is_regular,
    list_folder,
    names_in,
    read_error,
    retried,
    stat_of,
    writing,
)
from kvr_mpi.errors import DataError, ForeignError, KvrError, OutputError
from kvr_mpi.plain import read_plain
from kvr_mpi.store.cost import COST, Cost
from kvr_mpi.store.kv import Piece
from kvr_mpi.store.kv_reader import check_pieces
from kvr_mpi.store.log import DROPPED, PRUNED, VOLUME, DocumentsLine, Header, VolumeLine, is_sealed, read_header, unseal
from kvr_mpi.store.places import Place, Places, Records, seconds_of, short_digest
from kvr_mpi.store.record import read_head, read_record
from kvr_mpi.store.summary import shorten
from kvr_mpi.store.volumes import RESULTS, is_ours, lines_of

# Appended to the name of a damaged file when it is set aside.
DAMAGED = ".damaged"
RECORD_START = b'{"id": '


@dataclass(slots=True)
class Survey:
    """The contents of a run's folder.

    records : all records, in the order of writing.
    volumes : by name, the size that the log lists (None for ``results.h5``) and the pieces.
    headers : by log.
    sizes_bytes : of all existing files, by name.
    damaged : damaged files by name, with the damage.
    spoilt : damaged pieces in files that are otherwise intact, with the damage.
    """

    folder: Path
    sizes_bytes: dict[str, int]
    records: Records = field(default_factory=Records)
    volumes: dict[str, tuple[int | None, dict[str, Piece]]] = field(default_factory=dict)
    headers: dict[Path, Header] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    spoilt: dict[Piece, str] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def unlisted(self) -> list[str]:
        """Volumes that no log lists because they were never finished."""
        return sorted(name for name in self.sizes_bytes if VOLUME_NAME.fullmatch(name) and name not in self.volumes)

    @property
    def missing(self) -> list[str]:
        """Volumes that documents need but that do not exist."""
        gone = [name for name, (size, _) in self.volumes.items() if size is not None and name not in self.sizes_bytes]
        there = self._pieces()[0]
        needed = self.records.needed if gone else set()
        return sorted(name for name in gone if needed & self.volumes[name][1].keys() - there.keys())

    def _pieces(self) -> tuple[dict[str, Piece], set[str], dict[str, str]]:
        """Locate the pieces; also return those that are gone, and those in damaged files with the reason."""
        there: dict[str, Piece] = {}
        gone, unreadable = set[str](), dict[str, str]()
        for name, (size, pieces) in self.volumes.items():
            if name in self.damaged:
                unreadable |= dict.fromkeys(pieces, f"{self.folder / name} is damaged ({self.damaged[name]})")
            elif size is None or name in self.sizes_bytes:
                there |= {each: piece for each, piece in pieces.items() if piece not in self.spoilt}
            else:
                gone |= pieces.keys()
        unreadable |= {piece.id: f"{piece.path} is damaged ({why})" for piece, why in self.spoilt.items()}
        return there, gone, unreadable

    def locate(self) -> tuple[Places, set[str], dict[str, str]]:
        """Choose each document's valid record, and locate its keys and values.

        Returns the places by id; the ids of documents whose keys and values no longer exist; and by id the damage of
        those whose keys and values are in a damaged file.
        """
        there, gone_pieces, damage = self._pieces()
        places, lost = self.records.choose(there)
        gone = {name for name, pieces in lost.items() if not gone_pieces.isdisjoint(pieces)}
        damaged = {name: [damage[piece] for piece in pieces if piece in damage] for name, pieces in lost.items()}
        return places, gone, {name: whys[0] for name, whys in damaged.items() if whys and name not in gone}

    def verify(self, limit_bytes: int | None = None) -> None:
        """Verify the keys and values that documents need, the newest first, up to `limit_bytes`."""
        total, needed = 0, {piece for _, place in self.locate()[0].with_kv() for piece in place.pieces}
        for name, (_, found) in reversed(self.volumes.items()):
            pieces, path = needed & {*found.values()}, self.folder / name
            total += sum(piece.bytes for piece in pieces)
            if not pieces or (limit_bytes is not None and total > limit_bytes):
                continue
            try:
                self.spoilt |= check_pieces(path, pieces)
            except DataError as error:
                self.damaged[name] = str(error)


def survey(path: Path, *, reads_all: bool = False) -> Survey:
    """Read a run's folder, or one file of results.

    With `reads_all`, whole records are parsed instead of their heads; an invalid record with a correct checksum counts
    as damaged. If a job removes a log meanwhile, since it has merged it, the folder is listed again.

    Raises `ForeignError` if another program, or another version, wrote a file with one of our names; `UnavailableError`
    if something cannot be read now, `ConfigError` without permission, and `OSError` if there is no such folder.
    """
    return retried(lambda: _survey(path, reads_all=reads_all), path, listed=is_regular(path) or is_folder(path))


def _survey(path: Path, *, reads_all: bool) -> Survey:
    folder = path if is_folder(path) else path.parent
    there = {entry.name: entry for entry in list_folder(folder) if is_ours(entry.name)}
    sizes = {name: entry.stat().st_size for name, entry in there.items() if entry.is_file()}
    found = Survey(folder, sizes)
    for source in _sources(path, sizes):
        try:
            sizes.setdefault(source.name, os.stat(source).st_size)
            for _ in take_lines(found, source, reads_all=reads_all):
                pass
        except FileNotFoundError:
            raise
        except (OSError, MemoryError, DataError) as error:
            if isinstance(why := read_error(source, error), ForeignError) or not isinstance(why, DataError):
                raise why from error
            found.damaged[source.name] = str(why)
    for name, (size, _) in found.volumes.items():
        if size is not None and name not in sizes and (status := stat_of(folder / name)):
            sizes[name] = status.st_size  # completed since the folder was listed
        if size is not None and sizes.get(name, size) != size:
            found.damaged[name] = f"it has {sizes[name]} bytes, expected {size}"
    return found


def _sources(path: Path, names: Iterable[str]) -> list[Path]:
    """List the files with records, the oldest first; the session numbers in their names give the order."""
    if not is_folder(path):
        return [path] if is_regular(path) else []
    there = set(names)
    return [path / name for name in ([RESULTS] if RESULTS in there else []) + list_logs(there)]


def list_logs(names: Iterable[str]) -> list[str]:
    """Return the names of logs, the oldest first."""
    logs = [(match, name) for name in names if (match := LOG_NAME.fullmatch(name))]
    logs.sort(key=lambda one: (int(one[0][1]), -1 if one[0][2] is None else int(one[0][2])))
    return [name for _, name in logs]


def take_lines(found: Survey, source: Path, *, reads_all: bool = False) -> Iterator[bytes]:
    """Add the lines of a log to `found`, and yield the valid ones after the header; see `survey` for `reads_all`."""
    damaged = 0
    for number, (at, line) in enumerate(lines_of(source)):
        try:
            if not is_sealed(line):
                raise DataError(f"line {number + 1} is damaged (checksum)")
            if number == 0:
                found.headers[source] = read_header(from_json(line), source)
                continue
            if line.startswith(RECORD_START):
                head = read_head(line)
                if reads_all:
                    read_record(line, f"line {number + 1}")
                is_done, digest = head.status == "done", short_digest(head.document_sha256)
                reason, finished_s = "" if is_done else shorten(head.error), seconds_of(head.finished_at)
                place = Place(source, at, len(line), is_done, reason, finished_s, digest, head.pieces)
                found.records.add(head.id, place)
            else:
                _take_in(found, source, from_json(line))
            yield line
        except ForeignError:
            raise
        except (DataError, ValueError, AttributeError) as error:
            damaged += 1
            found.damaged.setdefault(source.name, str(error))
    if damaged > 1:
        found.damaged[source.name] += f", and {damaged - 1} more"


def _take_in(found: Survey, path: Path, values: dict[str, Any]) -> None:
    kind = values.get("line")
    if kind == VOLUME:
        volume = read_plain(VolumeLine, values)
        is_own = volume.name == RESULTS
        if not is_own and not VOLUME_NAME.fullmatch(volume.name):
            raise DataError(f"{volume.name[:60]!r} is not the name of a volume")
        where = str(path if is_own else found.folder / volume.name)
        pieces = {each: Piece(each, where, *told) for each, told in volume.pieces.items()}
        found.volumes[path.name if is_own else volume.name] = None if is_own else volume.size_bytes, pieces
    elif kind in (DROPPED, PRUNED):
        found.records.invalidate(read_plain(DocumentsLine, values).ids, only_kv=kind == PRUNED)
    elif kind == COST:
        cost = read_plain(Cost, values)
        found.costs[cost.key] = cost
    else:
        raise DataError(f"{str(kind)[:60]!r} is not a kind of line")


def has_results(path: Path) -> bool:
    """Whether a run's folder has a file of results or a log."""
    if not is_folder(path):
        return is_regular(path)
    return any(is_ours(name) and is_regular(path / name) for name in names_in(path))


def read_run_header(path: Path) -> Header | None:
    """Read a run's latest readable header; None if it has no files; raises `DataError` if all have damaged ones."""
    broken: KvrError | None = None
    for source in reversed(_sources(path, names_in(path) if is_folder(path) else ())):
        try:
            for _, line in lines_of(source):
                return read_header(unseal(line) or {}, source)
        except ValueError as error:
            broken = broken or DataError(f"{source}: its first line is damaged: {error}")
        except (DataError, OSError) as error:
            if not isinstance(why := read_error(source, error), DataError):
                raise why from error
            broken = broken or why
    if broken is not None:
        raise broken
    return None


def make_writable(folder: Path) -> None:
    """Create the folder if it is missing; raise `OutputError` if files cannot be created in it."""
    with writing(f"output.path {str(folder)!r}", OTHER_FOLDER):
        retried(lambda: folder.mkdir(parents=True, exist_ok=True), folder)
        try_writing(folder)


def try_writing(folder: Path) -> None:
    """Raise `OSError` if files cannot be created in the folder or, if it does not exist, in its nearest parent."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{there} is not a folder")
    probe = there / f".probe-{secrets.token_hex(8)}"
    os.close(create(probe))
    probe.unlink()


def check_is_folder(folder: Path) -> None:
    """Raise `OutputError` if an output folder is a file."""
    if is_regular(folder):
        raise OutputError(
            f"output.path {str(folder)!r} is a file; expected a folder, which is created if it does not exist"
        )
