"""The ways to prefill one prompt: plain transformers and KV-Runahead, both exact.

Each takes a plan (a `Partition`), and returns a `Prefill`, which decoding reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from transformers import DynamicCache

from kvr_mpi.compress.compression import RetainedSize
from kvr_mpi.errors import ModelError, PartitionError
from kvr_mpi.events import Span
from kvr_mpi.kv.chain import Retain, SliceRow, WriteLayer
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.relay import PromptTransfers, Relay
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.layer_chunks import UnreadError, cut_layers
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.model.tp_group import guarded
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, agree, attempt, complete_transfers, describe_failure, digest_of
from kvr_mpi.prefill.reading import Reading
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport

# How a prompt is prefilled, in records: by plain transformers, or as a slice of a chain.
PLAIN, KVR = "single", "kvr"


@dataclass(slots=True)
class Prefill:
    """The result of a prefill; on the decode rank (in a chain the last one) with logits and the whole cache.

    cache : a `SequenceKV` with what this rank keeps, or transformers' cache; None if it keeps nothing. Whoever has the
        prefill releases it.
    """

    partition: Partition
    cache: Any
    logits: torch.Tensor | None  # (vocab_size,) float32; None on every rank but the decode rank, or with a `Reading`
    seconds: float
    wait_s: float = 0.0  # of `seconds`, waiting for other ranks' keys and values
    sent_bytes: int = 0
    last: int = 0  # the decode rank, which had the last slice
    error: str | None = None  # why it failed, here or (on the last rank) anywhere in the chain; no cache then
    layer_times_s: Sequence[float] = ()  # when each layer's keys were made, excluding wait time
    send_wait_s: float = 0.0  # of `seconds`, waiting for this rank's sends to complete
    strategy: str = KVR  # or PLAIN
    known_tokens: int = 0  # number of first tokens whose keys and values were known before
    stored_tokens: int = 0  # number of first tokens whose keys and values earlier ranks store
    retained: RetainedSize | None = None  # size of the compressed cache; None: not compressed
    rolling: Rolling | None = None  # the rolling cache; None: the cache holds all tokens
    began_s: float = 0.0  # time.perf_counter
    row_share: float = 1.0  # this prompt's fraction of `seconds`, which covers its whole row
    spans: Sequence[Span] = ()  # of its layers and waits
    read: torch.Tensor | None = None  # on the decode rank, the result of a `Reading` (values,) float64, on the CPU

    @property
    def held_tokens(self) -> float:
        """Mean number of tokens per KV head if some were dropped; 0 if none were."""
        if self.retained is not None:
            return self.retained.tokens
        if self.rolling is None or not self.rolling.sinks:
            return 0.0
        return float(min(self.rolling.cache_tokens, self.partition.tokens))

    @property
    def rank_s(self) -> float:
        """Seconds summed over all ranks."""
        return self.seconds * self.row_share * self.partition.size

    @property
    def is_plain(self) -> bool:
        """Whether the cache is transformers' own."""
        return self.strategy == PLAIN

    def count_prefix(self, prefix: Prefill) -> None:
        """Count time, slices and tokens of the prefill of its prefix as its own."""
        self.seconds += prefix.seconds
        self.wait_s += prefix.wait_s
        self.send_wait_s += prefix.send_wait_s
        self.known_tokens = prefix.known_tokens
        self.partition = Partition((*prefix.partition.bounds[:-1], self.partition.tokens))

    def release(self) -> None:
        """Give up the keys and values. It can be called again."""
        if isinstance(self.cache, SequenceKV):
            self.cache.release()


class CacheOptions(TypedDict, total=False):
    """Options that `SliceRow` describes."""

    reserve_tokens: int
    stop_after: int | None
    prefix: SequenceKV | None
    is_sharded: bool
    keeps: bool
    retain: Retain | None
    write_layer: WriteLayer | None


def prefill_single(model: Any, ids: Sequence[int], device: torch.device) -> Prefill:
    """Prefill on one rank with plain transformers: for any architecture, and as the reference."""
    began, cache = time.perf_counter(), plain_cache(model)
    with torch.inference_mode():
        logits = run_model(model, torch.tensor([ids], device=device), cache)[0]
    wait_for_compute(device)
    seconds = time.perf_counter() - began
    return Prefill(Partition((0, len(ids))), cache, logits, seconds, strategy=PLAIN, began_s=began)


@torch.inference_mode()
def run_plain(
    loaded: LoadedModel, ids: Sequence[int], reading: Reading | None = None
) -> tuple[DynamicCache, torch.Tensor]:
    """Run a prompt with plain transformers; return its cache, and the last logits (vocab_size,) or what is read."""
    cache, row = plain_cache(loaded.model), torch.tensor([ids], device=loaded.device)
    if reading is None:
        return cache, run_model(loaded.model, row, cache)[0]
    states = run_model(loaded.model, row, cache, reads="states")
    return cache, reading.join([reading.read(loaded, ids, 0, states)], len(ids))


