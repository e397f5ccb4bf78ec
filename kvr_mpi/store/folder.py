"""The files of a run: shards that appear whole or not at all, and the one file they are merged into.

A run's folder holds ``*.h5`` files, each with whole documents; a document counts once, in whatever file it is.
Writers fill ``NAME.h5.part``, close and fsync it, and only then give it its name. When all ranks are done the
shards become ``results.h5``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py

from kvr_mpi.errors import ConfigError, DataError, OutputError
from kvr_mpi.store.outputs import (
    Header,
    KeysValues,
    Record,
    document_groups,
    open_file,
    read_header,
    read_record,
    start_file,
    write_record,
)

RESULTS = "results.h5"
PART = ".part"
OUR_FILES = re.compile(r"results\.h5|shard-.*\.h5")
# Shards larger than this together are left as they are: copying them would double the writing.
MERGE_MAX_BYTES = 4 << 30
# A shard is closed at the first document after this time, or at this size.
FLUSH_S = 10.0
FLUSH_BYTES = 1 << 30


class ShardWriter:
    """Write finished documents of one chain; what is flushed survives any crash.

    Parameters
    ----------
    folder : Path
    name : str
        Distinguishes this writer's files from those of other writers of the run.
    header : Header
        Goes into every file.
    """

    def __init__(self, folder: Path, name: str, header: Header) -> None:
        self._folder, self._name, self._header = folder, name, header
        self._file: h5py.File | None = None
        self._path = folder
        self._opened = 0.0
        self._count = 0

    def write(self, record: Record, layers: Iterable[KeysValues | None] = ()) -> None:
        """Add a document; it is durable after the next flush, at most `FLUSH_S` and one document later."""
        if self._file is None:
            self._open()
        assert self._file is not None
        write_record(self._file, record, layers)
        if time.monotonic() - self._opened > FLUSH_S or self._file.id.get_filesize() > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Close the shard, bring it to the disk, and give it its name."""
        if self._file is not None:
            part = Path(self._file.filename)
            self._file.close()
            self._file = None
            _publish(part, self._path)

    def _open(self) -> None:
        while (path := self._folder / f"shard-{self._name}-{self._count:05d}.h5").exists():
            self._count += 1
        self._path, self._opened = path, time.monotonic()
        self._count += 1
        self._file = h5py.File(path.with_name(path.name + PART), "w", libver="v110")
        start_file(self._file, self._header)


def prepare_folder(folder: Path, identity: dict[str, Any], *, overwrite: bool, resume: bool) -> set[str]:
    """Make a run's folder ready, and tell which documents are done already.

    Raises
    ------
    OutputError
        If it holds results and neither `overwrite` nor `resume` was asked for, if it cannot be written, or if
        it was made with another model, prompt or setting (then the message says which).
    """
    check_writable(folder)
    for part in folder.glob(f"*.h5{PART}"):  # left by a crash: never complete, so never counted
        part.unlink(missing_ok=True)
    files = run_files(folder)
    if overwrite:
        for file in files:
            if not OUR_FILES.fullmatch(file.name):
                raise OutputError(
                    f"--overwrite: {file} is none of this program's files; move it away, or choose another folder"
                )
        for file in files:
            file.unlink()
        return set()
    if files and not resume:
        check_fresh(folder)
    done: set[str] = set()
    for file in files:
        with open_file(file) as stored:
            _check_identity(file, read_header(stored).identity, identity)
            done.update(name for _, name, is_done in document_groups(stored) if is_done)
    return done


def check_writable(folder: Path) -> None:
    """Make the folder if it is missing, and raise `OutputError` unless files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OutputError(f"output.path {str(folder)!r} cannot be written: {error.strerror or error}") from error


def check_fresh(folder: Path) -> None:
    """Raise `OutputError` if the folder holds results of an earlier run."""
    files = run_files(folder)
    if files:
        raise OutputError(
            f"output.path {str(folder)!r} holds {len(files)} result file(s) of an earlier run; add --resume to go on "
            f"with it, --overwrite to delete them, or choose another folder (--set output.path=...)"
        )


def run_files(path: Path) -> list[Path]:
    """List the result files of a run's folder (or a single file), oldest first."""
    if path.is_file():
        return [path]
    return sorted(
        (file for file in path.glob("*.h5") if file.is_file()), key=lambda file: (file.stat().st_mtime_ns, file.name)
    )


def read_run(path: Path) -> Iterator[Record]:
    """Yield every document of a file or a run's folder once, in the order of their ids.

    Raises
    ------
    DataError
        If there is nothing to read, or a file is damaged or foreign.
    """
    for _, (file, key) in sorted(_index(path).items()):
        with open_file(file) as stored:
            yield read_record(stored["documents"][key])


def merge_run(folder: Path) -> Path:
    """Put all documents of a run into ``results.h5`` and remove the shards.

    Returns
    -------
    Path
        ``results.h5``; the folder itself if the shards are too large to be copied, or empty.
    """
    files = run_files(folder)
    result = folder / RESULTS
    if files == [result]:
        return result
    if not files or sum(file.stat().st_size for file in files) > MERGE_MAX_BYTES:
        return folder
    places: dict[Path, list[str]] = {}
    for file, key in _index(folder).values():
        places.setdefault(file, []).append(key)
    part = folder / (RESULTS + PART)
    with h5py.File(part, "w", libver="v110") as merged:
        with open_file(files[-1]) as latest:
            start_file(merged, read_header(latest))
        for file, keys in places.items():
            with open_file(file) as stored:
                for key in keys:
                    stored.copy(f"documents/{key}", merged["documents"], name=key)
    _publish(part, result)
    for file in files:
        if file != result:
            file.unlink()
    return result


def _index(path: Path) -> dict[str, tuple[Path, str]]:
    """Where each document is, by id: done beats error, later beats earlier."""
    files = run_files(path)
    if not files:
        raise DataError(f"{path}: no result file (*.h5) there; expected one, or the output folder of a run")
    index: dict[str, tuple[Path, str]] = {}
    done: set[str] = set()
    for file in files:
        with open_file(file) as stored:
            for group, name, is_done in document_groups(stored):
                if is_done or name not in done:
                    index[name] = (file, group.name.rsplit("/", 1)[1])
                if is_done:
                    done.add(name)
    return index


def _check_identity(file: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    changed = [
        f"{key} was {stored.get(key)!r}, is {wanted.get(key)!r}"
        for key in sorted({*stored, *wanted})
        if stored.get(key) != wanted.get(key)
    ]
    if changed:
        raise OutputError(
            f"cannot resume {file}: it was made with other settings ({'; '.join(changed)}); set them back, or choose "
            f"another output.path"
        )


def _publish(part: Path, path: Path) -> None:
    """Give a complete file its name so that a crash at any time leaves the old state or the new one."""
    for target in (part, path.parent):
        handle = os.open(target, os.O_RDONLY)
        try:
            if target == path.parent:
                os.replace(part, path)
            os.fsync(handle)
        finally:
            os.close(handle)


def find_record(path: Path, document_id: str) -> tuple[Path, str]:
    """Return the file and group name of one document.

    Raises
    ------
    ConfigError
        If there is no such document; the message names some that there are.
    """
    index = _index(path)
    if document_id not in index:
        some = ", ".join(sorted(index)[:8])
        raise ConfigError(
            f"{path} has no document {document_id!r}; it has {len(index)}: {some}{' ...' if len(index) > 8 else ''}"
        )
    return index[document_id]
