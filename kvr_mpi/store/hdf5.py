"""Reading HDF5 files that may be damaged, foreign or hostile; everything in the store reads through here.

No link out of a file is followed, no type is taken on trust, and whatever HDF5 stumbles over becomes a
`DataError`. Strings are written with a fixed length: HDF5 keeps strings of variable length in a heap without a
checksum, where a flipped bit can change them unseen, or send the library into an endless loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from kvr_mpi.errors import DataError

T = TypeVar("T", str, int, float)
NUMPY_KINDS: dict[type, str] = {str: "S", int: "i", float: "f"}


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open a file for reading; whatever goes wrong while it is open is a `DataError` that names it."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except DataError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is damaged, or no HDF5 file: {reason}") from error


def fixed_text(value: str) -> Any:
    """Text as a numpy value HDF5 stores with a fixed length, in UTF-8; NULs, which would end it, are replaced."""
    data = value.replace("\0", "\ufffd").encode()
    return np.array(data, dtype=h5py.string_dtype("utf-8", max(1, len(data))))


def write_attribute(item: Any, name: str, value: str | int | float) -> None:
    """Set an attribute; text with a fixed length."""
    item.attrs[name] = fixed_text(value) if isinstance(value, str) else value


def read_attribute(item: Any, name: str, kind: type[T]) -> T:
    """Read a single value of the type it is to have.

    Raises
    ------
    DataError
        If it is missing or of another type.
    """
    where = f"{_name(item)}: attribute {name!r}"
    if name not in item.attrs:
        raise DataError(f"{where} is missing")
    stored = item.attrs.get_id(name)
    try:
        dtype = stored.dtype
    except TypeError as error:
        raise DataError(f"{where} has a type that is none of ours: {error}") from error
    # Before its value is read: a string of variable length would be looked up in the heap.
    if stored.get_space().get_simple_extent_type() != h5py.h5s.SCALAR or dtype.kind != NUMPY_KINDS[kind]:
        raise DataError(f"{where} has the type {dtype} {stored.shape}; expected one {kind.__name__}")
    value = item.attrs[name]
    return kind(value.decode()) if isinstance(value, bytes) else kind(value)


def group_in(group: h5py.Group, name: str) -> h5py.Group:
    """Return a member that is a group and really in this file."""
    item = child(group, name)
    if not isinstance(item, h5py.Group):
        raise DataError(f"{_name(item)} is a {type(item).__name__}; expected a group")
    return item


def dataset_in(group: h5py.Group, name: str, kinds: str, ndim: int) -> h5py.Dataset:
    """Return a member that is a dataset of one of numpy's `kinds` (``"f"``, ``"S"`` ...) with `ndim` dimensions."""
    item = child(group, name)
    if not isinstance(item, h5py.Dataset):
        raise DataError(f"{_name(item)} is a {type(item).__name__}; expected a dataset")
    if item.shape is None or item.dtype.kind not in kinds or item.ndim != ndim:
        raise DataError(
            f"{_name(item)} has the type {item.dtype} {item.shape}; expected {ndim} dimension(s) of {kinds!r}"
        )
    return item


def child(group: h5py.Group, name: str) -> Any:
    """Return a member that is really in this file.

    Raises
    ------
    DataError
        If it is missing, a soft or external link, or its data are elsewhere or incomplete.
    """
    link = group.get(name, getlink=True) if name in group else None
    where = f"{_name(group).rstrip('/')}/{name}"
    if link is None:
        raise DataError(f"{where} is missing")
    if not isinstance(link, h5py.HardLink):
        raise DataError(f"{where} is a {type(link).__name__}, which could lead out of the file; expected data")
    item = group[name]
    if isinstance(item, h5py.Dataset):
        _check_data(item)
    return item


def _check_data(dataset: h5py.Dataset) -> None:
    """Refuse a dataset whose data lie elsewhere: in other files, or nowhere (then it would read as zeros)."""
    where = _name(dataset)
    if dataset.is_virtual or dataset.external:
        raise DataError(f"{where} takes its data from other files (virtual or external); expected a plain dataset")
    if dataset.shape is None:
        raise DataError(f"{where} is empty; expected data")
    if dataset.chunks is not None:  # a file that somebody repacked
        expected = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        complete = dataset.id.get_num_chunks() == expected
    else:
        # The stored type's size: h5py shows bfloat16 as float32, which is twice as large.
        complete = dataset.id.get_storage_size() >= math.prod(dataset.shape) * dataset.id.get_type().get_size()
    if not complete:
        raise DataError(f"{where} is incomplete: {dataset.id.get_storage_size()} bytes are there; copy the file again")


def _name(item: Any) -> str:
    return f"{item.file.filename}:{item.name}"
