"""A prompt whose beginning is stored, over a chain that holds it together: each rank loads a share, all run the rest.

No rank ever holds more than its share (``kv.shares``), so that a document larger than a rank's memory can be asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.shares import Share, SharesCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import UNREADABLE, Prefill, wait_for_compute
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport, gather_json, share_json


def share_out_stored(known: int, tokens: int, size: int) -> Partition:
    """Divide a prompt's first `known` tokens evenly over ranks; those after them go to the last."""
    return Partition((*Partition.even(known, size).bounds[:-1], tokens))


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
        With this rank's share; on all ranks with `error` instead, if some rank could not read its own.
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
    logits = run_model(loaded.model, row, cache, positions=cache.positions)[0]
    cache.lengthen()
    share.end_loading()
    wait_for_compute(loaded.device)
    failures: list[str | None] = share_json(chain, gather_json(chain, share.failure))
    failure = next((one for one in failures if one is not None), None)
    return Prefill(
        partition,
        None,
        logits if chain.rank == last and failure is None else None,
        time.perf_counter() - began,
        last=last,
        error=None if failure is None else f"{UNREADABLE}: {failure}",
        known_tokens=known,
        share=None if failure is not None else share,
        began_s=began,
    )
