"""One decode step: append one token to each of several documents, and attend from it to the rows each head holds.

A unit is one KV head of a document. `attend_units` has three backends for the units of a layer: our kernel on CPUs,
paged flash attention on GPUs, and torch, document by document, if neither supports the layer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvr_mpi.kv.arena import PAGE_ROWS, Extent
from kvr_mpi.kv.attention import PartialAttention, takes_flash
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.varlen import attend_pages
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.model.unit_table import Unit, UnitTable

# Columns of a page table, for each unit: the row at which it would begin if its shared rows lay before its own; its
# rows, minus the document's tokens if it appends; and whether it lies in this extent.
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
        extents = [sorted({store.memory.extent for store in stores if store.runs}, key=id) for stores in layers]
        held = [store for stores in layers for store in stores if store.runs]
        if not held or any(None in each for each in extents):
            return None
        appends = held[0].appends
        assert all(store.appends == appends for store in held), "a rank appends to all stores or to none"
        kv_heads = tuple(stores[0].shape.num_kv_heads for stores in layers)
        heads = [sum(len(store.heads) for store in stores) for stores in layers]
        whole = all(count == each * len(layers[0]) for count, each in zip(heads, kv_heads, strict=True))
        return cls(
            tuple(tuple(weakref.ref(extent) for extent in each if extent is not None) for each in extents),
            kv_heads,
            len(layers[0]),
            max(pages.shape[1] for store in held for _, _, _, pages in store.paged),
            appends,
            whole and all(len(each) == 1 for each in extents),
        )

    @property
    def shapes(self) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """Of each layer: columns (`COLUMNS`, extents, units), and pages (extents, units, width)."""
        sizes = [(len(one), self.slots * heads) for one, heads in zip(self.extents, self.kv_heads, strict=True)]
        return [((COLUMNS, extents, units), (extents, units, self.width)) for extents, units in sizes]

    def numbers(self, layers: Sequence[Sequence[HeadStore]]) -> Numbers:
        """Return the tables of all layers as one array: for each layer its columns, then its pages.

        Units that do not lie in an extent read and write its spare page.
        """
        tables = list[Numbers]()
        for shapes, extents, kv_heads, stores in zip(self.shapes, self.extents, self.kv_heads, layers, strict=True):
            columns, all_pages = (np.zeros(shape, dtype=np.int32) for shape in shapes)
            alive = [one for one in (extent() for extent in extents) if one is not None]
            for at, extent in enumerate(alive):
                columns[BEGINS, at], all_pages[at] = extent.pages * PAGE_ROWS, extent.pages
            for document, store in enumerate(stores):
                at = 0 if store.memory.extent is None else alive.index(store.memory.extent)
                for first, begins, filled, pages in store.paged:
                    units = slice(document * kv_heads + first, document * kv_heads + first + len(begins))
                    for column, number in ((BEGINS, begins), (FILLED, filled), (IS_HERE, 1)):
                        columns[column, at, units] = number
                    all_pages[at, units] = pages[:, :1]  # padding, which is never read
                    all_pages[at, units, : pages.shape[1]] = pages
            tables += columns.ravel(), all_pages.ravel()
        return np.concatenate(tables)


class PageTables:
    """The page tables of all layers, on their device.

    Attributes
    ----------
    of_layers : list of PageTable
    """

    def __init__(self, layout: PageLayout, device: torch.device) -> None:
        self.layout, self.of_layers, at = layout, list[PageTable](), 0
        self._numbers = torch.zeros(
            sum(math.prod(shape) for pair in layout.shapes for shape in pair), dtype=torch.int32, device=device
        )
        for layer, pair in enumerate(layout.shapes):
            columns, pages = map(math.prod, pair)
            parts = self._numbers[at : at + columns], self._numbers[at + columns : at + columns + pages]
            self.of_layers.append(PageTable(layout, layer, parts[0].view(pair[0]), parts[1].view(pair[1])))
            at += columns + pages

    def fill(self, layers: Sequence[Sequence[HeadStore]]) -> None:
        """Replace the documents by others of the same layout."""
        self._numbers.copy_(torch.from_numpy(self.layout.numbers(layers)))


class PageTable:
    """The page table of one layer.

    Parameters
    ----------
    columns, pages : Tensor
        Of `PageLayout.shapes`, on the device.
    """

    def __init__(self, layout: PageLayout, layer: int, columns: torch.Tensor, pages: torch.Tensor) -> None:
        self._layout, self._layer = layout, layer
        self._begins, self._filled, self._is_here, self.pages = columns[0], columns[1], columns[2], pages
        units, device = pages.shape[1], pages.device
        self._documents = torch.arange(units, device=device) // layout.kv_heads[layer]
        self._edges = torch.arange(units + 1, dtype=torch.int32, device=device)
        self._counts = self._filled

    @property
    def _extents(self) -> list[Extent]:
        return [one for one in (extent() for extent in self._layout.extents[self._layer]) if one is not None]

    def write(self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Append one token per document, keys and values (1, kv_heads, documents, dim).

        Parameters
        ----------
        lengths : Tensor
            Tokens of each document before the new one (documents,), int64 on the device.
        """
        if not self._layout.appends:
            return
        counts = self._filled + self._is_here * lengths.index_select(0, self._documents)
        rows = self._begins + counts
        self._counts = (counts + 1).int()
        by_unit = [tokens[0].transpose(0, 1).flatten(0, 1) for tokens in (keys, values)]
        for extent, places in zip(self._extents, rows, strict=True):
            extent.keys.index_copy_(0, places, by_unit[0])
            extent.values.index_copy_(0, places, by_unit[1])

    def attend(self, query: torch.Tensor, params: AttentionParams, window: int | None) -> PartialAttention:
        """Attend from one token per document (1, heads, documents, head_dim), with one call per extent."""
        documents, dim = query.shape[2:]
        units = query[0].view(self._layout.kv_heads[self._layer], -1, documents, dim).permute(2, 0, 1, 3).flatten(0, 1)
        longest, parts = self._layout.width * PAGE_ROWS, []
        for extent, pages, counts in zip(self._extents, self.pages, self._counts, strict=True):
            keys, values = (each.view(-1, PAGE_ROWS, 1, each.shape[1]) for each in (extent.keys, extent.values))
            parts.append(attend_pages(units, keys, values, params, pages, counts, self._edges, longest, window))
        out, lse = parts[0]
        if not self._layout.is_complete:
            out, lse = torch.zeros_like(units), torch.full_like(units[..., 0], float("-inf"), dtype=torch.float32)
            for is_here, (its_out, its_lse) in zip(self._is_here.bool(), parts, strict=True):
                out = torch.where(is_here.view(-1, 1, 1), its_out, out)
                lse = torch.where(is_here.view(-1, 1), its_lse, lse)
        return PartialAttention(
            out.reshape(1, documents, -1, dim).transpose(1, 2), lse.reshape(1, documents, -1).transpose(1, 2)
        )


