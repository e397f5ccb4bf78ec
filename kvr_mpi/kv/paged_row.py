"""One token each of several documents whose keys and values lie in pages: one attention call a layer for each extent.

Where the documents are and how long they are lies on the device, in tensors that stay: in a layer nothing is made on
the host. So a step can be captured (`decode.graphs`), which is launched again on the same memory with the same numbers.
Its rows are padded: those without a document write to a scrap page of their extent, which no document has, and attend
to that alone.
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
from kvr_mpi.kv.paged import PAGE_TOKENS, Extent, PageRun
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.kv.varlen import PageTable, attend_pages
from kvr_mpi.model import LayerShape, ModelShape
from kvr_mpi.model.attention_hook import AttentionParams


@dataclass(frozen=True, slots=True)
class PartSize:
    """Room for the documents of one extent.

    extent : weak: a size that is kept does not keep the extent's memory.
    rows : documents at most; fewer if the extent has a scrap page.
    pages : of the longest at most.
    """

    extent: weakref.ref[Extent]
    rows: int
    pages: int


class _Part:
    """The rows of one extent, of all rows those from `first` on."""

    def __init__(self, size: PartSize, first: int, counts: torch.Tensor) -> None:
        self._extent = size.extent
        self.rows = slice(first, first + size.rows)
        self.table = PageTable(
            torch.zeros(size.rows, size.pages, dtype=torch.int32, device=counts.device),
            counts[self.rows],
            torch.arange(size.rows + 1, dtype=torch.int32, device=counts.device),
        )
        self.longest = size.pages * PAGE_TOKENS  # keys that a document has at most
        self.documents: list[int] = []  # numbers of those that have its first rows

    @property
    def extent(self) -> Extent:
        """Where its pages are; whoever has documents in it holds it."""
        extent = self._extent()
        assert extent is not None, "the memory of a step that is run is there"
        return extent

    def lay_out(self, runs: Sequence[PageRun]) -> list[int]:
        """Note where documents lie; tell the first row of keys of every row's."""
        count, most = self.table.pages.shape
        scrap = self.extent.scrap
        assert scrap is not None or len(runs) == count
        other = scrap or 0  # beyond a document's own pages any will do: no key of them is used
        rows = [[run.first + page if page < run.pages else other for page in range(most)] for run in runs]
        rows += [[other] * most] * (count - len(runs))
        self.table.pages.copy_(torch.tensor(rows, dtype=torch.int32))
        return [row[0] * PAGE_TOKENS for row in rows]


class PagedRow:
    """Rows for documents of some extents.

    Parameters
    ----------
    sizes : sequence of PartSize
        Their rows follow each other.
    layers : sequence of LayerShape
        Of the model.

    Attributes
    ----------
    rows : int
        How many there are.
    places : list of int
        Rows of the documents, as they were given.
    index : Tensor
        The same, on the device (documents,), int64.
    """

    def __init__(self, sizes: Sequence[PartSize], layers: Sequence[LayerShape], device: torch.device) -> None:
        kept = [layer_idx for layer_idx, layer in enumerate(layers) if layer.elements]
        self._kept = {layer_idx: at for at, layer_idx in enumerate(kept)}
        self.rows = sum(size.rows for size in sizes)
        self._begins = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self._slots = torch.zeros_like(self._begins)  # rows of the extents that the tokens are written to
        self._counts = torch.zeros(self.rows, dtype=torch.int32, device=device)
        self._parts: list[_Part] = []
        for size in sizes:
            self._parts.append(_Part(size, self._parts[-1].rows.stop if self._parts else 0, self._counts))
        self._laid_out: list[tuple[int, int, int]] = []
        self._order: torch.Tensor | None = None  # which of the tokens each row is of, if it is another
        self.places: list[int] = []
        self.index = torch.zeros(0, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, runs: Sequence[PageRun], layers: Sequence[LayerShape], device: torch.device) -> PagedRow:
        """Make rows for just these documents, whose tokens come in the order of the documents."""
        groups = by_extent(runs)
        sizes = [
            PartSize(weakref.ref(group[0].extent), len(group), max(run.pages for run in group)) for group in groups
        ]
        row = cls(sizes, layers, device)
        row.lay_out(runs)
        if len(groups) > 1:
            row._order = row.index.argsort()
        return row

    def lay_out(self, runs: Sequence[PageRun]) -> None:
        """Give every document a row of its extent's part; copies to the device if some have joined or left."""
        extents = [part.extent for part in self._parts]
        found = [(extents.index(run.extent), run.first, run.pages) for run in runs]
        if found == self._laid_out:
            return
        self._laid_out = found
        self.places, begins = [0] * len(runs), list[int]()
        for number, part in enumerate(self._parts):
            part.documents = [at for at, (own, _, _) in enumerate(found) if own == number]
            for place, at in enumerate(part.documents, start=part.rows.start):
                self.places[at] = place
            begins += part.lay_out([runs[at] for at in part.documents])
        self._begins.copy_(torch.tensor(begins))
        self.index = torch.tensor(self.places, device=self.index.device)

    def begin(self, lengths: torch.Tensor, known: Sequence[int] | None = None) -> None:
        """Note how long the documents are before the next token of each.

        Parameters
        ----------
        lengths : Tensor
            For each token (tokens,), int64 on the device.
        known : sequence of int, optional
            The same. Otherwise attention is told the most that fit, as it has to be if the step is captured.
        """
        lengths = self._in_rows(lengths)
        torch.add(self._begins, lengths, out=self._slots)
        self._counts.copy_(lengths).add_(1)
        if known is not None:
            for part in self._parts:
                part.longest = 1 + max(known[at] for at in part.documents)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in the tokens (1, kv_heads, tokens, head_dim)."""
        own = [self._in_rows(tokens[0].transpose(0, 1)) for tokens in (keys, values)]
        for part in self._parts:
            pages = part.extent.pages_of(self._kept[layer_idx])
            for place, tokens in zip(pages, own, strict=True):
                place.view(-1, *place.shape[2:]).index_copy_(0, self._slots[part.rows], tokens[part.rows])

    def attend(
        self, layer_idx: int, query: torch.Tensor, params: AttentionParams, window: int | None
    ) -> PartialAttention:
        """Attend from each token (1, heads, tokens, head_dim) to all, or the last `window`, keys of its document.

        On a GPU, where `attention.takes_flash`.
        """
        parts, tokens = [], self._in_rows(query[0].transpose(0, 1))
        for part in self._parts:
            keys, values = part.extent.pages_of(self._kept[layer_idx])
            parts.append(attend_pages(tokens[part.rows], keys, values, params, part.table, part.longest, window))
        if len(parts) == 1:
            return parts[0]
        out, lse = torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2)
        if self._order is None:
            return PartialAttention(out, lse)
        return PartialAttention(out.index_select(2, self.index), lse.index_select(2, self.index))

    def _in_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bring what there is of each token (tokens, ...) into the order of the rows."""
        return tokens if self._order is None else tokens.index_select(0, self._order)


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
        return self.cache.longest


