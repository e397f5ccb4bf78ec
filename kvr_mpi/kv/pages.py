"""Block tables: where the rows of documents in pages lie, so that one call attends for all documents on a GPU."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvr_mpi.kv.arena import PAGE_ROWS, Extent
from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.model.attention_hook import AttentionParams

# Columns of a page table, for each unit: the row at which it would begin if its shared rows lay before its own; its
# number of rows (if it appends, minus the document's tokens); and whether it lies in this extent.
BEGINS, FILLED, IS_HERE, COLUMNS = 0, 1, 2, 3


@dataclass(frozen=True)
class PageLayout:
    """The shape of the page tables of some documents; a recorded CUDA graph fits all documents of the same layout.

    extents : of each layer, those that hold its units; a layer's table has an entry for every unit in each of them.
    kv_heads : of each layer.
    slots : largest number of documents in a row.
    width : largest number of pages of a unit.
    appends : whether this rank keeps new tokens.
    is_complete : whether all heads of all documents lie in one extent of each layer.
    """

    extents: tuple[tuple[weakref.ref[Extent], ...], ...]
    kv_heads: tuple[int, ...]
    slots: int
    width: int
    appends: bool
    is_complete: bool

    @classmethod
    def of(cls, layers: Sequence[Sequence[HeadStore]]) -> PageLayout | None:
        """Return the layout of documents, given the stores of each layer; None if some are not in pages."""
        extents = [sorted({store.extent for store in stores if store.runs}, key=id) for stores in layers]
        held = [store for stores in layers for store in stores if store.runs]
        if not held or any(None in each for each in extents):
            return None
        appends = held[0].appends
        assert all(store.appends == appends for store in held), "a rank appends to all stores or to none"
        kv_heads = tuple(stores[0].shape.num_kv_heads for stores in layers)
        heads = [sum(run.heads for store in stores for run in store.runs) for stores in layers]
        whole = all(count == each * len(layers[0]) for count, each in zip(heads, kv_heads, strict=True))
        return cls(
            tuple(tuple(weakref.ref(extent) for extent in each if extent is not None) for each in extents),
            kv_heads,
            len(layers[0]),
            max(pages.shape[1] for store in held for _, _, _, pages in store.paged),
            appends,
            whole and all(len(each) == 1 for each in extents),
        )

    def extents_of(self, layer_idx: int) -> list[Extent]:
        """Return a layer's extents."""
        return [one for one in (extent() for extent in self.extents[layer_idx]) if one is not None]


class PageTables:
    """The page tables of all layers, on their device.

    A unit is one KV head of a document. For each extent of a layer there are the units' columns (`COLUMNS`, extents,
    units) and their pages (extents, units, width).
    """

    def __init__(self, layout: PageLayout, device: torch.device) -> None:
        self.layout = layout
        units = [layout.slots * heads for heads in layout.kv_heads]
        shapes = list[tuple[int, ...]]()
        for extents, many in zip(map(len, layout.extents), units, strict=True):
            shapes += (COLUMNS, extents, many), (extents, many, layout.width)
        sizes = list(map(math.prod, shapes))
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = [part.view(shape) for part, shape in zip(torch.split(self._numbers, sizes), shapes, strict=True)]
        self._columns, self._pages = parts[::2], parts[1::2]
        self._counts = [columns[FILLED] for columns in self._columns]
        self._documents = [
            torch.arange(many, device=device) // heads for many, heads in zip(units, layout.kv_heads, strict=True)
        ]
        self._edges = [torch.arange(many + 1, dtype=torch.int32, device=device) for many in units]

    def fill(self, layers: Sequence[Sequence[HeadStore]]) -> None:
        """Replace the documents by others of the same or a narrower layout, given the stores of each layer.

        Units that do not lie in an extent read and write its spare page.
        """
        numbers = list[npt.NDArray[np.int32]]()
        for layer_idx, stores in enumerate(layers):
            extents, kv_heads = self.layout.extents_of(layer_idx), self.layout.kv_heads[layer_idx]
            columns, table = (np.zeros(each[layer_idx].shape, dtype=np.int32) for each in (self._columns, self._pages))
            for at, extent in enumerate(extents):
                columns[BEGINS, at], table[at] = extent.pages * PAGE_ROWS, extent.pages
            for document, store in enumerate(stores):
                at = 0 if store.extent is None else extents.index(store.extent)
                for first, begins, filled, pages in store.paged:
                    units = slice(document * kv_heads + first, document * kv_heads + first + len(begins))
                    for column, number in ((BEGINS, begins), (FILLED, filled), (IS_HERE, 1)):
                        columns[column, at, units] = number
                    table[at, units] = pages[:, :1]  # padding, which is never read
                    table[at, units, : pages.shape[1]] = pages
            numbers += columns.ravel(), table.ravel()
        self._numbers.copy_(torch.from_numpy(np.concatenate(numbers)))

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Append one token per document, keys and values (1, kv_heads, documents, dim).

        lengths : tokens of each document before the new one (documents,), int64 on the device.
        """
        if not self.layout.appends:
            return
        columns = self._columns[layer_idx]
        counts = columns[FILLED] + columns[IS_HERE] * lengths.index_select(0, self._documents[layer_idx])
        rows = columns[BEGINS] + counts
        self._counts[layer_idx] = (counts + 1).int()
        by_unit = [tokens[0].transpose(0, 1).flatten(0, 1) for tokens in (keys, values)]
        for extent, places in zip(self.layout.extents_of(layer_idx), rows, strict=True):
            extent.keys.index_copy_(0, places, by_unit[0])
            extent.values.index_copy_(0, places, by_unit[1])

    def attend(
        self, layer_idx: int, query: torch.Tensor, params: AttentionParams, window: int | None
    ) -> PartialAttention:
        """Attend from one token per document (1, heads, documents, head_dim), with one call per extent."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        documents, dim = query.shape[2:]
        units = query[0].view(self.layout.kv_heads[layer_idx], -1, documents, dim).permute(2, 0, 1, 3).flatten(0, 1)
        edges, parts = self._edges[layer_idx], list[tuple[torch.Tensor, torch.Tensor]]()
        tables = zip(self._pages[layer_idx], self._counts[layer_idx], strict=True)
        for extent, (pages, counts) in zip(self.layout.extents_of(layer_idx), tables, strict=True):
            keys, values = (each.view(-1, PAGE_ROWS, 1, each.shape[1]) for each in (extent.keys, extent.values))
            out, lse = varlen_attn(
                units,
                keys,
                values,
                edges,
                edges,  # required but not read for keys, which pages and counts locate
                1,
                self.layout.width * PAGE_ROWS,
                return_aux=AuxRequest(lse=True),
                scale=params.scale,
                window_size=(-1, -1) if window is None else (window - 1, 0),
                enable_gqa=True,
                seqused_k=counts,
                block_table=pages,
            )
            parts.append((out, lse.t().float()))  # varlen_attn returns (group, units)
        out, lse = parts[0]
        if not self.layout.is_complete:
            out, lse = torch.zeros_like(units), torch.full_like(units[..., 0], float("-inf"), dtype=torch.float32)
            for is_here, (its_out, its_lse) in zip(self._columns[layer_idx][IS_HERE].bool(), parts, strict=True):
                out = torch.where(is_here.view(-1, 1, 1), its_out, out)
                lse = torch.where(is_here.view(-1, 1), its_lse, lse)
        return PartialAttention(
            out.reshape(1, documents, -1, dim).transpose(1, 2), lse.reshape(1, documents, -1).transpose(1, 2)
        )