def prefill_alone(
    loaded: LoadedModel,
    tokens: int,
    run: Callable[[], tuple[Any, torch.Tensor]],
    *,
    strategy: str = KVR,
    is_read: bool = False,
    **facts: Any,
) -> Prefill:
    """Prefill a prompt on this rank with `run`, which returns its cache and logits (or what `is_read` of it).

    If memory runs out, or plain transformers (`PLAIN`) fails, the result has the error instead of a cache. `facts` are
    its other attributes.
    """
    began = time.perf_counter()
    found = attempt(run, loaded.tp_group, is_plain=strategy == PLAIN)
    wait_for_compute(loaded.device)
    seconds, cache, error = time.perf_counter() - began, None, None
    if isinstance(found, Failure):
        error = found.why
    else:
        cache, output = found
        facts["read" if is_read else "logits"] = output
    whole = Partition((0, tokens))
    return Prefill(
        whole, cache, seconds=seconds, strategy=strategy, error=error, began_s=began, **{"logits": None, **facts}
    )


def plain_cache(model: Any) -> DynamicCache:
    """Make an empty transformers cache for a model."""
    return DynamicCache(config=model.config)


def own_pool(loaded: LoadedModel) -> Pool:
    """Return a pool in which each sequence has memory of its own."""
    return Pool(loaded.shape.layers, loaded.dtype, loaded.device)


def pool_for(loaded: LoadedModel, prefix: SequenceKV | None) -> Pool:
    """Return the pool of prompts after a prefix, whose rows they then share; without a prefix, one of their own."""
    return own_pool(loaded) if prefix is None else prefix.pool


def compute_prefix(loaded: LoadedModel, ids: Sequence[int], pool: Pool | None = None) -> SequenceKV:
    """Compute the prefix that all prompts share, once, on every rank that will use it.

    Raises `ModelError` if its keys depend on the length of the whole prompt.
    """
    if kinds := depends_on_length(loaded.model):
        raise ModelError(
            f"{loaded.shape.architecture}: its rotary embedding ({kinds}) depends on the whole prompt's length, so "
            "the common prefix of prompts cannot be computed once for all of them"
        )
    sequence: SequenceKV = prefill_whole(loaded, ids, pool=pool).cache
    sequence.ids = tuple(ids)
    return sequence


