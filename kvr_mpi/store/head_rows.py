"""In HDF5, the tokens that each head keeps after compression.

    /kv/KEY              attribute compression: method and settings
    /kv/KEY/layer_000/keys, values
                         (rows, 1, head_dim): one KV head after the other
    /kv/KEY/layer_000/head_rows
                         rows of each KV head (int64)
    /kv/KEY/layer_000/positions
                         index of each row in token_ids, ascending in each
                         head (int32)

The hash that the log's checksum covers includes both. A layer that is not compressed has the usual layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvr_mpi.errors import ConfigError, DataError
from kvr_mpi.store.arrays import digest_of
from kvr_mpi.store.hdf5 import dataset_in, where, write_dataset

Positions = npt.NDArray[np.int32]
NAMES = ("head_rows", "positions")
MAX_HEADS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The rows of each head of one layer.

    counts : of each KV head.
    positions : of each row, one head after the other (rows,).
    """

    counts: tuple[int, ...]
    positions: Positions

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row of each head, and the end of the last."""
        ends = list(itertools.accumulate(self.counts))
        return list(zip([0, *ends], ends, strict=False))

    def bounds_before(self, tokens: int) -> list[tuple[int, int]]:
        """Bounds of each head's rows whose position is below `tokens`."""
        return [
            (first, first + int(np.searchsorted(self.positions[first:last], tokens))) for first, last in self.bounds
        ]

    def facts(self) -> list[Any]:
        """Return the data that is hashed."""
        return [list(self.counts), digest_of(np.ascontiguousarray(self.positions, np.int32))]


def join_head_rows(some: Sequence[HeadRows]) -> HeadRows | None:
    """Concatenate the rows of some heads; None if there are none."""
    if not some:
        return None
    counts = tuple(itertools.chain.from_iterable(one.counts for one in some))
    return HeadRows(counts, np.concatenate([one.positions for one in some]))


def refuse_compressed(compression: str, name: str, what: str) -> None:
    """Refuse compressed keys and values where every head must have all tokens.

    Parameters
    ----------
    compression : str
        Of the stored keys and values; empty: none.
    name, what : str
        The document's id, and the operation that needs them.

    Raises
    ------
    ConfigError
        If `compression` is not empty.
    """
    if compression:
        raise ConfigError(
            f"{name!r} has compressed keys and values ({compression}), whose heads keep different tokens; {what} needs "
            f"whole ones: use kvr ask, or prefill it again without [compress]"
        )


def write_head_rows(layer: Any, rows: HeadRows) -> None:
    """Write which tokens the heads of a layer keep."""
    write_dataset(layer, NAMES[0], np.asarray(rows.counts, np.int64))
    write_dataset(layer, NAMES[1], np.asarray(rows.positions, np.int32))


def open_head_rows(layer: Any, shape: tuple[int, ...]) -> HeadRows | None:
    """Read which tokens each head of a layer keeps; None if all heads keep the same tokens.

    Parameters
    ----------
    shape : tuple of int
        Shape of the layer's keys.

    Raises
    ------
    DataError
        If the rows do not match the keys, or the positions of a head do not ascend.
    """
    if not any(name in layer for name in NAMES):
        return None
    counts, positions = dataset_in(layer, NAMES[0], "i", (1,)), dataset_in(layer, NAMES[1], "i", (1,))
    if counts.shape[0] > MAX_HEADS or positions.shape != shape[:1] or shape[1] != 1 or positions.dtype != np.int32:
        raise DataError(
            f"{where(layer)}: rows of {counts.shape[0]} heads, positions {positions.shape} {positions.dtype} and keys "
            f"{shape} do not match"
        )
    found = HeadRows(tuple(counts[()].tolist()), positions[()])
    if not found.counts or min(found.counts) < 1 or sum(found.counts) != shape[0]:
        raise DataError(f"{where(layer)}: heads of {list(found.counts[:8])} rows and more do not add up to {shape[0]}")
    for first, last in found.bounds:
        own = found.positions[first:last]
        if own[0] < 0 or not bool((np.diff(own) > 0).all()):
            raise DataError(f"{where(layer)}: rows {first} to {last} are not in ascending order of tokens")
    return found
