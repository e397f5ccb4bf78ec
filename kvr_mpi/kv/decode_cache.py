"""The cache that the model uses in a decode step, which has one token of each of several documents.

The model reads its weights once for all documents. Their keys and values stay in place (``head_store``): a layer
appends each document's token to its rows, and one `attend_units` call attends for all documents (``units``). A single
document is decoded in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.kv.units import (
    PageLayout,
    PageTables,
    Table,
    attend_units,
    takes_pages,
    unit_tables,
    write_token,
)
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams

Merge = Callable[[PartialAttention], PartialAttention]


class DecodeCache(RowCache):
    """The caches of several documents as one cache.

    Parameters
    ----------
    documents : sequence of SliceCache
        The decode rank's cache of each document, after its prefill.
    merge : callable, optional
        Merges this rank's attention with that of other ranks, for one document whose tokens are sharded.

    Attributes
    ----------
    lengths : list of int
        Tokens of each document before the one being decoded.
    """

    prefilling = False

    def __init__(self, documents: Sequence[SliceCache], merge: Merge | None = None) -> None:
        assert merge is None or len(documents) == 1, "the tokens of one document are divided"
        self.documents, self.merge = documents, merge
        self.lengths = [0] * len(documents)
        self.on_device = torch.zeros(len(documents), dtype=torch.int64, device=documents[0].device)
        layers = zip(*(document.layers for document in documents), strict=True)
        self._stores = [[layer.store for layer in layer_of_all] for layer_of_all in layers]
        self._tables: list[Table] | None = None
        super().__init__([RowLayer(self, at, stores[0].shape) for at, stores in enumerate(self._stores)])
        self.take_up()

    @property
    def tables(self) -> list[Table]:
        """For each layer, the table that `attend_units` reads."""
        if self._tables is None:
            self._tables = unit_tables(self._stores)
        return self._tables

    @functools.cached_property
    def layout(self) -> PageLayout | None:
        """Layout of the documents' page tables; None if some are not in pages, or if ranks merge."""
        return None if self.merge is not None else PageLayout.of(self._stores)

    def fill(self, pages: PageTables) -> None:
        """Fill page tables of this or a wider layout with these documents."""
        pages.fill(self._stores)

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append one token per document, (1, kv_heads, documents, head_dim)."""
        at = layer.layer_idx
        write_token(self._stores[at], self.tables[at], keys, values, self.lengths, self.on_device)
        for document, length in zip(self.documents, self.lengths, strict=True):
            document.layers[at].length = length + 1

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each document's token to those before it.

        For one document, heads may be folded into the query length.
        """
        at, shape = layer.layer_idx, query.shape
        if len(self.documents) == 1:
            query = query.reshape(1, -1, 1, shape[-1])
        lengths = [length + 1 for length in self.lengths]
        part = attend_units(query, self._stores[at], self.tables[at], lengths, params, layer.shape.visibility)
        if self.merge is not None:
            part = self.merge(part)
        return part.finish(params).to(query.dtype).reshape(*shape[:-1], layer.shape.value_dim)

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """For each document, its tokens in this row (1) and its length with them."""
        return [(1, length + 1) for length in self.lengths]

    def take_up(self) -> list[int]:
        """Read the current lengths of the documents, and return them."""
        self.current = None
        self.lengths = [document.length for document in self.documents]
        return self.lengths

    def begin(self, lengths: torch.Tensor) -> None:
        """Begin a step at the lengths (documents,), int64 on the device, that `take_up` returned."""
        self.on_device = lengths

    def went_on(self) -> None:
        """Count each document's new token, which a CUDA graph wrote without `append`."""
        for document, length in zip(self.documents, self.lengths, strict=True):
            for layer in document.layers:
                layer.length = length + 1

    def take_back(self) -> None:
        """Drop the tokens of a step that failed between layers."""
        self.current = None
        for document, length in zip(self.documents, self.lengths, strict=True):
            document.step_back(length)


class PagedRows(RowCache):
    """The cache that is recorded in a CUDA graph: one token for every slot of the page tables.

    Parameters
    ----------
    shapes : sequence of LayerShape
    pages : PageTables
    """

    prefilling = False

    def __init__(self, shapes: Sequence[LayerShape], pages: PageTables) -> None:
        self._pages, self.on_device = pages, torch.zeros(0)
        super().__init__([RowLayer(self, at, shape) for at, shape in enumerate(shapes)])

    def begin(self, lengths: torch.Tensor) -> None:
        """Begin a step at lengths (documents,), int64 on the device."""
        self.on_device = lengths

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append one token per document, (1, kv_heads, documents, head_dim)."""
        self._pages.of_layers[layer.layer_idx].write(keys, values, self.on_device)

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each document's token to those before it.

        For one document, heads may be folded into the query length.

        Raises
        ------
        ModelError
            If the layer cannot use paged attention.
        """
        shape, seen, dim = query.shape, layer.shape.visibility, layer.shape.value_dim
        if self._pages.layout.slots == 1:
            query = query.reshape(1, -1, 1, shape[-1])
        if not takes_pages(query, dim, params, seen):
            raise ModelError(f"layer {layer.layer_idx} does not attend by pages, but document by document")
        part = self._pages.of_layers[layer.layer_idx].attend(query, params, seen.window)
        return part.finish(params).to(query.dtype).reshape(*shape[:-1], dim)

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """For each document, its tokens in this row (1) and a placeholder for its length."""
        return [(1, 1)] * tokens
