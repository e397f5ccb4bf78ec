"""Prefill the rest of a prompt whose stored beginning is compressed, on one rank.

Stands beside `packed`, which it is called by. Its tokens attend to what each head has kept, as those that are decoded
do; they are all kept themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvr_mpi.compress.compression import RetainedSize
from kvr_mpi.kv.arena import Arena, make_rows
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.tp_group import guarded
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.one_prompt import Prefill, wait_for_compute
from kvr_mpi.prefill.routes import relay


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
        Where the rows are kept.

    Returns
    -------
    Prefill
        With its `error` if memory ran out.

    Raises
    ------
    DataError
        If what is stored cannot be read.
    """
    prefix.check(ids)
    began, partition = time.perf_counter(), Partition((0, len(ids)))
    try:
        with guarded(loaded.tp_group):
            cache = _load(loaded, partition, prefix, len(ids) - prefix.tokens + reserve_tokens, arena)
            fresh = torch.tensor([list(ids[prefix.tokens :])], device=loaded.device)
            logits = run_model(loaded.model, fresh, cache)[0]
            wait_for_compute(loaded.device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        what = str(error).splitlines()[0]
    else:
        return Prefill(
            partition,
            cache,
            logits,
            time.perf_counter() - began,
            known_tokens=prefix.tokens,
            retained=_size_of(loaded, cache, prefix.compression),
            began_s=began,
        )
    # Out of the except block: the error held on to what was made.
    why = f"there is no memory for its {prefix.tokens} stored tokens and {len(ids) - prefix.tokens} more: {what}"
    return Prefill(partition, None, None, 0.0, error=why, known_tokens=prefix.tokens, began_s=began)


def _load(
    loaded: LoadedModel, partition: Partition, prefix: SharedPrefix, slack: int, arena: Arena | None
) -> SliceCache:
    """Load what is stored into a cache with room for so many more tokens."""
    stores = [_load_layer(loaded, idx, shape, prefix, slack, arena) for idx, shape in enumerate(loaded.shape.layers)]
    cache = SliceCache(loaded, relay(partition, 0), None)
    cache.finish()
    cache.adopt(stores, prefix.tokens, slack)
    return cache


def _load_layer(
    loaded: LoadedModel, layer_idx: int, shape: LayerShape, prefix: SharedPrefix, slack: int, arena: Arena | None
) -> HeadStore:
    """Load the rows of a layer."""
    assert prefix.heads is not None, "it is compressed"
    heads = prefix.heads(layer_idx)
    assert heads is not None, "models that are compressed keep keys and values in every layer"
    counts = [len(keys) for keys, _ in heads]
    memory = make_rows(shape, counts, slack, loaded.dtype, loaded.device, arena)
    # A layer that forgets by position has them all.
    is_whole = shape.visibility.size is not None
    store = HeadStore.by_heads(memory, shape, counts, slack, prefix.tokens, is_whole=is_whole)
    for at, stored in enumerate(heads):
        for place, rows in zip(store.own_rows(at, prefix.tokens), stored, strict=True):
            place.copy_(rows)
    return store


def _size_of(loaded: LoadedModel, cache: SliceCache, compression: str) -> RetainedSize:
    """Return how much a prompt keeps, compressed and new; for a tensor-parallel group over all heads."""
    counts = [count for layer in cache.layers if layer.is_ragged for count in layer.head_counts]
    kv_bytes = sum(
        sum(layer.head_counts) * (layer.shape.key_dim + layer.shape.value_dim) * cache.dtype.itemsize
        for layer in cache.layers
    )
    tokens, heads = sum(counts), len(counts)
    if loaded.tp_group is not None and loaded.part is not None:
        mine = [each * loaded.part.stores for each in (tokens, heads, kv_bytes)]
        tokens, heads, kv_bytes = loaded.tp_group.total(mine, cache.device)
    return RetainedSize(compression, tokens / max(1, heads), kv_bytes)
