"""Files that commands write where they are asked to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn what the system raises while a file is written into an `OutputError`.

    Parameters
    ----------
    path : Path or str
        The file, for errors that do not name one.
    """
    from kvr_mpi.errors import OutputError

    try:
        yield
    except OSError as error:
        raise OutputError(f"{error.filename or path} cannot be written: {error.strerror or error}") from error


def check_writable(*files: Path | None) -> None:
    """Find out before a long measurement that its files could not be written after it.

    Raises
    ------
    OutputError
        If a file's folder is not there, or nothing may be written there.
    """
    from kvr_mpi.errors import OutputError

    for file in filter(None, files):
        if not file.parent.is_dir():
            raise OutputError(f"{file} cannot be written: there is no folder {file.parent}")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise OutputError(f"{file} cannot be written: permission denied")
