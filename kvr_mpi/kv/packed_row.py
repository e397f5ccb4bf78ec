"""Several short prompts in one row of tokens: the model reads its weights once for all of them.

A packed row (1, tokens) holds the tokens of each prompt, one prompt after the other, each with its own positions. A
`PackedCache` takes every layer's keys and values apart again and gives each prompt's to its own `SliceCache`, which
attends as if it were alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kvr_mpi.kv.attention import takes_flash
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.layer import SliceLayer
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.kv.varlen import attend_documents
from kvr_mpi.model.attention_hook import AttentionParams


class PackedLayer(RowLayer):
    """One layer of all prompts of a packed row."""

    cache: PackedCache

    def __init__(self, cache: PackedCache, layer_idx: int, documents: Sequence[SliceLayer]) -> None:
        super().__init__(cache, layer_idx, documents[0].shape)
        self.documents = documents

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put each prompt's tokens of (1, kv_heads, tokens, head_dim) into its own buffer."""
        cache = self.cache
        cache.enter(self)
        for layer, (first, last) in zip(self.documents, cache.bounds, strict=True):
            layer.update(key_states[:, :, first:last], value_states[:, :, first:last])
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each prompt's tokens to those before them; (1, heads, tokens, value_dim) in the query's dtype."""
        cache, self.attended = self.cache, True
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

    def get_max_length(self) -> int:
        """Most tokens any of the buffers holds."""
        return max(layer.cache.capacity for layer in self.documents)


class PackedCache(RowCache):
    """The caches of several prompts, seen by the model as one.

    Parameters
    ----------
    documents : sequence of SliceCache
        Each that of a rank that prefills its prompt alone.
    tokens : sequence of int
        How many tokens of each a row holds.
    """

    prefilling = True

    def __init__(self, documents: Sequence[SliceCache], tokens: Sequence[int]) -> None:
        self.documents = documents
        stops = list(itertools.accumulate(tokens))
        self.bounds = list(zip([0, *stops], stops, strict=False))
        self.edges = torch.tensor([0, *stops], dtype=torch.int32, device=documents[0].device)
        self.longest = max(tokens)
        count = len(documents[0].layers)
        super().__init__(
            [PackedLayer(self, at, [document.layers[at] for document in documents]) for at in range(count)]
        )

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of each prompt: its tokens in the row, and its length with them."""
        rows = zip(self.documents, self.bounds, strict=True)
        return [(last - first, document.prompt_tokens) for document, (first, last) in rows]
