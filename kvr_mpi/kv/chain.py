"""The cache of one rank's slice of a prompt, as the model sees it (KV-Runahead, section 4.1, Fig. 5).

A causal LM calls ``past_key_values.update(keys, values, layer_idx)`` and then an attention function (see
``attention_hook``). `SliceLayer.append` stores this rank's keys and values by token in a buffer, and sends them along
its `Relay`; `SliceLayer.attend` attends to them and to other ranks' segments. When a layer is complete, the rank that
decodes the prompt admits it to its `SequenceKV`, and the buffer is used again. No model code is changed, and the model
is not aware of ranks.

A recurrent state summarizes all tokens before it, so a rank can begin such a layer only after the previous rank has
finished it. Rank i runs one layer behind rank i-1, and a chain of p ranks takes (layers + p - 1) / layers of its ideal
time. States are sent as one message of bytes per layer, whose size does not depend on the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, attend, attend_range
from kvr_mpi.kv.clock import Clock
from kvr_mpi.kv.layer import RowCache, RowLayer
from kvr_mpi.kv.pool import LayerBuffers, Pool
from kvr_mpi.kv.relay import (
    STATES,
    LayerTransfers,
    PromptTransfers,
    Range,
    Relay,
    in_two_groups,
    join_ranges,
)
from kvr_mpi.kv.sequence import Pair, SequenceKV, by_head, check_retained, copy_states, join_pieces
from kvr_mpi.kv.states import StateLayer
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.layer_chunks import UnreadError
from kvr_mpi.transport.forwarder import Transfer

# Takes a layer's keys and values, each (tokens, kv_heads, head_dim); None if it has none.
WriteLayer = Callable[[tuple[torch.Tensor, torch.Tensor] | None], None]
# Layers with unfinished sends that a rank holds before it waits for the sends.
LAYERS_HELD = 8
# Layers whose receives are posted ahead of the computing one.
LAYERS_AHEAD = 2
# Fewer where a pending receive occupies part of a GPU, or the decode rank compresses each layer when it is complete.
FEW_AHEAD = 1
# Devices on which attention combines the prefix's segments into two groups.
GROUPING = ("cuda",)


class SliceLayer(RowLayer):
    """One layer's keys and values on one rank; empty for layers without attention, such as a plain MLP.

    If attention cannot be computed in parts (`RowCache.in_parts`), `append` waits for the whole prefix and returns
    all keys and values up to the slice's end. The model's own attention then runs over them, as it continues from a
    cache. This is as exact as transformers' own cache, but slower: attention does not overlap with transfers.

    slab : by token (capacity, elements of K and V of all heads), so that a range of tokens is received in place,
        attended to as a view, and sent without packing; None: not allocated yet, or given back.
    length : position after the last token that was appended.
    observed : on the decode rank, if compression scores keys with them: the window's queries (1, heads, window,
        head_dim).
    params : of the attention to this layer.
    """

    cache: Any  # a `SliceRow`
    is_sent = True  # its states, if it has any

    def __init__(self, cache: SliceRow, layer_idx: int, shape: LayerShape) -> None:
        super().__init__(cache, layer_idx, shape)
        self._begin()

    def _begin(self) -> None:
        cache = self.cache
        self.length = cache.start
        self.fresh: Range = (cache.start, cache.start)  # tokens last appended
        self.chunks: Sequence[Range] = cache.relay.chunks  # of tokens that this layer processes, in order
        self.chunks_done = 0  # chunks of the slice that are appended
        self.slab: torch.Tensor | None = None
        self._by_head: Pair | None = None  # of the slab, by head
        self.observed: torch.Tensor | None = None
        self.params: AttentionParams | None = None
        self.segments: LayerTransfers | None = None
        if cache.transfers is not None and (self.shape.elements or self.shape.states):
            self.segments = LayerTransfers(cache.transfers, self.layer_idx, self.shape.visibility)

    def post(self) -> None:
        """Allocate the buffer and post the receives, once."""
        cache = self.cache
        if self.slab is not None or not self.shape.elements:
            return
        self.slab, free = slab, _ = cache.buffers.take(self.shape)
        self._by_head, start = by_head(slab, self.shape), cache.slab_start
        if self.segments is not None:
            self.segments.rows = lambda first, last: slab[first - start : last - start]
            self.segments.free = free
            self.segments.post()
        if cache.prefix is not None:
            cache.prefix.open(self.layer_idx)  # a damaged file raises a DataError
            if start < cache.prefix.length:
                for to, rows in zip(
                    self._by_head, cache.prefix.rows(self.layer_idx, 0, cache.prefix.length), strict=True
                ):
                    to[:, : cache.prefix.length] = rows[0]

    def pieces(self, first: int, last: int) -> list[Pair]:
        """Keys and values of a range of tokens, in order, as views (1, kv_heads, tokens, dim)."""
        start, found = self.cache.slab_start, list[Pair]()
        if first < start:
            found = self.cache.prefix.pieces(self.layer_idx, first, min(last, start))
        if last > start:
            assert self._by_head is not None, "this rank holds keys and values"
            rows = slice(max(first, start) - start, last - start)
            found.append((self._by_head[0][None, :, rows], self._by_head[1][None, :, rows]))
        return found

    def rows(self, first: int, last: int) -> Pair:
        """Keys and values of a range of tokens (1, kv_heads, tokens, dim); views unless some are of a prefix."""
        return join_pieces(self.pieces(first, last))

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Write new tokens (1, kv_heads, tokens, head_dim) of the slice or its next chunk, and send them.

        Returns the same tensors; for the model's own attention, those of all tokens up to the last new one.
        """
        cache = self.cache
        if cache.is_alone:  # the previous layer gives its buffer back first
            cache.advance(self.layer_idx)
        if self.slab is None:
            self.post()
        assert self._by_head is not None, "it is allocated"
        first, self.length = self.fresh = self._take_chunk(keys, values)
        for to, rows in zip(self._by_head, (keys, values), strict=True):
            to[:, first - cache.slab_start : self.length - cache.slab_start] = rows[0]
        if self.segments is not None:
            self.segments.share(self.length)
        cache.advance(self.layer_idx)
        self.leave_if_done()
        if cache.in_parts:
            return keys, values
        cache.current = None
        if self.segments is not None:
            self.segments.wait_for()
        return self.rows(0, self.length)

    def leave_if_done(self) -> None:
        """Raise `UnreadError` if the layer's output is not used, to leave the layer with this chunk, or the model."""
        if self.layer_idx != self.cache.left_after:
            return
        if len(self.cache.relay.chunks) > 1 or (self.has_all_chunks and self.is_sent):
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
        self.cache.current, shape, (first, last) = None, query.shape, self.fresh
        if last - first == 1:  # the token's heads may come folded into the query length (1, kv_heads, group, head_dim)
            query = query.reshape(1, -1, 1, shape[-1])
        if query.shape[2] != last - first:
            raise ModelError(f"layer {self.layer_idx}: {query.shape[2]} queries for {last - first} tokens")
        seen, self.params = self.shape.visibility, params
        if self.cache.window is not None:
            self._observe(query, self.cache.window)
        reads_only_last = self.layer_idx == self.cache.last and self.cache.relay.saves_last_layer
        if reads_only_last and not self.has_all_chunks:
            raise UnreadError
        skipped = last - first - 1 if reads_only_last else 0
        query = query[:, :, skipped:]
        if not reads_only_last and seen.sees_all(self.length):
            part = self._attend_relay(query, keys, values, params)
        else:  # for a last token alone, and with windows or chunks
            if self.segments is not None:
                self.segments.wait_for()
            part = attend_range(query, (first + skipped, last), self.rows, seen, params)
        out = part.finish(params).to(query.dtype)
        whole = torch.nn.functional.pad(out, (0, 0, skipped, 0)) if skipped else out
        return whole.reshape(*shape[:-1], self.shape.out_dim)

    def _observe(self, query: torch.Tensor, window: Range) -> None:
        """Keep the queries (1, heads, tokens, head_dim) of window tokens, after those kept from earlier chunks."""
        start, stop = self.fresh
        first, last = max(start, window[0]), min(stop, window[1])
        if first >= last:
            return
        rows = query[:, :, first - start : last - start].clone()
        self.observed = rows if self.observed is None else torch.cat([self.observed, rows], dim=2)

    def _attend_relay(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Attend to this rank's tokens while segments are in flight, then to the segments in the order of arrival."""
        relay: Relay = self.cache.relay
        if self.fresh[0] > relay.own[0]:
            if self.segments is not None:  # the first chunk has waited for them, unless its output is unused
                self.segments.wait_for()
            *before, own = self.pieces(0, self.length)
            part = attend(query, *own, params, causal=True)
            for rows in before:
                part = part.merge(attend(query, *rows, params))
            return part
        part = attend(query, keys, values, params, causal=query.shape[2] > 1)
        for rows in self.pieces(0, relay.known):  # the known tokens are local
            part = part.merge(attend(query, *rows, params))
        for numbers, ranges in self.cache.arrivals:
            if self.segments is not None:
                self.segments.wait_for(numbers)
            for bounds in ranges:
                for rows in self.pieces(*bounds):
                    part = part.merge(attend(query, *rows, params))
        return part

    def release(self, *, wait: bool) -> bool:
        """Release the buffer if everything is sent, or after waiting for that; return whether it is released."""
        if self.segments is not None and not self.segments.is_through(wait=wait):
            return False
        if self.slab is not None:
            self.cache.reuse(self.slab)
        self.drop()
        return True

    def drop(self) -> None:
        """Drop the buffer, and what was read of a stored prefix; the forwarder keeps what is still being sent."""
        self.slab = self._by_head = self.segments = None
        cache = self.cache
        if cache.prefix is not None and cache.prefix.is_stored and (cache.sequence is None or cache.is_sharded):
            cache.prefix.close(self.layer_idx)  # no rows of it are shared here

    def get_seq_length(self) -> int:
        """Return the number of tokens before the next ones, at first the slice's start; models may ask any layer."""
        return self.length if self.shape.elements else int(self.cache.length)

    def _take_chunk(self, keys: torch.Tensor, values: torch.Tensor) -> Range:
        """Return the positions of the new tokens: the slice's next chunk.

        Raises `ModelError` if the model passes other heads or other tokens.
        """
        heads = self.shape.num_kv_heads
        if self.has_all_chunks:
            raise ModelError(f"layer {self.layer_idx}: it was updated twice with the same tokens")
        first, last = self.chunks[self.chunks_done]
        self.chunks_done += 1
        expected = [(1, heads, last - first, dim) for dim in (self.shape.key_dim, self.shape.value_dim)]
        if [keys.shape, values.shape] != expected:
            raise ModelError(
                f"layer {self.layer_idx}: keys and values are {[*map(tuple, (keys.shape, values.shape))]}; expected "
                f"{expected}"
            )
        return first, last


class SliceStateLayer(StateLayer, SliceLayer):
    """The states of one layer on one rank of a chain, which receives them before the layer and sends them after it."""

    def __init__(self, cache: SliceRow, layer_idx: int, shape: LayerShape) -> None:
        StateLayer.__init__(self, cache, layer_idx, shape)
        SliceLayer._begin(self)
        self._incoming: torch.Tensor | None = None
        self._outgoing: Transfer | None = None
        self._updated: set[tuple[str, int]] = set()
        self.is_sent = False

    def post(self) -> None:
        SliceLayer.post(self)
        self._post_states()

    def _post_states(self) -> None:
        """Post the receive of the states, or copy those of the prefix."""
        cache, relay = self.cache, self.cache.relay
        if relay.position > 0 and self.segments is not None:
            if not self.has_previous_state[0]:
                self._incoming = torch.empty(self.state_bytes, dtype=torch.uint8, device=cache.device)
                self.segments.receive(STATES, self._incoming)
                self.expect()
        elif cache.prefix is not None and not self.has_previous_state[0]:
            self.set_states(copy_states({0: cache.prefix.states[self.layer_idx]})[0])
        if self._outgoing is None and self.segments is not None and not relay.is_last:
            message = torch.zeros(self.state_bytes, dtype=torch.uint8, device=cache.device)
            self._outgoing = self.segments.announce(STATES, message)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Append the inputs of a convolution; return them after the earlier ones (1, channels, tokens)."""
        self.enter()
        whole: torch.Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
        self._note_update("conv", state_idx)
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Store the state after this rank's tokens."""
        self.enter()
        state: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.has_previous_state[state_idx] = True  # a layer without a convolution does not set it
        self._note_update("recurrent", state_idx)
        return state

    def send_states(self) -> None:
        """Send the layer's states, unless that was done before."""
        if not self.is_sent and self.segments is not None and self._outgoing is not None:
            self.pack(self._outgoing.tensor)
            self.segments.prompt.forwarder.send(self._outgoing)
        self.is_sent = True

    def complete(self) -> None:
        """Take part in the transfers of a prompt that failed on this rank; what is sent is meaningless."""
        self._post_states()
        if self._outgoing is not None and self.segments is not None and not self._outgoing.is_ready:
            self.segments.prompt.forwarder.send(self._outgoing)

    def drop(self) -> None:
        """Drop everything; the forwarder keeps what is still being sent."""
        SliceLayer.drop(self)
        self.held = {"conv": {}, "recurrent": {}}
        self._incoming = self._outgoing = None

    def enter(self) -> None:
        """Begin the layer: finish the sends of earlier layers, and wait for the states."""
        if self.cache.is_over:
            return
        self.cache.advance(self.layer_idx)
        if self._incoming is None:
            return
        incoming, self._incoming = self._incoming, None
        if self.segments is not None:
            self.segments.wait_for([STATES])
        self.set_states(self.unpack(incoming))

    def _note_update(self, kind: str, index: int) -> None:
        """Send the states after the last of them is updated."""
        self._updated.add((kind, index))
        if self._updated >= {(state.kind, state.index) for state in self.shape.states}:
            self.send_states()
            self.leave_if_done()


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


class SliceRow(RowCache):
    """The cache of one rank's slice of a prompt.

    relay : what this rank does.
    transfers : the prompt's transfers on this rank; None if the chain has only this rank.
    pool : for the prompt's keys and values on ranks that keep any.
    prefix : keys and values of the first tokens, if they have been computed already; another owns it.
    reserve_tokens : room for decoded tokens on the decode rank.
    stop_after : leave the model after this many layers (for timing a few of them).
    is_sharded : every rank keeps its own tokens, and no rank keeps all.
    keeps : whether any rank keeps keys and values.
    retain : what compression keeps of each layer, once the decode rank has attended in that layer. The rest is dropped,
        so this rank never holds all layers uncompressed. All heads keep the tokens decoded later.
    write_layer : called for each complete layer with the keys and values of this rank's own tokens.
    sequence : what this rank keeps of the prompt; None if nothing. Whoever has this cache releases it.
    arrivals : numbers of segments that are received and attended to together, and their tokens, in order.
    slab_start : position of the first row of each layer's buffer.
    cuts_last_layer : the last layer processes the last token as a separate chunk, the only one that attends
        (``layer_chunks``).
    is_alone : no other rank takes part. A layer's buffer is allocated only after the layer before it is complete.
    last : the last layer that keeps anything; later layers work token by token.
    left_after : this rank leaves the model after computing this layer's keys and values.
    is_over : the model has run.
    """

    prefilling = True
    is_over = False

    def __init__(
        self,
        loaded: LoadedModel,
        relay: Relay,
        transfers: PromptTransfers | None,
        pool: Pool,
        *,
        reserve_tokens: int = 0,
        prefix: SequenceKV | None = None,
        stop_after: int | None = None,
        is_sharded: bool = False,
        keeps: bool = True,
        retain: Retain | None = None,
        write_layer: WriteLayer | None = None,
    ) -> None:
        shape = loaded.shape
        self.relay, self.transfers, self.prefix = relay, transfers, prefix
        self.dtype, self.device = loaded.dtype, loaded.device
        self.is_decode_rank = transfers is None or relay.is_last
        keep = retain if retain is not None and self.is_decode_rank else Retain(None)
        coming = relay.received
        groups = in_two_groups(coming) if self.device.type in GROUPING else [[segment] for segment in coming]
        self.arrivals = [
            ([segment.number for segment in group], join_ranges([segment.bounds for segment in group]))
            for group in groups
        ]
        self.window, self._choose, self._late_layers = keep.window, keep.choose, keep.late_layers
        if self.window is not None:  # otherwise what compression keeps would depend on the partition
            (first, last), window = relay.own, self.window
            if not first <= window[0] < window[1] <= last:
                raise ValueError(f"the observation window, tokens {window}, is not in the last slice, {first, last}")
        (self.start, end), self.prompt_tokens = relay.own, relay.partition.tokens
        self.is_sharded, self.in_parts = is_sharded, loaded.attends_in_parts
        self.sequence = self._make_sequence(loaded, pool, self.prompt_tokens + reserve_tokens, end) if keeps else None
        self.slab_start = prefix.length if prefix is not None and self.in_parts else 0
        self.clock = Clock(self.device) if transfers is None else transfers.clock
        self._write_layer = write_layer
        self._unsent: list[Any] = []
        self._chosen: list[tuple[SliceLayer, Iterable[torch.Tensor] | None]] = []  # complete layers, to be admitted
        self._begun, self._posted = -1, 0
        self.is_alone = transfers is None and not shape.has_states  # models read states before keys
        in_streams = transfers is not None and transfers.forwarder.transport.in_streams
        self._layers_ahead = FEW_AHEAD if in_streams or self._choose is not None else LAYERS_AHEAD
        if self.is_alone:
            self._layers_ahead = 0
        kept = [idx for idx, layer in enumerate(shape.layers) if layer.elements or layer.states]
        self.last = kept[-1]
        stop = next((idx for idx in kept if stop_after is not None and idx + 1 >= stop_after), None)
        is_read = self.is_decode_rank or not relay.saves_last_layer
        self.left_after = self.last if stop is None and not is_read else stop
        self.cuts_last_layer = loaded.cuts_last_layer and self.in_parts and not shape.layers[self.last].states
        super().__init__(
            [
                SliceStateLayer(self, idx, layer) if layer.states else SliceLayer(self, idx, layer)
                for idx, layer in enumerate(shape.layers)
            ]
        )
        elements = max(layer.elements for layer in shape.layers)
        self.buffers = LayerBuffers(elements, end - self.slab_start, self.dtype, self.device)

    def _make_sequence(self, loaded: LoadedModel, pool: Pool, capacity: int, end: int) -> SequenceKV | None:
        """Make an empty sequence of what this rank keeps; its rows are allocated layer by layer."""
        prefix, tokens = self.prefix, self.prompt_tokens
        if not self.is_sharded and not self.is_decode_rank:
            return None
        if prefix is not None and (not self.is_sharded or self.start == prefix.length):  # with the tokens of the prefix
            found = prefix.fork(capacity, pool)
        else:
            found = SequenceKV(loaded, pool, capacity, start=self.start if self.is_sharded else 0)
        found.length = tokens
        if self.is_sharded:
            found.stop, found.is_last, found.longest = end, end == tokens, capacity
        return found

    def begin(self) -> None:
        """Post the receives of the first layers before anything is computed."""
        if self.cuts_last_layer and self.is_decode_rank and self.relay.saves_last_layer:  # the last token alone
            *before, (first, last) = self.relay.chunks
            rest = [(first, last - 1)] if last - first > 1 else []
            self.layers[self.last].chunks = [*before, *rest, (last - 1, last)]
        self._posted = self._layers_ahead
        for layer in self.layers[: self._posted]:
            layer.post()

    @property
    def length(self) -> int:
        """Tokens appended in layers that keep keys and values; 0 if no layer does."""
        return next((int(layer.length) for layer in self.layers if layer.shape.elements), 0)

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Return the tokens to run and the length of the whole prompt, including the slices of later ranks."""
        return [(tokens, self.prompt_tokens)]

    def append(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        found: Pair = layer.append(keys, values)
        return found

    def advance(self, layer_idx: int) -> None:
        """Begin a layer: finish those before it, release the ones that are sent, and post receives.

        Beginning the layer after the last one finishes all layers.
        """
        if layer_idx <= self._begun:
            return
        is_end, through = layer_idx == len(self.layers), self.layers[max(self._begun, 0) : layer_idx]
        if not is_end:
            for begun in range(self._begun + 1, layer_idx + 1):  # those without keys begin with the next that has them
                self.clock.mark("layer", begun)
        self._begun = layer_idx
        for layer in through:
            if layer.shape.states:
                layer.send_states()
            if self._write_layer is not None:
                bounds = self.relay.partition.bounds[self.relay.position :][:2]
                self._write_layer(_by_token(layer.rows(*bounds)) if layer.shape.elements else None)
            if layer.shape.elements and layer.has_all_chunks:
                self._finish_layer(layer)
        while len(self._chosen) > (0 if is_end else self._late_layers):
            layer, chosen = self._chosen.pop(0)
            kept = None if chosen is None else list(chosen)
            if kept is not None:
                check_retained(kept, layer.shape, layer.layer_idx)
            self.admit(layer, kept)
        if is_end:
            return
        for layer in self.layers[self._posted : layer_idx + 1 + self._layers_ahead]:
            layer.post()
        self._posted = max(self._posted, layer_idx + 1 + self._layers_ahead)
        if self.sequence is None or self.is_sharded:
            self._unsent += through
            while self._unsent and self._unsent[0].release(wait=len(self._unsent) > LAYERS_HELD):
                self._unsent.pop(0)

    def _finish_layer(self, layer: SliceLayer) -> None:
        """Keep what this rank keeps of a complete layer, or choose what it will keep."""
        sequence, idx = self.sequence, layer.layer_idx
        if sequence is None:
            return
        if self.is_sharded:
            if sequence.layers[idx] is None:
                first = sequence.first_new(idx)
                sequence.admit(idx, first, *layer.rows(first, sequence.stop))
            return
        chosen = None
        if self._choose is not None:
            chosen, layer.observed = self._choose(layer), None
        self._chosen.append((layer, chosen))

    def finish(self) -> None:
        """End the prefill, so that decoding can begin; unfinished sends continue in the background."""
        if self._begun >= 0:
            self.advance(len(self.layers))
        self.buffers.clear()
        self.is_over = True
        for layer in self.layers:
            if self.sequence is not None and layer.shape.states:
                self.sequence.states[layer.layer_idx] = layer.held
            if self.sequence is not None and layer.observed is not None:
                self.sequence.observed[layer.layer_idx] = layer.observed, layer.params
            layer.drop()

    def admit(self, layer: SliceLayer, kept: Sequence[torch.Tensor] | None) -> None:
        """Move the tokens that each head keeps (None: all) to the sequence, and release the layer's buffer.

        Transfers need rows by token; in the sequence they are by head, which decoding on CPUs reads twice as fast.
        """
        assert self.sequence is not None and layer.slab is not None, "this rank keeps them"
        if layer.segments is not None:
            layer.segments.is_through(wait=True)
        first = 0 if kept is not None else self.relay.first_held(layer.shape.visibility)
        self.sequence.admit(layer.layer_idx, first, *layer.rows(first, layer.length), kept)
        self.reuse(layer.slab)
        SliceLayer.drop(layer)  # states are in use until the model has run

    def reuse(self, slab: torch.Tensor) -> None:
        """Give a complete layer's buffer to later layers; if none needs it, it is freed with the last view of it.

        Buffers are not reused if the model attends by itself: its later layers may share keys and values of this one.
        """
        if self.in_parts and self._posted < len(self.layers):
            self.buffers.give_back(slab)


def _by_token(pair: Pair) -> Pair:
    """View keys and values (1, kv_heads, tokens, dim) as (tokens, kv_heads, dim)."""
    keys, values = pair
    return keys[0].transpose(0, 1), values[0].transpose(0, 1)


def layer_kv(cache: Any, layer_idx: int, first: int = 0) -> Pair | None:
    """Return keys and values of one layer, each (tokens, kv_heads, head_dim), or None if it has none.

    From a `SequenceKV`, only tokens from `first` on are returned that this rank keeps. A layer with a window or chunks
    may hold only its last tokens. If heads keep different tokens, the tensors are (rows, 1, head_dim), head after head
    (`SequenceKV.kept_positions`).

    cache : a `SequenceKV`, or a cache of transformers.
    """
    if not isinstance(cache, SequenceKV):
        layer = cache.layers[layer_idx]
        held: tuple[Any, Any] = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in held):
            return None
        return _by_token(held)
    shape = cache.shapes[layer_idx]
    if not shape.elements:
        return None
    if cache.rolling is not None:
        return None
    if layer_idx in cache.ragged:
        heads = [piece for head in range(shape.num_kv_heads) for piece in cache.head_pieces(layer_idx, head)]
        keys, values = (torch.cat(each).unsqueeze(1) for each in zip(*heads, strict=True))
        return keys, values
    stop = cache.length if cache.is_last else cache.stop
    return _by_token(cache.rows(layer_idx, max(first, cache.start, cache.first_whole(layer_idx)), stop))
