"""Which KV heads a piece of a document's keys and values has, in HDF5, where a stage's ranks have some each.

    kv          attributes first_head, last_head (not included), all_heads; not there: it has all

They are in the hash that the record's own checksum covers. What a merge makes of the pieces does not have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvr_mpi.errors import DataError
from kvr_mpi.store.arrays import where
from kvr_mpi.store.hdf5 import attribute_names, read_attribute, write_attribute
from kvr_mpi.store.head_rows import MAX_HEADS
from kvr_mpi.topology import KVHeads

ATTRIBUTES = ("first_head", "last_head", "all_heads")


def write_heads(kv: Any, heads: KVHeads) -> None:
    """Write which KV heads a document's group has."""
    for name, value in zip(ATTRIBUTES, (heads.first, heads.last, heads.of), strict=True):
        write_attribute(kv, name, value)


def read_heads(kv: Any, counts: Iterable[int]) -> KVHeads | None:
    """Read which KV heads a document's group has; None if it has all.

    Parameters
    ----------
    counts : iterable of int
        How many each of its layers has.

    Raises
    ------
    DataError
        If they are none that a rank of a stage has, or are not as many as its layers have.
    """
    if not attribute_names(kv) & {*ATTRIBUTES}:
        return None
    heads = KVHeads(*(read_attribute(kv, name, int) for name in ATTRIBUTES))
    if not 0 <= heads.first < heads.last <= heads.of <= MAX_HEADS or not heads.is_even_share:
        raise DataError(
            f"{where(kv)} has the KV heads from {heads.first} to {heads.last} of {heads.of}; expected an even share"
        )
    if {*counts} != {heads.last - heads.first}:
        raise DataError(f"{where(kv)} has the KV heads from {heads.first} to {heads.last}, and its layers have others")
    return heads
