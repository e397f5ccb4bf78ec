"""Reading HDF5 files that may be damaged, foreign or hostile; the whole store uses these functions.

They follow no link out of a file, check every type, check the size of data before reading them, and convert every
error of HDF5: to a `DataError` if the contents are wrong, and otherwise to what the system said. Strings are written
with a fixed length: HDF5 keeps strings of variable length in a heap without a checksum, where a flipped bit can change
them undetected, or send the library into an endless loop.

Datasets are contiguous, those of keys and values in the model's dtype: float32, float16, bfloat16 or float64. HDF5 has
no named bfloat16 type, but can describe any binary floating-point format; plain h5py reads it as float32.
"""

from __future__ import annotations

import atexit
import errno
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import h5py
import numpy as np

from kvr_mpi.disk import RETRIED, check_regular, create, errno_of, read_error, write_all
from kvr_mpi.errors import DataError, KvrError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

T = TypeVar("T")
V = TypeVar("V", str, int)
# HDF5's type class, and numpy's dtype for reading; text is read as a string of its stored length.
CLASSES: dict[type, tuple[int, Any]] = {str: (h5py.h5t.STRING, None), int: (h5py.h5t.INTEGER, np.int64)}
# Maximum size of an attribute, so that a hostile file cannot exhaust the memory.
LARGEST_BYTES = 64 << 20
Bits = np.ndarray[Any, Any]
DTYPES = ("float32", "bfloat16", "float16", "float64")  # types of keys and values


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open a file for reading; see `hdf5_errors` for all errors while it is open."""
    with hdf5_errors(path):
        check_regular(os.stat(path).st_mode, path)
        with h5py.File(path, "r", locking=False) as file:
            yield file


@contextmanager
def hdf5_errors(path: Path) -> Iterator[None]:
    """Convert HDF5's errors to those of `read_error`, but for system errors that `retried` and its callers handle."""
    try:
        yield
    except KvrError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
        number = errno_of(error)
        if number is not None and number in RETRIED | {errno.ENOENT}:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise read_error(path, error) from error


class NewFile(h5py.File):  # type: ignore[misc]
    """A new file, without HDF5's file locks, which some file systems do not support.

    After a failed write, HDF5 could not close the file, h5py would not report that, and the process would end with a
    signal at its exit. So HDF5 never sees a system error: `check` and `close` raise it.
    """

    def __init__(self, path: Path) -> None:
        self._output = _Output(path)
        super().__init__(self._output, "x", libver="v110")
        atexit.register(self._end)  # before Python ends, since HDF5 calls it

    def check(self) -> None:
        """Raise `OSError` if something could not be written."""
        if self._output.error is not None:
            raise self._output.error

    def close(self) -> None:
        """Close the file; raises as `check` does."""
        self._end()
        self.check()

    def _end(self) -> None:
        atexit.unregister(self._end)
        super().close()
        self._output.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is None:
            self.check()


class _Output:
    """The file that HDF5 writes, as it expects a file-like object; after an error nothing is written any more."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle, self._at, self._size = path, create(path), 0, 0
        self.error: OSError | None = None

    def __repr__(self) -> str:  # h5py's name of the file
        return str(self._path)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset if whence == os.SEEK_SET else self._size
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        self.readinto(data)
        return bytes(data)

    def readinto(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        count = self._call(lambda: os.preadv(self._handle, [view], self._at)) or 0
        view[count:] = bytes(len(view) - count)
        return len(view)

    def write(self, data: Buffer) -> None:
        self._call(lambda: write_all(self._handle, data, self._at))
        self._size = max(self._size, self._at + len(memoryview(data)))

    def truncate(self, size: int) -> None:
        self._call(lambda: os.ftruncate(self._handle, size))
        self._size = size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            try:
                os.close(handle)
            except OSError as error:
                self.error = self.error or error

    def _call(self, action: Callable[[], T]) -> T | None:
        if self.error is None:
            try:
                return action()
            except OSError as error:
                self.error = OSError(error.errno, error.strerror, str(self._path))
        return None


def write_attribute(item: Any, name: str, value: str | int) -> None:
    """Write an attribute; text has a fixed length; raises `DataError` if it is larger than `LARGEST_BYTES`."""
    if isinstance(value, str):
        data = np.array(value.encode(), h5py.string_dtype("utf-8", max(1, len(value.encode()))))
    else:
        data = np.array(value, np.int64)
    if data.nbytes > LARGEST_BYTES:
        raise DataError(f"{where(item)}: {name} has {data.nbytes} bytes; no more than {LARGEST_BYTES} can be stored")
    kind = h5py.h5t.py_create(data.dtype, logical=True)
    h5py.h5a.create(item.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR)).write(data)


def create_dataset(group: h5py.Group, name: str, kind: Any, shape: tuple[int, ...]) -> Any:
    """Create a contiguous dataset (with chunks, HDF5 aborts on a full disk) to be written; return its h5py id."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(shape), dcpl=plist)


