"""A slice's keys and values among the ranks of a chain: the only file that touches transformers' cache classes.

Every attention layer of a causal LM calls ``past_key_values.update(keys, values, layer_idx)`` and then an
attention function (see ``seam``). `SliceLayer.update` takes this rank's keys and values and lets an `Exchange`
send them; `SliceLayer.attend` lets it attend to what has come from the others (KV-Runahead, section 4.1, Fig. 5).
No model code is changed, and the model does not know of ranks.

Each layer has one token-major buffer (tokens, elements of K and V of all heads), so that a stretch of tokens is
contiguous: it is received in place, attended to as a view, and sent on without packing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LayerShape, ModelShape
from kvr_mpi.prefill.attention import Part, Scores, attend, attend_window
from kvr_mpi.prefill.buffers import LayerBuffers
from kvr_mpi.prefill.exchange import Exchange, Range
from kvr_mpi.transport import Transport
from kvr_mpi.transport.courier import Courier, Parcel

# Layers whose receives are posted before they compute.
LAYERS_AHEAD = 2
# Layers a rank holds until they are sent, before it waits for the link.
LAYERS_HELD = 8


class SliceDoneError(Exception):
    """Raised out of the last layer when nobody reads what the rest of the model would compute."""


class SliceLayer(CacheLayerMixin):
    """One layer's keys and values on one rank."""

    is_sliding = False

    def __init__(self, cache: SliceCache, layer_idx: int, shape: LayerShape) -> None:
        super().__init__()
        self.cache, self.layer_idx, self.shape = cache, layer_idx, shape
        self.length = cache.start
        self.fresh = 0  # tokens last appended
        self.attended = True
        self.buffer: torch.Tensor | None = None
        self._arriving: dict[int, tuple[Parcel, Range]] = {}  # by segment, in the order they were posted
        self._parcels: list[Parcel] = []

    def post(self) -> None:
        """Make the buffer and post the receives."""
        cache = self.cache
        self.buffer = cache.buffers.take(self.shape)
        if cache.courier is not None:
            cache.exchange.post(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens (1, kv_heads, tokens, head_dim); while prefilling, share them."""
        cache = self.cache
        self._check(key_states, value_states)
        if self.buffer is None:
            self.post()
        assert self.buffer is not None
        self.fresh = key_states.shape[2]
        ranges = cache.exchange.owned if cache.prefilling else [(self.length, self.length + self.fresh)]
        at = 0
        for first, last in ranges:
            keys, values = self._heads(self.buffer[first:last])
            keys.copy_(key_states[0, :, at : at + last - first].transpose(0, 1))
            values.copy_(value_states[0, :, at : at + last - first].transpose(0, 1))
            at += last - first
        self.length = ranges[-1][1]
        self.is_initialized, self.attended = True, False
        cache.current = self
        if cache.prefilling:
            if cache.courier is not None:
                cache.exchange.share(self)
            cache.advance(self.layer_idx)
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: Scores,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from the tokens last appended to all tokens up to each.

        Returns
        -------
        torch.Tensor
            (1, heads, tokens, value_dim) in the query's dtype.
        """
        self.attended = True
        # A single token's query heads may come folded into the query length (1, kv_heads, group, head_dim).
        if query.shape[2] != self.fresh and self.fresh > 1:
            raise ModelError(
                f"layer {self.layer_idx}: {query.shape[2]} queries for {self.fresh} tokens; use strategy = 'single'"
            )
        skipped = self.fresh - 1 if self.cache.reads_only_last(self.layer_idx) else 0
        query = query[:, :, skipped:]
        bites = window is not None and self.length > window
        if self.cache.prefilling and not skipped and not bites:
            part = self.cache.exchange.attend(self, query, keys, values, scores)
        else:
            part = self._attend_collected(query, scores, skipped, window if bites else None)
        if sinks is not None:
            part = part.with_sinks(sinks)
        return torch.nn.functional.pad(part.out.to(query.dtype), (0, 0, skipped, 0))

    def _attend_collected(self, query: torch.Tensor, scores: Scores, skipped: int, window: int | None) -> Part:
        """Attend once everything is here: decoded tokens, the only token that is read, or bands of a window."""
        self.collect()
        ranges = self.cache.exchange.owned if self.cache.prefilling else [(self.length - self.fresh, self.length)]
        if skipped or self.fresh == 1:
            ranges = [(self.length - 1, self.length)]
        part, at = None, 0
        for first, last in ranges:
            some = query if len(ranges) == 1 else query[:, :, at : at + last - first]
            at += last - first
            if window is None and last - first == 1:
                piece = attend(some, *self.rows(0, last), scores)
            else:
                low = max(0, first - (window or last) + 1)
                piece = attend_window(some, *self.rows(low, last), scores, window or last)
            part = piece if part is None else part.join(piece)
        assert part is not None
        return part

    def receive(self, bounds: Range, source: int, segment: int, forward_to: int | None = None) -> None:
        """Post the receive of a segment; for exchanges."""
        assert self.buffer is not None and self.cache.courier is not None
        parcel = self.cache.courier.receive(self.buffer[bounds[0] : bounds[1]], source, self._tag(segment), forward_to)
        self._arriving[segment] = parcel, bounds
        self._parcels.append(parcel)

    def announce(self, dest: int, segment: int) -> None:
        """Say that a segment will be sent, in the order in which `dest` receives from here; for exchanges."""
        assert self.cache.courier is not None
        self.cache.courier.announce(dest, self._tag(segment))

    def send(self, bounds: Range, dest: int, segment: int) -> None:
        """Send a segment; for exchanges."""
        assert self.buffer is not None and self.cache.courier is not None
        rows = self.buffer[bounds[0] : bounds[1]]
        self._parcels.append(self.cache.courier.send(rows, dest, self._tag(segment)))

    def wait_for(self, segment: int) -> None:
        """Return when a segment is here; the time is counted."""
        courier = self.cache.courier
        assert courier is not None
        began = time.perf_counter()
        courier.wait(self._arriving.pop(segment)[0])
        self.cache.wait_s += time.perf_counter() - began

    def collect(self) -> None:
        """Return when all segments are here."""
        for segment in list(self._arriving):
            self.wait_for(segment)

    def arrivals(self) -> Iterator[Range]:
        """Yield the ranges of the segments to come, each when it is here, in the order their receives were posted.

        A fixed order, whatever comes first: sums in another order differ in their last bits, and the same job is to
        give the same answers every time.
        """
        for segment, (_, bounds) in list(self._arriving.items()):
            self.wait_for(segment)
            yield bounds

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, as views (1, kv_heads, tokens, head_dim)."""
        assert self.buffer is not None
        keys, values = self._heads(self.buffer[first:last])
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def release(self, *, wait: bool) -> bool:
        """Let go of the buffer if all of it is sent, or wait for that; say whether it is gone."""
        courier = self.cache.courier
        if courier is not None:
            if not wait and not all(courier.is_through(parcel) for parcel in self._parcels):
                return False
            began = time.perf_counter()
            for parcel in self._parcels:
                courier.wait_through(parcel)
            self.cache.stalled_s += time.perf_counter() - began
        self._parcels.clear()
        if self.buffer is not None:
            self.cache.buffers.give_back(self.buffer)
        self.buffer = None
        return True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: buffers are made from the model's shape."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a query sees."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before the ones to come: the slice's start until the slice is in."""
        return self.length

    def get_max_length(self) -> int:
        """Most tokens the buffer holds."""
        return self.cache.capacity

    def _heads(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, cut = self.shape, self.shape.key_elements
        return (
            rows[:, :cut].view(-1, shape.num_kv_heads, shape.key_dim),
            rows[:, cut:].view(-1, shape.num_kv_heads, shape.value_dim),
        )

    def _tag(self, segment: int) -> int:
        return self.layer_idx * self.cache.segments + segment

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        heads = self.shape.num_kv_heads
        expected = (1, heads, self.shape.key_dim), (1, heads, self.shape.value_dim)
        found = tuple((tensor.shape[0], tensor.shape[1], tensor.shape[3]) for tensor in (keys, values))
        if found != expected:
            raise ModelError(f"layer {self.layer_idx}: keys and values are {found}, {expected} were announced")
        if self.cache.current is not None and not self.cache.current.attended:
            raise ModelError(
                f"layer {self.layer_idx}: the layer before it never attended to its keys through the cache"
            )


class SliceCache(Cache):
    """The cache of one rank's part of one prompt; on the keeper, of the whole prompt and then the answer.

    Parameters
    ----------
    shape : ModelShape
    exchange : Exchange
        The strategy, on this rank.
    segments : int
        Number of segments the prompt is cut into, over all ranks.
    chain : Transport or None
        The ranks; None if there is only this one.
    dtype, device
        Of the model's keys and values.
    reserve_tokens : int
        Room for tokens to be decoded after the prompt, on the keeper.
    stop_after : int or None
        Leave the model after this many layers (for timing a few of them).
    cuts_last_layer : bool
        Compute what follows the last layer's attention for the last token only (``lastrow``).
    """

    def __init__(
        self,
        shape: ModelShape,
        exchange: Exchange,
        segments: int,
        chain: Transport | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        reserve_tokens: int = 0,
        stop_after: int | None = None,
        cuts_last_layer: bool = True,
    ) -> None:
        self.exchange, self.segments, self.dtype, self.device = exchange, segments, dtype, device
        self.is_keeper = chain is None or chain.rank == exchange.keeper
        self.start = exchange.owned[0][0]
        self.capacity = exchange.capacity + (reserve_tokens if self.is_keeper else 0)
        self.stop_after, self.cuts_last_layer = stop_after, cuts_last_layer
        self.tail = contextlib.ExitStack()  # what is entered behind the last attention, until the model returns
        self.wait_s = 0.0  # for other ranks' keys and values
        self.stalled_s = 0.0  # for the link to take what is sent
        self.marks_s: list[float] = []  # a clock that stands still while the rank waits, at every layer's keys
        self.prefilling = True
        self.current: SliceLayer | None = None
        self._held: list[SliceLayer] = []
        layers = [SliceLayer(self, idx, layer) for idx, layer in enumerate(shape.layers) if layer is not None]
        if not layers or len(layers) != len(shape.layers):
            raise ModelError(f"{shape.architecture} keeps more than keys and values; use strategy = 'single' for it")
        super().__init__(layers=layers)
        filled = [layer.shape for layer in layers[: None if stop_after is None else stop_after + LAYERS_AHEAD]]
        self.buffers = LayerBuffers(filled, self.capacity, keeps=self.is_keeper, dtype=dtype, device=device)
        on_gpu = device.type == "cuda"
        self.courier = None if chain is None else Courier(chain, forwards=exchange.forwards, on_gpu=on_gpu)
        for layer in layers[:LAYERS_AHEAD]:
            layer.post()

    @property
    def attending(self) -> SliceLayer:
        """The layer that was updated and has not attended yet.

        Raises
        ------
        ModelError
            If there is none: the model does not use its cache as a chain needs it.
        """
        if self.current is None or self.current.attended:
            raise ModelError("a layer attends without having updated the cache; use strategy = 'single' for this model")
        return self.current

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent."""
        return 0 if self.courier is None else self.courier.sent_bytes

    def reads_only_last(self, layer_idx: int) -> bool:
        """Whether only the last token's output of this layer is ever read: the prompt's last layer."""
        return self.prefilling and self.exchange.saves_last_layer and layer_idx == len(self.layers) - 1

    def advance(self, layer_idx: int) -> None:
        """Keep `LAYERS_AHEAD` layers posted, free those that are through, leave where nobody reads on."""
        self.marks_s.append(time.perf_counter() - self.wait_s - self.stalled_s)
        if layer_idx + LAYERS_AHEAD < len(self.layers):
            self.layers[layer_idx + LAYERS_AHEAD].post()
        if layer_idx and not self.is_keeper:
            self._held.append(self.layers[layer_idx - 1])
            while self._held and self._held[0].release(wait=len(self._held) > LAYERS_HELD):
                self._held.pop(0)
        is_last_layer = layer_idx == len(self.layers) - 1
        if layer_idx + 1 == self.stop_after or (
            is_last_layer and not self.is_keeper and self.exchange.saves_last_layer
        ):
            raise SliceDoneError

    def finish(self) -> None:
        """End the prefill: wait for what is still under way; from now on tokens are decoded."""
        if self.courier is not None:
            self.courier.close()
        if not self.is_keeper:
            for layer in self.layers:
                layer.release(wait=True)
        self.prefilling = False

    def abandon(self) -> None:
        """End without waiting, because the prompt failed."""
        if self.courier is not None:
            self.courier.abandon()


def layer_kv(cache: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values a cache holds of one layer, each (tokens, kv_heads, head_dim), or None if it holds none.

    A sliding-window layer of a plain cache holds only its last tokens.
    """
    layer = cache.layers[layer_idx]
    if isinstance(layer, SliceLayer):
        keys, values = layer.rows(0, layer.length)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)
    held: tuple[Any, Any] = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in held):
        return None
    return held[0][0].transpose(0, 1), held[1][0].transpose(0, 1)
