"""One token each of several documents whose keys and values lie in pages: one attention call a layer for all of them.

What the calls are told of the documents lies on the device: it is copied there when documents join or leave, and counts
itself on from step to step. In a layer nothing is made on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.paged import PAGE_TOKENS, Extent, PageRun, pages_for
from kvr_mpi.kv.varlen import PageTable, attend_pages
from kvr_mpi.model.attention_hook import AttentionParams


class _Group:
    """The documents of a row that share an extent."""

    def __init__(self, extent: Extent, places: Sequence[int], runs: Sequence[PageRun], device: torch.device) -> None:
        self.extent, self.places = extent, list(places)
        firsts = [runs[at].first for at in places]
        most = max(pages_for(len(runs[at].buffers[0])) for at in places)
        last = extent.pages - 1
        # Beyond a document's own pages any will do: no key of them is used.
        rows = [[min(first + page, last) for page in range(most)] for first in firsts]
        count = len(self.places)
        self.table = PageTable(
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
            torch.arange(count + 1, dtype=torch.int32, device=device),
        )
        self.begins = torch.tensor(firsts, dtype=torch.int64, device=device) * PAGE_TOKENS
        self.slots = torch.zeros_like(self.begins)  # rows of the extent that the tokens are written to
        self.index = torch.tensor(self.places, dtype=torch.int64, device=device)


class PagedRow:
    """The documents of a packed row.

    Parameters
    ----------
    runs : sequence of PageRun
        Of each document.
    kept : sequence of int
        Numbers of the layers that keep keys and values.
    """

    def __init__(self, runs: Sequence[PageRun], kept: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._kept = {layer_idx: at for at, layer_idx in enumerate(kept)}
        places: dict[int, list[int]] = {}
        for at, run in enumerate(runs):
            places.setdefault(id(run.extent), []).append(at)
        self._groups = [_Group(runs[some[0]].extent, some, runs, device) for some in places.values()]
        order = [at for group in self._groups for at in group.places]
        self._back = torch.tensor(order, dtype=torch.int64, device=device).argsort()
        self._lengths: list[int] = []

    def take_up(self, lengths: Sequence[int]) -> None:
        """Note how long the documents are before the next token of each."""
        if list(lengths) == self._lengths:
            return
        if list(lengths) == [length + 1 for length in self._lengths]:
            for group in self._groups:
                group.slots.add_(1)
                group.table.counts.add_(1)
        else:
            before = torch.tensor(list(lengths), dtype=torch.int64, device=self._device)
            for group in self._groups:
                own = before.index_select(0, group.index)
                group.slots.copy_(group.begins + own)
                group.table.counts.copy_(own + 1)
        self._lengths = list(lengths)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in one token of each (1, kv_heads, documents, head_dim)."""
        for group in self._groups:
            pages = group.extent.pages_of(self._kept[layer_idx])
            for place, tokens in zip(pages, (keys, values), strict=True):
                rows = place.view(-1, *place.shape[2:])
                rows.index_copy_(0, group.slots, self._of(group, tokens[0].transpose(0, 1)))

    def attend(
        self, layer_idx: int, query: torch.Tensor, params: AttentionParams, window: int | None
    ) -> PartialAttention:
        """Attend from one token of each (1, heads, documents, head_dim) to all, or the last `window`, keys of its own.

        On a GPU, where `attention.takes_flash`.
        """
        parts, tokens = [], query[0].transpose(0, 1)
        for group in self._groups:
            keys, values = group.extent.pages_of(self._kept[layer_idx])
            longest = 1 + max(self._lengths[at] for at in group.places)
            parts.append(attend_pages(self._of(group, tokens), keys, values, params, group.table, longest, window))
        if len(parts) == 1:
            return parts[0]
        out, lse = torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2)
        return PartialAttention(out.index_select(2, self._back), lse.index_select(2, self._back))

    def _of(self, group: _Group, tokens: torch.Tensor) -> torch.Tensor:
        """Choose the documents of a group (documents, heads, dim)."""
        return tokens if len(self._groups) == 1 else tokens.index_select(0, group.index)
