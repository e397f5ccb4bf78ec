"""A token each of documents in pages, padded to a fixed number, in tensors that stay where they are.

A captured step (`decode.graphs`) is launched again on the same memory with the same numbers. So all that changes from
step to step lies in tensors made once, filled before each step: tokens, lengths, and where each document's pages are.
Rows without a document write to a scrap page of their extent, which no document has, and attend to that alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, takes_flash
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.paged import PAGE_TOKENS, Extent, PageRun, pages_for
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.kv.varlen import PageTable, attend_pages
from kvr_mpi.model import ModelShape
from kvr_mpi.model.attention_hook import AttentionParams


@dataclass(frozen=True, slots=True)
class PartSize:
    """Room for the documents of one extent, which has a scrap page.

    extent : weak: a size that is kept does not keep the extent's memory.
    rows : documents at most.
    pages : of the longest at most.
    """

    extent: weakref.ref[Extent]
    rows: int
    pages: int


class _Part:
    """The rows of one extent, of all rows those from `first` on."""

    def __init__(self, size: PartSize, first: int, device: torch.device) -> None:
        self._extent, self.pages = size.extent, size.pages
        scrap = self.extent.scrap
        assert scrap is not None
        self.scrap = scrap
        self.rows = slice(first, first + size.rows)
        self.table = torch.full((size.rows, size.pages), scrap, dtype=torch.int32, device=device)
        self.edges = torch.arange(size.rows + 1, dtype=torch.int32, device=device)

    @property
    def extent(self) -> Extent:
        """Where its pages are; whoever has documents in it holds it."""
        extent = self._extent()
        assert extent is not None, "the memory of a step that is run is there"
        return extent

    def fill(self, runs: Sequence[tuple[int, int]]) -> list[int]:
        """Note where documents lie, by first page and pages of each; tell the first row of keys of every row's."""
        empty = self.rows.stop - self.rows.start - len(runs)
        rows = [
            [first + page if page < pages else self.scrap for page in range(self.pages)] for first, pages in runs
        ] + [[self.scrap] * self.pages] * empty
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))
        return [row[0] * PAGE_TOKENS for row in rows]


