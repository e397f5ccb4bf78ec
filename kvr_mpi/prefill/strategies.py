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
from kvr_mpi.prefill.failure import agree, is_out_of_memory, play_on
from kvr_mpi.prefill.passage import Passage
from kvr_mpi.prefill.prefix import SharedPrefix
from kvr_mpi.prefill.seam import prepare_model, run_model
from kvr_mpi.prefill.weights import forget_packed
from kvr_mpi.transport import Transport
from kvr_mpi.transport.courier import Courier
from kvr_mpi.transport.local import LocalTransport, run_local


@dataclass(slots=True)
class Prefill:
    """What a rank has after a prompt: on the keeper (the chain's last rank), logits and the whole cache."""

    partition: Partition
    cache: Any
    logits: torch.Tensor | None  # (vocab_size,) float32; None on every rank but the keeper
    seconds: float
    wait_s: float = 0.0  # of them, waiting for other ranks' keys and values
    sent_bytes: int = 0
    last: int = 0  # the rank of the chain that had the last slice
    error: str | None = None  # memory ran out, here or (on the last rank) anywhere in the chain: there is no cache
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


def compute_prefix(loaded: LoadedModel, ids: Sequence[int]) -> SharedPrefix:
    """Compute what all prompts begin with, once, on every rank that will take part in one."""
    cache = prefill_kvr(loaded, ids, Partition((0, len(ids))), LocalTransport()).cache
    return SharedPrefix(tuple(ids), [layer.buffer for layer in cache.layers])


def prefill_kvr(
    loaded: LoadedModel,
    ids: Sequence[int],
    partition: Partition,
    chain: Transport,
    *,
    reserve_tokens: int = 0,
    stop_after: int | None = None,
    prefix: SharedPrefix | None = None,
    last: int | None = None,
    courier: Courier | None = None,
    spares_chain: bool = False,
) -> Prefill:
    """Prefill on a chain of ranks, each computing its slice (KV-Runahead, section 4).

    Parameters
    ----------
    ids : sequence of int
        The whole prompt, the same on every rank.
    partition : Partition
        One slice for each rank of `chain`, in the order of the prompt; with a prefix the first slice includes it.
    reserve_tokens, stop_after
        See `SliceCache`.
    prefix : SharedPrefix or None
        What the prompt begins with, if it has been computed: nobody does so again.
    last : int or None
        The rank that has the last slice, and ends with the cache; the one behind it, cyclically, has the first.
        None: the highest.
    courier : Courier or None
        One that goes on from prompt to prompt, with the ranks of `chain`: what this rank still has to send when it
        has computed goes beside the next prompt. None: everything is sent when this returns.
    spares_chain : bool
        If memory runs out on a rank it takes part in the transfers to the end, so that the others come through;
        `Prefill.error` says so there and on the last rank. Otherwise the error is raised. The same on all ranks.
    """
    partition.check_tokens(len(ids))
    if prefix is not None:
        prefix.check(ids)
        partition.check_prefix(prefix.tokens)
    rotation = 0 if last is None else (last + 1) % chain.size
    exchange = Relay(partition, (chain.rank - rotation) % chain.size, 0 if prefix is None else prefix.tokens)
    return _prefill(
        loaded,
        ids,
        partition,
        exchange,
        chain,
        reserve_tokens,
        stop_after=stop_after,
        prefix=prefix,
        rotation=rotation,
        courier=courier,
        spares_chain=spares_chain,
    )


def prefill_tsp(
    loaded: LoadedModel,
    ids: Sequence[int],
    chain: Transport,
    *,
    dense: bool,
    saves_last_layer: bool = False,
    reserve_tokens: int = 0,
) -> Prefill:
    """Prefill with even slices and an all-gather in every layer (the paper's baseline, section 3, Fig. 3 a)."""
    partition = Partition.even(len(ids), chain.size)
    exchange = AllGather(partition, chain.rank, dense=dense, saves_last_layer=saves_last_layer)
    return _prefill(loaded, ids, partition, exchange, chain, reserve_tokens)


