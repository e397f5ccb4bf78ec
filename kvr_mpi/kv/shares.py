"""Keys and values that stay spread over the ranks of a chain, and attention to all of them.

Every rank holds a *share* of a prompt: of every layer the keys and values of some tokens. All ranks run the model on
the same new tokens; in each layer a rank attends to its own share, and what all found is merged by log-sum-exp
(``attention``). So no rank ever holds a whole prompt, and every rank ends with the same output, to the bit. New tokens
go to the last share. Prompts that go on from one stored document share its rows (``document_share``), to which each
rank attends once for all of them.

Of a layer with a window or chunks the last share has all that is seen, and the others nothing to add.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from kvr_mpi.kv.attention import PartialAttention, attend, gather_parts, merge_gathered
from kvr_mpi.kv.document_share import DocumentShare, ShareBounds, ShareLayer
from kvr_mpi.kv.layer import SliceLayer, attend_ranges
from kvr_mpi.kv.layout import Slab
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.transport import Transport


class Share:
    """What one rank holds of a prompt.

    Parameters
    ----------
    loaded : LoadedModel
    start, stop : int
        The prompt's tokens that are this rank's.
    prompt_tokens : int
        Of the whole prompt, or of what is held of it.
    reserve_tokens : int
        Room for tokens after the prompt, in the last share.
    document : DocumentShare or None
        What it goes on from, whose rows are not its own: see `after`.

    Attributes
    ----------
    length : int
        Tokens that all ranks together hold.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        start: int,
        stop: int,
        prompt_tokens: int,
        *,
        reserve_tokens: int = 0,
        document: DocumentShare | None = None,
    ) -> None:
        self.start, self.stop, self.length, self.document = start, stop, prompt_tokens, document
        self.is_last = stop == prompt_tokens
        self.reserve_tokens = reserve_tokens if self.is_last else 0
        self.dtype, self.device = loaded.dtype, loaded.device
        self.layers: list[ShareLayer | None] = [None] * len(loaded.shape.layers)
        self._shapes = loaded.shape.layers

    @classmethod
    def after(cls, loaded: LoadedModel, document: DocumentShare, reserve_tokens: int) -> Share:
        """Make the share of a prompt that goes on from a stored document, of which the last rank holds what follows.

        Parameters
        ----------
        reserve_tokens : int
            Room for all that follows.
        """
        bounds = document.bounds
        if document.tokens + reserve_tokens > bounds.longest:
            raise ValueError(f"{reserve_tokens} tokens after {document.tokens} of a document held for {bounds.longest}")
        return cls(loaded, bounds.start, bounds.stop, document.tokens, reserve_tokens=reserve_tokens, document=document)

    @property
    def bytes(self) -> int:
        """Memory it takes, without the document's."""
        return sum(layer.layout.nbytes for layer in self.layers if layer is not None)

    @property
    def held_until(self) -> int:
        """Position after the last token that is held here."""
        return self.length if self.is_last else self.stop

    @property
    def capacity(self) -> int:
        """Most tokens there may be, all ranks' together; only the last share knows."""
        return self.stop + self.reserve_tokens

    @property
    def own_start(self) -> int:
        """Position of the first token whose keys and values are this share's own."""
        return self.start if self.document is None else self.document.tokens

    def add_layer(self, layer_idx: int, shape: LayerShape) -> ShareLayer:
        """Make room for a layer; what is in it is not defined."""
        bounds = ShareBounds(self.own_start, self.stop, self.is_last, self.capacity)
        first = self.own_start if self.document is not None else bounds.first_row(shape.visibility)
        rows = self.stop + self.reserve_tokens - first
        buffer = torch.empty(rows, shape.elements, dtype=self.dtype, device=self.device)
        layer = self.layers[layer_idx] = ShareLayer(Slab(buffer, shape), shape, first)
        return layer

    def prepare(self, layer_idx: int) -> ShareLayer | None:
        """Make sure that a layer of the document is here, and room for what follows it; returns the share's own."""
        if self.document is not None:
            self.document.load(layer_idx)
            if self.is_last and self.layers[layer_idx] is None and self._shapes[layer_idx].elements:
                self.add_layer(layer_idx, self._shapes[layer_idx])
        return self.layers[layer_idx]

    def pieces(self, layer_idx: int, first: int, last: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a range of tokens that are here, as views: of the document, and of what follows it."""
        layer, cut = self.layers[layer_idx], first if self.document is None else self.document.tokens
        if cut <= first:
            assert layer is not None, "it is held here"
            return [layer.rows(first, last)]
        rows = None if self.document is None else self.document.layers[layer_idx]
        assert rows is not None, "it is of the document"
        if last <= cut:
            return [rows.rows(first, last)]
        assert layer is not None, "it follows the document here"
        return [rows.rows(first, cut), layer.rows(cut, last)]

    def rows(self, layer_idx: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens that are here (1, kv_heads, tokens, head_dim); copied if in pieces."""
        pieces = self.pieces(layer_idx, first, last)
        if len(pieces) == 1:
            return pieces[0]
        keys, values = (torch.cat(each, 2) for each in zip(*pieces, strict=True))
        return keys, values

    def take(self, layer: SliceLayer) -> None:
        """Copy this rank's part out of a layer whose attention is over."""
        if not layer.shape.elements or self.layers[layer.layer_idx] is not None:
            return
        own = self.add_layer(layer.layer_idx, layer.shape)
        own.write(own.first, *layer.rows(own.first, self.stop))

    def lay_by_heads(self) -> None:
        """Let a CPU attend faster, once the share is complete."""
        if self.document is not None:
            self.document.lay_by_heads()
        self.layers = [None if layer is None else layer.by_heads(self.held_until) for layer in self.layers]

    def own_kv(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of this rank's tokens and those decoded since, each (tokens, kv_heads, head_dim)."""
        layer = self.layers[layer_idx]
        if layer is None:
            return None
        assert self.document is None, "what is asked of a stored document is not stored again"
        keys, values = layer.rows(self.start, self.held_until)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)


class SharedLayer(RowLayer):
    """One layer of some prompts, of each this rank's share."""

    cache: SharesCache
    is_gathered = False  # once the ranks have told each other what they found, not any more

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens of (1, kv_heads, tokens, head_dim) to the shares of this rank that are last."""
        cache = self.cache
        cache.enter(self)
        for share, (first, last) in zip(cache.shares, cache.bounds, strict=True):
            layer = share.prepare(self.layer_idx)
            if share.is_last and layer is not None:
                layer.write(share.length, key_states[:, :, first:last], value_states[:, :, first:last])
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from the new tokens to all before, on whatever rank they are.

        Returns
        -------
        torch.Tensor
            (1, heads, tokens, value_dim) in the query's dtype, the same on every rank.
        """
        cache, self.attended = self.cache, True
        # What a window or chunk lets a prompt see of a document is its own affair.
        groups = cache.groups if self.shape.visibility.size is None else cache.apart
        parts = []
        for numbers in groups:
            first, last = cache.bounds[numbers[0]][0], cache.bounds[numbers[-1]][1]
            # Of one prompt a single token's heads may come folded, and stay so.
            some = query if len(cache.shares) == 1 else query[:, :, first:last]
            parts += self._attend_group(numbers, some, params)
        whole = PartialAttention(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
        gathered = gather_parts(whole, cache.chain)
        self.is_gathered = True
        return merge_gathered(gathered).finish(params).to(query.dtype)

    def play_on(self, heads: int) -> None:
        """Tell the others that nothing was found here, if they wait for that."""
        if not self.is_gathered and self.shape.elements:
            queries = torch.empty(1, heads, self.cache.bounds[-1][1], 0, device=self.cache.shares[0].device)
            gather_parts(_nothing(queries, self.shape), self.cache.chain)

    def _attend_group(self, numbers: range, query: torch.Tensor, params: AttentionParams) -> list[PartialAttention]:
        """Attend from the new tokens of prompts that go on from one document; its rows are read once for all."""
        cache, found = self.cache, []
        before = self._attend_document(numbers, query, params)
        for number in numbers:
            first, last = (edge - cache.bounds[numbers[0]][0] for edge in cache.bounds[number])
            # Of a prompt alone the heads may be folded.
            some = query if len(numbers) == 1 else query[:, :, first:last]
            part = self._attend_own(cache.shares[number], some, last - first, params)
            if before is not None:
                of_document = before if len(numbers) == 1 else before.cut(first, last)
                part = of_document if part is None else part.merge(of_document)
            found.append(_nothing(some, self.shape) if part is None else part)
        return found

    def _attend_document(self, numbers: range, query: torch.Tensor, params: AttentionParams) -> PartialAttention | None:
        """Attend to what this rank has of a stored document; None if all of that is seen to elsewhere."""
        share, (first, last) = self.cache.shares[numbers[0]], self.cache.bounds[numbers[0]]
        if share.document is None or not self.shape.visibility.sees_all(share.length + last - first):
            return None
        rows, bounds = share.document.layers[self.layer_idx], share.document.bounds
        assert rows is not None, "it was loaded before the first tokens came"
        return attend(query, *rows.rows(bounds.start, bounds.stop), params) if bounds.start < bounds.stop else None

    def _attend_own(
        self, share: Share, query: torch.Tensor, fresh: int, params: AttentionParams
    ) -> PartialAttention | None:
        """Attend from a prompt's new tokens to what this rank has of those before, but for a document that all see.

        None if they see nothing of it.
        """
        before, seen, idx = share.length, self.shape.visibility, self.layer_idx
        if not seen.sees_all(before + fresh):
            if not share.is_last:
                return None
            if fresh == 1:
                return _attend_pieces(query, share.pieces(idx, seen.first_key(before), before + 1), params)
            return attend_ranges(query, [(before, before + fresh)], partial(share.rows, idx), seen, params)
        start, stop = share.own_start, before if share.is_last else share.stop
        if share.is_last and fresh == 1:
            return attend(query, *share.rows(idx, start, stop + 1), params)
        part = attend(query, *share.rows(idx, start, stop), params) if start < stop else None
        if share.is_last:
            own = attend(query, *share.rows(idx, before, before + fresh), params, causal=True)
            part = own if part is None else own.merge(part)
        return part

    def get_max_length(self) -> int:
        """Most tokens any of the shares has room for."""
        return max(share.capacity for share in self.cache.shares)


class SharesCache(RowCache):
    """Some prompts that are spread over the ranks of a chain, seen by the model as one; every rank makes it alike.

    Parameters
    ----------
    loaded : LoadedModel
    shares : sequence of Share
        This rank's, one of each prompt.
    tokens : sequence of int
        How many new tokens of each a row holds.
    chain : Transport
        The ranks that have the other shares.
    """

    def __init__(self, loaded: LoadedModel, shares: Sequence[Share], tokens: Sequence[int], chain: Transport) -> None:
        self.shares, self.chain, self._first_position = shares, chain, loaded.shape.first_position
        self._heads = loaded.model.config.get_text_config().num_attention_heads
        stops = list(itertools.accumulate(tokens))
        self.bounds = list(zip([0, *stops], stops, strict=False))
        self.groups, self.apart = _same_document(shares), [range(at, at + 1) for at in range(len(shares))]
        for share, count in zip(shares, tokens, strict=True):
            if share.is_last and share.length + count > share.capacity:
                raise ValueError(f"a share with room for {share.capacity} tokens is full; reserve room for more")
        super().__init__([SharedLayer(self, idx, shape) for idx, shape in enumerate(loaded.shape.layers)])

    @property
    def prefilling(self) -> bool:
        """Whether a prompt's tokens are run: what stands after its stored beginning."""
        return any(last - first > 1 for first, last in self.bounds)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the new tokens (1, tokens)."""
        rows = zip(self.shares, self.bounds, strict=True)
        each = [torch.arange(share.length, share.length + last - first) for share, (first, last) in rows]
        return torch.cat(each).unsqueeze(0).to(self.shares[0].device) + self._first_position

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of each prompt: its tokens in the row, and its length with them."""
        rows = zip(self.shares, self.bounds, strict=True)
        return [(last - first, share.length + last - first) for share, (first, last) in rows]

    def play_on(self) -> None:
        """Take part in all that is left of a row that failed on this rank, so that the others come through."""
        for layer in self.layers:
            layer.play_on(self._heads)

    def lengthen(self) -> None:
        """Count the new tokens in, when they have gone through all layers."""
        for share, (first, last) in zip(self.shares, self.bounds, strict=True):
            share.length += last - first


def _attend_pieces(
    query: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], params: AttentionParams
) -> PartialAttention:
    """Attend to keys and values that lie in several pieces, one at least."""
    first, *others = (attend(query, keys, values, params) for keys, values in pieces)
    return reduce(PartialAttention.merge, others, first)


def _same_document(shares: Sequence[Share]) -> list[range]:
    """Group the shares, by number, that lie next to each other and go on from one document."""
    edges = [0]
    for at, (one, other) in enumerate(itertools.pairwise(shares), 1):
        if one.document is None or one.document is not other.document:
            edges.append(at)
    return [range(*bounds) for bounds in itertools.pairwise([*edges, len(shares)])]


def _nothing(query: torch.Tensor, shape: LayerShape) -> PartialAttention:
    return PartialAttention.of_nothing((*query.shape[:-1], shape.value_dim), query.device)
