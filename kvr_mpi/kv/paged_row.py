"""One token each of several documents whose keys and values lie in pages: one attention call a layer for each extent.

Where the documents are and how long they are lies on the device, in tensors that stay: in a layer nothing is made on
the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.paged import PAGE_TOKENS, Extent, PageRun
from kvr_mpi.kv.varlen import PageTable, attend_pages
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams


@dataclass(frozen=True, slots=True)
class PartSize:
    """Room for the documents of one extent.

    extent : weak: a size that is kept does not keep the extent's memory.
    rows : documents.
    pages : of the longest.
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
        most = self.table.pages.shape[1]
        # Beyond a document's own pages any will do: no key of them is used.
        rows = [[run.first + page if page < run.pages else 0 for page in range(most)] for run in runs]
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

    def begin(self, lengths: torch.Tensor, known: Sequence[int]) -> None:
        """Note how long the documents are before the next token of each.

        Parameters
        ----------
        lengths : Tensor
            For each token (tokens,), int64 on the device.
        known : sequence of int
            The same.
        """
        lengths = self._in_rows(lengths)
        torch.add(self._begins, lengths, out=self._slots)
        self._counts.copy_(lengths).add_(1)
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


def by_extent(runs: Sequence[PageRun]) -> list[list[PageRun]]:
    """Divide documents by their extents, in one order of these, whichever document was first."""
    groups: dict[int, list[PageRun]] = {}
    for run in runs:
        groups.setdefault(id(run.extent), []).append(run)
    return [group for _, group in sorted(groups.items())]
