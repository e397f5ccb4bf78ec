"""Memory for the rows of one layer of one document: its own buffer, or pages of a pool that documents share.

On GPUs one attention call reads the rows of many documents through a block table (``units``). Each KV head's rows
therefore begin on a page boundary, as in vLLM (Kwon et al., SOSP 2023, section 4); the pages of a head are contiguous.
Pages are allocated from extents of many pages, and freed with their last view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class RowMemory:
    """Rows of one layer of a document.

    keys, values : (rows, dim).
    extent : the extent that the pages belong to; None: memory allocated for these rows alone.
    first : row of the extent at which these rows begin.
    """

    keys: torch.Tensor
    values: torch.Tensor
    extent: Extent | None = None
    first: int = 0

    @classmethod
    def in_flat(cls, flat: torch.Tensor, rows: int, shape: LayerShape) -> RowMemory:
        """View a flat tensor (elements,) as rows: first all keys, then all values."""
        cut = rows * shape.key_dim
        values = flat[cut : cut + rows * shape.value_dim]
        return cls(flat[:cut].view(rows, shape.key_dim), values.view(rows, shape.value_dim))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.keys.nbytes + self.values.nbytes


def capacity_of(rows: int, extent: Extent | None) -> int:
    """Return the rows to allocate for a head of `rows` rows; in an extent, whole pages."""
    return rows if extent is None else PAGE_ROWS * pages_for(rows)


class Extent:
    """A block of pages for heads of one size, allocated at once.

    Parameters
    ----------
    shape : LayerShape
        A layer with heads of that size.
    pages : int

    Raises
    ------
    MemoryError, torch.OutOfMemoryError
        If there is no memory for it.
    """

    def __init__(self, shape: LayerShape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages, self.dims = pages, (shape.key_dim, shape.value_dim)
        rows = (pages + 1) * PAGE_ROWS  # the last page is a dummy for heads that lie in other extents
        memory = RowMemory.in_flat(make_flat(rows * sum(self.dims), dtype, device)[0], rows, shape)
        self.keys, self.values = memory.keys, memory.values
        for each in (self.keys, self.values):
            each[-PAGE_ROWS:] = 0
        self._taken: list[tuple[int, int, list[StorageWeakRef]]] = []  # first page, pages, their storages; ascending

    @property
    def taken_pages(self) -> int:
        """Pages in use."""
        return sum(pages for _, pages, _ in self._taken)

    def collect(self) -> None:
        """Free the pages that no cache, transfer or writer references any more."""
        self._taken = [run for run in self._taken if not all(one.expired() for one in run[2])]  # type: ignore[no-untyped-call]

    def take(self, pages: int) -> RowMemory | None:
        """Allocate the first free run of `pages` pages until its last view is gone; return None if there is none."""
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
        return RowMemory(keys, values, self, first)


def share_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory with its own storage, whose weak reference expires with its last view."""
    return from_dlpack(to_dlpack(tensor))


class Arena:
    """The page pool of a rank.

    Parameters
    ----------
    layers : sequence of LayerShape
        Of the model.
    extent_bytes : int
        Memory of an extent that several documents share; at least a page for each head of the model.
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
        for extent in self.extents:
            extent.collect()
        self.extents = [extent for extent in self.extents if extent.taken_pages]

    def take(self, shape: LayerShape, pages: int, beside: Extent | None = None) -> RowMemory:
        """Allocate uninitialised pages for a layer of a document, preferably in the extent `beside`.

        Raises
        ------
        MemoryError, torch.OutOfMemoryError
            If there is no memory for them.
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

    def _find(self, shape: LayerShape, pages: int, beside: Extent | None) -> RowMemory | None:
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


def make_rows(
    shape: LayerShape,
    counts: Sequence[int],
    room: int,
    dtype: torch.dtype,
    device: torch.device,
    arena: Arena | None = None,
    beside: Extent | None = None,
) -> RowMemory:
    """Allocate memory for heads of `counts` rows and `room` more each, in `arena` or (None) separately.

    In an arena, the extent `beside` is preferred.

    Raises
    ------
    MemoryError, torch.OutOfMemoryError
        If there is no memory for them.
    """
    if arena is not None and counts:
        return arena.take(shape, sum(pages_for(count + room) for count in counts), beside)
    rows = sum(counts) + room * len(counts)
    return RowMemory.in_flat(make_flat(rows * (shape.key_dim + shape.value_dim), dtype, device)[0], rows, shape)
