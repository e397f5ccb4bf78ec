"""The cache that the model uses in a decode step, which has one token of each of several documents.

The model reads its weights once for all documents. Their keys and values stay in place (``head_store``): a layer
appends each document's token to its rows, and attends for all documents at once. A single document is decoded in the
same way. Attention has three backends: our kernel on CPUs, paged flash attention on GPUs (``pages``), and torch,
document by document, if neither supports the layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, takes_flash
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.pages import PageLayout, PageTables
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.unit_table import Unit, UnitTable

Merge = Callable[[PartialAttention], PartialAttention]


class DecodeCache(RowCache):
    """The caches of several documents as one cache.

    documents : the decode rank's cache of each document, after its prefill.
    merge : merges this rank's attention with that of other ranks, for one document whose tokens are sharded.
    recorded : to record a step in a CUDA graph: the only tables that are read, filled with these documents. They may
        have more slots than there are documents.
    stores : for each layer, the documents' keys and values.
    lengths : tokens of each document before the one being decoded.
    on_device : the same (documents,), int64, for a step that has begun.
    """

    prefilling = False

    def __init__(
        self, documents: Sequence[SliceCache], merge: Merge | None = None, recorded: PageTables | None = None
    ) -> None:
        assert merge is None or len(documents) == 1, "the tokens of one document are divided"
        self.documents, self.merge, self._is_recorded = documents, merge, recorded is not None
        self.lengths = [0] * len(documents)
        self.on_device = torch.zeros(len(documents), dtype=torch.int64, device=documents[0].device)
        layers = zip(*(document.layers for document in documents), strict=True)
        self.stores: list[list[HeadStore]] = [[layer.store for layer in layer_of_all] for layer_of_all in layers]
        if recorded is not None:
            self.tables = recorded
        super().__init__([RowLayer(self, at, stores[0].shape) for at, stores in enumerate(self.stores)])
        self.take_up()

    @functools.cached_property
    def layout(self) -> PageLayout | None:
        """Layout of the documents' page tables; None if some are not in pages."""
        return PageLayout.of(self.stores)

    @functools.cached_property
    def tables(self) -> PageTables | list[UnitTable]:
        """What attention reads: page tables, or for each layer the table of our kernel."""
        if self.layout is not None:
            pages = PageTables(self.layout, self.on_device.device)
            pages.fill(self.stores)
            return pages
        found = []
        for stores in self.stores:
            units = list[Unit]()
            for document, store in enumerate(stores):
                for head, count, keys, values in store.lines:
                    shared = (
                        (rows.keys[head], rows.values[head], rows.count, False, rows.first) for rows in store.shared
                    )
                    own = keys, values, count + store.appended(0), store.appends, store.shared_tokens
                    units += [Unit(document, head, *rows) for rows in (*shared, own)]
            found.append(UnitTable(len(stores), stores[0].shape.num_kv_heads, units))
        return found

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append one token per document, (1, kv_heads, documents, head_dim)."""
        at = layer.layer_idx
        if isinstance(self.tables, PageTables):
            self.tables.write(at, keys, values, self.on_device)
        else:
            self._write(at, keys, values)
        for document, length in zip(self.documents, self.lengths, strict=True):
            document.layers[at].length = length + 1

    def _write(self, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append one token per document where its rows lie, with one call for all of them."""
        places, tokens = list[torch.Tensor](), list[torch.Tensor]()
        rows = zip(self.stores[at], self.lengths, keys[0].unbind(1), values[0].unbind(1), strict=True)
        for store, length, token_keys, token_values in rows:
            if not store.appends:
                continue
            appended = length - store.origin
            if store.is_one_run:
                (run,) = store.runs
                row = run.count + appended
                places += (run.keys.select(1, row), run.values.select(1, row))
                tokens += (token_keys, token_values)
                continue
            of_keys, of_values = token_keys.unbind(0), token_values.unbind(0)
            for head, count, to_keys, to_values in store.lines:
                row = count + appended
                places += (to_keys.select(0, row), to_values.select(0, row))
                tokens += (of_keys[head], of_values[head])
        if places:
            torch._foreach_copy_(places, tokens)

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each document's token to those before it.

        For one document, heads may be folded into the query length.

        Raises `ModelError` if a step is recorded, and the layer cannot use paged attention.
        """
        shape, seen, dim = query.shape, layer.shape.visibility, layer.shape.value_dim
        if len(self.documents) == 1:
            query = query.reshape(1, -1, 1, shape[-1])
        if (
            isinstance(self.tables, PageTables)
            and seen.chunk is None
            and takes_flash(query, query.new_empty(0, dim), params)
        ):
            part = self.tables.attend(layer.layer_idx, query, params, seen.window)
        elif self._is_recorded:
            raise ModelError(f"layer {layer.layer_idx} does not attend by pages, but document by document")
        else:
            part = self._attend_units(layer, query, params)
        if self.merge is not None:
            part = self.merge(part)
        return part.finish(params).to(query.dtype).reshape(*shape[:-1], dim)

    def _attend_units(self, layer: RowLayer, query: torch.Tensor, params: AttentionParams) -> PartialAttention:
        """Attend with our kernel, or document by document; heads without rows have a log-sum-exp of -inf."""
        at, seen, kernel = layer.layer_idx, layer.shape.visibility, params.kernel
        lengths = [length + 1 for length in self.lengths]
        firsts = None if seen.size is None else [seen.first_key(length) for length in self.lengths]
        if kernel is not None and params.is_plain and not isinstance(self.tables, PageTables):
            table = self.tables[at]
            if kernel.takes_units(query, table):
                from_rows = None if firsts is None else np.array(firsts)
                out, lse = kernel.library.attend_units(query, table, np.array(lengths), params.scale, from_rows)
                return PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0))
        parts = [
            store.attend(query.narrow(2, row, 1), length, params, 0 if firsts is None else firsts[row])
            for row, (store, length) in enumerate(zip(self.stores[at], lengths, strict=True))
        ]
        return PartialAttention.join(parts)

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """For each document, its tokens in this row (1) and its length with them; 1 for empty slots."""
        return [(1, length + 1) for length in self.lengths] + [(1, 1)] * (tokens - len(self.lengths))

    def take_up(self) -> list[int]:
        """Read the current lengths of the documents, and return them."""
        self.current = None
        self.lengths = [document.length for document in self.documents]
        return self.lengths

    def went_on(self) -> None:
        """Count each document's new token, which a CUDA graph wrote without `append`."""
        for document, length in zip(self.documents, self.lengths, strict=True):
            for layer in document.layers:
                layer.length = length + 1

    def take_back(self) -> None:
        """Drop the tokens of a step that failed between layers, or was only recorded."""
        self.current = None
        for document, length in zip(self.documents, self.lengths, strict=True):
            document.step_back(length)