def write_dataset(group: h5py.Group, name: str, data: np.ndarray[Any, Any], kind: Any = None) -> h5py.Dataset:
    """Write an array as a dataset; `kind` is its HDF5 type if that is not the one of its dtype."""
    kind = h5py.h5t.py_create(data.dtype, logical=True) if kind is None else kind
    dataset = create_dataset(group, name, kind, data.shape)
    if data.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, data, kind)
    return h5py.Dataset(dataset)


def read_attribute(item: Any, name: str, kind: type[V]) -> V:
    """Read a scalar attribute of the expected type; raises `DataError` if it is missing or has the wrong type."""
    if not h5py.h5a.exists(item.id, name.encode()):
        raise DataError(f"{where(item)}: attribute {name!r} is missing")
    stored = h5py.h5a.open(item.id, name.encode())
    wanted, dtype = CLASSES[kind]
    found = stored.get_type()
    # Check the type before reading: a string of variable length would be read from the heap, which has no checksum.
    fits = stored.get_space().get_simple_extent_type() == h5py.h5s.SCALAR and found.get_class() == wanted
    if fits and kind is str:
        fits, dtype = not found.is_variable_str() and found.get_size() <= LARGEST_BYTES, f"S{found.get_size()}"
    elif fits and kind is int:
        fits = found.get_sign() == h5py.h5t.SGN_2
    if not fits:
        raise DataError(f"{where(item)}: attribute {name!r} has another type or size; expected one {kind.__name__}")
    value: Any = np.empty((), dtype)
    stored.read(value, mtype=found if kind is str else None)
    return kind(value[()].decode()) if kind is str else kind(value[()])


def attribute_names(item: Any) -> set[str]:
    """Names of all attributes."""
    found: list[bytes] = []
    h5py.h5a.iterate(item.id, found.append)  # continues while the callback returns None
    return {name.decode(errors="replace") for name in found}


def group_in(group: h5py.Group, name: str) -> h5py.Group:
    """Return a member that is a group stored in this file."""
    item = child(group, name)
    if not isinstance(item, h5py.h5g.GroupID):
        raise DataError(f"{_path(group, name)} is a {type(item).__name__}; expected a group")
    return h5py.Group(item)


def dataset_in(group: h5py.Group, name: str, kinds: str, ndims: tuple[int, ...]) -> h5py.Dataset:
    """Return a member that is a dataset of one of numpy's `kinds` (``"f"``, ``"S"`` ...) with `ndims` dimensions."""
    item = child(group, name)
    if not isinstance(item, h5py.h5d.DatasetID):
        raise DataError(f"{_path(group, name)} is a {type(item).__name__}; expected a dataset")
    dataset = h5py.Dataset(item)
    if dataset.dtype.kind not in kinds or dataset.ndim not in ndims:
        raise DataError(
            f"{_path(group, name)} has the type {dataset.dtype} {dataset.shape}; expected {ndims} "
            f"dimensions of {kinds!r}"
        )
    return dataset


