"""A slice's keys and values on their way along a chain: the only file that touches transformers' cache classes.

Every attention layer of a causal LM calls ``past_key_values.update(keys, values, layer_idx)`` and then an
attention function (see ``seam``). `ChainLayer.update` takes this rank's keys and values, sends them on, and lets
the predecessors' arrive; `ChainLayer.attend` merges what is there (KV-Runahead, section 4.1, Fig. 5). No model
code is changed, and the model does not know of ranks.

Each layer has one token-major buffer (tokens, bytes of K and V of all heads), so that a prefix is contiguous:
it is received in place, attended to as a view, and sent on without packing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LayerShape, ModelShape
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.attention import Scores, attend, attend_window
from kvr_mpi.transport import Request, Transport

# Layers whose receives are posted, and whose buffers a passing rank holds, at one time.
LAYERS_IN_FLIGHT = 2


class SliceDoneError(Exception):
    """Raised out of the last layer when nobody reads what the rest of the model would compute."""


class ChainLayer(CacheLayerMixin):
    """One layer's keys and values on one rank of a chain."""

    is_sliding = False

    def __init__(self, cache: ChainCache, layer_idx: int, shape: LayerShape) -> None:
        super().__init__()
        self.cache, self.layer_idx, self.shape = cache, layer_idx, shape
        self.start = self.length = cache.start  # the tokens last appended are start:length
        self.buffer: torch.Tensor | None = None
        self.arriving: deque[tuple[Request, int]] = deque()  # (receive, its segment), nearest to token 0 first
        self.leaving: list[Request] = []
        self.attended = True

    def post(self) -> None:
        """Make the buffer and post the receives of all predecessors' segments."""
        cache = self.cache
        self.buffer = torch.empty(cache.capacity, self.shape.elements, dtype=cache.dtype, device=cache.device)
        if cache.transport is not None:
            for segment in range(cache.rank):
                rows = self._segment(segment)
                request = cache.transport.irecv(rows, cache.rank - 1, self._tag(segment))
                self.arriving.append((request, segment))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens (1, kv_heads, tokens, head_dim); send them on while prefilling."""
        cache = self.cache
        self._check(key_states, value_states)
        if self.buffer is None:
            self.post()
        assert self.buffer is not None
        self.start, self.length = self.length, self.length + key_states.shape[2]
        cut = self.shape.key_elements
        rows = self.buffer[self.start : self.length]
        rows[:, :cut].view(-1, *self._key_shape).copy_(key_states[0].transpose(0, 1))
        rows[:, cut:].view(-1, *self._value_shape).copy_(value_states[0].transpose(0, 1))
        self.is_initialized, self.attended = True, False
        cache.current = self
        if cache.prefilling:
            self._send(cache.rank)
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
        """Attend from the tokens last appended to all tokens up to them.

        Returns
        -------
        torch.Tensor
            (1, heads, tokens, value_dim) in the query's dtype.
        """
        self.attended = True
        tokens = self.length - self.start
        # A single token's query heads may come folded into the query length (1, kv_heads, group, head_dim).
        if query.shape[2] != tokens and tokens > 1:
            raise ModelError(
                f"layer {self.layer_idx}: {query.shape[2]} queries for {tokens} tokens; use strategy = 'single'"
            )
        skipped = tokens - 1 if self.cache.reads_only_last(self.layer_idx) else 0
        query = query[:, :, skipped:]
        if window is not None and self.length > window:
            for _ in self.arrivals():  # a band crosses segments: have them all first
                pass
            first = max(0, self.start + skipped - window + 1)
            part = attend_window(query, *self.rows(first, self.length), scores, window)
        elif tokens == 1 and not self.arriving:  # decoding
            part = attend(query, *self.rows(0, self.length), scores)
        else:
            part = attend(query, keys, values, scores, causal=tokens > 1 and not skipped)
            for first, last in self.arrivals():
                part = part.merge(attend(query, *self.rows(first, last), scores))
        if sinks is not None:
            part = part.with_sinks(sinks)
        return torch.nn.functional.pad(part.out.to(query.dtype), (0, 0, skipped, 0))

    def arrivals(self) -> Iterator[tuple[int, int]]:
        """Yield the prefix of the tokens last appended, in ranges, as it arrives; send each segment on at once."""
        bounds = self.cache.partition.bounds
        first = last = 0
        while self.arriving:
            request, segment = self.arriving.popleft()
            began = time.perf_counter()
            request.wait()
            self.cache.wait_s += time.perf_counter() - began
            self._send(segment)
            last = bounds[segment + 1]
            while self.arriving and self.arriving[0][0].test():  # what is here already goes into the same pass
                segment = self.arriving.popleft()[1]
                self._send(segment)
                last = bounds[segment + 1]
            yield first, last
            first = last
        if first < self.start:
            yield first, self.start

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, as views (1, kv_heads, tokens, head_dim)."""
        assert self.buffer is not None
        rows, cut = self.buffer[first:last], self.shape.key_elements
        keys = rows[:, :cut].view(-1, *self._key_shape)
        values = rows[:, cut:].view(-1, *self._value_shape)
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def release(self) -> None:
        """Wait until everything is sent, and let go of the buffer unless this rank is to keep it."""
        for request in self.leaving:
            request.wait()
        self.leaving.clear()
        if not self.cache.is_last:
            self.buffer = None

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

    @property
    def _key_shape(self) -> tuple[int, int]:
        return self.shape.num_kv_heads, self.shape.key_dim

    @property
    def _value_shape(self) -> tuple[int, int]:
        return self.shape.num_kv_heads, self.shape.value_dim

    def _segment(self, rank: int) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer[self.cache.partition.start(rank) : self.cache.partition.stop(rank)]

    def _tag(self, segment: int) -> int:
        return self.layer_idx * self.cache.partition.size + segment

    def _send(self, segment: int) -> None:
        cache = self.cache
        if cache.transport is not None and not cache.is_last:
            rows = self._segment(segment)
            self.leaving.append(cache.transport.isend(rows, cache.rank + 1, self._tag(segment)))

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        expected = (1, *self._key_shape), (1, *self._value_shape)
        found = tuple((tensor.shape[0], tensor.shape[1], tensor.shape[3]) for tensor in (keys, values))
        if found != expected:
            raise ModelError(f"layer {self.layer_idx}: keys and values are {found}, {expected} were announced")
        if self.cache.current is not None and not self.cache.current.attended:
            raise ModelError(
                f"layer {self.layer_idx}: the layer before it never attended to its keys through the cache"
            )


