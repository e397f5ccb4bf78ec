"""The table for attention in a decode step: the units of each KV head of each document.

A unit is a run of rows of keys and values that one group of query heads of some documents reads. The results of a
head's units are merged. A table is built when documents join or leave; between steps only the documents' lengths
change. Its rows are the ``Unit``s of ``decode_attention.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.int64]


class Unit(NamedTuple):
    """Rows of one KV head of a document, or of adjacent documents that share them.

    document, head : indices of the (first) document and of the KV head in the query.
    keys, values : (capacity, head_dim), with contiguous rows.
    filled : number of rows; if the unit grows, that number minus the document's length.
    grows : whether each new token of the document adds a row.
    first : position of the first row.
    documents : number of documents.
    """

    document: int
    head: int
    keys: torch.Tensor
    values: torch.Tensor
    filled: int = 0
    grows: bool = True
    first: int = 0
    documents: int = 1


class UnitTable:
    """The units of one layer.

    documents, kv_heads : sizes for queries (1, heads, documents, head_dim); heads is a multiple of kv_heads.
    rows : the units as the kernel reads them (units, 11).
    dtype, dim : of all keys and values; None unless all are plain, of one kind, and have adjacent features.
    """

    def __init__(self, documents: int, kv_heads: int, units: Sequence[Unit]) -> None:
        self.documents, self.kv_heads, self.units = documents, kv_heads, units
        of_all = [each for unit in units for each in (unit.keys, unit.values)]
        kinds = {(type(each), each.device.type, each.dtype, each.shape[-1], each.stride(-1)) for each in of_all}
        self.dtype: torch.dtype | None = None
        self.dim: int | None = None
        if len(kinds) == 1:
            kind, device, dtype, dim, stride = kinds.pop()
            if kind is torch.Tensor and device == "cpu" and stride == 1:
                self.dtype, self.dim = dtype, dim
        rows = units if self.dtype is not None else ()
        self.rows = np.array([_row(unit) for unit in rows], dtype=np.int64).reshape(-1, 11)


def _row(unit: Unit) -> tuple[int, ...]:
    keys, values, bounds = unit.keys, unit.values, (unit.document, unit.document + unit.documents)
    places = keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0), min(len(keys), len(values))
    return *places, unit.filled, unit.grows, unit.first, unit.head, *bounds
