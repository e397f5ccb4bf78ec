"""Tensors in HDF5, bit for bit: float32, float16, bfloat16, and, if asked for, 8 bits with a scale of each row.

HDF5 knows no bfloat16 by name, but describes any binary floating-point type: what is written here is read by plain h5py
as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import xxhash

from kvr_mpi.errors import DataError
from kvr_mpi.store.filters import compress, is_compressed
from kvr_mpi.store.hdf5 import CHUNK_BYTES, attribute_names, dataset_in, read_attribute, size_bytes, write_attribute

if TYPE_CHECKING:
    import torch

Bits = np.ndarray[Any, Any]
# Largest magnitude of 8 bits.
MOST = 127
# Types that keys and values have, and the end of the name of what goes with 8 bits.
DTYPES = ("float32", "bfloat16", "float16", "float64")
SCALES = "_scales"


@dataclass(frozen=True, slots=True)
class EightBit:
    """Keys or values in 8 bits: of each token and head the largest magnitude becomes 127.

    codes : int8 (tokens, kv_heads, head_dim).
    scales : float32 (tokens, kv_heads), what a code of 1 is.
    dtype : name of the type they had.
    error : root of the mean squared difference, over that of what they were.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: str
    error: float


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Keys or values in a file that is open.

    data, scales : h5py's datasets; scales only with 8 bits.
    dtype : of what was stored in 8 bits.
    error : see `EightBit`.
    """

    data: Any
    scales: Any = None
    dtype: str = ""
    error: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Tokens, KV heads, elements of a head."""
        return tuple(self.data.shape)

    @property
    def type_name(self) -> str:
        """Name of the type it has when it is read."""
        return self.dtype or type_name(self.data)

    @property
    def is_compressed(self) -> bool:
        """Whether it takes less in the file."""
        return is_compressed(self.data)

    @property
    def bytes(self) -> int:
        """As stored, before it is compressed."""
        return size_bytes(self.data) + (0 if self.scales is None else size_bytes(self.scales))

    def bits(self, first: int, last: int) -> tuple[Bits, ...]:
        """Read what is stored of some rows."""
        return tuple(read_bits(each, first, last) for each in (self.data, self.scales) if each is not None)

    def tensor(self, bits: Sequence[Bits]) -> torch.Tensor:
        """Make keys or values of what `bits` read, or of some rows of it."""
        if self.scales is None:
            return as_tensor(self.data, bits[0])
        import torch

        return restore(torch.from_numpy(bits[0]), as_tensor(self.scales, bits[1]), self.dtype)

    def content(self, bits: Sequence[Bits]) -> torch.Tensor | EightBit:
        """Make of all that `bits` read what was written."""
        if self.scales is None:
            return as_tensor(self.data, bits[0])
        import torch

        return EightBit(torch.from_numpy(bits[0]), as_tensor(self.scales, bits[1]), self.dtype, self.error)

    def facts(self) -> list[Any]:
        """Say what it is, but for its contents."""
        return [list(self.shape), type_name(self.data), *([self.dtype, self.error] if self.dtype else [])]


def quantise(tensor: torch.Tensor) -> EightBit:
    """Round keys or values (tokens, kv_heads, head_dim) to 8 bits."""
    import torch

    exact = tensor.detach().float()
    scales = exact.abs().amax(-1) / MOST
    steps = torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    codes = (exact / steps).round_()
    total = exact.square().sum()
    error = float((codes * steps - exact).square().sum().div(total).sqrt()) if total > 0 else 0.0
    return EightBit(codes.to(torch.int8), scales, str(tensor.dtype).removeprefix("torch."), error)


def restore(codes: torch.Tensor, scales: torch.Tensor, dtype: str) -> torch.Tensor:
    """Turn 8 bits back, in the type they had."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return (codes.float() * scales.unsqueeze(-1)).to(kind)


def bfloat16_type() -> Any:
    """HDF5's description of bfloat16: sign, 8 bits of exponent with bias 127, 7 bits of mantissa."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def type_name(dataset: Any) -> str:
    """Name of a dataset's type: ``bfloat16``, or numpy's name."""
    return "bfloat16" if dataset.id.get_type().equal(bfloat16_type()) else str(dataset.dtype)


