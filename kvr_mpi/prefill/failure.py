"""A rank that fails within a prompt still takes part in all transfers, so that the chain can continue.

It may have run out of memory, or been unable to read the stored beginning of the prompt.

The other ranks wait for segments that this rank passes on, and for it to receive theirs. So it continues to receive, to
pass on, and to send, through the last layer; its own segments then contain arbitrary data. At the end the ranks
exchange their status, the last rank drops what it has computed, and the next prompt finds the chain unaffected.

The status also says what a rank has computed: a digest of the prompt's token ids and plan. Ranks that have computed
different prompts end the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from kvr_mpi.errors import AgreementError, DataError
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.transfers import PromptTransfers
from kvr_mpi.model.tp_group import TensorParallelGroup, guarded
from kvr_mpi.topology import Rotation

# The status of a rank that has failed; of others it is a digest.
FAILED = -1
# The message begins so if it was the stored beginning of a prompt that could not be read.
UNREADABLE = "what is stored of the prompt's beginning cannot be used"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a computation failed: memory ran out, or a stored document is unreadable."""

    why: str
    is_unreadable: bool = False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's error on a GPU, its RuntimeError on a CPU, or Python's MemoryError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("can't allocate memory", "ALLOC_FAILED", "out of memory")
    )


def attempt(
    work: Callable[[], T], tp_group: TensorParallelGroup | None = None, *, reads_stored: bool = False
) -> T | Failure:
    """Compute something; if memory runs out, return why instead of its error, whose traceback holds tensors.

    Parameters
    ----------
    tp_group : TensorParallelGroup or None
        Ranks that compute it together: if it fails on one, it fails on all.
    reads_stored : bool
        A stored document that cannot be read is such a failure, too; otherwise its `DataError` is raised.
    """
    try:
        with guarded(tp_group):
            return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Failure(next(iter(str(error).splitlines()), type(error).__name__))
    except DataError as error:
        if not reads_stored:
            raise
        return Failure(str(error), is_unreadable=True)


def play_on(cache: SliceCache) -> None:
    """Take part in the remaining transfers of a prompt that failed on this rank, with little memory."""
    slots: list[torch.Tensor] = []
    for layer in cache.layers:
        if layer.is_over or layer.segments is None:
            continue
        if layer.shape.elements:
            if layer.buffer is None:
                if not slots:  # the layers that have buffers come first, and have given them back by now
                    slots = cache.buffers.scratch(cache.route.longest_segment, cache.route.slots)
                layer.segments.do_without(slots, layer.shape.elements)
            layer.segments.post(cache.route)
            layer.segments.share(cache.route, cache.route.owned)
        if layer.shape.states:
            layer.play_on()
        layer.release(wait=True)


def digest_of(ids: Sequence[int], bounds: Sequence[int], strategy: str) -> int:
    """Return a 63-bit hash of a prompt's token ids and its partition."""
    digest = hashlib.sha256(np.asarray(ids, "<i8").tobytes())
    digest.update(f"{strategy} {list(bounds)}".encode())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def agree(
    transfers: PromptTransfers | None, place: int, decode_place: int, device: torch.device, digest: int | None
) -> list[int]:
    """Tell the decode rank what this rank computed; every rank calls this after its part.

    Status messages take the same way as segments, from each place of the slices to the next, up to the decode rank.

    Parameters
    ----------
    place, decode_place : int
        Of this rank's slice, and of the decode rank's.
    digest : int or None
        Of `digest_of`; None if this rank has failed.

    Returns
    -------
    list of int
        On the decode rank, the places of all ranks that failed, first slice first; on the others, only their own place
        if they failed.

    Raises
    ------
    AgreementError
        On the decode rank, if another rank has computed another prompt.
    """
    has_failed = digest is None
    if transfers is None:
        return [place] if has_failed else []
    forwarder, size = transfers.forwarder, transfers.forwarder.transport.size
    # Of the way: the decode rank is at the last one, the rank after it at the first.
    way = Rotation.ending_at(size, decode_place)
    step = way.place_of(place)

    def tag(step: int) -> int:
        return transfers.tag(transfers.layers, step)

    after = None if place == decode_place else transfers.rank_of(place + 1)
    if after is not None:
        forwarder.announce(after, tag(step))
    words, receives = [], []
    for source in reversed(range(step)):
        word = torch.zeros(1, dtype=torch.int64, device=device)
        receives.append(forwarder.receive(word, transfers.rank_of(place - 1), tag(source), after))
        words.append((way.rank_of(source), word))
    if after is not None:
        status = FAILED if digest is None else digest
        forwarder.send(torch.full((1,), status, dtype=torch.int64, device=device), after, tag(step))
        return [place] if has_failed else []
    for receive in receives:
        forwarder.wait(receive)
    found = {source: int(word) for source, word in words}
    for source, other in found.items():
        if digest is not None and other not in (FAILED, digest):
            raise AgreementError(
                f"rank {transfers.rank_of(source)} of the chain has computed another prompt or another plan (digest "
                f"{other:016x}) than rank {transfers.rank_of(place)} ({digest:016x}): the job ends before a wrong "
                f"answer is stored; please report this"
            )
    return sorted([place] * has_failed + [source for source, other in found.items() if other == FAILED])


def describe_failure(
    ranks: Sequence[int], computed: Sequence[int], failure: Failure | None, tokens: int, size: int
) -> str:
    """Describe which ranks of the chain failed, and what to do; `failure` is this rank's own."""
    if failure is not None and failure.is_unreadable:
        return f"{UNREADABLE}: {failure.why}"
    why = "" if failure is None else f" ({failure.why})"
    return (
        f"a prompt of {tokens} tokens: rank {', '.join(map(str, ranks))} of the {size} in its chain ran out of memory "
        f"with a slice of {', '.join(map(str, computed))} tokens{why}; use longer chains, or reserve less memory for "
        f"other prompts (parallel.memory_gib)"
    )
