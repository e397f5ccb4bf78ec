"""Prefill the rest of a prompt whose stored prefix is compressed, on one rank.

`packed` calls it. The new tokens attend to the tokens that each head has kept, as decoded tokens do; all heads keep all
new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.compress.compression import size_of
from kvr_mpi.kv.arena import Arena, make_rows
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.prefill.one_prompt import Prefill, make_decode_cache, prefill_alone


@torch.inference_mode()
def prefill_after_compressed(
    loaded: LoadedModel, ids: Sequence[int], prefix: SharedPrefix, reserve_tokens: int, arena: Arena | None = None
) -> Prefill:
    """Prefill a prompt that begins with stored, compressed keys and values.

    Parameters
    ----------
    ids : sequence of int
        The whole prompt.
    prefix : SharedPrefix
        With `heads`.
    reserve_tokens : int
        Room for tokens to be decoded.
    arena : Arena or None
        Page pool for the rows; None: separate memory.

    Returns
    -------
    Prefill
        With its `error` if memory ran out.

    Raises
    ------
    DataError
        If the stored keys and values cannot be read.
    """
    prefix.check(ids)
    fresh = ids[prefix.tokens :]
    slack = len(fresh) + reserve_tokens

    def run() -> tuple[SliceCache, torch.Tensor]:
        layers = enumerate(loaded.shape.layers)
        stores = [_load_layer(loaded, idx, shape, prefix, slack, arena) for idx, shape in layers]
        cache = make_decode_cache(loaded, stores, prefix.tokens, slack)
        return cache, run_model(loaded.model, torch.tensor([list(fresh)], device=loaded.device), cache)[0]

    def describe(why: str) -> str:
        return f"not enough memory for its {prefix.tokens} stored tokens and {len(fresh)} more: {why}"

    found = prefill_alone(loaded, len(ids), run, describe, known_tokens=prefix.tokens)
    if found.error is None:
        found.retained = size_of(loaded, found.cache, prefix.compression)
    return found


def _load_layer(
    loaded: LoadedModel, layer_idx: int, shape: LayerShape, prefix: SharedPrefix, slack: int, arena: Arena | None
) -> HeadStore:
    """Load the rows of a layer."""
    assert prefix.heads is not None, "it is compressed"
    heads = prefix.heads(layer_idx)
    assert heads is not None, "models that are compressed keep keys and values in every layer"
    counts = [len(keys) for keys, _ in heads]
    memory = make_rows(shape, counts, slack, loaded.dtype, loaded.device, arena)
    # A layer with a window or chunks is not compressed.
    is_whole = shape.visibility.size is not None
    store = HeadStore.by_heads(memory, shape, counts, slack, prefix.tokens, is_whole=is_whole)
    for at, stored in enumerate(heads):
        for place, rows in zip(store.own_rows(at, prefix.tokens), stored, strict=True):
            place.copy_(rows)
    return store
