"""Keys and values in HDF5, in the model's own dtype, bfloat16 included.

HDF5 knows no bfloat16 by name, but describes any binary floating-point type: files written here are read by
plain h5py as float32, and by `read_array` bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from kvr_mpi.errors import DataError
from kvr_mpi.store.hdf5 import slabs, write_dataset

if TYPE_CHECKING:
    import torch


def bfloat16_type() -> Any:
    """HDF5's description of bfloat16: sign, 8 bits of exponent with bias 127, 7 bits of mantissa."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def write_array(group: Any, name: str, tensor: torch.Tensor) -> None:
    """Write a tensor of float32, float16 or bfloat16 as a dataset of its own type: checksums, no compression."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        write_dataset(group, name, tensor.numpy())
    else:
        write_dataset(group, name, tensor.view(torch.int16).numpy().view(np.uint16), bfloat16_type())


def read_array(dataset: Any) -> torch.Tensor:
    """Read what `write_array` wrote, bit for bit.

    Raises
    ------
    DataError
        If the dataset is of another type.
    """
    import torch

    if dataset.id.get_type().equal(bfloat16_type()):
        raw = np.empty(dataset.shape, np.uint16)
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, bfloat16_type())
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    if dataset.dtype not in (np.dtype("<f4"), np.dtype("<f2"), np.dtype("<f8")):
        raise DataError(
            f"{dataset.file.filename}{dataset.name}: type {dataset.dtype}; expected keys or values (a float type)"
        )
    return torch.from_numpy(dataset[()])


def check_array(dataset: Any) -> None:
    """Read a dataset piece by piece, so that HDF5 checks its checksums; raises what HDF5 raises."""
    kind = dataset.id.get_type()
    for start, stop in slabs(dataset):
        shape = (stop - start, *dataset.shape[1:])
        piece = dataset.id.get_space()
        piece.select_hyperslab((start, *(0 for _ in shape[1:])), shape)
        # As raw bytes of the stored type: nothing is converted.
        dataset.id.read(h5py.h5s.create_simple(shape), piece, np.empty(shape, f"V{kind.get_size()}"), kind)


def type_name(dataset: Any) -> str:
    """Name of a dataset's type: ``bfloat16``, or numpy's name."""
    return "bfloat16" if dataset.id.get_type().equal(bfloat16_type()) else str(dataset.dtype)
