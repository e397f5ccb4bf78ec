"""What a row of tokens needs to look like a cache to the model, whatever its tokens are of.

The caches of ``packed_row`` (several prompts), ``decode_cache`` (answers) and ``shares`` (prompts that stay spread over
ranks) say what a layer keeps and how it attends, as do the layers of ``rolling`` (a prompt's last tokens); the rest is
here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams


class RowLayer(CacheLayerMixin):
    """One layer of a row.

    Attributes
    ----------
    attended : bool
        Whether the tokens that came last have attended.
    """

    is_sliding = False
    cache: RowCache

    def __init__(self, cache: RowCache, layer_idx: int, shape: LayerShape) -> None:
        super().__init__()
        self.cache = cast("RowCache", weakref.proxy(cache))  # see `SliceLayer`
        self.layer_idx, self.shape, self.attended = layer_idx, shape, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens (1, kv_heads, tokens, head_dim); they are returned as they came."""
        self.cache.enter(self)
        self.cache.append(self, key_states, value_states)
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from the tokens that came last; (1, heads, tokens, value_dim) in the query's dtype."""
        self.attended = True
        return self.cache.attend(self, query, keys, values, params)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: buffers are there before the model runs."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a query sees; no mask is made of them."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Nothing that could be said of several prompts: models are given every token's position."""
        return 0

    def get_max_length(self) -> int:
        """Most tokens that any prompt of the row has room for."""
        return self.cache.capacity


class RowCache(Cache):
    """All layers of a row.

    Attributes
    ----------
    current : RowLayer or None
        The layer that was updated last.
    """

    in_parts = True

    def __init__(self, layers: Sequence[RowLayer]) -> None:
        self.current: Any = None
        super().__init__(layers=list(layers))

    @property
    def attending(self) -> Any:
        """The layer that was updated and has not attended yet.

        Raises
        ------
        ModelError
            If there is none: the model does not use its cache as we need it.
        """
        if self.current is None or self.current.attended:
            raise ModelError("a layer attends without having updated the cache")
        return self.current

    def enter(self, layer: RowLayer) -> None:
        """Let a layer be the one that attends next.

        Raises
        ------
        ModelError
            If the one before it has not.
        """
        if self.current is not None and not self.current.attended:
            raise ModelError(f"layer {layer.layer_idx}: the layer before it never attended to its keys")
        self.current, layer.attended, layer.is_initialized = layer, False, True

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep a layer's new tokens (1, kv_heads, tokens, head_dim)."""
        raise NotImplementedError

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend in a layer from the tokens that came last; of a single token the heads may come folded, and stay so.

        Returns
        -------
        torch.Tensor
            (1, heads, tokens, value_dim), or folded into the query length (1, kv_heads, group, value_dim), in the
            query's dtype.
        """
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """Most tokens that any prompt of the row has room for."""
        raise NotImplementedError

    @property
    def positions(self) -> torch.Tensor | None:
        """Positions of the tokens (1, tokens), where neither the model nor whoever packs the row knows them."""
        return None

    @property
    def prefilling(self) -> bool:
        """Whether prompts' tokens are run; otherwise answers go on."""
        raise NotImplementedError

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Of each prompt: its tokens in the row of so many, and its length with them."""
        raise NotImplementedError
