"""Memory for the rows of one layer of one document: its own buffer, or pages of a pool that documents share.

On GPUs one attention call reads the rows of many documents through a block table (``pages``). Each KV head's rows
therefore begin on a page boundary, as in vLLM (Kwon et al., SOSP 2023, section 4); the pages of a head are contiguous.
Pages are allocated from extents of many pages, and freed with their last view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from kvr_mpi.kv.buffers import make_flat
from kvr_mpi.model import LayerShape

# Rows of a page: flash attention requires a multiple of this.
PAGE_ROWS = 256


def pages_for(rows: int) -> int:
    """Return the number of pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Adjacent KV heads of a layer that hold the same number of rows.

    head : index of the first one, among the heads that the model computes on this rank.
    first : position of the first row, if rows are in the order of positions.
    count : rows that each head holds, without appended tokens.
    keys, values : views (heads, capacity, dim).
    row : row of the extent at which the first head's rows begin.
    extent : the extent that the rows lie in; None: memory of their own.
    owner : the store that owns these rows, if other prompts share them.
    """

    head: int
    first: int
    count: int
    keys: torch.Tensor
    values: torch.Tensor
    row: int = 0
    extent: Extent | None = None
    owner: Any = None

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.keys)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.first + self.count

    @property
    def nbytes(self) -> int:
        """Size in bytes, with room for further rows."""
        return self.keys.nbytes + self.values.nbytes

    def cut(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of positions, as views (1, heads, tokens, dim)."""
        rows = slice(first - self.first, last - self.first)
        return self.keys[None, :, rows], self.values[None, :, rows]


def in_flat(flat: torch.Tensor, heads: int, rows: int, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
    """View a flat tensor (elements,) as keys and values (heads, rows, dim), all keys first."""
    keys, values = torch.split(flat, [heads * rows * shape.key_dim, heads * rows * shape.value_dim])
    return keys.view(heads, rows, shape.key_dim), values.view(heads, rows, shape.value_dim)


class Extent:
    """A block of pages for heads of one size, allocated at once.

    shape : a layer with heads of that size.

    Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for it.
    """

    def __init__(self, shape: LayerShape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages, self.dims = pages, (shape.key_dim, shape.value_dim)
        rows = (pages + 1) * PAGE_ROWS  # the last page is a dummy for heads that lie in other extents
        keys, values = in_flat(make_flat(rows * sum(self.dims), dtype, device), 1, rows, shape)
        self.keys, self.values = keys[0], values[0]
        for each in (self.keys, self.values):
            each[-PAGE_ROWS:] = 0
        self._taken: list[tuple[int, int, list[StorageWeakRef]]] = []  # first page, pages, their storages; ascending

    def collect(self) -> bool:
        """Free the pages that no cache, transfer or writer references any more; return whether any are left in use."""
        self._taken = [run for run in self._taken if not all(one.expired() for one in run[2])]  # type: ignore[no-untyped-call]
        return bool(self._taken)

    def take(self, pages: int) -> Run | None:
        """Allocate the first free run of `pages` pages until its last view is gone; return None if there is none.

        All its rows belong to one head.
        """
        page = 0
        for start, count, _ in self._taken:
            if start - page >= pages:
                break
            page = start + count
        if page + pages > self.pages:
            return None
        first, last = page * PAGE_ROWS, (page + pages) * PAGE_ROWS
        keys, values = (share_memory(each[first:last]) for each in (self.keys, self.values))
        readers = [StorageWeakRef(each.untyped_storage()) for each in (keys, values)]  # type: ignore[no-untyped-call]
        self._taken.append((page, pages, readers))
        self._taken.sort(key=lambda run: run[0])
        return Run(0, 0, 0, keys[None], values[None], first, self)


def share_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory with its own storage, whose weak reference expires with its last view."""
    return from_dlpack(to_dlpack(tensor))


class Arena:
    """The page pool of a rank.

    layers : of the model.
    extent_bytes : memory of an extent that several documents share; at least a page for each head of the model.
    """

    def __init__(
        self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, *, extent_bytes: int
    ) -> None:
        self._dtype, self._device = dtype, device
        self.page_bytes = PAGE_ROWS * sum(shape.elements for shape in layers) * dtype.itemsize
        self.spare_bytes = max(extent_bytes, self.page_bytes)
        self.extents: list[Extent] = []

    def collect(self) -> None:
        """Free the pages that nothing references any more, and drop empty extents."""
        self.extents = [extent for extent in self.extents if extent.collect()]

    def take(self, shape: LayerShape, pages: int, beside: Extent | None = None) -> Run:
        """Allocate uninitialised pages for a layer of a document, preferably in the extent `beside`.

        Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for them.
        """
        found = self._find(shape, pages, beside)
        if found is None or found.extent is not (beside or found.extent):
            self.collect()
            found = self._find(shape, pages, beside)
        if found is None:
            self.extents.append(self._make(shape, pages))
            found = self.extents[-1].take(pages)
        assert found is not None, "a new extent has enough pages"
        return found

    def _find(self, shape: LayerShape, pages: int, beside: Extent | None) -> Run | None:
        for extent in sorted(self.extents, key=lambda extent: extent is not beside):
            if extent.dims == (shape.key_dim, shape.value_dim) and (found := extent.take(pages)) is not None:
                return found
        return None

    def _make(self, shape: LayerShape, pages: int) -> Extent:
        """Allocate an extent that has room for other documents, too; if memory is short, for these pages only."""
        shared = self.spare_bytes // (PAGE_ROWS * (shape.key_dim + shape.value_dim) * self._dtype.itemsize)
        if pages < shared:
            try:
                return Extent(shape, shared, self._dtype, self._device)
            except (MemoryError, torch.OutOfMemoryError):
                pass
        return Extent(shape, pages, self._dtype, self._device)
