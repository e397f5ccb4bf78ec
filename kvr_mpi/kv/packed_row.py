"""Several documents in one row of tokens: the model reads its weights once for all of them.

A packed row (1, tokens) holds some tokens of each document, one document after the other, each with its own
positions. A `PackedCache` takes every layer's keys and values apart again and gives each document's to its own
`SliceCache`, which attends as if it were alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvr_mpi.kv.attention import PartialAttention, attend, attend_held, takes_flash
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.layer import SliceLayer
from kvr_mpi.kv.paged_row import PagedRow
from kvr_mpi.kv.ragged import RaggedLayout, attend_row, write_row
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.kv.varlen import attend_documents
from kvr_mpi.model.attention_hook import AttentionParams, HeldHead

Merge = Callable[[PartialAttention], PartialAttention]


class PackedLayer(RowLayer):
    """One layer of all documents of a packed row."""

    cache: PackedCache

    def __init__(self, cache: PackedCache, layer_idx: int, documents: Sequence[SliceLayer]) -> None:
        super().__init__(cache, layer_idx, documents[0].shape)
        self.documents = documents
        # Views of whole buffers, (kv_heads, capacity, head_dim): narrowing these is all there is to do for a token.
        # None where heads keep tokens of their own.
        self._whole = [
            None if layer.is_ragged else layer.rows(0, layer.cache.capacity) for layer in documents if cache.decodes
        ]
        # Of each document the rows of each KV head, (capacity, head_dim).
        pairs = [pair for pair in self._whole if pair is not None]
        heads = [list(zip(keys[0].unbind(0), values[0].unbind(0), strict=True)) for keys, values in pairs]
        self._heads = heads if heads and len(heads) == len(documents) else None
        layouts = [layer.layout for layer in documents if isinstance(layer.layout, RaggedLayout)]
        self._ragged = layouts if len(layouts) == len(documents) else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each document's tokens of (1, kv_heads, tokens, head_dim) to its own buffer."""
        cache = self.cache
        cache.enter(self)
        if not cache.decodes:
            for layer, (first, last) in zip(self.documents, cache.bounds, strict=True):
                layer.update(key_states[:, :, first:last], value_states[:, :, first:last])
            return key_states, value_states
        if self._ragged is not None or cache.paged is not None:
            if self._ragged is not None:
                write_row(self._ragged, key_states, value_states, cache.lengths)
            else:
                assert cache.paged is not None
                cache.paged.write(self.layer_idx, key_states, value_states)
            for layer, length in zip(self.documents, cache.lengths, strict=True):
                layer.length = length + 1
            return key_states, value_states
        places, tokens = [], []
        for at, (layer, pair, length) in enumerate(zip(self.documents, self._whole, cache.lengths, strict=True)):
            keys, values = key_states.narrow(2, at, 1), value_states.narrow(2, at, 1)
            if pair is None:
                assert layer.layout is not None
                layer.layout.write(length, keys, values)
            else:
                places += [whole.narrow(2, length, 1) for whole in pair]
                tokens += [keys, values]
            layer.length = length + 1
        if places:
            torch._foreach_copy_(places, tokens)
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend from each document's tokens to those before them.

        Returns
        -------
        torch.Tensor
            (1, heads, tokens, value_dim) in the query's dtype.
        """
        cache, self.attended = self.cache, True
        if cache.decodes:
            return self._attend_tokens(query, values, params)
        seen = self.shape.visibility
        is_plain = all(layer.cache.prefix is None for layer in self.documents) and seen.chunk is None
        if is_plain and takes_flash(query, values, params):
            for layer in self.documents:
                layer.attended = True
            part = attend_documents(query, keys, values, params, cache.edges, cache.longest, seen.window)
            return part.finish(params).to(query.dtype)
        outs = [
            layer.attend(query[:, :, first:last], keys[:, :, first:last], values[:, :, first:last], params)
            for layer, (first, last) in zip(self.documents, cache.bounds, strict=True)
        ]
        return torch.cat(outs, dim=2)

    def _attend_tokens(self, query: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend from one token of each document: what `SliceLayer.attend` does, without its detours."""
        if self.cache.merge is not None:
            assert self._ragged is not None
            part = self._ragged[0].attend_part(query, self.cache.lengths[0] + 1, params)
            return self.cache.merge(part).finish(params).to(query.dtype)
        if self._ragged is not None and query.shape[2] == len(self.documents):
            return attend_row(self._ragged, query, [length + 1 for length in self.cache.lengths], params)
        seen, paged = self.shape.visibility, self.cache.paged
        if paged is not None and seen.chunk is None and takes_flash(query, values, params):
            return paged.attend(self.layer_idx, query, params, seen.window).finish(params).to(query.dtype)
        if params.kernel is not None and params.is_plain and self._heads is not None:
            spans = [(seen.first_key(before), before + 1) for before in self.cache.lengths]
            rows = enumerate(zip(self._heads, spans, strict=True))
            held = [HeldHead(at, head, *row, *span) for at, (pair, span) in rows for head, row in enumerate(pair)]
            if query.shape[2] == len(self.documents) and params.kernel.takes_heads(query, held):
                return attend_held(query, held, self.shape.num_kv_heads, params).finish(params).to(query.dtype)
        tokens = query.chunk(len(self.documents), dim=2)  # of one document it may be folded, and stays whole
        outs = []
        for layer, token, pair, before in zip(self.documents, tokens, self._whole, self.cache.lengths, strict=True):
            length = before + 1
            if isinstance(layer.layout, RaggedLayout):
                outs.append(layer.layout.attend(token, length, 1, params))
                continue
            assert pair is not None
            keys, values = pair
            low = seen.first_key(before)
            part = attend(token, keys.narrow(2, low, length - low), values.narrow(2, low, length - low), params)
            outs.append(part.finish(params))
        return torch.cat(outs, dim=2).to(query.dtype)

    def get_max_length(self) -> int:
        """Most tokens any of the buffers holds."""
        return max(layer.cache.capacity for layer in self.documents)