class PaddedCache(RowCache):
    """Rows of fixed sizes, seen by the model as one cache, whichever documents have them.

    Parameters
    ----------
    sizes : sequence of PartSize
        Of extents with scrap pages.

    Attributes
    ----------
    tokens, lengths : Tensor
        Of each row, the token to run and how many are before it (1, rows), int64.
    """

    def __init__(self, sizes: Sequence[PartSize], shape: ModelShape, device: torch.device) -> None:
        self.row = PagedRow(sizes, shape.layers, device)
        self.longest = PAGE_TOKENS * max(size.pages for size in sizes)
        self._first_position = shape.first_position
        self._inputs = torch.zeros(2, self.row.rows, dtype=torch.int64, device=device)
        self.tokens, self.lengths = self._inputs[:1], self._inputs[1:]
        self._positions = torch.zeros_like(self.lengths)
        super().__init__([PaddedLayer(self, idx, layer) for idx, layer in enumerate(shape.layers)])

    def fill(self, runs: Sequence[PageRun], lengths: Sequence[int], tokens: Sequence[int]) -> None:
        """Note which documents have rows now, how long they are, and the next token of each.

        The only part of a step that copies to the device: numbers of all rows at once, and where documents lie when
        some have joined or left.
        """
        self.row.lay_out(runs)
        rows = [[0] * self.row.rows, [0] * self.row.rows]
        for place, token, length in zip(self.row.places, tokens, lengths, strict=True):
            rows[0][place], rows[1][place] = token, length
        self._inputs.copy_(torch.tensor(rows))

    def begin(self) -> None:
        """Derive what the layers need from lengths; the first part of what is captured."""
        self.current = None
        torch.add(self.lengths, self._first_position, out=self._positions)
        self.row.begin(self.lengths[0])

    @property
    def prefilling(self) -> bool:
        """Never: answers go on."""
        return False

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row's token (1, rows)."""
        return self._positions

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of nothing that depends on lengths: models whose rotary embedding does are not run so (`decode.graphs`)."""
        return [(1, 1)] * tokens


def by_extent(runs: Sequence[PageRun]) -> list[list[PageRun]]:
    """Divide documents by their extents, in one order of these, whichever document was first."""
    groups: dict[int, list[PageRun]] = {}
    for run in runs:
        groups.setdefault(id(run.extent), []).append(run)
    return [group for _, group in sorted(groups.items())]


def runs_of(documents: Sequence[SliceCache]) -> list[PageRun] | None:
    """Find where documents lie; None if one is not in pages beside a scrap page."""
    runs = [each.run for each in documents if each.run is not None and each.run.extent.scrap is not None]
    return runs if len(runs) == len(documents) else None


def append_token(document: SliceCache) -> None:
    """Count a token that was written to all of a document's layers."""
    for layer in document.layers:
        layer.length += 1
