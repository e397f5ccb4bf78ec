"""Tensors in HDF5 without conversion: float32, float16, bfloat16, float64.

HDF5 has no named bfloat16 type, but can describe any binary floating-point format. Plain h5py reads the bfloat16
datasets written here as float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import xxhash

from kvr_mpi.errors import DataError
from kvr_mpi.store.hdf5 import attribute_names, dataset_in, where

if TYPE_CHECKING:
    import torch

Bits = np.ndarray[Any, Any]
# Types that keys and values have.
DTYPES = ("float32", "bfloat16", "float16", "float64")


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
    """Convert the result of `read_bits`, or some rows of it, to a tensor.

    Raises
    ------
    DataError
        If the dataset's type is not in `DTYPES`.
    """
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


def write_array(group: h5py.Group, name: str, tensor: torch.Tensor) -> Bits:
    """Write keys or values in their own dtype, in one contiguous dataset; return their raw bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    kind = bfloat16_type() if tensor.dtype == torch.bfloat16 else h5py.h5t.py_create(bits.dtype, logical=True)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    dataset = h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(bits.shape), dcpl=plist)
    if bits.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, kind)
    return bits


def open_array(group: h5py.Group, name: str) -> h5py.Dataset:
    """Open keys or values (tokens, kv_heads, head_dim).

    Raises
    ------
    DataError
        If they are not floating-point numbers, or have attributes, which are never written.
    """
    data = dataset_in(group, name, "f", (3,))
    if names := attribute_names(data):
        raise DataError(f"{where(data)} has attributes ({', '.join(sorted(names)[:5])}); expected none")
    return data


def digest_of(array: Bits) -> int:
    """XXH3 of a contiguous array, as a signed integer."""
    digest = xxhash.xxh3_64()
    if array.size:
        digest.update(array.data.cast("B"))
    return int.from_bytes(digest.digest(), "big", signed=True)
