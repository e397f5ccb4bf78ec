"""Prefill a prompt of any length on a chain of ranks in memory that does not depend on it: each by a rolling cache.

The ranks take turns at the prompt, a few tokens each in every step, and compute side by side (`kv.rolling_relay`). What
a token sees is what it sees on one rank (`streaming`), exact or approximated, so that the answer is the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from kvr_mpi.kv.cache import SliceDoneError
from kvr_mpi.kv.rolling import Rolling, RollingCache, check_rolling
from kvr_mpi.kv.rolling_relay import PIECES, RollingRelay, Stretches
from kvr_mpi.kv.transfers import PromptTransfers
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import agree, is_out_of_memory
from kvr_mpi.prefill.one_prompt import Prefill, wait_for_compute
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder


@torch.inference_mode()
def prefill_rolling_chain(
    loaded: LoadedModel,
    ids: Sequence[int],
    rolling: Rolling,
    partition: Partition,
    chain: Transport,
    *,
    last: int | None = None,
    forwarder: Forwarder | None = None,
) -> Prefill:
    """Prefill on a chain of two ranks or more, all of which call this; the model has to be prepared for chains.

    Parameters
    ----------
    ids : sequence of int
        The whole prompt, the same on every rank.
    rolling : Rolling
        What each rank holds; a step has up to `step_tokens` new tokens of each.
    partition : Partition
        How many tokens each rank computes, in the order of their turns.
    last : int or None
        The rank that has the last turn, and ends with logits and cache; None: the chain's last.
    forwarder : Forwarder or None
        As `one_prompt.Options`.

    Returns
    -------
    Prefill
        If memory runs out on a rank the others come through: `error` says so there and on the rank with the last turn.

    Raises
    ------
    ModelError
        If the cache does not hold all that the model sees, and no approximation was asked for.
    PartitionError
        If the partition is of another prompt.
    """
    partition.check_tokens(len(ids))
    loaded.shape.check_ids(ids)
    check_rolling(loaded, rolling)
    rotation = Rotation.ending_at(chain.size, chain.size - 1 if last is None else last)
    place, last_place = rotation.place_of(chain.rank), chain.size - 1
    began, own = time.perf_counter(), None
    if forwarder is None:
        own = forwarder = Forwarder(chain, device=loaded.device)
    transfers = PromptTransfers(forwarder, PIECES * chain.size, len(loaded.shape.layers), rotation)
    relay = RollingRelay(Stretches(partition, rolling.step_tokens), place, transfers)
    try:
        transfers.begin()
        cache, logits, failure = _run_or_pass_on(loaded, ids, rolling, relay)
        failed = agree(transfers, place, last_place, loaded.device, has_failed=failure is not None)
    except BaseException:
        forwarder.abandon()
        raise
    wait_for_compute(loaded.device)
    seconds = time.perf_counter() - began
    cache.leave_chain()
    if own is not None:
        own.close()
    has_all = place == last_place and not failed
    return Prefill(
        partition,
        cache if has_all else None,
        logits if has_all else None,
        seconds,
        wait_s=transfers.waits.seconds("receive"),
        sent_bytes=transfers.sent_bytes,
        last=rotation.rank_of(last_place),
        error=_say(list(map(rotation.rank_of, failed)), failure, len(ids), rolling) if failed else None,
        send_wait_s=transfers.waits.seconds("send"),
        began_s=began,
        rolling=f"{rolling.name} on each of {chain.size} ranks",
    )


def _run_or_pass_on(
    loaded: LoadedModel, ids: Sequence[int], rolling: Rolling, relay: RollingRelay
) -> tuple[RollingCache, torch.Tensor | None, str | None]:
    """Run this rank's stretches; without memory for that, only take part in the transfers, and say what went wrong."""
    cache = None
    try:
        cache = RollingCache(loaded, rolling, len(ids), relay)
        return cache, _run_stretches(loaded, ids, cache, relay), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error).splitlines()[0]
    # The error, with all that it held, is forgotten.
    if cache is None:
        cache = RollingCache(loaded, rolling, len(ids), relay, is_void=True)
    cache.is_void = True
    for step in range(max(0, relay.step), relay.stretches.steps):
        relay.begin_step(step)
        cache.pass_on()
    return cache, None, failure


def _run_stretches(
    loaded: LoadedModel, ids: Sequence[int], cache: RollingCache, relay: RollingRelay
) -> torch.Tensor | None:
    """Run this rank's stretches, step by step; logits of the prompt's last token (vocab_size,), if it is in them."""
    logits = None
    for step in range(relay.stretches.steps):
        first, last = relay.stretches.bounds(step, relay.place)
        cache.begin_step(is_read=last == len(ids), step=step)
        if first == last:
            cache.pass_on()
            continue
        with contextlib.suppress(SliceDoneError):
            logits = run_model(loaded.model, torch.tensor([ids[first:last]], device=loaded.device), cache)[0]
    return logits


def _say(ranks: Sequence[int], failure: str | None, tokens: int, rolling: Rolling) -> str:
    """Say which ranks of the chain had no memory, and what to do about it."""
    why = f" ({failure})" if failure else ""
    return (
        f"a prompt of {tokens} tokens: rank {', '.join(map(str, ranks))} of its chain had no memory for a "
        f"{rolling.name}{why}; lower cache.tokens or cache.step_tokens, or the memory for other prompts "
        f"(parallel.memory_gib)"
    )
