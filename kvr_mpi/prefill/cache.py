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
import weakref
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LayerShape, ModelShape
from kvr_mpi.prefill.attention import Part, Scores, attend, attend_window
from kvr_mpi.prefill.buffers import LayerBuffers
from kvr_mpi.prefill.exchange import Exchange
from kvr_mpi.prefill.passage import LayerSegments, Passage
from kvr_mpi.prefill.prefix import SharedPrefix

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
        # Two that hold each other would hold their memory until Python looks for such circles.
        self.cache = cast(SliceCache, weakref.proxy(cache))
        self.layer_idx, self.shape = layer_idx, shape
        self.length = cache.start
        self.fresh = 0  # tokens last appended
        self.attended = True
        self.is_by_heads = False
        self.buffer: torch.Tensor | None = None
        self.is_over = False  # let go of, with everything sent
        self.segments = None if cache.passage is None else LayerSegments(cache.passage, layer_idx)

    def post(self) -> None:
        """Make the buffer and post the receives."""
        cache = self.cache
        self.buffer = cache.buffers.take(self.shape)
        if cache.prefix is not None and cache.prefilling:
            cache.prefix.copy_into(self.buffer, self.layer_idx)
        if self.segments is not None:
            self.segments.buffer = self.buffer
            cache.exchange.post(self.segments)

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
            keys, values = self.rows(first, last)
            keys.copy_(key_states[:, :, at : at + last - first])
            values.copy_(value_states[:, :, at : at + last - first])
            at += last - first
        self.length = ranges[-1][1]
        self.is_initialized, self.attended = True, False
        cache.current = self
        if cache.prefilling:
            if self.segments is not None:
                cache.exchange.share(self.segments)
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
        out = part.out.to(query.dtype)
        return torch.nn.functional.pad(out, (0, 0, skipped, 0)) if skipped else out

    def _attend_collected(self, query: torch.Tensor, scores: Scores, skipped: int, window: int | None) -> Part:
        """Attend once everything is here: decoded tokens, the only token that is read, or bands of a window."""
        if self.segments is not None:
            self.segments.collect()
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

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, as views (1, kv_heads, tokens, head_dim)."""
        assert self.buffer is not None
        shape, heads = self.shape, self.shape.num_kv_heads
        if self.is_by_heads:
            flat, cut = self.buffer.view(-1), self.buffer.shape[0] * shape.key_elements
            keys = flat[:cut].view(1, heads, -1, shape.key_dim)
            values = flat[cut:].view(1, heads, -1, shape.value_dim)
            return keys[:, :, first:last], values[:, :, first:last]
        rows, cut = self.buffer[first:last], shape.key_elements
        keys, values = (
            rows[:, :cut].view(1, -1, heads, shape.key_dim),
            rows[:, cut:].view(1, -1, heads, shape.value_dim),
        )
        return keys.transpose(1, 2), values.transpose(1, 2)

    def lay_by_heads(self) -> None:
        """Put each head's keys and values together, in place: a CPU attends to them from one token twice as fast.

        Once the prompt is through: segments travel token-major.
        """
        if self.is_by_heads:
            return
        if self.segments is not None:
            self.segments.wait_through()
        old = [rows.clone(memory_format=torch.contiguous_format) for rows in self.rows(0, self.length)]
        self.is_by_heads = True
        for new, rows in zip(self.rows(0, self.length), old, strict=True):
            new.copy_(rows)

    def release(self, *, wait: bool) -> bool:
        """Let go of the buffer if all of it is sent, or wait for that; say whether it is gone."""
        if self.segments is not None:
            if not wait and not self.segments.are_through():
                return False
            self.segments.wait_through()
        if self.buffer is not None and not self.cache.is_keeper:
            self.cache.buffers.give_back(self.buffer)
        self.let_go()
        self.is_over = True
        return True

    def let_go(self) -> None:
        """Forget the buffer; what of it is still being sent is held by the courier."""
        self.buffer = self.segments = None

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
    passage : Passage or None
        The prompt's way over this rank; None if it is the only one.
    prefix : SharedPrefix or None
        Keys and values of the first tokens, which are there already.
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
        passage: Passage | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        reserve_tokens: int = 0,
        prefix: SharedPrefix | None = None,
        stop_after: int | None = None,
        cuts_last_layer: bool = True,
    ) -> None:
        self.exchange, self.passage, self.prefix = exchange, passage, prefix
        self.dtype, self.device = dtype, device
        self.is_keeper = passage is None or exchange.rank == exchange.keeper
        self.start = exchange.owned[0][0]
        self.capacity = exchange.capacity + (reserve_tokens if self.is_keeper else 0)
        self.stop_after, self.cuts_last_layer = stop_after, cuts_last_layer
        self.tail = contextlib.ExitStack()  # what is entered behind the last attention, until the model returns
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

    def begin(self) -> None:
        """Post the first layers' receives, before anything is computed."""
        if self.passage is not None:
            self.passage.begin()
        for layer in self.layers[:LAYERS_AHEAD]:
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

    def reads_only_last(self, layer_idx: int) -> bool:
        """Whether only the last token's output of this layer is ever read: the prompt's last layer."""
        return self.prefilling and self.exchange.saves_last_layer and layer_idx == len(self.layers) - 1

    def advance(self, layer_idx: int) -> None:
        """Keep `LAYERS_AHEAD` layers posted, free those that are through, leave where nobody reads on."""
        waits_s = 0.0 if self.passage is None else self.passage.wait_s + self.passage.stalled_s
        self.marks_s.append(time.perf_counter() - waits_s)
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
        """End the prefill: what is still being sent goes on by itself; from now on tokens are decoded."""
        if not self.is_keeper:
            for layer in self.layers:
                layer.let_go()
        self.prefilling = False


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