class ChainCache(Cache):
    """The cache of one rank's slice of one prompt, and, on the last rank, of the whole prompt and the answer.

    Parameters
    ----------
    shape : ModelShape
    partition : Partition
        The prompt's slices; ``partition.size`` ranks form the chain.
    transport : Transport or None
        The chain; None for a chain of one.
    dtype, device
        Of the model's keys and values.
    reserve_tokens : int
        Room for tokens to be decoded after the prompt, on the last rank.
    stop_after : int or None
        Leave the model after this many layers (for timing a few of them).
    """

    def __init__(
        self,
        shape: ModelShape,
        partition: Partition,
        transport: Transport | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        reserve_tokens: int = 0,
        stop_after: int | None = None,
    ) -> None:
        self.partition, self.dtype, self.device = partition, dtype, device
        self.transport = transport if partition.size > 1 else None
        self.rank = transport.rank if transport is not None and partition.size > 1 else 0
        self.is_last = self.rank == partition.size - 1
        self.start, self.stop = partition.start(self.rank), partition.stop(self.rank)
        self.capacity = self.stop + (reserve_tokens if self.is_last else 0)
        self.stop_after = stop_after
        self.wait_s = 0.0
        self.prefilling = True
        self.current: ChainLayer | None = None
        layers = [ChainLayer(self, idx, layer) for idx, layer in enumerate(shape.layers) if layer is not None]
        if not layers or len(layers) != len(shape.layers):
            raise ModelError(f"{shape.architecture} keeps more than keys and values; use strategy = 'single' for it")
        super().__init__(layers=layers)
        for layer in layers[:LAYERS_IN_FLIGHT]:
            layer.post()

    @property
    def attending(self) -> ChainLayer:
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
        return self.prefilling and layer_idx == len(self.layers) - 1

    def advance(self, layer_idx: int) -> None:
        """Keep `LAYERS_IN_FLIGHT` layers posted, free those that are through, leave where nobody reads on."""
        if layer_idx >= LAYERS_IN_FLIGHT:
            self.layers[layer_idx - LAYERS_IN_FLIGHT].release()
        ahead = layer_idx + LAYERS_IN_FLIGHT
        if ahead < len(self.layers):
            self.layers[ahead].post()
        if layer_idx + 1 == self.stop_after:
            raise SliceDoneError
        if layer_idx == len(self.layers) - 1 and not self.is_last:
            for _ in self.layers[layer_idx].arrivals():  # pass on the predecessors' segments
                pass
            raise SliceDoneError

    def finish(self) -> None:
        """End the prefill: wait for what is still being sent; from now on tokens are decoded."""
        for layer in self.layers:
            layer.release()
        self.prefilling = False


def layer_kv(cache: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values a cache holds of one layer, each (tokens, kv_heads, head_dim), or None if it holds none.

    A sliding-window layer of a plain cache holds only its last tokens.
    """
    layer = cache.layers[layer_idx]
    if isinstance(layer, ChainLayer):
        keys, values = layer.rows(0, layer.length)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)
    held: tuple[Any, Any] = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in held):
        return None
    return held[0][0].transpose(0, 1), held[1][0].transpose(0, 1)