def prefill_ring(
    loaded: LoadedModel,
    ids: Sequence[int],
    chain: Transport,
    *,
    saves_last_layer: bool = False,
    reserve_tokens: int = 0,
) -> Prefill:
    """Prefill with zigzag ring attention; rank 0 ends with the last token."""
    partition = Partition.even(len(ids), 2 * chain.size)
    exchange = Ring(partition, chain.rank, saves_last_layer=saves_last_layer)
    return _prefill(loaded, ids, partition, exchange, chain, reserve_tokens)


@torch.inference_mode()
def _prefill(
    loaded: LoadedModel,
    ids: Sequence[int],
    partition: Partition,
    exchange: Exchange,
    chain: Transport,
    reserve_tokens: int,
    *,
    stop_after: int | None = None,
    prefix: SharedPrefix | None = None,
    rotation: int = 0,
    courier: Courier | None = None,
    spares_chain: bool = False,
) -> Prefill:
    began = time.perf_counter()
    own = None
    if courier is None and chain.size > 1:
        own = courier = Courier(chain, forwards=exchange.forwards, on_gpu=loaded.device.type == "cuda")
    passage = None
    if courier is not None and chain.size > 1:
        passage = Passage(courier, partition.size, len(loaded.shape.layers), rotation)
    cache = SliceCache(
        loaded.shape,
        exchange,
        passage,
        dtype=loaded.dtype,
        device=loaded.device,
        reserve_tokens=reserve_tokens,
        prefix=prefix,
        stop_after=stop_after,
        cuts_last_layer=loaded.cuts_last_layer,
    )
    mine = [token for first, last in exchange.owned for token in ids[first:last]]
    logits = failure = None
    try:
        cache.begin()
        logits = run_model(loaded.model, torch.tensor([mine], device=loaded.device), cache)
    except SliceDoneError:
        pass
    except BaseException as error:
        if not spares_chain or not is_out_of_memory(error):
            if courier is not None:
                courier.abandon()
            raise
        failure = str(error).splitlines()[0]
    if failure is not None:  # and the error, with all that it held, is forgotten
        play_on(cache)
    failed = agree(cache, failure is not None) if spares_chain else []
    _computed(loaded.device)
    seconds = time.perf_counter() - began
    cache.finish()
    if own is not None:
        own.close()
    has_logits = cache.is_keeper and stop_after is None and not failed
    return Prefill(
        partition,
        None if failed else cache,
        logits if has_logits else None,
        seconds,
        wait_s=passage.wait_s if passage else 0.0,
        sent_bytes=passage.sent_bytes if passage else 0,
        last=(rotation - 1) % chain.size,
        error=_say(failed, failure, passage, partition) if failed else None,
        marks_s=cache.marks_s,
        stalled_s=passage.stalled_s if passage else 0.0,
    )


def _say(failed: Sequence[int], failure: str | None, passage: Passage | None, partition: Partition) -> str:
    """Say which ranks of the chain ran out of memory, and what to do about it."""
    ranks = ", ".join(str(place if passage is None else passage.rank_of(place)) for place in failed)
    slices = ", ".join(str(partition.lengths[place]) for place in failed)
    why = f" ({failure})" if failure else ""
    return (
        f"a prompt of {partition.tokens} tokens: of the {partition.size} rank(s) of its chain rank {ranks} ran out of "
        f"memory with a slice of {slices} tokens{why}; use longer chains, or less of it for other prompts "
        f"(parallel.memory_gib)"
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
        The same, or without that cut if its code does not bear it. Weights that were laid out anew are forgotten if
        that is what makes the difference.

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
    try:
        _compare(loaded, ids, Partition((0, 1, tokens - 1, tokens)), truth)
    except ModelError:
        if not forget_packed(loaded.model):
            raise
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
