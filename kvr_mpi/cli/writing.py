"""Errors of files that commands write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Convert system errors while a file is written to an `OutputError`.

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
