"""The contents of a cache by layer and token, for storing, sending and comparing."""

from __future__ import annotations

from typing import Any

import torch

from kvr_mpi.kv.head_store import Pair
from kvr_mpi.kv.layer import SliceLayer


def layer_kv(cache: Any, layer_idx: int, first: int = 0) -> Pair | None:
    """Return keys and values of one layer, each (tokens, kv_heads, head_dim), or None if it has none.

    From a `SliceCache`, only tokens from `first` on are returned.

    A layer with a window or chunks may hold only its last tokens. If heads keep different tokens, the tensors are
    (rows, 1, head_dim), head after head (`SliceLayer.positions`).
    """
    layer = cache.layers[layer_idx]
    if getattr(layer, "is_ragged", False):
        heads = [layer.store.head_rows(head, layer.length) for head in range(layer.shape.num_kv_heads)]
        keys, values = (torch.cat(each).unsqueeze(1) for each in zip(*heads, strict=True))
        return keys, values
    if isinstance(layer, SliceLayer):
        if not layer.shape.elements:
            return None
        assert layer.layout is not None, "this rank holds keys and values"
        return layer.layout.rows_by_token(max(first, cache.route.first_held(layer.shape.visibility)), layer.length)
    held: tuple[Any, Any] = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in held):
        return None
    return held[0][0].transpose(0, 1), held[1][0].transpose(0, 1)
