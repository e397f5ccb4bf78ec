"""Files shipped with the package: job scripts, and the demo's job and documents."""

from __future__ import annotations

from pathlib import Path


def find_shipped(folder: str, name: str) -> Path:
    """Find a shipped file: next to the package in a checkout, otherwise where pip installed it.

    Raises
    ------
    ConfigError
        If it cannot be found.
    """
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
        f"{folder}/{name} was not installed with kvr-mpi (looked for {', '.join(map(str, places))}); reinstall kvr-mpi"
    )
