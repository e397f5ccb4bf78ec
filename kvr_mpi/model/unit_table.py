"""The table for attention in a decode step: the units of each KV head of each document.

A unit is a run of rows of keys and values that one group of query heads reads. The units of one KV head are adjacent,
and their results are merged. A table is built when documents join or leave; between steps only the documents' lengths
change. Its rows are the ``Unit``s of ``decode_attention.cpp``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.int64]
# For steps with several queries of a document: units of a table, which may repeat, and the query of each.
Picks = tuple[Integers, Integers]
# Columns, in the order of the C++ structure's fields.
QUERY, KEYS, VALUES, OUT, LSE, COUNT, KEY_ROW, VALUE_ROW = range(8)


class Unit(NamedTuple):
    """Rows of one KV head of a document.

    document, head : indices of the document and of its KV head in the query.
    keys, values : (capacity, head_dim), with contiguous rows.
    filled : number of rows; if the unit grows, that number minus the document's length.
    grows : whether each new token of the document adds a row.
    first : position of the first row.
    """

    document: int
    head: int
    keys: torch.Tensor
    values: torch.Tensor
    filled: int = 0
    grows: bool = True
    first: int = 0


class UnitTable:
    """The units of one layer; the units of a document's KV head are adjacent.

    documents, kv_heads : sizes for queries (1, heads, documents, head_dim); heads is a multiple of kv_heads.
    """

    def __init__(self, documents: int, kv_heads: int, units: Sequence[Unit]) -> None:
        self.documents, self.kv_heads, self.units = documents, kv_heads, units
        self.is_complete = len({unit[:2] for unit in units}) == documents * kv_heads
        self.document, self.head, self._count, self._grows, self._capacity, self._first = (
            np.array(
                [(*unit[:2], unit.filled, unit.grows, len(unit.keys), unit.first) for unit in units], dtype=np.int64
            )
            .reshape(-1, 6)
            .T
        )
        self._rows: Integers | None = None

    @functools.cached_property
    def layout(self) -> bytes:
        """Equal for tables whose `pick` is the same."""
        return self.document.tobytes() + self.head.tobytes()

    def pick(self, documents: Integers) -> Picks:
        """Select units for some queries of each document (queries,), in the order of documents.

        Queries of the same KV head follow each other, so that its rows are still in the cache.
        """
        queries = np.bincount(documents, minlength=self.documents)
        begins = np.flatnonzero(np.diff(self.document * self.kv_heads + self.head, prepend=-1))  # of each KV head
        many = np.diff(begins, append=len(self.document))  # its units
        each = many * queries[self.document[begins]]
        at = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        query, unit = np.divmod(at, np.repeat(many, each))
        first_query = (np.cumsum(queries) - queries)[self.document[begins]]
        return unit + np.repeat(begins, each), query + np.repeat(first_query, each)

    def rows(self, lengths: Integers, firsts: Integers | None, item_bytes: int, picks: Picks | None = None) -> Integers:
        """Return the units' table (units, 8) for queries whose documents have these lengths (queries,).

        Units read all rows, or those from the positions `firsts` (queries,) on.

        picks : the units; by default all of them, for one query of each document.

        Raises `ValueError` if a unit has no rows, or more rows than its capacity, so that a kernel would read beyond
        its memory.
        """
        units, query = (slice(None), self.document) if picks is None else picks
        counts, capacity = self._count[units] + self._grows[units] * lengths[query], self._capacity[units]
        if bool(((counts < 1) | (counts > capacity)).any()):
            raise ValueError(f"units of {counts.tolist()} rows with room for {capacity.tolist()}")
        if self._rows is None:
            self._rows = np.zeros((len(self.units), 8), dtype=np.int64)
            for row, unit in zip(self._rows, self.units, strict=True):
                row[KEYS], row[VALUES] = unit.keys.data_ptr(), unit.values.data_ptr()
                row[KEY_ROW], row[VALUE_ROW] = unit.keys.stride(0), unit.values.stride(0)
        table = self._rows.copy() if picks is None else self._rows[units]
        table[:, COUNT] = counts
        if firsts is not None:
            skipped = np.clip(firsts[query] - self._first[units], 0, counts)
            table[:, COUNT] -= skipped
            table[:, KEYS] += skipped * table[:, KEY_ROW] * item_bytes
            table[:, VALUES] += skipped * table[:, VALUE_ROW] * item_bytes
        return table
