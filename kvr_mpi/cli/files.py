"""Files that come with kvr-mpi."""

from __future__ import annotations

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
