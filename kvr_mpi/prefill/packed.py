"""Prefill several short prompts in one packed row, and decode one token each of many answers.

``kv.row`` describes how a model runs several documents as one row. Prompts after a compressed prefix run one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kvr_mpi.compress.compression import size_of
from kvr_mpi.kv.arena import Arena
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.decode_cache import DecodeCache
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.layer import Retain
from kvr_mpi.kv.packed_row import PackedCache
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt
from kvr_mpi.prefill.one_prompt import Prefill, make_decode_cache, prefill_alone, prefill_whole, wait_for_compute
from kvr_mpi.prefill.routes import relay

# Tokens of a packed forward pass, by device type: a GPU needs more rows for the full speed of its products.
PACK_TOKENS = {"cpu": 2048, "cuda": 8192}


def prefill_packed(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    reserve_tokens: int | Sequence[int] = 0,
    prefix: SharedPrefix | None = None,
    retain: Retain | None = None,
    arena: Arena | None = None,
) -> list[Prefill]:
    """Prefill several short prompts in one forward pass, each exactly as alone (`prefill_kvr` on one rank).

    If memory runs out, the prompts are split into halves; one that does not fit alone gets a `Prefill.error`.

    prompts : at least one, none of them empty.
    reserve_tokens : room for decoded tokens, the same for all prompts or for each.
    prefix : prefix of all prompts, if it has been computed; the prompts still contain it.
    retain : for a single prompt: what its heads keep.
    arena : see `SliceCache`.

    Returns a prefill for each prompt, with its own cache; `seconds` covers the whole forward pass.
    """
    assert retain is None or len(prompts) == 1, "prompts that are compressed run one by one"
    reserves = [reserve_tokens] * len(prompts) if isinstance(reserve_tokens, int) else reserve_tokens
    if prefix is not None and prefix.heads is not None:
        pairs = zip(prompts, reserves, strict=True)
        return [_prefill_after_compressed(loaded, ids, prefix, reserve, arena) for ids, reserve in pairs]
    if len(prompts) == 1 or why_never_packed(loaded):
        return [
            prefill_whole(
                loaded, ids, reserve_tokens=reserve, prefix=prefix, spares_chain=True, retain=retain, arena=arena
            )
            for ids, reserve in zip(prompts, reserves, strict=True)
        ]
    found = attempt(lambda: _prefill_row(loaded, prompts, reserves, prefix, arena), loaded.tp_group)
    if not isinstance(found, Failure):
        return found
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    half = len(prompts) // 2
    return [
        prefill
        for some in (slice(None, half), slice(half, None))
        for prefill in prefill_packed(loaded, prompts[some], reserve_tokens=reserves[some], prefix=prefix, arena=arena)
    ]


@torch.inference_mode()
def _prefill_row(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    reserves: Sequence[int],
    prefix: SharedPrefix | None,
    arena: Arena | None,
) -> list[Prefill]:
    began, start = time.perf_counter(), 0 if prefix is None else prefix.tokens
    partitions, caches = [Partition((0, len(ids))) for ids in prompts], []
    for ids, partition, reserve in zip(prompts, partitions, reserves, strict=True):
        if prefix is not None:
            prefix.check(ids)
        route = relay(partition, 0, start)
        caches.append(SliceCache(loaded, route, None, reserve_tokens=reserve, prefix=prefix, arena=arena))
    device = loaded.device
    packed = PackedCache(caches, [len(ids) - start for ids in prompts])
    row = torch.tensor([[token for ids in prompts for token in ids[start:]]], device=device)
    positions = torch.cat([torch.arange(start, len(ids), device=device) for ids in prompts]).unsqueeze(0)
    positions += loaded.shape.first_position
    last_rows = torch.tensor([last - 1 for _, last in packed.bounds], device=device)
    logits = run_model(loaded.model, row, packed, positions=positions, keep=last_rows)
    wait_for_compute(device)
    seconds = time.perf_counter() - began
    for cache in caches:
        cache.finish()
    parts = [(len(ids) - start) / row.shape[1] for ids in prompts]
    return [
        Prefill(partition, cache, each.clone(), seconds, known_tokens=start, began_s=began, row_share=part)
        for part, partition, cache, each in zip(parts, partitions, caches, logits, strict=True)
    ]


@torch.inference_mode()
def _prefill_after_compressed(
    loaded: LoadedModel, ids: Sequence[int], prefix: SharedPrefix, reserve_tokens: int, arena: Arena | None = None
) -> Prefill:
    """Prefill the rest of a prompt that begins with stored, compressed keys and values.

    The new tokens attend to the tokens that each head has kept, as decoded tokens do; all heads keep all new tokens.

    Raises `DataError` if the stored keys and values cannot be read.
    """
    prefix.check(ids)
    fresh = ids[prefix.tokens :]
    slack = len(fresh) + reserve_tokens

    def run() -> tuple[SliceCache, torch.Tensor]:
        stores, memory = list[HeadStore](), (loaded.dtype, loaded.device, arena)
        for layer_idx, shape in enumerate(loaded.shape.layers):
            assert prefix.heads is not None, "it is compressed"
            heads = prefix.heads(layer_idx)
            assert heads is not None, "models that are compressed keep keys and values in every layer"
            is_whole = shape.visibility.size is not None  # a layer with a window or chunks is not compressed
            counts = [len(keys) for keys, _ in heads]
            stores.append(HeadStore.reserve(shape, counts, slack, prefix.tokens, *memory, is_whole=is_whole))
            stores[-1].fill(heads)
        cache = make_decode_cache(loaded, stores, prefix.tokens, slack)
        return cache, run_model(loaded.model, torch.tensor([list(fresh)], device=loaded.device), cache)[0]

    found = prefill_alone(loaded, len(ids), run, known_tokens=prefix.tokens)
    if found.error is None:
        found.retained = size_of(loaded, found.cache, prefix.compression)
    else:
        stored = f"its {prefix.tokens} stored tokens and {len(fresh)} more"
        found.error = f"not enough memory for {stored}: {found.error}"
    return found


@torch.inference_mode()
def decode_packed(
    loaded: LoadedModel,
    cache: DecodeCache,
    tokens: Sequence[int],
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run one more token of each document.

    If the model raises an error, `DecodeCache.take_back` restores the documents.

    run : called instead of `run_step`.

    Returns logits after them (documents, vocab_size), float32.
    """
    lengths = cache.take_up()
    full = [length for length, document in zip(lengths, cache.documents, strict=True) if length >= document.capacity]
    if full:
        raise ValueError(f"a cache of {full[0]} tokens is full; reserve room for the tokens to be decoded")
    inputs = torch.tensor([list(tokens), lengths], device=loaded.device)
    return run_step(loaded, cache, inputs) if run is None else run(inputs)


def run_step(loaded: LoadedModel, cache: DecodeCache, inputs: torch.Tensor) -> torch.Tensor:
    """Run the model on one token of each document, after `DecodeCache.take_up`.

    inputs : the tokens, and the documents' lengths before them (2, documents), int64 on the device.

    Returns logits (documents, vocab_size), float32.
    """
    cache.on_device = inputs[1]
    keep = torch.arange(inputs.shape[1], device=inputs.device)
    positions = inputs[1:] + loaded.shape.first_position
    return run_model(loaded.model, inputs[:1], cache, positions=positions, keep=keep)


def why_never_packed(loaded: LoadedModel) -> str | None:
    """Return why models of this kind do not run packed; None if they may."""
    if loaded.shape.has_states:
        return "its recurrent layers keep one document's state at a time"
    if loaded.shape.counts_cache:
        return "its attention temperature depends on the length of the cache"
    if not loaded.attends_in_parts:
        return "its own attention attends to one document at a time"
    return None
