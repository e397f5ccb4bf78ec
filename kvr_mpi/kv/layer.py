"""Base classes of both caches that a model sees, and of their layers: a row of tokens (1, tokens) in one forward pass.

The caches are in ``row`` (new tokens of some sequences) and ``chain`` (one rank's slice of a prompt).
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams


class RowLayer(CacheLayerMixin):
    """One layer of a row."""

    is_sliding = False
    cache: Any

    def __init__(self, cache: RowCache, layer_idx: int, shape: LayerShape) -> None:
        super().__init__()
        # A strong reference would make a cycle, whose memory only Python's garbage collector frees.
        self.cache = weakref.proxy(cache)
        self.layer_idx, self.shape = layer_idx, shape

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens (1, kv_heads, tokens, head_dim), and return what the model attends to.

        Raises `ModelError` if the layer before it has not attended.
        """
        cache = self.cache
        if cache.current is not None:
            raise ModelError(f"layer {self.layer_idx}: the layer before it never attended to its keys")
        cache.current, self.is_initialized = self, True
        return cast("tuple[torch.Tensor, torch.Tensor]", cache.append(self, key_states, value_states))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from the tokens last appended; (1, heads, tokens, value_dim) in the query's dtype."""
        self.cache.current = None
        return cast("torch.Tensor", self.cache.attend(self, query, keys, values, params))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: buffers exist before the model runs."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a query sees; no mask is built from them."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens before the row, from which models count positions that they are not given."""
        return int(self.cache.length)

    def get_max_length(self) -> int:
        """Return -1, no limit: room is reserved before the model runs."""
        return -1


class RowCache(Cache):
    """Both caches; each is a ``model.attention_hook.HookedCache``.

    current : the layer that was updated and has not attended yet.
    """

    in_parts = True
    current: Any = None

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new tokens (1, kv_heads, tokens, head_dim).

        Returns them unchanged, or for the model's own attention those of all tokens up to the last new one.
        """
        raise NotImplementedError

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from the tokens last appended in a layer.

        For a single token, heads may be folded into the query length.

        Returns (1, heads, tokens, value_dim), or folded into the query length (1, kv_heads, group, value_dim), in the
        query's dtype.
        """
        raise NotImplementedError
