"""Files that commands read and write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def find_shipped(folder: str, name: str) -> Path:
    """Find a shipped file, in a checkout or where pip installed it; raise `ConfigError` if it is not there."""
    from importlib import metadata

    import kvr_mpi
    from kvr_mpi.errors import ConfigError

    places = [Path(kvr_mpi.__file__).parents[1] / folder / name]
    try:
        files = metadata.files("kvr-mpi") or []
    except metadata.PackageNotFoundError:
        files = []
    places += [Path(str(file.locate())).resolve() for file in files if file.parts[-2:] == (folder, name)]
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f"{folder}/{name} was not installed with kvr-mpi (searched: {', '.join(map(str, places))}); reinstall kvr-mpi"
    )


@contextmanager
def writing_file(path: Path | str) -> Iterator[None]:
    """Convert system errors while a file is written to an `OutputError`.

    Parameters
    ----------
    path : Path or str
        The file, for errors that do not name one.
    """
    from kvr_mpi.errors import OutputError, UnavailableError

    try:
        yield
    except UnavailableError:  # of a file that is read meanwhile
        raise
    except OSError as error:
        raise OutputError(f"{error.filename or path} cannot be written: {error.strerror or error}") from error
