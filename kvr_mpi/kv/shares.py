"""Sharded keys and values: each rank of a chain keeps its tokens, and all ranks attend together.

Every rank holds a *share* of a prompt: the keys and values of some tokens, in all layers. All ranks run the model on
the same new tokens. In each layer a rank attends to its own share, and all parts are merged by log-sum-exp
(``attention``). So no rank holds a whole prompt, and all ranks get bit-identical outputs. New tokens go to the last
share. A stored document is a share, too, which is read once; each rank attends to it once for all prompts that continue
it, and the shares of these prompts hold only the tokens after the document.

In a layer with a window or chunks, the last share holds all visible tokens, and the other shares add nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.attention import PartialAttention, attend, gather_parts, merge_gathered
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.layer import SliceLayer, attend_ranges
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.transport import Transport


class Share:
    """What one rank holds of a prompt, or of a stored document that prompts continue.

    start, stop : bounds of this rank's tokens.
    tokens : number of tokens on all ranks together. The rank that holds the last token also holds those that follow.
    longest : largest number of tokens on all ranks together, including those that follow.
    prefix : the stored document that this share holds, with `read`: each layer's rows are read when the layer is first
        used. The tokens after it are in the shares of prompts (`after`).
    document : share of the stored document that this prompt continues.
    length : tokens that all ranks together hold.
    failure : why the stored document cannot be read, on this or another rank.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        start: int,
        stop: int,
        tokens: int,
        longest: int,
        *,
        prefix: SharedPrefix | None = None,
        document: Share | None = None,
    ) -> None:
        self.start, self.stop, self.length, self.longest = start, stop, tokens, longest
        self.is_last = stop == tokens
        self.prefix, self.document = prefix, document
        self.layers: list[HeadStore | None] = [None] * len(loaded.shape.layers)
        self.failure: str | None = None
        self.dtype, self.device, self._shape = loaded.dtype, loaded.device, loaded.shape
        self._loading = None if prefix is None else LoadedLayers(len(self.layers), self._read, loaded.device)

    @classmethod
    def after(cls, loaded: LoadedModel, document: Share, reserve_tokens: int) -> Share:
        """Make the share of a prompt that continues a stored document; the last rank has room for the new tokens."""
        longest = document.length + reserve_tokens
        if longest > document.longest:
            raise ValueError(
                f"{reserve_tokens} tokens after {document.length} of a document held for {document.longest}"
            )
        return cls(loaded, document.stop, document.stop, document.length, longest, document=document)

    @property
    def stores(self) -> list[HeadStore]:
        """Keys and values of the layers that hold any now, and of the document's."""
        before = [] if self.document is None else self.document.stores
        return [*before, *(layer for layer in self.layers if layer is not None)]

    @property
    def bytes_of_rows(self) -> int:
        """Bytes of all layers' rows up to `stop`, loaded or not."""
        layers = self._shape.layers
        elements = sum((self.stop - self.first_row(layer.visibility)) * layer.elements for layer in layers)
        return elements * self._shape.dtype_bytes

    @property
    def held_until(self) -> int:
        """Position after the last token held on this rank."""
        return self.length if self.is_last else self.stop

    def first_row(self, seen: Visibility) -> int:
        """Position of the first token of a layer held on this rank.

        In a layer with a window or chunks, the last share also holds the earlier tokens that its own tokens attend to.
        """
        if not self.is_last or self.document is not None or seen.sees_all(self.longest):
            return self.start
        return min(self.start, seen.first_key(self.stop))

    def prepare(self, layer_idx: int) -> None:
        """Load a layer of a document if needed, prefetch the next ones, and allocate room for new tokens.

        Raises `DataError` if it cannot be read.
        """
        shape = self._shape.layers[layer_idx]
        if self.document is not None:
            self.document.prepare(layer_idx)
        if self.layers[layer_idx] is not None or not shape.elements:
            return
        if self.prefix is None:
            if self.is_last:
                self.layers[layer_idx] = self._make(layer_idx)
            return
        assert self._loading is not None, "loading ends with the last layer"
        rows, first = self._loading[layer_idx], self.first_row(shape.visibility)
        if rows is None or len(rows) != self.stop - first:
            found = 0 if rows is None else len(rows)
            raise DataError(f"layer {layer_idx} has keys and values of {found} tokens, expected {self.stop - first}")
        self.layers[layer_idx] = HeadStore.of_rows(rows, shape, self.device, start=first)

    def take(self, layer: SliceLayer) -> None:
        """Copy this rank's tokens out of a layer after its attention."""
        if layer.shape.elements and self.layers[layer.layer_idx] is None:
            store = self.layers[layer.layer_idx] = self._make(layer.layer_idx)
            assert layer.store is not None, "it is complete"
            store.write(store.start, *layer.store.rows(store.start, self.stop))

    def end_loading(self, failure: str | None = None) -> None:
        """Close the file after all layers are loaded, or after a rank failed to read its own."""
        self.failure, self._loading = failure, None

    def step_back(self, length: int) -> None:
        """Truncate to the prompt's first `length` tokens."""
        self.length = length

    def own_kv(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of this rank's tokens, including decoded ones, each (tokens, kv_heads, head_dim)."""
        layer = self.layers[layer_idx]
        if layer is None:
            return None
        assert self.document is None, "questions about a stored document are not stored again"
        return layer.rows_by_token(self.start, self.held_until)

    def _make(self, layer_idx: int) -> HeadStore:
        """Allocate uninitialised rows of a layer."""
        shape, before = self._shape.layers[layer_idx], None
        if self.document is not None:
            before = self.document.layers[layer_idx]
            assert before is not None, "it was read first"
        shared, first = () if before is None else before.as_shared(self.start), self.first_row(shape.visibility)
        counts, room = [self.stop - first] * shape.num_kv_heads, self.longest - self.stop if self.is_last else 0
        return HeadStore.reserve(
            shape, counts, room, self.stop, self.dtype, self.device, start=first, shared=shared, is_whole=True
        )

    def _read(self, number: int) -> torch.Tensor | None:
        assert self.prefix is not None and self.prefix.read is not None, "it is stored"
        return self.prefix.read(number, self.first_row(self._shape.layers[number].visibility), self.stop)


class SharesCache(RowCache):
    """The sharded caches of several prompts as one cache; every rank creates the same one.

    shares : this rank's share of each prompt.
    tokens : new tokens of each prompt in the row.
    chain : the ranks that have the other shares.
    """

    def __init__(self, loaded: LoadedModel, shares: Sequence[Share], tokens: Sequence[int], chain: Transport) -> None:
        self.shares, self.chain, self._first_position = shares, chain, loaded.shape.first_position
        self._heads = loaded.model.config.get_text_config().num_attention_heads
        self.bounds = list(itertools.pairwise(itertools.accumulate(tokens, initial=0)))
        # `groups` joins adjacent shares that continue the same document; `apart` has each share by itself.
        documents = [-at if share.document is None else id(share.document) for at, share in enumerate(shares)]
        self.groups = [list(some) for _, some in itertools.groupby(range(len(shares)), documents.__getitem__)]
        self.apart = [[at] for at in range(len(shares))]
        for share, count in zip(shares, tokens, strict=True):
            if share.is_last and share.length + count > share.longest:
                raise ValueError(f"a share with room for {share.longest} tokens is full; reserve room for more")
        self._gathered: set[int] = set()  # layers whose parts all ranks have gathered
        super().__init__([RowLayer(self, idx, shape) for idx, shape in enumerate(loaded.shape.layers)])

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append new tokens to the shares that end on this rank."""
        for share, (first, last) in zip(self.shares, self.bounds, strict=True):
            share.prepare(layer.layer_idx)
            store = share.layers[layer.layer_idx]
            if share.is_last and store is not None:
                store.write(share.length, keys[:, :, first:last], values[:, :, first:last])

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from the new tokens to all earlier ones on all ranks; every rank gets the same result."""
        shape = query.shape
        query = query.reshape(1, -1, self.bounds[-1][1], shape[-1])
        # With a window or chunks, each prompt sees other tokens of the document.
        groups = self.groups if layer.shape.visibility.size is None else self.apart
        found = [part for some in groups for part in self._attend(layer, some, query, params)]
        gathered = gather_parts(PartialAttention.join(found), self.chain)
        self._gathered.add(layer.layer_idx)
        out = merge_gathered(gathered).finish(params).to(query.dtype)
        return out.reshape(*shape[:-1], layer.shape.value_dim)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens after the stored prefix are processed."""
        return any(last - first > 1 for first, last in self.bounds)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the new tokens (1, tokens)."""
        rows = zip(self.shares, self.bounds, strict=True)
        each = [torch.arange(share.length, share.length + last - first) for share, (first, last) in rows]
        return torch.cat(each).unsqueeze(0).to(self.shares[0].device) + self._first_position

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """For each prompt, its tokens in the row and its length with them."""
        rows = zip(self.shares, self.bounds, strict=True)
        return [(last - first, share.length + last - first) for share, (first, last) in rows]

    def play_on(self) -> None:
        """Take part in the remaining transfers of a row that failed on this rank, so that others can finish."""
        for layer in self.layers:
            if layer.layer_idx not in self._gathered and layer.shape.elements:
                gather_parts(self._nothing(layer, self._heads, self.bounds[-1][1]), self.chain)

    def _attend(
        self, layer: RowLayer, numbers: Sequence[int], query: torch.Tensor, params: AttentionParams
    ) -> list[PartialAttention]:
        """Attend from the new tokens of prompts that continue the same document; its rows are read once for all."""
        found, before = [], None
        share, (begin, end) = self.shares[numbers[0]], self.bounds[numbers[0]]
        document = share.document
        if document is not None and layer.shape.visibility.sees_all(share.length + end - begin):
            rows = document.layers[layer.layer_idx]
            assert rows is not None, "stored rows are read before the first step"
            some = query[:, :, begin : self.bounds[numbers[-1]][1]]
            before = attend(some, *rows.rows(document.start, document.stop), params)
        for number in numbers:
            first, last = self.bounds[number]
            part = self._attend_own(layer, self.shares[number], query[:, :, first:last], params)
            if before is not None:
                of_document = before.cut(first - begin, last - begin)
                part = of_document if part is None else part.merge(of_document)
            found.append(self._nothing(layer, query.shape[1], last - first) if part is None else part)
        return found

    def _attend_own(
        self, layer: RowLayer, share: Share, query: torch.Tensor, params: AttentionParams
    ) -> PartialAttention | None:
        """Attend from a prompt's new tokens to this rank's rows of it; None if they see nothing of it.

        With a window or chunks, these include the shared document.
        """
        store, fresh, seen = share.layers[layer.layer_idx], query.shape[2], layer.shape.visibility
        if store is None:  # what follows the document is on another rank
            return None
        sees_all = seen.sees_all(share.length + fresh)
        if not share.is_last:
            return attend(query, *store.rows(share.start, share.stop), params) if sees_all else None
        if sees_all or fresh == 1:
            first = share.start if sees_all else seen.first_key(share.length)
            return store.attend(query, share.length + fresh, params, first)
        return attend_ranges(query, [(share.length, share.length + fresh)], store.rows, seen, params)

    def _nothing(self, layer: RowLayer, heads: int, tokens: int) -> PartialAttention:
        return PartialAttention.of_nothing((1, heads, tokens, layer.shape.value_dim), self.shares[0].device)