class PaddedRow:
    """Rows for documents of some extents.

    Parameters
    ----------
    sizes : sequence of PartSize
        Their rows follow each other.
    kept : sequence of int
        Numbers of the layers that keep keys and values.
    first_position : int
        Position of a document's first token.

    Attributes
    ----------
    tokens, lengths : Tensor
        Of each row, the token to run and how many are before it (1, rows), int64.
    """

    def __init__(
        self, sizes: Sequence[PartSize], kept: Sequence[int], first_position: int, device: torch.device
    ) -> None:
        self._kept = {layer_idx: at for at, layer_idx in enumerate(kept)}
        self._first_position = first_position
        self._parts: list[_Part] = []
        self.rows = 0
        self.longest = PAGE_TOKENS * max(size.pages for size in sizes)
        for size in sizes:
            self._parts.append(_Part(size, self.rows, device))
            self.rows += size.rows
        self._inputs = torch.zeros(2, self.rows, dtype=torch.int64, device=device)
        self.tokens, self.lengths = self._inputs[:1], self._inputs[1:]
        self.positions = torch.zeros_like(self.lengths)
        self._begins = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self._slots = torch.zeros_like(self._begins)  # rows of the extents that the tokens are written to
        self._counts = torch.zeros(self.rows, dtype=torch.int32, device=device)
        self._runs: list[tuple[int, int, int]] = []
        self._places: list[int] = []
        self.places = torch.zeros(0, dtype=torch.int64, device=device)  # rows of the documents, as they were given

    def fill(self, runs: Sequence[PageRun], lengths: Sequence[int], tokens: Sequence[int]) -> None:
        """Note which documents have rows now, how long they are, and the next token of each.

        The only part of a step that copies to the device: numbers of all rows at once, and where documents lie when
        some have joined or left.
        """
        extents = [part.extent for part in self._parts]
        found = [(extents.index(run.extent), run.first, pages_for(len(run.buffers[0]))) for run in runs]
        if found != self._runs:
            self._runs = found
            self._lay_out()
        rows = [[0] * self.rows, [0] * self.rows]
        for place, token, length in zip(self._places, tokens, lengths, strict=True):
            rows[0][place], rows[1][place] = token, length
        self._inputs.copy_(torch.tensor(rows))

    def _lay_out(self) -> None:
        """Give every document a row of its extent's part."""
        begins: list[int] = []
        self._places = [0] * len(self._runs)
        for number, part in enumerate(self._parts):
            mine = [at for at, run in enumerate(self._runs) if run[0] == number]
            for row, at in enumerate(mine, start=part.rows.start):
                self._places[at] = row
            begins += part.fill([self._runs[at][1:] for at in mine])
        self._begins.copy_(torch.tensor(begins))
        self.places = torch.tensor(self._places, device=self._begins.device)

    def begin(self) -> None:
        """Derive what the layers need from lengths; the first part of what is captured."""
        torch.add(self.lengths, self._first_position, out=self.positions)
        torch.add(self._begins, self.lengths[0], out=self._slots)
        self._counts.copy_(self.lengths[0]).add_(1)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in one token of each row (1, kv_heads, rows, head_dim)."""
        for part in self._parts:
            pages = part.extent.pages_of(self._kept[layer_idx])
            for place, tokens in zip(pages, (keys, values), strict=True):
                rows = place.view(-1, *place.shape[2:])
                rows.index_copy_(0, self._slots[part.rows], tokens[0, :, part.rows].transpose(0, 1))

    def attend(
        self, layer_idx: int, query: torch.Tensor, params: AttentionParams, window: int | None
    ) -> PartialAttention:
        """Attend from one token of each row (1, heads, rows, head_dim) to all, or the last `window`, keys of its own.

        However long the documents are, attention is told the most that fit, and by `PageTable.counts` how many.
        """
        parts, tokens = [], query[0].transpose(0, 1)
        for part in self._parts:
            keys, values = part.extent.pages_of(self._kept[layer_idx])
            table = PageTable(part.table, self._counts[part.rows], part.edges)
            parts.append(attend_pages(tokens[part.rows], keys, values, params, table, part.pages * PAGE_TOKENS, window))
        if len(parts) == 1:
            return parts[0]
        return PartialAttention(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


class PaddedLayer(RowLayer):
    """One layer of a padded row."""

    cache: PaddedCache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each row's token (1, kv_heads, rows, head_dim) to its page."""
        self.cache.enter(self)
        self.cache.row.write(self.layer_idx, key_states, value_states)
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each row's token to its document's.

        Raises
        ------
        ModelError
            If no one call reads all documents of such a layer.
        """
        self.attended, seen = True, self.shape.visibility
        if seen.chunk is not None or not takes_flash(query, values, params):
            raise ModelError(f"layer {self.layer_idx} attends to documents one by one")
        part = self.cache.row.attend(self.layer_idx, query, params, seen.window)
        return part.finish(params).to(query.dtype)

    def get_max_length(self) -> int:
        """Most tokens a document of these rows has."""
        return self.cache.row.longest


class PaddedCache(RowCache):
    """The documents of a padded row, seen by the model as one cache, whichever they are."""

    def __init__(self, row: PaddedRow, shape: ModelShape) -> None:
        self.row = row
        super().__init__([PaddedLayer(self, idx, layer) for idx, layer in enumerate(shape.layers)])

    def begin(self) -> None:
        """Begin a step."""
        self.current = None
        self.row.begin()

    @property
    def prefilling(self) -> bool:
        """Never: answers go on."""
        return False

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row's token (1, rows)."""
        return self.row.positions

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of nothing that depends on lengths: models whose rotary embedding does are not run so (`decode.graphs`)."""
        return [(1, 1)] * tokens


def runs_of(documents: Sequence[SliceCache]) -> list[PageRun] | None:
    """Find where documents lie; None if one is not in pages beside a scrap page."""
    runs = [each.run for each in documents if each.run is not None and each.run.extent.scrap is not None]
    return runs if len(runs) == len(documents) else None


def append_token(document: SliceCache) -> None:
    """Count a token that was written to all of a document's layers."""
    for layer in document.layers:
        layer.length += 1
