"""Compress a cache once its prompt is through, for figures and tests: jobs drop each layer's keys as it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvr_mpi.compress.compression import Compression
from kvr_mpi.kv.relay import Range
from kvr_mpi.kv.sequence import SequenceKV, check_retained

# For each layer and KV head the positions that are kept, ascending; None: the layer keeps all it has.
Retained = list[Sequence[torch.Tensor] | None]


@torch.inference_mode()
def choose_kept(compression: Compression, cache: SequenceKV, text: Range) -> Retained | None:
    """Choose what each KV head keeps of a whole cache that has observed the window; None: all of it."""
    retain = compression.retain(cache.length, text)
    if retain is None or retain.choose is None:
        return None
    layers: list[Any] = []
    for idx in range(len(cache.layers)):
        observed, params = cache.observed.get(idx, (None, None))
        rows = partial(cache.rows, idx)
        layers.append(SimpleNamespace(layer_idx=idx, length=cache.length, observed=observed, params=params, rows=rows))
    chosen = [retain.choose(layer) for layer in layers]
    return [None if kept is None else list(kept) for kept in chosen]


def keep_only(cache: SequenceKV, retained: Sequence[Sequence[torch.Tensor] | None], slack: int) -> None:
    """Drop all keys and values except those that each head is to keep, before any token is decoded.

    Parameters
    ----------
    retained : sequence
        For each layer, for each KV head: positions (tokens,) int64 that it keeps, ascending; None for a layer that
        keeps all it has, and for one without keys and values.
    slack : int
        Tokens that can be appended.

    Raises
    ------
    ValueError
        If positions are not ascending within the prompt, or a head would keep nothing.
    """
    length = cache.length
    for idx, (shape, kept) in enumerate(zip(cache.shapes, retained, strict=True)):
        if kept is not None:
            check_retained(kept, shape, idx)
            for head, positions in enumerate(kept):
                if positions[0] < 0 or positions[-1] >= length or not (positions.diff() > 0).all():
                    raise ValueError(f"layer {idx}, KV head {head}: positions have to ascend from 0 to {length - 1}")
    cache.capacity = length + slack
    for idx, (shape, kept) in enumerate(zip(cache.shapes, retained, strict=True)):
        if kept is not None:
            cache.admit(idx, 0, *cache.rows(idx, 0, length), kept)
        elif shape.elements:
            first = cache.first_whole(idx)
            keys, values = (rows.clone() for rows in cache.rows(idx, first, length))
            cache.close(idx)
            cache.admit(idx, first, keys, values)