@torch.inference_mode()
def prefill_kvr(
    loaded: LoadedModel,
    ids: Sequence[int],
    partition: Partition,
    chain: Transport,
    *,
    last: int | None = None,
    forwarder: Forwarder | None = None,
    spares_chain: bool = False,
    keeps_all: bool = False,
    chunk_tokens: int | None = None,
    pool: Pool | None = None,
    reading: Reading | None = None,
    **of_cache: Unpack[CacheOptions],
) -> Prefill:
    """Prefill on a chain, each rank computing its slice (KV-Runahead, section 4).

    ids : the whole prompt, the same on every rank.
    partition : the prompt's slices, one for each rank. The first slice includes the prefix.
    last : the rank that ends with the cache; the slices are rotated around the ranks accordingly. None: rank i has
        slice i.
    forwarder : a forwarder that is reused from prompt to prompt: sends that are unfinished after the prefill overlap
        with the next prompt. None: everything is sent when the prefill returns.
    spares_chain : if a rank runs out of memory, or cannot read a stored prefix, it completes its transfers so that the
        other ranks can finish, and `Prefill.error` is set there and on the rank that ends with the cache. Otherwise the
        error is raised. Pass the same on all ranks.
    keeps_all : the rank with the last slice ends with the keys and values of all tokens, even in layers with windows or
        chunks.
    chunk_tokens : every rank computes its slice in chunks that end at multiples of this in the prompt. None: at once.
    pool : for the keys and values that this rank keeps; None: `pool_for`.
    reading : what is read of the prompt instead of its logits.
    **of_cache : options of `SliceRow`, on each rank.
    """
    if partition.tokens != len(ids):
        raise PartitionError(
            f"slice bounds {list(partition.bounds)} add up to {partition.tokens} tokens; the prompt has {len(ids)}"
        )
    if chunk_tokens is not None and (why := why_no_chunks(loaded)):
        raise ModelError(why)
    known, prefix = 0, of_cache.get("prefix")
    if prefix is not None:
        prefix.check(ids)
        partition.check_prefix(known := prefix.length)
    rotation = Rotation.ending_at(chain.size, chain.size - 1 if last is None else last)
    relay = Relay(
        partition,
        rotation.place_of(chain.rank),
        known,
        chunk_tokens,
        receives_all=keeps_all or not loaded.attends_in_parts,
        saves_last_layer=reading is None or not reading.reads_all,
    )
    began = time.perf_counter()
    own = transfers = None
    if forwarder is None and chain.size > 1:
        own = forwarder = Forwarder(chain, device=loaded.device)

    def run_slice() -> torch.Tensor | None:
        """Run this rank's tokens; return logits (vocab_size,), or the values that are read, if there are any."""
        row, found = torch.tensor([ids[slice(*relay.own)]], device=loaded.device), None
        assert cache is not None
        cache.begin()
        with contextlib.suppress(UnreadError):
            run = partial(run_model, loaded.model, row, cache)
            lengths = [[stop - first for first, stop in layer.chunks] for layer in cache.layers]
            if reading is None:
                found = run(chunk_lengths=lengths)[0]
            else:
                states = run(chunk_lengths=lengths, reads="states")
                found = reading.read(loaded, ids, relay.own[0], states)
        cache.finish()
        return found

    def size_of(place: int) -> int:
        """Count the values that are read at a place of the chain."""
        if reading is None:
            return 0
        return reading.size(loaded.shape.hidden_size, *relay.slices[place], partition.tokens)

    found: torch.Tensor | Failure | None
    cache: SliceRow | None = None
    try:
        if forwarder is not None and chain.size > 1:
            transfers = PromptTransfers(forwarder, relay, len(loaded.shape.layers), rotation)
        cache = SliceRow(loaded, relay, transfers, pool or pool_for(loaded, prefix), **of_cache)
        if spares_chain:
            found = attempt(run_slice, loaded.tp_group, reads_stored=True)
        else:
            with guarded(loaded.tp_group):
                found = run_slice()
    except BaseException:
        if forwarder is not None:
            forwarder.abandon()
        if cache is not None and cache.sequence is not None:
            cache.sequence.release()
        raise
    failure = found if isinstance(found, Failure) else None
    if failure is not None:
        complete_transfers(cache)
    failed, parts = list[int](), list[torch.Tensor]()
    if spares_chain or reading is not None:
        digest = None if failure is not None else digest_of(ids, partition.bounds)
        values = None if reading is None or isinstance(found, Failure) else found
        failed, parts = agree(transfers, cache.device, digest, values, size_of)
    if transfers is None:
        wait_for_compute(loaded.device)
    else:
        transfers.forwarder.wait_for_compute()
    seconds = time.perf_counter() - began
    times = cache.clock.read(began, began + seconds)
    if own is not None:
        own.close()
    error = None
    if failed:
        computed = [relay.slices[place][1] - relay.slices[place][0] for place in failed]
        if cache.sequence is not None:
            cache.sequence.release()
        error = describe_failure(list(map(rotation.rank_of, failed)), computed, failure, partition.tokens, chain.size)
    has_logits = cache.is_decode_rank and of_cache.get("stop_after") is None and not failed and reading is None
    return Prefill(
        partition,
        None if failed else cache.sequence,
        found if has_logits and not isinstance(found, Failure) else None,
        seconds,
        read=None if reading is None or failed or not parts else reading.join(parts, partition.tokens),
        wait_s=times.wait_s,
        sent_bytes=transfers.sent_bytes if transfers else 0,
        last=rotation.rank_of(partition.size - 1),
        error=error,
        layer_times_s=times.layers_s,
        send_wait_s=times.send_wait_s,
        known_tokens=known,
        began_s=began,
        spans=times.spans,
    )


def prefill_whole(
    loaded: LoadedModel,
    ids: Sequence[int],
    *,
    spares_chain: bool = False,
    pool: Pool | None = None,
    reading: Reading | None = None,
    **of_cache: Unpack[CacheOptions],
) -> Prefill:
    """Prefill a whole prompt on this rank as `prefill_kvr` does its slices."""
    whole = Partition((0, len(ids)))
    return prefill_kvr(
        loaded, ids, whole, LocalTransport(), spares_chain=spares_chain, pool=pool, reading=reading, **of_cache
    )


def why_no_chunks(loaded: LoadedModel) -> str | None:
    """Return why a model's slices cannot be run in chunks; None if they can, and the model is prepared for it."""
    if loaded.shape.has_states:
        why = "its recurrent layers pass on one state per slice"
    elif not loaded.attends_in_parts:
        why = "its attention cannot be computed in parts, and needs a mask for the whole slice"
    elif not cut_layers(loaded.model):
        why = "it has no list of its layers"
    else:
        return None
    return f"{loaded.shape.architecture}: {why}, so its slices cannot be run in chunks"


def wait_for_compute(device: torch.device) -> None:
    """Wait until a GPU has finished, so that the measured time is a time to first token."""
    if device.type == "cuda":  # only the compute stream: transfers continue in other streams
        torch.cuda.current_stream(device).synchronize()