# A layer's units in the format of a backend: our kernel, or paged attention.
Table = UnitTable | PageTable
Numbers = npt.NDArray[np.int32]


def unit_tables(layers: Sequence[Sequence[HeadStore]]) -> list[Table]:
    """Make the table of each layer from the documents' stores."""
    layout = PageLayout.of(layers)
    if layout is not None:
        pages = PageTables(layout, layers[0][0].memory.keys.device)
        pages.fill(layers)
        return list(pages.of_layers)
    return [
        UnitTable(
            len(stores),
            stores[0].shape.num_kv_heads,
            [unit for at, store in enumerate(stores) for unit in _units_of(at, store)],
        )
        for stores in layers
    ]


def _units_of(document: int, store: HeadStore) -> Iterator[Unit]:
    """Yield the units of each KV head of a document: shared rows, and its own."""
    for run in store.runs:
        filled = run.count - (store.origin if store.appends else 0)
        for at, (keys, values) in enumerate(zip(run.keys.unbind(0), run.values.unbind(0), strict=True)):
            head = run.head + at
            for rows in store.shared:
                yield Unit(document, head, rows.keys[head], rows.values[head], rows.count, False, rows.first)
            yield Unit(document, head, keys, values, filled, store.appends, store.shared_tokens)


def write_token(
    stores: Sequence[HeadStore],
    table: Table,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: Sequence[int],
    on_device: torch.Tensor,
) -> None:
    """Append one token to each of several documents.

    Parameters
    ----------
    keys, values : Tensor
        (1, kv_heads, documents, dim).
    lengths, on_device : sequence of int, Tensor
        Tokens of each document before the new one, on the host and (documents,), int64, on the device.
    """
    if isinstance(table, PageTable):
        table.write(keys, values, on_device)
        return
    places, tokens = list[torch.Tensor](), list[torch.Tensor]()
    rows = zip(stores, lengths, keys[0].unbind(1), values[0].unbind(1), strict=True)
    for store, length, token_keys, token_values in rows:
        if not store.appends:
            continue
        appended = length - store.origin
        if store.lines is None:
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


def takes_pages(query: torch.Tensor, value_dim: int, params: AttentionParams, seen: Visibility) -> bool:
    """Whether a layer can use paged attention for such a query and visibility."""
    return seen.chunk is None and takes_flash(query, query.new_empty(0, value_dim), params)


def attend_units(
    query: torch.Tensor,
    stores: Sequence[HeadStore],
    table: Table,
    lengths: Sequence[int],
    params: AttentionParams,
    seen: Visibility,
) -> PartialAttention:
    """Attend from one token of each of several documents to the rows that its heads hold.

    Parameters
    ----------
    query : Tensor
        (1, heads, documents, head_dim).
    stores : sequence of HeadStore
        Of each document.
    table : UnitTable or PageTable
        Made of them (`unit_tables`).
    lengths : sequence of int
        Tokens of each document, including the query's.
    seen : Visibility
        Which rows a token sees, if heads hold all tokens.

    Returns
    -------
    PartialAttention
        Of (1, heads, documents, value_dim); heads without rows have a log-sum-exp of -inf.
    """
    if isinstance(table, PageTable) and takes_pages(query, stores[0].shape.value_dim, params, seen):
        return table.attend(query, params, seen.window)
    firsts = None if seen.size is None else [seen.first_key(length - 1) for length in lengths]
    kernel = params.kernel
    if kernel is not None and isinstance(table, UnitTable) and params.is_plain and kernel.takes_units(query, table):
        from_rows = None if firsts is None else np.array(firsts)
        out, lse = kernel.library.attend_units(query, table, np.array(lengths), params.scale, from_rows)
        return PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0))
    parts = [
        store.attend(query.narrow(2, at, 1), length, params, 0 if firsts is None else firsts[at])
        for at, (store, length) in enumerate(zip(stores, lengths, strict=True))
    ]
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
