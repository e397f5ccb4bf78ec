"""Reading a run: a folder of shards, or the one file they are merged into; each document counts once.

Done beats error, later beats earlier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvr_mpi.errors import ConfigError, DataError, OutputError
from kvr_mpi.store.outputs import Record, document_groups, key_of, open_file, read_record
from kvr_mpi.store.survey import RESULTS, is_ours, order, survey

__all__ = ["RESULTS", "check_fresh", "check_writable", "find_record", "index_run", "read_run", "run_files"]


def run_files(path: Path) -> list[Path]:
    """List the result files of a run's folder (or a single file), oldest first."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    return [path / name for name in sorted(os.listdir(path), key=order) if is_ours(name) and (path / name).is_file()]


def read_run(path: Path) -> Iterator[Record]:
    """Yield every document of a file or a run's folder once, in the order of their ids.

    Raises
    ------
    DataError
        If there is nothing to read, or a file is damaged or foreign.
    """
    index = index_run(path)
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, (file, key) in index.items():
        by_file.setdefault(file, []).append((name, key))
    if len(by_file) == 1:
        ((file, _),) = by_file.items()
        with open_file(file) as stored:
            for _, (_, key) in sorted(index.items()):
                yield read_record(stored["documents"][key])
        return
    for _, (file, key) in sorted(index.items()):
        with open_file(file) as stored:
            yield read_record(stored["documents"][key])


def index_run(path: Path) -> dict[str, tuple[Path, str]]:
    """Say in which file each document is, and its group's name there, by id.

    Raises
    ------
    DataError
        If there is nothing to read, or a file that the ledger does not know is damaged or foreign.
    """
    files = run_files(path)
    if not files:
        raise DataError(f"{path}: no result file (*.h5) there; expected one, or the output folder of a run")
    known = survey(path).sound if path.is_dir() else {}
    index: dict[str, tuple[Path, str]] = {}
    done: set[str] = set()
    for file in files:
        line = known.get(file.name)
        found = [(name, True) for name in line.done] + [(name, False) for name in line.failed] if line else None
        for name, is_done in found if found is not None else list_documents(file):
            if is_done or name not in done:
                index[name] = (file, key_of(name))
            if is_done:
                done.add(name)
    return index


def list_documents(file: Path) -> list[tuple[str, bool]]:
    """Read the id of every document in a file, and whether it is done."""
    with open_file(file) as stored:
        return [(name, is_done) for _, name, is_done in document_groups(stored)]


def find_record(path: Path, document_id: str) -> tuple[Path, str]:
    """Return the file and group name of one document.

    Raises
    ------
    ConfigError
        If there is no such document; the message names some that there are.
    """
    index = index_run(path)
    if document_id not in index:
        some = ", ".join(sorted(index)[:8])
        raise ConfigError(
            f"{path} has no document {document_id!r}; it has {len(index)}: {some}{' ...' if len(index) > 8 else ''}"
        )
    return index[document_id]


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
