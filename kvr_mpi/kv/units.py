"""A step of decoding: one token of each of several documents is written and attends, whatever their heads hold.

A unit is one KV head of a document. Three backends read the units of a layer behind `attend_units`: our kernel on
processors, paged flash attention on GPUs, and torch, document by document, for what neither takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvr_mpi.kv.arena import PAGE_ROWS, Extent, pages_for
from kvr_mpi.kv.attention import PartialAttention, takes_flash
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.varlen import attend_pages
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.model.unit_table import Unit, UnitTable


class PageTable:
    """The units of a layer that lie in one extent, on its device.

    Parameters
    ----------
    extent : Extent
    stores : sequence of HeadStore
        Of all documents, in any extents; those that keep tokens to come, or those that do not.
    """

    def __init__(self, extent: Extent, stores: Sequence[HeadStore]) -> None:
        self._extent, device = extent, extent.keys.device
        held = [(at, store) for at, store in enumerate(stores) if store.memory.extent is extent]
        self.appends, kv_heads = held[0][1].appends, stores[0].shape.num_kv_heads
        assert all(store.appends == self.appends for _, store in held), "a rank keeps tokens to come, or does not"
        units = [unit for at, store in held for unit in _paged(at, store, kv_heads)]
        documents, slots, begins, filled, pages = (list(each) for each in zip(*units, strict=True))
        most = max(map(len, pages))
        pages = [[*own, *own[:1] * (most - len(own))] for own in pages]  # of those beyond its own no row is read
        self._on_host = np.array(filled), np.array(documents)
        self.is_complete = slots == list(range(len(stores) * kv_heads))
        self._documents, self.slots, self._begins, self._filled = (
            torch.tensor(numbers, device=device) for numbers in (documents, slots, begins, filled)
        )
        self.pages = torch.tensor(pages, dtype=torch.int32, device=device)
        self._edges = torch.arange(len(units) + 1, dtype=torch.int32, device=device)
        self._counts = self._filled

    def write(self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Append a token of each slot (documents * kv_heads, dim) to its unit.

        Parameters
        ----------
        lengths : Tensor
            Tokens of each document before that one (documents,), int64 on the device.
        """
        if not self.appends:
            return
        self._counts = self._filled + lengths.index_select(0, self._documents)
        rows = self._begins + self._counts
        self._counts = self._counts + 1
        for place, tokens in ((self._extent.keys, keys), (self._extent.values, values)):
            place.index_copy_(0, rows, tokens if self.is_complete else tokens.index_select(0, self.slots))

    def attend(
        self, query: torch.Tensor, lengths: Sequence[int], params: AttentionParams, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from each slot (documents * kv_heads, group, head_dim); as `attend_pages`, of the units."""
        filled, documents = self._on_host
        longest = int((filled + self.appends * np.array(lengths)[documents]).max())
        keys, values = (each.view(-1, PAGE_ROWS, 1, each.shape[1]) for each in (self._extent.keys, self._extent.values))
        query = query if self.is_complete else query.index_select(0, self.slots)
        counts = self._counts.int()
        return attend_pages(query, keys, values, params, self.pages, counts, self._edges, longest, window)


def _paged(document: int, store: HeadStore, kv_heads: int) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Yield of each KV head of a document: the document, the slot, where its rows would begin if none were shared.

    Then the rows it has beside the document's tokens, and its pages, those that are shared first.
    """
    for run in store.runs:
        filled = store.shared_tokens + run.count - (store.origin if store.appends else 0)
        for head in range(run.heads):
            own = store.memory.first + run.row + head * run.keys.shape[1]
            parts = [(rows.row + (run.first + head) * rows.stride, rows.keys.shape[1]) for rows in store.shared]
            parts.append((own, run.keys.shape[1]))
            pages = [row // PAGE_ROWS + page for row, rows in parts for page in range(pages_for(rows))]
            yield document, document * kv_heads + run.first + head, own - store.shared_tokens, filled, pages


# A layer's units, as one of the backends reads them: by the kernel, or by a call for each extent.
Table = UnitTable | list[PageTable]


def unit_table(stores: Sequence[HeadStore]) -> Table:
    """Make the table of a layer of several documents."""
    extents = {id(store.memory.extent): store.memory.extent for store in stores if store.runs}
    tables = [PageTable(extent, stores) for extent in extents.values() if extent is not None]
    if tables and len(tables) == len(extents):
        return tables
    units = [unit for at, store in enumerate(stores) for unit in _units_of(at, store)]
    return UnitTable(len(stores), stores[0].shape.num_kv_heads, units)


def _units_of(document: int, store: HeadStore) -> Iterator[Unit]:
    """Yield of each KV head of a document its units: of rows that are shared, and of those of its own."""
    for run in store.runs:
        filled = run.count - (store.origin if store.appends else 0)
        for at, (keys, values) in enumerate(zip(run.keys.unbind(0), run.values.unbind(0), strict=True)):
            head = run.first + at
            for rows in store.shared:
                yield Unit(document, head, rows.keys[head], rows.values[head], rows.keys.shape[1], False, rows.first)
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
        Tokens of each document before that one, on the host and (documents,), int64, on the device.
    """
    if isinstance(table, list):
        by_slot = [tokens[0].transpose(0, 1).flatten(0, 1) for tokens in (keys, values)]
        for part in table:
            part.write(by_slot[0], by_slot[1], on_device)
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


def takes_pages(
    query: torch.Tensor, stores: Sequence[HeadStore], table: Table, params: AttentionParams, seen: Visibility
) -> bool:
    """Whether `attend_units` has calls for all documents at once, which are told of their lengths by the device."""
    return isinstance(table, list) and seen.chunk is None and takes_flash(query, stores[0].memory.values, params)


def attend_units(
    query: torch.Tensor,
    stores: Sequence[HeadStore],
    table: Table,
    lengths: Sequence[int],
    params: AttentionParams,
    seen: Visibility,
) -> PartialAttention:
    """Attend from one token of each of several documents to what its heads hold.

    Parameters
    ----------
    query : Tensor
        (1, heads, documents, head_dim).
    stores : sequence of HeadStore
        Of each document.
    table : UnitTable or list of PageTable
        Made of them (`unit_table`).
    lengths : sequence of int
        Tokens of each document, that one included.
    seen : Visibility
        Which rows a token sees, where heads hold all tokens.

    Returns
    -------
    PartialAttention
        Of (1, heads, documents, value_dim); of heads that are not held the log-sum-exp is minus infinity.
    """
    if isinstance(table, list) and takes_pages(query, stores, table, params, seen):
        return _attend_paged(query, table, stores[0].shape.num_kv_heads, lengths, params, seen.window)
    firsts = None if seen.size is None else [seen.first_key(length - 1) for length in lengths]
    kernel = params.kernel
    if kernel is not None and isinstance(table, UnitTable) and params.is_plain and kernel.takes_units(query, table):
        from_rows = None if firsts is None else np.array(firsts)
        out, lse = kernel.attend_units(query, table, np.array(lengths), params.scale, from_rows)
        return PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0))
    parts = [
        store.attend(query.narrow(2, at, 1), length, params, 0 if firsts is None else firsts[at])
        for at, (store, length) in enumerate(zip(stores, lengths, strict=True))
    ]
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def _attend_paged(
    query: torch.Tensor,
    tables: Sequence[PageTable],
    kv_heads: int,
    lengths: Sequence[int],
    params: AttentionParams,
    window: int | None,
) -> PartialAttention:
    """Attend with a call for each extent; slots are documents and, of each, KV heads."""
    documents, dim = query.shape[2:]
    slots = query[0].view(kv_heads, -1, documents, dim).permute(2, 0, 1, 3).flatten(0, 1)
    parts = [table.attend(slots, lengths, params, window) for table in tables]
    (out, lse), *others = parts
    if others or not tables[0].is_complete:
        out, lse = torch.zeros_like(slots), torch.full_like(slots[..., 0], float("-inf"), dtype=torch.float32)
        for table, (its_out, its_lse) in zip(tables, parts, strict=True):
            out.index_copy_(0, table.slots, its_out)
            lse.index_copy_(0, table.slots, its_lse)
    return PartialAttention(
        out.reshape(1, documents, -1, dim).transpose(1, 2), lse.reshape(1, documents, -1).transpose(1, 2)
    )
