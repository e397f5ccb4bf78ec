"""Which files and folders commands may write to.

Only the run itself, a merge in place and pruning write a run's own files. A folder is a run or contains runs, never
both: a run inside another run would not be found. No command writes to a file that it reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvr_mpi.disk import (
    LOCK_NAME,
    LOG_NAME,
    OTHER_FOLDER,
    RUN_FILE,
    VOLUME_NAME,
    final_name,
    is_folder,
    is_output_folder,
    names_in,
)
from kvr_mpi.errors import OutputError
from kvr_mpi.store.folder import DAMAGED
from kvr_mpi.store.parts import SHARE_NAME, is_run
from kvr_mpi.store.states import STATES
from kvr_mpi.store.traces import TRACES
from kvr_mpi.store.volumes import RESULTS

# Names that only runs may use in any folder; names of a run's own files and folders inside its folder.
RESERVED = (VOLUME_NAME, LOG_NAME, LOCK_NAME)
OWN_FILES = (RESULTS, RUN_FILE)
OWN_FOLDERS = (TRACES, STATES)


def check_file(path: Path, *, overwrite: bool, reads: Iterable[Path] = ()) -> None:
    """Refuse a target file before the command starts its work: a run's own, one that it `reads`, or an existing one.

    With `overwrite`, the command may replace an existing file. Raises `OutputError` with the reason, and what to do.
    """
    folder = path.parent
    if not is_folder(folder):
        raise OutputError(f"{path} cannot be written: there is no folder {folder}")
    if is_folder(path):
        raise OutputError(f"{path} is a folder; name a file")
    if run := _run_that_owns(folder.resolve() / path.name):
        raise OutputError(f"{path} is a file of the run {run}, which only its own job writes; choose another file")
    if any(path.exists() and read.exists() and path.samefile(read) for read in reads):
        raise OutputError(f"{path} is an input of this command; choose another file")
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists; add --overwrite, or choose another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"{path} cannot be written: permission denied")


def _run_that_owns(path: Path) -> Path | None:
    """Return the run that a file belongs to, judged by its folder and name; None for other files."""
    name = final_name(path.name).partition(DAMAGED)[0]
    if any(pattern.fullmatch(name) for pattern in RESERVED):
        return path.parent
    if name in OWN_FILES and is_run(path.parent):
        return path.parent
    return next((each.parent for each in path.parents if each.name in OWN_FOLDERS and is_run(each.parent)), None)


def check_output_folder(folder: Path, reads: Iterable[Path] = ()) -> None:
    """Refuse an output folder in which a job would hide, mix or delete the results of another.

    `reads` are runs that the job reads, files or folders; the folder need not exist. Raises `OutputError` with the
    reason, and what to do.
    """
    there = folder.resolve()
    for read in filter(Path.exists, reads):
        source = read.resolve()
        home = _home_of(source)
        if there == (source.parent if home is None else home) or home in there.parents:
            raise OutputError(
                f"output.path {str(folder)!r} is where the job reads stored results ({str(read)!r}), which it would "
                f"delete or mix with its own; {OTHER_FOLDER}"
            )
    if around := next(filter(_has_run_file, there.parents), None):
        raise OutputError(
            f"output.path {str(folder)!r} is in the output folder of another run, {str(around)!r}; {OTHER_FOLDER}"
        )
    inner = sorted(name for name in names_in(there) if _has_run_file(there / name)) if is_folder(there) else []
    if inner and not is_run(there):
        raise OutputError(
            f"output.path {str(folder)!r} contains output folders of other runs, such as {inner[0]!r}; {OTHER_FOLDER}"
        )


def answers_folders(run: Path) -> list[str]:
    """List the default output folders for answers about a run, next to it: those in use, in order, and a new one."""
    path = Path(os.path.abspath(run))
    first = f"{_home_of(path) or path.with_suffix('')}-answers"
    names = [first]
    while _has_run_file(Path(names[-1])):
        names.append(f"{first}-{len(names) + 1}")
    return names


def _home_of(path: Path) -> Path | None:
    """Return the folder that a file or folder of results belongs to; None for a separate file."""
    if is_folder(path):
        return path
    folder = path.parent
    return folder if is_run(folder) or any(map(SHARE_NAME.fullmatch, names_in(folder))) else None


def _has_run_file(folder: Path) -> bool:
    return is_output_folder(folder, [RUN_FILE])