def child(group: h5py.Group, name: str) -> Any:
    """Return a member's h5py id; raises `DataError` if it is missing, incomplete, a link, or data of another file."""
    raw = name.encode()
    if not group.id.links.exists(raw):
        raise DataError(f"{_path(group, name)} is missing")
    if group.id.links.get_info(raw).type != h5py.h5l.TYPE_HARD:
        raise DataError(f"{_path(group, name)} is a link that could lead out of the file; expected data")
    item = h5py.h5o.open(group.id, raw)
    if isinstance(item, h5py.h5d.DatasetID):
        _check_data(item, partial(_path, group, name))  # finding the path takes as long as the check
    return item


def size_bytes(dataset: h5py.Dataset) -> int:
    """Bytes of all elements as stored; h5py shows bfloat16 as float32, which doubles them."""
    return int(math.prod(dataset.shape)) * int(dataset.id.get_type().get_size())


def _check_data(dataset: Any, path: Callable[[], str]) -> None:
    """Refuse external data, missing data (which read as zeros), and datasets that would exhaust the memory."""
    plist, space = dataset.get_create_plist(), dataset.get_space()
    layout, item_bytes = plist.get_layout(), dataset.get_type().get_size()
    if layout == h5py.h5d.VIRTUAL or plist.get_external_count():
        raise DataError(f"{path()} takes its data from other files (virtual or external); expected a plain dataset")
    if space.get_simple_extent_type() == h5py.h5s.NULL:
        raise DataError(f"{path()} is empty; expected data")
    if layout == h5py.h5d.CHUNKED:  # through filters, little data can become much
        raise DataError(f"{path()} is stored in chunks, which kvr-mpi never writes")
    stored_bytes = dataset.get_storage_size()
    if stored_bytes < math.prod(space.get_simple_extent_dims()) * item_bytes:
        raise DataError(f"{path()} is incomplete: only {stored_bytes} bytes are stored; copy the file again")


def where(item: Any) -> str:
    """Name a file and an item in it, for messages."""
    return f"{item.file.filename}:{item.name}"


def _path(group: h5py.Group, name: str) -> str:
    return f"{where(group).rstrip('/')}/{name}"


def read_bits(dataset: h5py.Dataset, first: int, last: int) -> Bits:
    """Read some rows of keys or values (tokens, kv_heads, head_dim) as raw integers."""
    kind, shape = dataset.id.get_type(), (last - first, *dataset.shape[1:])
    raw = np.empty(shape, f"<i{kind.get_size()}")
    if raw.size:
        rows = dataset.id.get_space()
        rows.select_hyperslab((first, *(0 for _ in shape[1:])), shape)
        dataset.id.read(h5py.h5s.create_simple(shape), rows, raw, kind)
    return raw


def as_tensor(dataset: h5py.Dataset, raw: Bits) -> torch.Tensor:
    """Convert the result of `read_bits` to a tensor; raises `DataError` if the dataset's type is not in `DTYPES`."""
    import torch

    name = type_name(dataset)
    if name not in DTYPES:
        raise DataError(f"{where(dataset)}: type {name}; expected keys or values (one of {', '.join(DTYPES)})")
    kind: torch.dtype = getattr(torch, name)
    return torch.from_numpy(raw).view(kind)


def bfloat16_type() -> Any:
    """Return HDF5's type for bfloat16: sign, 8 exponent bits with bias 127, 7 mantissa bits."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def type_name(dataset: Any) -> str:
    """Name a dataset's dtype: ``bfloat16``, or numpy's name."""
    return "bfloat16" if dataset.id.get_type().equal(bfloat16_type()) else str(dataset.dtype)


def write_array(group: h5py.Group, name: str, tensor: torch.Tensor) -> tuple[h5py.Dataset, Bits]:
    """Write keys or values in their own dtype; also return their raw bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    kind = bfloat16_type() if tensor.dtype == torch.bfloat16 else None
    return write_dataset(group, name, bits, kind), bits
