"""Prefill the rest of a prompt whose stored prefix is compressed, on one rank.

`packed` calls it. The new tokens attend to the tokens that each head has kept, as decoded tokens do; all heads keep all
new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvr_mpi.compress.compression import size_of
from kvr_mpi.kv.arena import Arena, make_runs
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt
from kvr_mpi.prefill.one_prompt import Prefill, make_decode_cache, wait_for_compute


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
    began, partition, fresh = time.perf_counter(), Partition((0, len(ids))), ids[prefix.tokens :]

    def run() -> tuple[SliceCache, torch.Tensor]:
        slack = len(fresh) + reserve_tokens
        layers = enumerate(loaded.shape.layers)
        stores = [_load_layer(loaded, idx, shape, prefix, slack, arena) for idx, shape in layers]
        cache = make_decode_cache(loaded, stores, prefix.tokens, slack)
        logits = run_model(loaded.model, torch.tensor([list(fresh)], device=loaded.device), cache)[0]
        wait_for_compute(loaded.device)
        return cache, logits

    found = attempt(run, loaded.tp_group)
    if isinstance(found, Failure):
        why = f"not enough memory for its {prefix.tokens} stored tokens and {len(fresh)} more: {found.why}"
        return Prefill(partition, None, None, 0.0, error=why, known_tokens=prefix.tokens, began_s=began)
    cache, logits = found
    return Prefill(
        partition,
        cache,
        logits,
        time.perf_counter() - began,
        known_tokens=prefix.tokens,
        retained=size_of(loaded, cache, prefix.compression),
        began_s=began,
    )


def _load_layer(
    loaded: LoadedModel, layer_idx: int, shape: LayerShape, prefix: SharedPrefix, slack: int, arena: Arena | None
) -> HeadStore:
    """Load the rows of a layer."""
    assert prefix.heads is not None, "it is compressed"
    heads = prefix.heads(layer_idx)
    assert heads is not None, "models that are compressed keep keys and values in every layer"
    counts = [len(keys) for keys, _ in heads]
    runs = make_runs(shape, counts, slack, loaded.dtype, loaded.device, arena)
    # A layer with a window or chunks is not compressed.
    is_whole = shape.visibility.size is not None
    store = HeadStore(runs, shape, slack, prefix.tokens, is_whole=is_whole)
    for at, stored in enumerate(heads):
        for place, rows in zip(store.own_rows(at, prefix.tokens), stored, strict=True):
            place.copy_(rows)
    return store
