"""The ways to prefill one prompt, side by side: plain transformers, KV-Runahead, and its rivals; all exact.

Stands between the plan (a `Partition`) and decoding (which reads `Prefill`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.cache import SliceCache, SliceDoneError
from kvr_mpi.prefill.exchange import AllGather, Exchange, Relay, Ring
from kvr_mpi.prefill.seam import prepare_model, run_model
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local


@dataclass(slots=True)
class Prefill:
    """What a rank has after a prompt: on the keeper (the chain's last rank), logits and the whole cache."""

    partition: Partition
    cache: Any
    logits: torch.Tensor | None  # (vocab_size,) float32; None on every rank but the keeper
    seconds: float
    wait_s: float = 0.0  # of them, waiting for other ranks' keys and values
    sent_bytes: int = 0
    marks_s: Sequence[float] = ()  # when each layer's keys were made, by a clock that stands still in waits
    stalled_s: float = 0.0  # and of them, waiting for the link to take what this rank sent


@torch.inference_mode()
def prefill_single(model: Any, ids: Sequence[int], device: torch.device) -> Prefill:
    """Prefill on one rank with plain transformers: any architecture, and the truth the others are held to."""
    began = time.perf_counter()
    cache = DynamicCache(config=model.config)
    logits = run_model(model, torch.tensor([ids], device=device), cache)
    _computed(device)
    return Prefill(Partition((0, len(ids))), cache, logits, time.perf_counter() - began)


def prefill_kvr(
    loaded: LoadedModel,
    ids: Sequence[int],
    partition: Partition,
    chain: Transport,
    *,
    reserve_tokens: int = 0,
    stop_after: int | None = None,
) -> Prefill:
    """Prefill on a chain of ranks, each computing its slice (KV-Runahead, section 4).

    Parameters
    ----------
    ids : sequence of int
        The whole prompt, the same on every rank.
    partition : Partition
        One slice for each rank of `chain`.
    reserve_tokens, stop_after
        See `SliceCache`.
    """
    partition.check_tokens(len(ids))
    exchange = Relay(partition, chain.rank)
    return _prefill(loaded, ids, partition, exchange, chain, reserve_tokens, stop_after)


def prefill_tsp(
    loaded: LoadedModel, ids: Sequence[int], chain: Transport, *, dense: bool, reserve_tokens: int = 0
) -> Prefill:
    """Prefill with even slices and an all-gather in every layer (the paper's baseline, section 3, Fig. 3 a)."""
    partition = Partition.even(len(ids), chain.size)
    exchange = AllGather(partition, chain.rank, dense=dense)
    return _prefill(loaded, ids, partition, exchange, chain, reserve_tokens)


def prefill_ring(loaded: LoadedModel, ids: Sequence[int], chain: Transport, *, reserve_tokens: int = 0) -> Prefill:
    """Prefill with zigzag ring attention; rank 0 ends with the last token."""
    partition = Partition.even(len(ids), 2 * chain.size)
    return _prefill(loaded, ids, partition, Ring(partition, chain.rank), chain, reserve_tokens)


@torch.inference_mode()
def _prefill(
    loaded: LoadedModel,
    ids: Sequence[int],
    partition: Partition,
    exchange: Exchange,
    chain: Transport,
    reserve_tokens: int,
    stop_after: int | None = None,
) -> Prefill:
    began = time.perf_counter()
    cache = SliceCache(
        loaded.shape,
        exchange,
        partition.size,
        chain if chain.size > 1 else None,
        dtype=loaded.dtype,
        device=loaded.device,
        reserve_tokens=reserve_tokens,
        stop_after=stop_after,
        cuts_last_layer=loaded.cuts_last_layer,
    )
    mine = [token for first, last in exchange.owned for token in ids[first:last]]
    logits = None
    try:
        logits = run_model(loaded.model, torch.tensor([mine], device=loaded.device), cache)
    except SliceDoneError:
        pass
    except BaseException:
        cache.abandon()
        raise
    _computed(loaded.device)
    seconds, stalled_s = time.perf_counter() - began, cache.stalled_s
    cache.finish()
    has_logits = cache.is_keeper and stop_after is None
    return Prefill(
        partition,
        cache,
        logits if has_logits else None,
        seconds,
        wait_s=cache.wait_s,
        sent_bytes=cache.sent_bytes,
        marks_s=cache.marks_s,
        stalled_s=stalled_s,
    )


def _computed(device: torch.device) -> None:
    """Return when a GPU has done what it was told: only then is the time a time to first token."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_chain(loaded: LoadedModel, tokens: int = 12) -> LoadedModel:
    """Prove on a few tokens that chains give this model's own logits; leaves the model ready for chains.

    An architecture whose attention does not go through the seam in the way we think would otherwise give wrong
    answers for a whole corpus. Three ranks have slices of one token at both ends, since that takes paths of its own;
    two have a last slice that is cut to its last token behind the last attention.

    Returns
    -------
    LoadedModel
        The same, or without that cut if its code does not bear it.

    Raises
    ------
    ModelError
        If it cannot run as a chain, or the logits differ.
    """
    tokens = min(tokens, loaded.shape.max_tokens or tokens)
    ids = [(37 * position + 11) % loaded.shape.vocab_size for position in range(tokens)]
    prepare_model(loaded.model, chain=False)
    truth = prefill_single(loaded.model, ids, loaded.device).logits
    prepare_model(loaded.model, chain=True)
    assert truth is not None
    _compare(loaded, ids, Partition((0, 1, tokens - 1, tokens)), truth)
    try:
        _compare(loaded, ids, Partition((0, 1, tokens)), truth)
    except ModelError:
        loaded = replace(loaded, cuts_last_layer=False)
        _compare(loaded, ids, Partition((0, 1, tokens)), truth)
    return loaded


def _compare(loaded: LoadedModel, ids: Sequence[int], partition: Partition, truth: torch.Tensor) -> None:
    """Run a chain of threads, and raise `ModelError` unless it gives the true logits."""
    try:
        found = run_local(partition.size, lambda rank: prefill_kvr(loaded, ids, partition, rank).logits)[-1]
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{loaded.shape.architecture} does not run as a chain ({type(error).__name__}: {error}); "
            f"use strategy = 'single' for it"
        ) from error
    assert found is not None
    spread = max(float(truth.max() - truth.min()), 1e-6)
    error_share = float((found - truth).abs().max()) / spread
    # Room for the rounding of the dtype; a wrong position or mask is off by a large part of the spread.
    allowed = {torch.float32: 1e-3, torch.float16: 2e-2}.get(loaded.dtype, 1e-1)
    if not error_share <= allowed:
        raise ModelError(
            f"{loaded.shape.architecture}: on {len(ids)} tokens a chain differs from plain transformers by "
            f"{error_share:.1e} "
            f"of the logits' spread (allowed {allowed:.0e}); use strategy = 'single' for this model"
        )
