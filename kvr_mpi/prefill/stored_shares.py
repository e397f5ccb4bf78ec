"""A prompt whose beginning is stored, over a chain that holds it together: each rank loads a share, all run the rest.

No rank ever holds more than its share (``kv.shares``), so that a document larger than a rank's memory can be asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.shares import Share, SharesCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.stage import guarded
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.one_prompt import UNREADABLE, Prefill, wait_for_compute
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.gather import all_gather


def share_out_stored(known: int, tokens: int, size: int) -> Partition:
    """Divide a prompt's first `known` tokens evenly over ranks; those after them go to the last."""
    return Partition((*Partition.even(known, size).bounds[:-1], tokens))


def run_shares(
    loaded: LoadedModel, row: torch.Tensor, cache: SharesCache, keep: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, str | None]:
    """Run new tokens (1, tokens) of prompts that are spread over a chain; every rank of it calls this.

    A rank whose memory runs out plays on (``failure``), so that it is known to all of them alike. Nothing has been
    counted in then: the row may be run again, or in pieces.

    Parameters
    ----------
    keep : torch.Tensor, optional
        Which tokens' logits are read; see `run_model`.

    Returns
    -------
    (torch.Tensor, None) or (None, str)
        Logits (rows, vocab_size), the same on every rank; or which ranks had no memory, and why if this one had none.
    """
    logits, why = None, ""
    try:
        with guarded(loaded.stage):
            logits = run_model(loaded.model, row, cache, positions=cache.positions, keep=keep)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0]
    # Out of the except block: the error held on to what had been made.
    if logits is None:
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        cache.play_on()
    told = all_gather(cache.chain, torch.tensor([int(logits is None)], device=loaded.device))
    failed = [rank for rank, one in enumerate(told) if int(one)]
    if not failed:
        return logits, None
    return None, f"rank {', '.join(map(str, failed))} of its chain ran out of memory{f' ({why})' if why else ''}"


@torch.inference_mode()
def prefill_stored(
    loaded: LoadedModel,
    ids: Sequence[int],
    prefix: SharedPrefix,
    partition: Partition,
    chain: Transport,
    *,
    reserve_tokens: int,
    last: int,
) -> Prefill:
    """Run what follows a stored beginning; every rank of the chain calls this.

    Parameters
    ----------
    ids : sequence of int
        The whole prompt.
    prefix : SharedPrefix
        Its beginning, with `read`.
    partition : Partition
        Of `share_out_stored`.
    reserve_tokens : int
        Room for tokens to be decoded, in the last share.
    last : int
        The rank that has the last share, and ends with the logits.

    Returns
    -------
    Prefill
        With this rank's share; on all ranks with `error` instead, if some rank could not read its own, or had no
        memory.
    """
    assert prefix.read is not None, "it is stored"
    prefix.check(ids)
    began, known = time.perf_counter(), prefix.tokens
    rotation = Rotation.bringing(chain.size, chain.size - 1, last)
    place = rotation.place_of(chain.rank)
    start, stop = partition.start(place), min(partition.stop(place), known)
    room = len(ids) - known + reserve_tokens
    share = Share(loaded, start, stop, known, reserve_tokens=room, read=prefix.read)
    cache = SharesCache(loaded, [share], [len(ids) - known], chain)
    row = torch.tensor([list(ids[known:])], device=loaded.device)
    logits, short = run_shares(loaded, row, cache)
    cache.lengthen()
    share.end_loading()
    wait_for_compute(loaded.device)
    failures: list[str | None] = share_json(chain, gather_json(chain, _failure_of(share, loaded)))
    failure = next((f"{UNREADABLE}: {one}" for one in failures if one is not None), None)
    if failure is None and short is not None:
        failure = f"a question of {len(ids) - known} tokens about a stored document: {short}"
    return Prefill(
        partition,
        None,
        logits[0] if logits is not None and chain.rank == last and failure is None else None,
        time.perf_counter() - began,
        last=last,
        error=failure,
        known_tokens=known,
        share=None if failure is not None else share,
        began_s=began,
    )


def _failure_of(share: Share, loaded: LoadedModel) -> str | None:
    """Say why what is stored of a share could not be read, on this rank or another one of its stage; None: it was."""
    try:
        with guarded(loaded.stage):
            if share.failure is not None:
                raise DataError(share.failure)
    except DataError as error:
        return str(error)
    return None
