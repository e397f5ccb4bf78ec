"""One layer's keys and values of a slice on one rank.

Every attention layer of a causal LM calls ``past_key_values.update(keys, values, layer_idx)`` and then an attention
function (see ``attention_hook``). `SliceLayer.update` stores this rank's keys and values and sends them along its
`Route`; `SliceLayer.attend` attends to them and to other ranks' segments (KV-Runahead, section 4.1, Fig. 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.arena import Arena, RowMemory
from kvr_mpi.kv.attention import PartialAttention, attend, attend_masked, attend_up_to, attend_window
from kvr_mpi.kv.buffers import LayerBuffers
from kvr_mpi.kv.head_store import HeadStore, Pair, Run
from kvr_mpi.kv.observation import Observation
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.route import Range, Route, in_two_groups
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.kv.transfers import LayerTransfers, PromptTransfers
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.layer_chunks import UnreadError
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import cut_range

# Devices on which attention combines the prefix's segments into two groups.
GROUPING = ("cuda",)


class LayersOwner(RowCache):
    """The attributes and methods of `cache.SliceCache` that its layers use."""

    prefilling, capacity = True, 0
    route: Route
    transfers: PromptTransfers | None
    prefix: SharedPrefix | None
    buffers: LayerBuffers
    dtype: torch.dtype
    device: torch.device
    start: int
    shared_tokens: int
    keeps_all: bool
    is_alone: bool
    arena: Arena | None
    observation: Observation | None

    @property
    def length(self) -> int:
        """Tokens held in layers that keep keys and values; 0 if no layer does."""
        return next((layer.length for layer in self.layers if layer.shape.elements), 0)

    def chunks(self, layer_idx: int) -> Sequence[Sequence[Range]]:
        """Chunks of tokens that a layer processes, in order (`Route.chunks`)."""
        raise NotImplementedError

    def reads_only_last(self, layer_idx: int) -> bool:
        """Whether only the last token's output of this layer is used, as for the last layer of a prefill."""
        raise NotImplementedError

    def advance(self, layer_idx: int) -> None:
        """Begin a layer: finish those before it, and post receives as far ahead as the transport allows. Idempotent."""
        raise NotImplementedError

    def leave_if_done(self, layer_idx: int) -> None:
        """Leave the model early if the rest of its output is not used.

        Raises
        ------
        UnreadError
            To leave this layer for the current chunk, or the model.
        """
        raise NotImplementedError