class PackedCache(RowCache):
    """The caches of several documents, seen by the model as one.

    Parameters
    ----------
    documents : sequence of SliceCache
        Each that of a decode rank: prompts that begin, or answers that go on.
    tokens : sequence of int
        How many tokens of each document a row holds; one of each if answers go on.
    merge : callable, optional
        Joins attention to what is held here with that of other ranks; of one document, whose tokens they divide.
    """

    def __init__(self, documents: Sequence[SliceCache], tokens: Sequence[int], merge: Merge | None = None) -> None:
        assert merge is None or len(documents) == 1, "the tokens of one document are divided"
        self.documents, self.merge = documents, merge
        stops = list(itertools.accumulate(tokens))
        self.bounds = list(zip([0, *stops], stops, strict=False))
        self.edges = torch.tensor([0, *stops], dtype=torch.int32, device=documents[0].device)
        self.longest = max(tokens)
        self.decodes = not any(document.prefilling for document in documents)
        assert not self.decodes or all(count == 1 for count in tokens), "one token of each answer at a time"
        self.lengths = [0] * len(documents)  # of the documents, before this row
        self.paged = _in_pages(documents) if self.decodes and len(documents) > 1 else None
        count = len(documents[0].layers)
        layers = [PackedLayer(self, idx, [document.layers[idx] for document in documents]) for idx in range(count)]
        super().__init__(layers)
        self.take_up()

    @property
    def prefilling(self) -> bool:
        """Whether prompts begin; otherwise answers go on."""
        return not self.decodes

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of each document: its tokens in the row, and its length with them."""
        if self.decodes:
            return [(1, length + 1) for length in self.lengths]
        rows = zip(self.documents, self.bounds, strict=True)
        return [(last - first, document.prompt_tokens) for document, (first, last) in rows]

    def take_up(self) -> list[int]:
        """Note how long the documents are before the next row, and tell."""
        self.current = None
        self.lengths = [document.length for document in self.documents]
        if self.paged is not None:
            self.paged.take_up(self.lengths)
        return self.lengths

    def take_back(self) -> None:
        """Forget the row that failed on its way through the layers."""
        self.current = None
        for document, length in zip(self.documents, self.lengths, strict=True):
            document.step_back(length)


def _in_pages(documents: Sequence[SliceCache]) -> PagedRow | None:
    """Find where documents lie that are all in pages; None if one is not."""
    runs = [document.run for document in documents if document.run is not None]
    if len(runs) < len(documents):
        return None
    kept = [layer.layer_idx for layer in documents[0].layers if layer.shape.elements]
    return PagedRow(runs, kept, documents[0].device)
