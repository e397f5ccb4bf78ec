"""One layer's keys and values of a slice on one rank.

Every attention layer of a causal LM calls ``past_key_values.update(keys, values, layer_idx)`` and then an attention
function (see ``attention_hook``). `SliceLayer.update` stores this rank's keys and values and sends them along its
`Route`; `SliceLayer.attend` attends to them and to other ranks' segments (KV-Runahead, section 4.1, Fig. 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, attend
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.route import Range, Route, in_two_groups, total_tokens
from kvr_mpi.kv.row import RowLayer
from kvr_mpi.kv.transfers import LayerTransfers
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.layer_chunks import UnreadError
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import cut_range

# Devices on which attention combines the prefix's segments into two groups.
GROUPING = ("cuda",)


class SliceLayer(RowLayer):
    """One layer's keys and values on one rank; empty for layers without attention, such as a plain MLP.

    If attention cannot be computed in parts (`SliceCache.in_parts`), `update` waits for the whole prefix and returns
    all keys and values up to the slice's end. The model's own attention then runs over them, as it continues from a
    cache. This is as exact as transformers' own cache, but slower: attention does not overlap with transfers.
    """

    cache: Any  # a `cache.SliceCache`
    is_sent = True  # its states, if it has any

    def __init__(self, cache: Any, layer_idx: int, shape: LayerShape) -> None:
        super().__init__(cache, layer_idx, shape)
        self.length = cache.start
        self.fresh = 0  # tokens last appended
        self.fresh_ranges: Sequence[Range] = ()  # their positions
        self.chunks: Sequence[Sequence[Range]] = cache.route.chunks  # of tokens that this layer processes, in order
        self.chunks_done = 0  # chunks of the slice that are appended
        # By token; once a rank that keeps all has admitted the layer, what decoding reads.
        self.store: HeadStore | None = None
        # On the decode rank, if compression scores keys with them: the window's queries (1, heads, window, head_dim).
        self.observed: torch.Tensor | None = None
        self.params: AttentionParams | None = None  # of the attention to this layer
        self.segments: LayerTransfers | None = None
        if cache.transfers is not None and (shape.elements or shape.states):
            self.segments = LayerTransfers(cache.transfers, layer_idx, shape.visibility)

    def post(self) -> None:
        """Allocate the buffer and post the receives, once."""
        cache = self.cache
        if self.store is not None or not self.shape.elements:
            return
        buffer, free = cache.buffers.take(self.shape)
        self.store = store = HeadStore.by_tokens(buffer, self.shape, cache.shared_tokens)
        if self.segments is not None:
            self.segments.rows = lambda first, last: buffer[first - store.start : last - store.start]
            self.segments.free = free
            self.segments.post(cache.route)
        if cache.prefix is None or not cache.prefilling:
            return
        known = cache.prefix.store(self.layer_idx, self.shape, cache.device, cache.arena)
        if known is not None:  # a damaged file has raised a DataError
            store.shared = known.as_shared(cache.prefix.tokens) if store.start else ()
            if store.start < cache.prefix.tokens:
                store.write(store.start, *known.rows(store.start, cache.prefix.tokens))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens (1, kv_heads, tokens, head_dim) of the slice or its next chunk, and send them.

        Returns the same tensors; for the model's own attention, those of all tokens up to the last new one.
        """
        cache = self.cache
        cache.enter(self)
        if cache.prefilling and cache.is_alone:  # the previous layer gives its buffer back first
            cache.advance(self.layer_idx)
        if self.store is None:
            self.post()
        assert self.store is not None
        self.fresh_ranges, at = self._take_chunk(key_states, value_states), 0
        for first, last in self.fresh_ranges:
            stretch = slice(at, at + last - first)
            self.store.write(first, key_states[:, :, stretch], value_states[:, :, stretch])
            at = stretch.stop
        self.length = self.fresh_ranges[-1][1]
        if cache.prefilling:
            if self.segments is not None:
                self.segments.share(cache.route.owned if self.has_all_chunks else self.fresh_ranges)
            cache.advance(self.layer_idx)
            self.leave_if_done()
        if cache.in_parts:
            return key_states, value_states
        cache.current = None
        if self.segments is not None:
            self.segments.wait_for()
        return self.store.rows(0, self.length)

    def leave_if_done(self) -> None:
        """Raise `UnreadError` if the layer's output is not used, to leave the layer with this chunk, or the model."""
        if self.layer_idx != self.cache.left_after:
            return
        if len(self.cache.route.chunks) > 1 or (self.has_all_chunks and self.is_sent):
            self.cache.current = None  # the layer's output is not used
            raise UnreadError

    @property
    def has_all_chunks(self) -> bool:
        """Whether all tokens of the slice are appended."""
        return not self.shape.elements or self.chunks_done == len(self.chunks)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend from the tokens last appended to all tokens that each of them sees.

        Returns (1, heads, tokens, value_dim) in the query's dtype. Raises `UnreadError` in the last layer, for a chunk
        without the last token.
        """
        self.cache.current, shape = None, query.shape
        if self.fresh == 1:  # the token's heads may come folded into the query length (1, kv_heads, group, head_dim)
            query = query.reshape(1, -1, 1, shape[-1])
        if query.shape[2] != self.fresh:
            raise ModelError(f"layer {self.layer_idx}: {query.shape[2]} queries for {self.fresh} tokens")
        seen, store, self.params = self.shape.visibility, self.store, params
        assert store is not None, "update came before"
        prefilling, sees_all = self.cache.prefilling, seen.sees_all(self.length)
        if self.cache.window is not None and prefilling:
            self._observe(query, self.cache.window)
        reads_only_last = prefilling and self.layer_idx == self.cache.last and self.cache.route.saves_last_layer
        if reads_only_last and not self.has_all_chunks:
            raise UnreadError
        skipped = self.fresh - 1 if reads_only_last else 0
        query = query[:, :, skipped:]
        if prefilling and not reads_only_last and sees_all:
            part = self._attend_route(query, keys, values, params)
        elif not prefilling and (sees_all or not store.is_whole):
            part = store.attend(query, self.length, params)
        else:  # for a last token alone, and with windows or chunks
            if self.segments is not None:
                self.segments.wait_for()
            ranges = [(self.length - 1, self.length)] if skipped or self.fresh == 1 else self.fresh_ranges
            part = attend_ranges(query, ranges, store.rows, seen, params)
        out = part.finish(params).to(query.dtype)
        whole = torch.nn.functional.pad(out, (0, 0, skipped, 0)) if skipped else out
        return whole.reshape(*shape[:-1], self.shape.value_dim)

    def _observe(self, query: torch.Tensor, window: Range) -> None:
        """Keep the queries (1, heads, tokens, head_dim) of window tokens, after those kept from earlier chunks.

        The window lies in the last range that this rank computes (`cache.SliceCache`).
        """
        (start, stop), chunk = self.fresh_ranges[-1], query.shape[2]
        first, last = max(start, window[0]), min(stop, window[1])
        if first >= last:
            return
        at = chunk - (stop - first)
        rows = query[:, :, at : at + last - first].clone()
        self.observed = rows if self.observed is None else torch.cat([self.observed, rows], dim=2)

    def _attend_route(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Attend to this rank's tokens while segments are in flight, then to the segments in the order of the route."""
        route: Route = self.cache.route
        store = self.store
        assert store is not None, "this rank holds keys and values"
        start = route.owned[0][0]
        if route.attend is not None or self.fresh_ranges[0][0] > start:
            if self.segments is not None:  # the first chunk has waited for them, unless its output is unused
                self.segments.wait_for()
            if route.attend is not None:
                return route.attend(query, *store.rows(0, route.capacity), params, start)
            *before, own = store.pieces(0, self.length)
            part = attend(query, *own, params, causal=True)
            for rows in before:
                part = part.merge(attend(query, *rows, params))
            return part
        part = attend(query, keys, values, params, causal=query.shape[2] > 1)
        for step in in_two_groups(route.steps) if route.in_order and query.device.type in GROUPING else route.steps:
            if self.segments is not None:
                self.segments.wait_for(step.segments)
            some = query[:, :, step.first_query :]
            for rows in (piece for bounds in step.ranges for piece in store.pieces(*bounds)):
                part = part.merge(attend(some, *rows, params), step.first_query)
        return part

    @property
    def is_ragged(self) -> bool:
        """Whether each head keeps different tokens."""
        return self.store is not None and not self.store.is_whole

    @property
    def head_counts(self) -> list[int]:
        """Tokens that each KV head holds."""
        assert self.store is not None, "this rank keeps its keys and values"
        return self.store.counts(self.length)

    @property
    def positions(self) -> list[torch.Tensor]:
        """Positions that each KV head holds, (tokens,) int32 on the host, if heads keep different tokens."""
        store = self.store
        assert store is not None and store.positions is not None, "this rank has dropped some"
        decoded = torch.arange(store.origin, self.length, dtype=torch.int32)
        return [torch.cat([kept.cpu(), decoded]) for kept in store.positions]

    def release(self, *, wait: bool) -> bool:
        """Release the buffer if everything is sent, or after waiting for that; return whether it is released."""
        if self.segments is not None and not self.segments.is_through(wait=wait):
            return False
        if self.store is not None:
            self.cache.reuse(self.store)
        self.let_go()
        return True

    def let_go(self) -> None:
        """Drop the buffer; the forwarder keeps what is still being sent."""
        self.store = self.segments = None

    def get_seq_length(self) -> int:
        """Return the number of tokens before the next ones, at first the slice's start; models may ask any layer."""
        return self.length if self.shape.elements else int(self.cache.length)

    def _take_chunk(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Range]:
        """Return the ranges of the new tokens: the slice's next chunk, or after the prefill the tokens that follow.

        Raises `ModelError` if the model passes other heads or other tokens than the next chunk's.
        """
        heads, self.fresh = self.shape.num_kv_heads, keys.shape[2]
        ranges: Sequence[Range] = [(self.length, self.length + self.fresh)]
        if self.cache.prefilling:
            if self.has_all_chunks:
                raise ModelError(f"layer {self.layer_idx}: it was updated twice with the same tokens")
            ranges = self.chunks[self.chunks_done]
            self.chunks_done += 1
        expected = [(1, heads, total_tokens(ranges), dim) for dim in (self.shape.key_dim, self.shape.value_dim)]
        if [keys.shape, values.shape] != expected:
            raise ModelError(
                f"layer {self.layer_idx}: keys and values are {[*map(tuple, (keys.shape, values.shape))]}; expected "
                f"{expected}"
            )
        return ranges