def join(parts: Sequence[torch.Tensor | EightBit], dim: int = 0) -> torch.Tensor | EightBit:
    """Put keys or values of some tokens (dimension 0) or heads (1) after each other, in 8 bits if all are.

    The error is then the largest of theirs.
    """
    import torch

    eight = [part for part in parts if isinstance(part, EightBit)]
    if len(eight) == len(parts):
        codes, scales = (torch.cat(each, dim) for each in zip(*((one.codes, one.scales) for one in eight), strict=True))
        return EightBit(codes, scales, eight[0].dtype, max(part.error for part in eight))
    return torch.cat(
        [restore(part.codes, part.scales, part.dtype) if isinstance(part, EightBit) else part for part in parts], dim
    )


def write_tensor(group: h5py.Group, name: str, tensor: torch.Tensor, *, compressed: bool = False) -> Bits:
    """Write a tensor in its own type, in one piece or by Blosc2 in chunks of some rows; return its bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    kind = bfloat16_type() if tensor.dtype == torch.bfloat16 else h5py.h5t.py_create(bits.dtype, logical=True)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compressed and bits.size:
        plist.set_chunk((min(len(bits), max(1, CHUNK_BYTES // bits[0].nbytes)), *bits.shape[1:]))
        compress(plist)
    dataset = h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(bits.shape), dcpl=plist)
    if bits.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, kind)
    return bits


def write_array(
    group: h5py.Group, name: str, content: torch.Tensor | EightBit, *, compressed: bool = False
) -> tuple[Bits, ...]:
    """Write keys or values, in 8 bits with ``NAME_scales`` beside them; return what was written."""
    if not isinstance(content, EightBit):
        return (write_tensor(group, name, content, compressed=compressed),)
    codes = write_tensor(group, name, content.codes, compressed=compressed)
    written = codes, write_tensor(group, name + SCALES, content.scales)
    write_attribute(group[name], "dtype", content.dtype)
    write_attribute(group[name], "error", content.error)
    return written


def open_array(group: h5py.Group, name: str) -> StoredArray:
    """Find keys or values (tokens, kv_heads, head_dim).

    Raises
    ------
    DataError
        If they are of no type that keys and values have.
    """
    data = dataset_in(group, name, "fi", (3,))
    if data.dtype.kind == "f":
        if attribute_names(data) or name + SCALES in group:
            raise DataError(f"{where(data)} has scales or attributes of 8-bit data, but is not int8")
        return StoredArray(data)
    if data.dtype != np.int8:
        raise DataError(f"{where(data)}: type {data.dtype}; expected keys or values ({', '.join(DTYPES)}, int8)")
    scales, names = dataset_in(group, name + SCALES, "f", (2,)), attribute_names(data)
    dtype, error = read_attribute(data, "dtype", str), read_attribute(data, "error", float)
    if scales.dtype != np.float32 or scales.shape != data.shape[:2] or names != {"dtype", "error"}:
        raise DataError(f"{where(data)} and its scales {scales.shape} {scales.dtype} do not match")
    if dtype not in DTYPES:
        raise DataError(f"{where(data)} was of type {dtype!r}; expected one of {', '.join(DTYPES)}")
    return StoredArray(data, scales, dtype, error)


def read_bits(dataset: Any, first: int, last: int) -> Bits:
    """Read the bits of some rows."""
    kind, shape = dataset.id.get_type(), (last - first, *dataset.shape[1:])
    raw = np.empty(shape, f"<i{kind.get_size()}")
    if raw.size:
        rows = dataset.id.get_space()
        rows.select_hyperslab((first, *(0 for _ in shape[1:])), shape)
        dataset.id.read(h5py.h5s.create_simple(shape), rows, raw, kind)
    return raw


def as_tensor(dataset: Any, raw: Bits) -> torch.Tensor:
    """Take bits for what the dataset says they are."""
    import torch

    name = type_name(dataset)
    if name not in DTYPES:
        raise DataError(f"{where(dataset)}: type {name}; expected keys or values (one of {', '.join(DTYPES)})")
    kind: torch.dtype = getattr(torch, name)
    return torch.from_numpy(raw).view(kind)


def digest_of(arrays: Sequence[Bits]) -> int:
    """XXH3 of arrays, one after the other, as a signed number."""
    digest = xxhash.xxh3_64()
    for each in arrays:
        if each.size:
            digest.update(each.data.cast("B"))
    return int.from_bytes(digest.digest(), "big", signed=True)


def where(item: Any) -> str:
    """Name a file and what is meant in it."""
    return f"{item.file.filename}:{item.name}"
