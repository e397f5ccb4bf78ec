"""Keys and values that stay spread over the ranks of a chain, and attention to all of them.

Every rank holds a *share* of a prompt: of every layer the keys and values of some tokens. All ranks run the model on
the same new tokens; in each layer a rank attends to its own share, and what all found is merged by log-sum-exp
(``attention``). So no rank ever holds a whole prompt, and every rank ends with the same output, to the bit. New tokens
go to the last share.

Of a layer with a window or chunks the last share has all that is seen, and the others nothing to add.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.attention import PartialAttention, attend, merge_over_ranks
from kvr_mpi.kv.layer import SliceLayer, attend_ranges
from kvr_mpi.kv.layout import UniformLayout
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.prefix import ReadRows
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.transport import Transport


@dataclass(frozen=True, slots=True, eq=False)
class ShareLayer:
    """One layer's keys and values of the tokens from `first` on."""

    layout: UniformLayout
    first: int

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, by their positions, as views (1, kv_heads, tokens, head_dim)."""
        return self.layout.rows(first - self.first, last - self.first)

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in keys and values (1, kv_heads, tokens, head_dim) from a position on."""
        self.layout.write(first - self.first, keys, values)


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

    read : callable or None
        Reads what is stored of it, when a layer is first come to (see `SharedPrefix`). What cannot be read does not
        stop this rank, since the others would wait for it.

    Attributes
    ----------
    length : int
        Tokens that all ranks together hold.
    failure : str or None
        Why something could not be read: what is computed has no meaning.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        start: int,
        stop: int,
        prompt_tokens: int,
        *,
        reserve_tokens: int = 0,
        read: ReadRows | None = None,
    ) -> None:
        self.start, self.stop, self.length = start, stop, prompt_tokens
        self.is_last = stop == prompt_tokens
        self.reserve_tokens = reserve_tokens if self.is_last else 0
        self.dtype, self.device = loaded.dtype, loaded.device
        self.layers: list[ShareLayer | None] = [None] * len(loaded.shape.layers)
        self.failure: str | None = None
        self._shapes = loaded.shape.layers
        self._loading = None if read is None else self._load(read)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return sum(layer.layout.buffer.nbytes for layer in self.layers if layer is not None)

    @property
    def held_until(self) -> int:
        """Position after the last token that is held here."""
        return self.length if self.is_last else self.stop

    @property
    def capacity(self) -> int:
        """Most tokens there may be, all ranks' together; only the last share knows."""
        return self.stop + self.reserve_tokens

    def add_layer(self, layer_idx: int, shape: LayerShape) -> ShareLayer:
        """Make room for a layer; what is in it is not defined."""
        first = self._first(shape)
        rows = self.stop + self.reserve_tokens - first
        buffer = torch.empty(rows, shape.elements, dtype=self.dtype, device=self.device)
        layer = self.layers[layer_idx] = ShareLayer(UniformLayout(buffer, shape), first)
        return layer

    def load(self, layer_idx: int) -> None:
        """Make sure that a layer is here; those after it are read meanwhile."""
        if self.layers[layer_idx] is not None or self._loading is None:
            return
        layer = self.add_layer(layer_idx, self._shapes[layer_idx])
        try:
            rows = None if self.failure else self._loading[layer_idx]
        except DataError as error:
            self.failure = str(error)
        else:
            if rows is not None:
                layer.layout.buffer[: len(rows)].copy_(rows)

    def end_loading(self) -> None:
        """Let go of the file; all layers are here."""
        self._loading = None

    def _load(self, read: ReadRows) -> LoadedLayers:
        return LoadedLayers(
            len(self._shapes), lambda number: read(number, self._first(self._shapes[number]), self.stop)
        )

    def _first(self, shape: LayerShape) -> int:
        """Position of the first token that is held of a layer.

        If its later tokens do not see all, the last share has what they see, since no other has anything to add.
        """
        seen = shape.visibility
        if not self.is_last or seen.sees_all(self.capacity):
            return self.start
        return min(self.start, seen.first_key(self.stop))

    def take(self, layer: SliceLayer) -> None:
        """Copy this rank's part out of a layer whose attention is over."""
        if not layer.shape.elements or self.layers[layer.layer_idx] is not None:
            return
        assert layer.buffer is not None
        own = self.add_layer(layer.layer_idx, layer.shape)
        own.layout.buffer[: self.stop - own.first].copy_(layer.buffer[own.first : self.stop])

    def lay_by_heads(self) -> None:
        """Let a CPU attend faster, once the share is complete."""
        for layer in self.layers:
            if layer is not None:
                layer.layout.lay_by_heads(self.held_until - layer.first)

    def own_kv(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of this rank's tokens and those decoded since, each (tokens, kv_heads, head_dim)."""
        layer = self.layers[layer_idx]
        if layer is None:
            return None
        keys, values = layer.rows(self.start, self.held_until)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)


class SharedLayer(RowLayer):
    """One layer of some prompts, of each this rank's share."""

    cache: SharesCache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens of (1, kv_heads, tokens, head_dim) to the shares of this rank that are last."""
        cache = self.cache
        cache.enter(self)
        for share, (first, last) in zip(cache.shares, cache.bounds, strict=True):
            share.load(self.layer_idx)
            layer = share.layers[self.layer_idx]
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
        is_one = len(cache.shares) == 1  # of one prompt a single token's heads may come folded, and stay so
        parts = []
        for share, (first, last) in zip(cache.shares, cache.bounds, strict=True):
            some = query if is_one else query[:, :, first:last]
            part = self._attend_share(share, some, last - first, params)
            parts.append(_nothing(some, self.shape) if part is None else part)
        whole = PartialAttention(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
        return merge_over_ranks(whole, cache.chain).finish(params).to(query.dtype)

    def _attend_share(
        self, share: Share, query: torch.Tensor, fresh: int, params: AttentionParams
    ) -> PartialAttention | None:
        """Attend from a prompt's new tokens to what this rank has of those before; None if they see nothing of it."""
        layer, before, seen = share.layers[self.layer_idx], share.length, self.shape.visibility
        assert layer is not None
        if not seen.sees_all(before + fresh):
            return attend_ranges(query, [(before, before + fresh)], layer.rows, seen, params) if share.is_last else None
        stop = before if share.is_last else share.stop
        if share.is_last and fresh == 1:
            return attend(query, *layer.rows(share.start, stop + 1), params)
        part = attend(query, *layer.rows(share.start, stop), params) if share.start < stop else None
        if share.is_last:
            own = attend(query, *layer.rows(before, before + fresh), params, causal=True)
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
        stops = list(itertools.accumulate(tokens))
        self.bounds = list(zip([0, *stops], stops, strict=False))
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

    def lengthen(self) -> None:
        """Count the new tokens in, when they have gone through all layers."""
        for share, (first, last) in zip(self.shares, self.bounds, strict=True):
            share.length += last - first


def _nothing(query: torch.Tensor, shape: LayerShape) -> PartialAttention:
    """Attention to no key at all: it has no weight in a merge."""
    _, heads, queries, _ = query.shape
    out = torch.zeros(1, heads, queries, shape.value_dim, dtype=torch.float32, device=query.device)
    return PartialAttention(out, torch.full_like(out[..., 0], float("-inf")))
