"""Files that commands write where they are asked to."""

from __future__ import annotations

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


def check_writable(*files: Path | str | None) -> None:
    """Find out before a long measurement that its files could not be written after it; files of runs never are.

    Raises
    ------
    OutputError
        Of `check_file`.
    """
    for file in (Path(file) for file in files if file is not None):
        from kvr_mpi.store.targets import check_file

        check_file(file, overwrite=True)
