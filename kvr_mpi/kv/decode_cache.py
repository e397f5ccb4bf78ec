"""One token each of several documents: what the model sees as one cache while answers are decoded.

The model reads its weights once for all documents. Their keys and values are where they are (``head_store``): a layer
writes each document's token behind its rows, and one call of `attend_units` attends for all of them (``units``). A
single document is decoded in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.layer import SliceLayer
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.kv.units import attend_units, unit_table, write_token
from kvr_mpi.model.attention_hook import AttentionParams

Merge = Callable[[PartialAttention], PartialAttention]


class DecodeLayer(RowLayer):
    """One layer of all documents."""

    cache: DecodeCache

    def __init__(self, cache: DecodeCache, layer_idx: int, documents: Sequence[SliceLayer]) -> None:
        self.stores = [layer.store for layer in documents]
        super().__init__(cache, layer_idx, self.stores[0].shape)
        self.documents = documents
        self._table = unit_table(self.stores)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each document's token of (1, kv_heads, documents, head_dim) to its own rows."""
        cache = self.cache
        cache.enter(self)
        write_token(self.stores, self._table, key_states, value_states, cache.lengths, cache.on_device)
        for layer, length in zip(self.documents, cache.lengths, strict=True):
            layer.length = length + 1
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each document's token to those before it; (1, heads, documents, value_dim), as the query.

        Of one document the heads may come folded into the query length (1, kv_heads, group, head_dim), and stay so.
        """
        cache, self.attended = self.cache, True
        shape = query.shape
        if len(self.stores) == 1:
            query = query.reshape(1, -1, 1, shape[-1])
        lengths = [length + 1 for length in cache.lengths]
        part = attend_units(query, self.stores, self._table, lengths, params, self.shape.visibility)
        if cache.merge is not None:
            part = cache.merge(part)
        return part.finish(params).to(query.dtype).reshape(*shape[:-1], self.shape.value_dim)

    def get_max_length(self) -> int:
        """Most tokens any of the documents has room for."""
        return max(layer.cache.capacity for layer in self.documents)


class DecodeCache(RowCache):
    """The caches of several documents, seen by the model as one.

    Parameters
    ----------
    documents : sequence of SliceCache
        Each that of a decode rank, after its prefill.
    merge : callable, optional
        Joins attention to what is held here with that of other ranks; of one document, whose tokens they divide.

    Attributes
    ----------
    lengths : list of int
        Tokens of each document, before the one that is run.
    """

    prefilling = False

    def __init__(self, documents: Sequence[SliceCache], merge: Merge | None = None) -> None:
        assert merge is None or len(documents) == 1, "the tokens of one document are divided"
        self.documents, self.merge = documents, merge
        self.lengths = [0] * len(documents)
        self.on_device = torch.zeros(len(documents), dtype=torch.int64, device=documents[0].device)
        count = len(documents[0].layers)
        super().__init__(
            [DecodeLayer(self, at, [document.layers[at] for document in documents]) for at in range(count)]
        )
        self.take_up()

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of each document: its token in the row, and its length with it."""
        return [(1, length + 1) for length in self.lengths]

    def take_up(self) -> list[int]:
        """Read how long the documents are before their next tokens, and return it."""
        self.current = None
        self.lengths = [document.length for document in self.documents]
        return self.lengths

    def begin(self, lengths: torch.Tensor) -> None:
        """Begin a step of documents of such lengths (documents,), int64 on the device: those that were taken up."""
        self.on_device = lengths

    def take_back(self) -> None:
        """Forget the tokens that failed on their way through the layers."""
        self.current = None
        for document, length in zip(self.documents, self.lengths, strict=True):
            document.step_back(length)
