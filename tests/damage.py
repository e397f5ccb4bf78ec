"""Ways to damage an HDF5 file so that it still is one: each gives what does it to an open file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from kvr_mpi.store.log import seal, unseal

Damage = Callable[[h5py.File, Path], None]


def relined(change: Callable[[dict[str, Any]], Any], name: str = "records", number: int = 0) -> Damage:
    """Change what a line says, and seal it again; bytes are put in its place as they are, None takes it away."""

    def damage(file: h5py.File, outside: Path) -> None:
        lines = file[name][()].tobytes().splitlines(keepends=True)
        value = unseal(lines[number])
        assert value is not None
        changed = change(value)
        lines[number] = changed if isinstance(changed, bytes) else b"" if changed is None else seal(changed)
        del file[name]
        file.create_dataset(name, data=np.frombuffer(b"".join(lines), np.uint8))

    return damage


def setting(name: str, value: Any) -> Damage:
    """Give a field of document a's record another value."""
    return relined(lambda line: line | {name: value})


def without(name: str) -> Damage:
    """Take a field of document a's record away."""
    return relined(lambda line: {key: value for key, value in line.items() if key != name})


def replace_in(place: str, value: Callable[[Path], Any]) -> Damage:
    """Put a link, which may need to know where the other files are, in the place of something."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        file[place] = value(outside)

    return damage


def to_group(place: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        file.create_group(place)

    return damage


def external(name: str) -> Callable[[Path], Any]:
    return lambda outside: h5py.ExternalLink(str(outside / "other.h5"), name)


def virtual(place: str, source: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        with h5py.File(outside / "other.h5") as other:
            found = other[source]
            layout = h5py.VirtualLayout(shape=found.shape, dtype=found.dtype)
            layout[...] = h5py.VirtualSource(found)
        file.create_virtual_dataset(place, layout)

    return damage


def stored_outside(place: str, shape: tuple[int, ...], dtype: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        raw = [(str(outside / "secret.txt"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset(place, shape, dtype, external=raw)

    return damage


def unwritten(place: str, shape: tuple[int, ...], dtype: str, **options: Any) -> Damage:
    """Put a dataset without data in the place: its values read as zeros, as many as it claims."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        file.create_dataset(place, shape, dtype, **options)

    return damage


def deflated(place: str) -> Damage:
    """Store the same values through a filter that kvr-mpi never uses, as a bomb would be."""

    def damage(file: h5py.File, outside: Path) -> None:
        values = file[place][()]
        del file[place]
        file.create_dataset(place, data=values, chunks=True, compression="gzip")

    return damage


def of_time(place: str) -> Damage:
    """Put a dataset of a type that numpy has no word for in the place."""

    def damage(file: h5py.File, outside: Path) -> None:
        parent, name = place.rsplit("/", 1)
        del file[place]
        space = h5py.h5s.create_simple((4, 1, 4))
        h5py.h5d.create(file[parent].id, name.encode(), h5py.h5t.UNIX_D32LE, space)

    return damage


def attribute(place: str, name: str, value: Any) -> Damage:
    """Give an attribute another value; None: take it away."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place].attrs[name]
        if value is not None:
            file[place].attrs[name] = value

    return damage


def attribute_of_time(place: str, name: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place].attrs[name]
        h5py.h5a.create(file[place].id, name.encode(), h5py.h5t.UNIX_D32LE, h5py.h5s.create(h5py.h5s.SCALAR))

    return damage


def attribute_bytes(place: str, name: str, value: bytes) -> Damage:
    """Write an attribute that claims to be UTF-8 and is not."""
    return attribute(place, name, np.array(value, dtype=h5py.string_dtype("utf-8", len(value))))


def move(source: str, target: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        file.move(source, target)

    return damage


def damaged(path: Path, outside: Path, damage: Damage) -> Path:
    with h5py.File(path, "a") as file:
        damage(file, outside)
    return path