class SliceLayer(RowLayer):
    """One layer's keys and values on one rank; empty for layers without attention, such as a plain MLP.

    If attention cannot be computed in parts (`SliceCache.in_parts`), `update` waits for the whole prefix and returns
    all keys and values up to the slice's end. The model's own attention then runs over them, as it continues from a
    cache. This is as exact as transformers' own cache, but slower: attention does not overlap with transfers.
    """

    cache: LayersOwner

    def __init__(self, cache: LayersOwner, layer_idx: int, shape: LayerShape) -> None:
        super().__init__(cache, layer_idx, shape)
        self.length = cache.start
        self.fresh = 0  # tokens last appended
        self.fresh_ranges: Sequence[Range] = ()  # their positions
        self.chunks_done = 0  # chunks of the slice that are appended
        self.layout: HeadStore | None = None
        self.is_over: bool = False  # released, after everything was sent
        self.segments: LayerTransfers | None = None
        if cache.transfers is not None and (shape.elements or shape.states):
            self.segments = LayerTransfers(cache.transfers, layer_idx, shape.visibility)

    def post(self) -> None:
        """Allocate the buffer and post the receives, once."""
        cache = self.cache
        if self.layout is not None or not self.shape.elements:
            return
        buffer, free = cache.buffers.take(self.shape)
        self.layout = layout = HeadStore.by_tokens(buffer, self.shape, cache.shared_tokens)
        if self.segments is not None:
            self.segments.buffer, self.segments.start, self.segments.free = buffer, layout.start, free
            self.segments.post(cache.route)
        if cache.prefix is None or not cache.prefilling:
            return
        known = cache.prefix.store(self.layer_idx, self.shape, cache.device, cache.arena)
        if known is not None:  # a damaged file has raised a DataError
            layout.shared = known.as_shared(cache.prefix.tokens) if layout.start else ()
            if layout.start < cache.prefix.tokens:
                layout.write(layout.start, *known.rows(layout.start, cache.prefix.tokens))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens (1, kv_heads, tokens, head_dim) of the slice or its next chunk, and send them.

        Returns
        -------
        tuple of torch.Tensor
            The same tensors; for the model's own attention, those of all tokens up to the last new one.
        """
        cache = self.cache
        self._check(key_states, value_states)
        cache.enter(self)
        if cache.prefilling and cache.is_alone:  # the previous layer gives its buffer back first
            cache.advance(self.layer_idx)
        if self.layout is None:
            self.post()
        assert self.layout is not None
        self.fresh = key_states.shape[2]
        self.fresh_ranges, at = self._next_ranges(), 0
        for first, last in self.fresh_ranges:
            stretch = slice(at, at + last - first)
            self.layout.write(first, key_states[:, :, stretch], value_states[:, :, stretch])
            at = stretch.stop
        self.length = self.fresh_ranges[-1][1]
        if cache.prefilling:
            if self.segments is not None:
                self.segments.share(cache.route, cache.route.owned if self.has_all_chunks else self.fresh_ranges)
            cache.advance(self.layer_idx)
            cache.leave_if_done(self.layer_idx)
        if cache.in_parts:
            return key_states, value_states
        self.attended = True
        if self.segments is not None:
            self.segments.collect()
        return self.rows(0, self.length)

    @property
    def has_all_chunks(self) -> bool:
        """Whether all tokens of the slice are appended."""
        return not self.shape.elements or self.chunks_done == len(self.cache.chunks(self.layer_idx))

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend from the tokens last appended to all tokens that each of them sees.

        Returns
        -------
        torch.Tensor
            (1, heads, tokens, value_dim) in the query's dtype.

        Raises
        ------
        UnreadError
            To skip the last layer's attention for a chunk without the last token.
        """
        self.attended, shape = True, query.shape
        if self.fresh == 1:  # the token's heads may come folded into the query length (1, kv_heads, group, head_dim)
            query = query.reshape(1, -1, 1, shape[-1])
        if query.shape[2] != self.fresh:
            raise ModelError(f"layer {self.layer_idx}: {query.shape[2]} queries for {self.fresh} tokens")
        seen, layout = self.shape.visibility, self.layout
        assert layout is not None, "update came before"
        is_shared = bool(layout.shared) and seen.sees_all(self.length)
        if layout.buffer is None and (not layout.is_whole or is_shared):
            out = layout.attend(query, self.length, params).finish(params).to(query.dtype)
            return out.reshape(*shape[:-1], layout.shape.value_dim)
        if self.cache.observation is not None and self.cache.prefilling:
            self.cache.observation.keep(self.layer_idx, query, self.fresh_ranges, params)
        reads_only_last = self.cache.reads_only_last(self.layer_idx)
        if reads_only_last and not self.has_all_chunks:
            raise UnreadError
        skipped = self.fresh - 1 if reads_only_last else 0
        query = query[:, :, skipped:]
        if self.cache.prefilling and not reads_only_last and seen.sees_all(self.length):
            part = self._attend_route(query, keys, values, params)
        else:
            part = self._attend_collected(query, params, skipped)
        out = part.finish(params).to(query.dtype)
        whole = torch.nn.functional.pad(out, (0, 0, skipped, 0)) if skipped else out
        return whole.reshape(*shape[:-1], self.shape.value_dim)

    def _attend_route(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Attend to this rank's tokens while segments are in flight, then to the segments in the order of the route."""
        route, layout = self.cache.route, self.layout
        assert layout is not None, "this rank holds keys and values"
        start = route.owned[0][0]
        if route.is_dense or self.fresh_ranges[0][0] > start:
            if self.segments is not None:  # the first chunk has waited for them, unless its output is unused
                self.segments.collect()
            if route.is_dense:
                return attend_masked(query, *layout.rows(0, route.capacity), params, start)
            *before, own = layout.pieces(0, self.length)
            part = attend_up_to(query, *own, params)
            for rows in before:
                part = part.merge(attend(query, *rows, params))
            return part
        part = attend(query, keys, values, params, causal=query.shape[2] > 1)
        for step in in_two_groups(route.steps) if route.in_order and query.device.type in GROUPING else route.steps:
            for segment in step.segments:
                assert self.segments is not None
                self.segments.wait_for(segment)
            some = query[:, :, step.first_query :]
            for rows in (piece for bounds in step.ranges for piece in layout.pieces(*bounds)):
                part = part.merge_after(step.first_query, attend(some, *rows, params))
        return part

    def _attend_collected(self, query: torch.Tensor, params: AttentionParams, skipped: int) -> PartialAttention:
        """Attend after all segments have arrived: for decoding, for a last token alone, and for windows or chunks."""
        if self.segments is not None:
            self.segments.collect()
        ranges = [(self.length - 1, self.length)] if skipped or self.fresh == 1 else self.fresh_ranges
        return attend_ranges(query, ranges, self.rows, self.shape.visibility, params)

    @property
    def buffer(self) -> torch.Tensor | None:
        """The whole buffer (capacity, elements of K and V of all heads).

        It is None before the prefill and after its release.
        """
        return None if self.layout is None else self.layout.buffer

    @property
    def store(self) -> HeadStore:
        """The store that decoding reads after the prefill."""
        assert self.layout is not None, "this rank keeps its keys and values"
        if self.segments is not None and self.buffer is not None:
            self.segments.collect()
        return self.layout

    @property
    def is_ragged(self) -> bool:
        """Whether each head keeps different tokens."""
        return self.layout is not None and not self.layout.is_whole

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values."""
        return 0 if self.layout is None else self.layout.nbytes

    @property
    def head_counts(self) -> list[int]:
        """Tokens that each KV head holds."""
        return self.store.counts(self.length)

    @property
    def positions(self) -> list[torch.Tensor]:
        """Positions that each KV head holds, (tokens,) int32 on the host, if heads keep different tokens."""
        store = self.store
        assert store.positions is not None, "this rank has dropped some"
        decoded = torch.arange(store.origin, self.length, dtype=torch.int32)
        return [torch.cat([kept, decoded]) for kept in store.positions]

    def head(self, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a KV head holds, as views (tokens, dim)."""
        return self.store.head_rows(head, self.length)

    def rows(self, first: int, last: int) -> Pair:
        """Keys and values of a range of tokens (1, kv_heads, tokens, head_dim); views, unless some are shared.

        Raises
        ------
        ModelError
            If heads keep different tokens, so that no range of tokens is complete.
        """
        assert self.layout is not None, "this rank holds keys and values"
        return self.layout.rows(first, last)

    def lay_by_heads(self) -> None:
        """Reorder rows by head after the prefill, which needed them by token for transfers: CPUs then decode faster."""
        if self.segments is not None:
            self.segments.wait_through()
        if self.layout is not None and self.layout.buffer is not None:
            self.layout = self.layout.laid_by_heads(self.length)

    def keep_only(
        self,
        retained: Sequence[torch.Tensor] | None,
        counts: Sequence[int],
        slack: int,
        memory: RowMemory,
        shared: Sequence[Run],
    ) -> None:
        """Copy the retained tokens, `counts` of each head, into `memory`; see `cache.SliceCache.admit`."""
        if self.segments is not None:
            self.segments.wait_through()
        is_whole = retained is None
        keys, values = self.rows(shared[-1].stop if shared else 0, self.length)
        store = HeadStore.by_heads(memory, self.shape, counts, slack, self.length, is_whole=is_whole, shared=shared)
        for head, places in enumerate(store.own_rows(head, self.length) for head in range(len(counts))):
            for place, rows in zip(places, (keys[0, head], values[0, head]), strict=True):
                if retained is None:
                    place.copy_(rows)
                else:
                    torch.index_select(rows, 0, retained[head].to(rows.device), out=place)
        if retained is not None:
            store.positions = [positions.to("cpu", torch.int32) for positions in retained]
        self.layout = store
        self.segments = None  # they reference the buffer, too

    def release(self, *, wait: bool) -> bool:
        """Release the buffer if everything is sent, or after waiting for that; return whether it is released."""
        if self.segments is not None:
            if not wait and not self.segments.are_through():
                return False
            self.segments.wait_through()
        if self.buffer is not None and not self.cache.keeps_all:
            self.cache.buffers.give_back(self.buffer)
        self.let_go()
        self.is_over = True
        return True

    def let_go(self) -> None:
        """Drop the buffer; the forwarder keeps what is still being sent."""
        self.layout = self.segments = None

    def get_seq_length(self) -> int:
        """Return the number of tokens before the next ones, at first the slice's start; models may ask any layer."""
        return self.length if self.shape.elements else self.cache.length

    def _next_ranges(self) -> Sequence[Range]:
        """Return the ranges of the new tokens: the slice's next chunk, or after the prefill the tokens that follow.

        Raises
        ------
        ModelError
            If the model passes other tokens than the next chunk's.
        """
        if not self.cache.prefilling:
            return [(self.length, self.length + self.fresh)]
        if self.has_all_chunks:
            raise ModelError(f"layer {self.layer_idx}: it is updated once more with the same tokens")
        ranges = self.cache.chunks(self.layer_idx)[self.chunks_done]
        self.chunks_done += 1
        expected = sum(last - first for first, last in ranges)
        if self.fresh != expected:
            raise ModelError(f"layer {self.layer_idx}: keys of {self.fresh} tokens have come instead of {expected}")
        return ranges

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        heads = self.shape.num_kv_heads
        expected = (1, heads, self.shape.key_dim), (1, heads, self.shape.value_dim)
        found = tuple((tensor.shape[0], tensor.shape[1], tensor.shape[3]) for tensor in (keys, values))
        if found != expected:
            raise ModelError(f"layer {self.layer_idx}: keys and values are {found}, {expected} were announced")


def attend_ranges(
    query: torch.Tensor,
    ranges: Sequence[Range],
    rows: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    seen: Visibility,
    params: AttentionParams,
) -> PartialAttention:
    """Attend from ranges of tokens to those they see, all of which this rank holds.

    Parameters
    ----------
    query : torch.Tensor
        Queries of the ranges' tokens, concatenated (1, heads, tokens, head_dim).
    rows : callable
        Returns keys and values of a range of tokens, each (1, kv_heads, tokens, head_dim).
    """
    pieces = [piece for bounds in ranges for piece in cut_range(*bounds, seen.chunk)]
    part, at = None, 0
    for first, last in pieces:
        some = query if len(pieces) == 1 else query[:, :, at : at + last - first]
        at += last - first
        keys, values = rows(seen.first_key(first), last)
        if last - first == 1:
            piece = attend(some, keys, values, params)
        elif not seen.sees_all(last) and seen.window is not None:
            piece = attend_window(some, keys, values, params, seen.window)
        else:
            piece = attend_up_to(some, keys, values, params)
        part = piece if part is None else part.join(piece)
    assert part is not None
    return part