@dataclass(frozen=True, slots=True)
class Retain:
    """What compression keeps of a prompt.

    window : tokens that show what the answer will attend to (SnapKV, Li et al. 2024, section 4), in the decode rank's
        last range of tokens; its layers keep their queries (`SliceLayer.observed`). None: no queries are needed.
    choose : takes a complete layer; returns an iterator over the positions that each KV head keeps, (tokens,) int64,
        ascending, or None if the layer keeps everything. None: all layers do.
    late_layers : number of complete layers that stay whole while later layers run: a GPU computes how many tokens their
        heads keep, and `choose` waits for these numbers before it yields.
    """

    window: Range | None
    choose: Callable[[SliceLayer], Iterable[torch.Tensor] | None] | None = None
    late_layers: int = 0


def attend_ranges(
    query: torch.Tensor,
    ranges: Sequence[Range],
    rows: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    seen: Visibility,
    params: AttentionParams,
) -> PartialAttention:
    """Attend from ranges of tokens to those they see, all of which this rank holds.

    query : queries of the ranges' tokens, concatenated (1, heads, tokens, head_dim).
    rows : returns keys and values of a range of tokens, each (1, kv_heads, tokens, head_dim).
    """
    pieces = [piece for bounds in ranges for piece in cut_range(*bounds, seen.chunk)]
    parts, at = list[PartialAttention](), 0
    for first, last in pieces:
        some = query if len(pieces) == 1 else query[:, :, at : at + last - first]
        at += last - first
        keys, values = rows(seen.first_key(first), last)
        if last - first == 1:
            parts.append(attend(some, keys, values, params))
        else:
            window = None if seen.sees_all(last) else seen.window
            parts.append(attend(some, keys, values, params, causal=True, window=window))
    return PartialAttention.join(parts)
