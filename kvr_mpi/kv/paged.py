"""Memory for the keys and values of many documents, in pages, so that one attention call reads those of all of them.

A document gets a run of pages next to each other: its prompt is received into it in place, token-major, and everything
that reads a document alone sees a buffer like any other. What reads many documents at once reads the pages by a block
table (`paged_row`). Paging as in vLLM (Kwon et al., SOSP 2023, section 4), but for the runs.

Memory comes in extents of many pages. Documents that are short beside one share it; a longer one has one of its own,
of just its size: its attention takes long enough alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from kvr_mpi.kv.buffers import make_flat
from kvr_mpi.model import LayerShape

# Tokens of a page: flash attention takes multiples of this.
PAGE_TOKENS = 256


def pages_for(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE_TOKENS)


class Extent:
    """Pages of all layers, made at once.

    Parameters
    ----------
    shapes : sequence of LayerShape
        Of the layers that keep keys and values.
    pages : int
        Of each layer, for documents.

    Raises
    ------
    MemoryError, torch.OutOfMemoryError
        If there is no memory for it.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages, self._shapes = pages, shapes
        rows = pages * PAGE_TOKENS
        flat = make_flat(rows * sum(shape.elements for shape in shapes), dtype, device)
        layers = torch.split(flat, [rows * shape.elements for shape in shapes])
        self.layers = [layer.view(rows, shape.elements) for layer, shape in zip(layers, shapes, strict=True)]
        self._taken: list[tuple[int, int, list[StorageWeakRef]]] = []  # first page, pages, who reads them; ascending

    @property
    def taken_pages(self) -> int:
        """Pages that documents have."""
        return sum(pages for _, pages, _ in self._taken)

    def collect(self) -> None:
        """Take back the pages that nothing refers to any more, be it a cache, a transfer or a writer."""
        self._taken = [run for run in self._taken if not all(one.expired() for one in run[2])]  # type: ignore[no-untyped-call]

    def take(self, pages: int) -> int | None:
        """Find the first run of so many free pages, for `buffers` to hand out; None if there is none."""
        first = 0
        for start, count, _ in self._taken:
            if start - first >= pages:
                break
            first = start + count
        return first if first + pages <= self.pages else None

    def buffers(self, first: int, tokens: int) -> list[torch.Tensor]:
        """Hand out a run of pages: of each layer (tokens, elements), in use until the last view of them is gone."""
        start = first * PAGE_TOKENS
        given = [share_memory(layer[start : start + tokens]) for layer in self.layers]
        readers = [StorageWeakRef(one.untyped_storage()) for one in given]  # type: ignore[no-untyped-call]
        self._taken.append((first, pages_for(tokens), readers))
        self._taken.sort(key=lambda run: run[0])
        return given

    def pages_of(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the layer kept at a place, as views (pages, tokens of a page, kv_heads, head_dim)."""
        shape, layer = self._shapes[at], self.layers[at]
        keys, values = layer[:, : shape.key_elements], layer[:, shape.key_elements :]
        each = -1, PAGE_TOKENS, shape.num_kv_heads
        return keys.view(*each, shape.key_dim), values.view(*each, shape.value_dim)


def share_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Make another tensor of the same memory, with a storage of its own: it tells when its last view is gone."""
    return from_dlpack(to_dlpack(tensor))


@dataclass(frozen=True, slots=True, eq=False)
class PageRun:
    """A document's pages.

    buffers : of each layer that keeps keys and values (tokens, elements).
    """

    extent: Extent
    first: int
    buffers: tuple[torch.Tensor, ...]

    @property
    def pages(self) -> int:
        """How many they are."""
        return pages_for(len(self.buffers[0]))


class PagedArena:
    """The keys and values of the documents that a rank decodes.

    Parameters
    ----------
    layers : sequence of LayerShape
        Of the model.
    extent_pages : int
        Pages of an extent that several documents share.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        extent_pages: int,
    ) -> None:
        assert extent_pages > 0
        self._shapes = [shape for shape in layers if shape.elements]
        self._dtype, self._device, self.extent_pages = dtype, device, extent_pages
        self.extents: list[Extent] = []

    @property
    def page_bytes(self) -> int:
        """Memory of a page of all layers."""
        return PAGE_TOKENS * sum(shape.elements for shape in self._shapes) * self._dtype.itemsize

    @property
    def spare_bytes(self) -> int:
        """Most memory that is held for documents to come, while others have pages."""
        return self.extent_pages * self.page_bytes

    def collect(self) -> None:
        """Take back the pages of documents that have left, and give memory back that no document has."""
        for extent in self.extents:
            extent.collect()
        self.extents = [extent for extent in self.extents if extent.taken_pages]

    def take(self, tokens: int) -> PageRun:
        """Give a document room for so many tokens; what is in it is not defined.

        Raises
        ------
        MemoryError, torch.OutOfMemoryError
            If there is no memory for it.
        """
        self.collect()
        pages = pages_for(tokens)
        for extent in self.extents:
            if (first := extent.take(pages)) is not None:
                return PageRun(extent, first, tuple(extent.buffers(first, tokens)))
        extent = self._make(pages)
        self.extents.append(extent)
        return PageRun(extent, 0, tuple(extent.buffers(0, tokens)))

    def _make(self, pages: int) -> Extent:
        """Make an extent for others, too, if there is memory for that."""
        if pages < self.extent_pages:
            try:
                return Extent(self._shapes, self.extent_pages, self._dtype, self._device)
            except (MemoryError, torch.OutOfMemoryError):
                pass
        return Extent(self._shapes, pages, self._dtype, self._device)
